"""FSDP2 by accelerate: https://huggingface.co/docs/accelerate/usage_guides/fsdp."""

from __future__ import annotations

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, get_linear_schedule_with_warmup

plugin = FullyShardedDataParallelPlugin(
    fsdp_version=2,
    auto_wrap_policy="transformer_based_wrap",
    transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
    activation_checkpointing=True,
)
accelerator = Accelerator(mixed_precision="bf16", fsdp_plugin=plugin, gradient_accumulation_steps=2)

config = LlamaConfig(
    vocab_size=4096, hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8
)
model = LlamaForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
loader = DataLoader([torch.randint(config.vocab_size, (128,)) for _ in range(8192)], batch_size=2, shuffle=True)
scheduler = get_linear_schedule_with_warmup(optimizer, 1, 100)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

model.train()
for step, tokens in enumerate(loader):
    with accelerator.accumulate(model):
        loss = model(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    mean = accelerator.reduce(loss.detach(), "mean")
    accelerator.print(f"step {step}: loss {mean.item():.4f}")
accelerator.save_state("checkpoints")
