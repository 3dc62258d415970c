"""Random state dicts: dtypes, shapes, strides, ties, names, and sizes around the limits of files."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import huggingface_hub
import hypothesis
import hypothesis.strategies as st
import safetensors.torch
import torch
from common import has_same_bits
from torch import nn

from torchext.checkpoint import load_checkpoint, save_safetensors
from torchext.deferred_init import deferred_init

DTYPES = [dtype for dtype in safetensors.torch._SIZE if dtype is not None and "float4" not in str(dtype)]
NAMES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="."), min_size=1, max_size=40)
LONG = st.integers(100, 300).map(lambda length: "long" * length)


@st.composite
def tensors(draw: Any) -> tuple[torch.dtype, tuple[int, ...], str]:
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
    return draw(st.sampled_from(DTYPES)), shape, draw(st.sampled_from(["plain", "transposed", "tail", "tied"]))


STATES = st.dictionaries(NAMES | LONG, tensors(), max_size=6)


def make(state: dict[str, tuple[torch.dtype, tuple[int, ...], str]]) -> dict[str, torch.Tensor]:
    """The same tensors each time, whether they are recorded or not."""
    torch.manual_seed(0)
    made: dict[str, torch.Tensor] = {}
    last = None
    for name, (dtype, shape, kind) in state.items():
        if kind == "tied" and last is not None:
            made[name] = last
            continue
        larger = (
            (shape[0] + 2, *shape[1:]) if kind == "tail" and shape else shape[::-1] if kind == "transposed" else shape
        )
        tensor = (torch.randn(larger) * 100).to(torch.int16).to(dtype)
        made[name] = last = tensor[2:] if kind == "tail" and shape else tensor.mT if _swaps(kind, tensor) else tensor
        if last.shape != torch.Size(shape) and kind == "transposed":
            made[name] = last = tensor
    return made


def _swaps(kind: str, tensor: torch.Tensor) -> bool:
    return kind == "transposed" and tensor.dim() == 2


@hypothesis.given(STATES)
def test_file_has_the_bytes_that_safetensors_writes(state: Any) -> None:
    eager = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in make(state).items()}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "ours.safetensors")
        save_safetensors(deferred_init(make, state), path, max_memory="4MiB")
        found = safetensors.torch.load_file(path)
        removed = eager.keys() - found.keys()
        metadata = None
        if removed:
            with safetensors.safe_open(path, "pt") as file:
                metadata = file.metadata()
            assert metadata.keys() == removed
            assert all(has_same_bits(eager[name], found[kept]) for name, kept in metadata.items())
        if len(metadata or {}) < 2:  # safetensors writes metadata in any order
            kept = {name: tensor for name, tensor in eager.items() if name not in removed}
            safetensors.torch.save_file(kept, Path(folder, "theirs.safetensors"), metadata=metadata)
            assert path.read_bytes() == Path(folder, "theirs.safetensors").read_bytes()


@hypothesis.given(st.lists(st.integers(0, 40), min_size=1, max_size=8), st.integers(1, 120))
def test_files_are_divided_as_huggingface_hub_divides_them(sizes: list[int], limit: int) -> None:
    def construct() -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        return {f"t{i}": torch.randn(size) for i, size in enumerate(sizes)}

    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = Path(folder, "ours"), Path(folder, "theirs")
        theirs.mkdir()
        huggingface_hub.save_torch_state_dict(construct(), theirs, max_shard_size=limit)
        save_safetensors(deferred_init(construct), ours, max_shard_size=limit)
        assert {path.name: path.read_bytes() for path in ours.iterdir()} == {
            path.name: path.read_bytes() for path in theirs.iterdir()
        }


@hypothesis.given(STATES)
def test_saved_tensors_are_loaded(state: Any) -> None:
    def construct() -> nn.Module:
        module = nn.Module()
        for i, tensor in enumerate(make(state).values()):
            module.register_buffer(f"b{i}", tensor)
        return module

    eager = construct()
    module = deferred_init(lambda: construct().apply(lambda one: [buffer.zero_() for buffer in one.buffers()] and one))
    with tempfile.TemporaryDirectory() as folder:
        save_safetensors(deferred_init(construct), Path(folder, "model.safetensors"))
        load_checkpoint(module, Path(folder, "model.safetensors"))
    for (name, found), wanted in zip(module.named_buffers(), eager.buffers(), strict=True):
        assert found.dtype == wanted.dtype, name
        assert has_same_bits(found, wanted), name
