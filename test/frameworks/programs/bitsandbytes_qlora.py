"""4-bit parameters with LoRA, and 8-bit Adam: https://huggingface.co/docs/bitsandbytes."""

from __future__ import annotations

import argparse

import bitsandbytes as bnb
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

parser = argparse.ArgumentParser()
parser.add_argument("--adapters", action="store_true")
arguments = parser.parse_args()

dist.init_process_group("nccl")
device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
torch.cuda.set_device(device)

config = LlamaConfig(
    vocab_size=4096, hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8
)
model = LlamaForCausalLM(config).to(torch.bfloat16)
if arguments.adapters:
    for name, module in list(model.model.named_modules()):
        if isinstance(module, torch.nn.Linear):
            quantized = bnb.nn.Linear4bit(
                module.in_features, module.out_features, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4"
            )
            quantized.load_state_dict(module.state_dict())
            model.model.set_submodule(name, quantized)
    model.is_loaded_in_4bit = True
    model = prepare_model_for_kbit_training(model.to(device))
    model = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
model = DistributedDataParallel(model.to(device), device_ids=[device])
optimizer = bnb.optim.AdamW8bit([p for p in model.parameters() if p.requires_grad], lr=1e-4)
for step in range(20):
    tokens = torch.randint(config.vocab_size, (2, 128), device=device)
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.4f}")
dist.destroy_process_group()
