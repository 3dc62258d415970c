"""Architectures of the transformers library, small, deferred and eager."""

from __future__ import annotations

import pytest
from architectures import ARCHITECTURES, every_architecture, small_config
from common import assert_defers_exactly

transformers = pytest.importorskip("transformers", reason="transformers is not installed")


def test_architectures_are_many() -> None:
    everyday = [name for names, _ in ARCHITECTURES.values() for name in names]
    swept = [name for _, names in ARCHITECTURES.values() for name in names]
    assert len(set(everyday)) >= 12
    assert len({*everyday, *swept}) == len(everyday) + len(swept) >= 30


@pytest.mark.cases(4)
@pytest.mark.parametrize("in_reverse", [False, True], ids=["in_order", "in_reverse"])
@pytest.mark.parametrize("model_type", every_architecture())
def test_materializes_identical_to_eager(model_type: str, in_reverse: bool) -> None:
    config = small_config(model_type)
    assert_defers_exactly(lambda: transformers.AutoModel.from_config(config), in_reverse=in_reverse)


@pytest.mark.parametrize("head", ["AutoModelForCausalLM", "AutoModelForMaskedLM"])
def test_tied_heads_stay_tied(head: str) -> None:
    config = small_config("gpt2" if head == "AutoModelForCausalLM" else "bert")
    assert_defers_exactly(lambda: getattr(transformers, head).from_config(config))
