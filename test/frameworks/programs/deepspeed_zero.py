"""DeepSpeed's ZeRO, stages 1, 2 and 3, with a PyTorch optimizer: https://www.deepspeed.ai/getting-started."""

from __future__ import annotations

import argparse

import deepspeed
import torch
from transformers import LlamaConfig, LlamaForCausalLM

parser = argparse.ArgumentParser()
parser.add_argument("--stage", type=int, default=3)
parser.add_argument("--offload", action="store_true")
parser.add_argument("--local_rank", type=int, default=-1)
arguments = parser.parse_args()

zero = {"stage": arguments.stage, "contiguous_gradients": True, "overlap_comm": True}
if arguments.offload:
    zero["offload_optimizer"] = {"device": "cpu"}
config = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "bf16": {"enabled": True},
    "gradient_clipping": 1.0,
    "zero_optimization": zero,
    "zero_force_ds_cpu_optimizer": False,
}

deepspeed.init_distributed()
shape = LlamaConfig(
    vocab_size=4096, hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8
)
with deepspeed.zero.Init(config_dict_or_path=config, enabled=arguments.stage == 3):
    model = LlamaForCausalLM(shape)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
engine, optimizer, _, scheduler = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

for step in range(8):
    tokens = torch.randint(shape.vocab_size, (2, 128), device=engine.device)
    loss = engine(input_ids=tokens, labels=tokens).loss
    engine.backward(loss)
    engine.step()
    if engine.global_rank == 0:
        print(f"step {step}: loss {loss.item():.4f}")
engine.save_checkpoint("checkpoints")
