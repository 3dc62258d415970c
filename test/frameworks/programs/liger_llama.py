"""Liger's kernels in a Llama: https://github.com/linkedin/Liger-Kernel."""

from __future__ import annotations

import torch
import torch.distributed as dist
from liger_kernel.transformers import apply_liger_kernel_to_llama
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

dist.init_process_group("nccl")
device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
torch.cuda.set_device(device)

apply_liger_kernel_to_llama(fused_linear_cross_entropy=True)
config = LlamaConfig(
    vocab_size=4096, hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8
)
model = DistributedDataParallel(LlamaForCausalLM(config).to(device, torch.bfloat16), device_ids=[device])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for step in range(20):
    tokens = torch.randint(config.vocab_size, (2, 128), device=device)
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.4f}")
dist.destroy_process_group()
