"""Shards, copies and files of recordings on a GPU have the bits of eager construction."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from common import COMPUTES_ON_CUDA, assert_same_tensor, has_same_bits
from safetensors.torch import load_file
from torch import Tensor, nn

from torchext.checkpoint import load_checkpoint, save_safetensors
from torchext.deferred_init import defer_again, deferred_init, materialize_module, materialize_tensor

pytestmark = pytest.mark.cuda


def layers() -> nn.Module:
    """A few tensors. One exceeds the number of values that all multiprocessors draw at once."""
    with torch.device("cuda"):
        linear = nn.Linear(128, 3000)
        nn.init.trunc_normal_(linear.weight, std=0.02)
        model = nn.Sequential(nn.Embedding(5000, 128), linear, nn.LayerNorm(3000))
        return model.bfloat16() if torch.initial_seed() % 2 else model


def eager_and_deferred(seed: int) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(seed)
    eager = layers()
    torch.manual_seed(seed)
    return eager, deferred_init(layers)


PARTS: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda weight: weight[1000:1500],
    "columns": lambda weight: weight[:, 17:90],
    "steps": lambda weight: weight[3::7],
    "transposed": lambda weight: weight.t(),
    "one element": lambda weight: weight[4999, 127],
    "converted": lambda weight: weight[100:].half(),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("part", PARTS)
def test_part_alone_has_the_bits_of_the_whole(part: str, dtype: torch.dtype) -> None:
    def build() -> Tensor:
        return PARTS[part](torch.randn(5000, 128, device="cuda", dtype=dtype).mul_(0.02)).clone()

    torch.manual_seed(3)
    expected = build()
    torch.manual_seed(3)
    deferred = deferred_init(build)
    torch.manual_seed(4)
    assert_same_tensor(materialize_tensor(deferred), expected, strictly=False)


@pytest.mark.parametrize("seed", [0, 1])
def test_file_has_the_bits_of_eager_construction(seed: int, tmp_path: Path) -> None:
    eager, deferred = eager_and_deferred(seed)
    save_safetensors(deferred, tmp_path / "model.safetensors", max_memory="20MiB")
    saved = load_file(tmp_path / "model.safetensors")
    for name, wanted in eager.state_dict().items():
        assert saved[name].dtype is wanted.dtype
        if COMPUTES_ON_CUDA:
            assert has_same_bits(saved[name], wanted.cpu()), name

    _, other = eager_and_deferred(seed)
    load_checkpoint(other, tmp_path / "model.safetensors")
    for name, wanted in eager.state_dict().items():
        assert_same_tensor(other.state_dict()[name], wanted, name, strictly=False)


def test_copies_and_redeferred_tensors_have_the_same_bits() -> None:
    eager, deferred = eager_and_deferred(0)
    twin = copy.deepcopy(deferred)
    materialize_module(deferred, retain_graph=True)
    defer_again(deferred)
    for module in (twin, deferred):
        materialize_module(module)
        for name, wanted in eager.state_dict().items():
            assert_same_tensor(module.state_dict()[name], wanted, name, strictly=False)


def test_values_do_not_depend_on_the_stream() -> None:
    eager, deferred = eager_and_deferred(0)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        materialize_module(deferred)
    stream.synchronize()
    for name, wanted in eager.state_dict().items():
        assert_same_tensor(deferred.state_dict()[name], wanted, name, strictly=False)
