"""The `Trainer` of transformers, with DDP, FSDP or DeepSpeed: https://huggingface.co/docs/transformers/main/en/trainer."""

from __future__ import annotations

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

parser = argparse.ArgumentParser()
parser.add_argument("--engine", choices=["ddp", "fsdp2", "deepspeed"], default="ddp")
choice = parser.parse_args().engine

ENGINES = {
    "ddp": {},
    "fsdp2": {"fsdp": True, "fsdp_config": {"fsdp_version": 2, "transformer_layer_cls_to_wrap": "LlamaDecoderLayer"}},
    "deepspeed": {
        "deepspeed": {
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
            "bf16": {"enabled": "auto"},
            "zero_optimization": {"stage": 2},
        }
    },
}


class Rows(torch.utils.data.Dataset):
    """Sentences of random words."""

    def __len__(self) -> int:
        return 8192

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        words = torch.randint(4096, (128,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": words, "labels": words}


arguments = TrainingArguments(
    output_dir="checkpoints",
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
    max_steps=20,
    logging_steps=1,
    save_steps=1,
    bf16=True,
    report_to=[],
    **ENGINES[choice],
)
config = LlamaConfig(
    vocab_size=4096, hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8
)
trainer = Trainer(model=LlamaForCausalLM(config), args=arguments, train_dataset=Rows(), eval_dataset=Rows())
trainer.train()
trainer.save_model("final")
