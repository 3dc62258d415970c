"""LoRA by peft with DDP by accelerate: https://huggingface.co/docs/peft/quicktour."""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

parser = argparse.ArgumentParser()
parser.add_argument("--dora", action="store_true")
arguments = parser.parse_args()

config = LlamaConfig(
    vocab_size=4096, hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8
)
model = LlamaForCausalLM(config).to(torch.bfloat16)
lora = LoraConfig(r=8, lora_alpha=16, lora_dropout=0.05, target_modules="all-linear", use_dora=arguments.dora)
model = get_peft_model(model, lora)
model.print_trainable_parameters()

accelerator = Accelerator(mixed_precision="bf16")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
loader = DataLoader([torch.randint(config.vocab_size, (128,)) for _ in range(8192)], batch_size=2, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for tokens in loader:
    loss = model(input_ids=tokens, labels=tokens).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    accelerator.print(f"loss {loss.item():.4f}")
accelerator.unwrap_model(model).save_pretrained("adapter")
