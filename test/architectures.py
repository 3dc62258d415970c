"""Architectures of the transformers library, small."""

from __future__ import annotations

from contextlib import suppress

import pytest
from _pytest.mark.structures import ParameterSet

__all__ = ["ARCHITECTURES", "every_architecture", "small_config"]

# Small values for all names of size parameters in configurations.
SMALL = {
    "hidden_size": 64,
    "d_model": 64,
    "n_embd": 64,
    "dim": 64,
    "embed_dim": 16,
    "num_hidden_layers": 2,
    "num_layers": 2,
    "n_layer": 2,
    "n_layers": 2,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "hidden_dim": 128,
    "ffn_dim": 128,
    "d_ff": 128,
    "d_kv": 16,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "vocab_size": 500,
    "num_local_experts": 2,
}

# By family: those that are always tested, and those that only `make sweep` adds.
ARCHITECTURES = {
    "text": (
        ["bert", "deberta-v2", "gpt2", "llama"],
        [
            *("albert", "bloom", "distilbert", "electra", "falcon", "gemma2", "gpt_neox", "mistral", "opt", "phi"),
            *("qwen2", "roberta", "xlnet"),
        ],
    ),
    "vision": (
        ["convnext", "swin", "vit"],
        ["beit", "deit", "dinov2", "mobilevit", "regnet", "resnet", "segformer", "videomae"],
    ),
    "detection": (["yolos"], ["d_fine", "mask2former", "owlvit", "rt_detr"]),
    "audio": (["wav2vec2"], ["audio-spectrogram-transformer", "hubert", "wavlm"]),
    "text and vision": (["clip"], ["blip", "siglip"]),
    "encoder and decoder": (["t5", "whisper"], ["bart", "pegasus"]),
    "mixture of experts": (["mixtral"], ["olmoe", "qwen2_moe", "switch_transformers"]),
    "state space": (["mamba"], ["falcon_mamba", "jamba", "mamba2", "rwkv"]),
}


def every_architecture() -> list[ParameterSet]:
    """One set of parameters for each architecture, named after it."""
    return [
        pytest.param(name, marks=[pytest.mark.long] if is_long else [], id=name)
        for families in ARCHITECTURES.values()
        for is_long, names in enumerate(families)
        for name in names
    ]


def small_config(model_type: str) -> object:
    import transformers

    config = transformers.AutoConfig.for_model(model_type)
    for part in (config, getattr(config, "text_config", None), getattr(config, "vision_config", None)):
        for name, value in SMALL.items():
            if isinstance(getattr(part, name, None), int):
                with suppress(AttributeError):  # a property derived from others
                    setattr(part, name, value)
    config.pad_token_id = 0 if config.to_dict().get("pad_token_id") is not None else None
    return config
