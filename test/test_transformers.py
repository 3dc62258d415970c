"""Architectures of the transformers library, small, deferred and eager."""

from __future__ import annotations

from contextlib import suppress

import pytest
from common import assert_defers_exactly

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

# Whatever a configuration calls its sizes, a small value for it.
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

ARCHITECTURES = [
    "llama",
    "bert",
    "vit",
    "gpt2",
    "t5",
    "whisper",
    "mixtral",
    "mamba",
    "swin",
    "wav2vec2",
    "convnext",
    "deberta-v2",
]

# Families that the ones above do not cover, for `make sweep`.
MORE_ARCHITECTURES = [
    "albert",
    "bart",
    "beit",
    "blip",
    "bloom",
    "clip",
    "deit",
    "dinov2",
    "distilbert",
    "electra",
    "falcon",
    "gemma2",
    "gpt_neox",
    "hubert",
    "jamba",
    "mistral",
    "opt",
    "pegasus",
    "phi",
    "qwen2",
    "regnet",
    "resnet",
    "roberta",
    "rwkv",
    "segformer",
    "siglip",
    "xlnet",
]


def small_config(model_type: str) -> object:
    config = transformers.AutoConfig.for_model(model_type)
    for name, value in SMALL.items():
        if isinstance(getattr(config, name, None), int):
            with suppress(AttributeError):  # a property that follows from others
                setattr(config, name, value)
    config.pad_token_id = 0 if config.to_dict().get("pad_token_id") is not None else None
    return config


@pytest.mark.parametrize(
    "model_type", [*ARCHITECTURES, *(pytest.param(name, marks=pytest.mark.long) for name in MORE_ARCHITECTURES)]
)
def test_materializes_identical_to_eager(model_type: str) -> None:
    config = small_config(model_type)
    assert_defers_exactly(lambda: transformers.AutoModel.from_config(config))


@pytest.mark.parametrize("head", ["AutoModelForCausalLM", "AutoModelForMaskedLM"])
def test_tied_heads_stay_tied(head: str) -> None:
    config = small_config("gpt2" if head == "AutoModelForCausalLM" else "bert")
    assert_defers_exactly(lambda: getattr(transformers, head).from_config(config))
