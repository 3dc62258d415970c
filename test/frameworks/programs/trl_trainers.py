"""The trainers SFT, DPO and GRPO of trl: https://huggingface.co/docs/trl/quickstart."""

from __future__ import annotations

import argparse

from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

parser = argparse.ArgumentParser()
parser.add_argument("--method", choices=["sft", "dpo", "grpo"], default="sft")
parser.add_argument("--lora", action="store_true")
arguments = parser.parse_args()

words = ["<pad>", "<s>", "</s>", "<unk>", *(f"word{i}" for i in range(4092))]
base = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
base.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=base, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
)


def sentence(seed: int, length: int) -> str:
    """Return words that differ from sentence to sentence."""
    return " ".join(words[4 + (seed * 7919 + i * 104729) % 4092] for i in range(length))


config = LlamaConfig(
    vocab_size=4096, hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8
)
model = LlamaForCausalLM(config)
lora = LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM") if arguments.lora else None
common = {
    "output_dir": "checkpoints",
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "max_steps": 20,
    "logging_steps": 1,
    "save_steps": 1,
    "bf16": True,
    "report_to": [],
}

if arguments.method == "sft":
    rows = Dataset.from_list([{"text": sentence(i, 20 + i % 60)} for i in range(8192)])
    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(max_length=64, **common),
        train_dataset=rows,
        processing_class=tokenizer,
        peft_config=lora,
    )
elif arguments.method == "dpo":
    rows = Dataset.from_list(
        [
            {"prompt": sentence(i, 10 + i % 9), "chosen": sentence(i + 1, 20), "rejected": sentence(i + 2, 12 + i % 20)}
            for i in range(8192)
        ]
    )
    trainer = DPOTrainer(
        model=model,
        ref_model=None if arguments.lora else LlamaForCausalLM(config),
        args=DPOConfig(**common),
        train_dataset=rows,
        processing_class=tokenizer,
        peft_config=lora,
    )
else:
    rows = Dataset.from_list([{"prompt": sentence(i, 10 + i % 9)} for i in range(8192)])

    def reward(completions: list[str], **_: object) -> list[float]:
        """Reward long completions."""
        return [float(len(set(completion.split()))) for completion in completions]

    trainer = GRPOTrainer(
        model=model,
        args=GRPOConfig(num_generations=4, max_completion_length=32, **common),
        reward_funcs=reward,
        train_dataset=rows,
        processing_class=tokenizer,
        peft_config=lora,
    )
trainer.train()
trainer.save_model("final")
