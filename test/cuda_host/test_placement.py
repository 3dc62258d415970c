"""Materializing, loading and saving on CUDA: each byte is copied once, and memory holds only the model."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from torchext.checkpoint import load_checkpoint, save_safetensors
from torchext.deferred_init import deferred_init, materialize_module, materialize_tensor

pytestmark = [
    pytest.mark.cuda_host,
    pytest.mark.skipif("NULLCUDA_TRACE" not in os.environ, reason="needs the null driver: make cuda-host"),
]
if "NULLCUDA_TRACE" in os.environ:
    from ledger import Copy, copies_of, draws_of

# Rounding unit and largest remainder of a block, as in CUDACachingAllocator.cpp.
ROUNDING = 512
REMAINDER = 2**20


def layers(device: str) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(500, 500, device=device) for _ in range(4)))


def peak_of(run: Callable[[], object]) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_cpu_recordings_are_copied_once_in_their_final_dtype(dtype: torch.dtype | None) -> None:
    model = deferred_init(layers, "cpu")
    peak = 0

    def materialize() -> None:
        nonlocal peak
        peak = peak_of(lambda: materialize_module(model, device="cuda", dtype=dtype))

    copies = copies_of(materialize)
    assert sorted(copies) == sorted(Copy("H->D", parameter.nbytes) for parameter in model.parameters())
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    assert nbytes <= peak <= nbytes + ROUNDING * len(list(model.parameters())) + REMAINDER


def test_cuda_recordings_are_drawn_in_place() -> None:
    model = deferred_init(layers, "cuda")
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    copies: list[Copy] = []
    peak = peak_of(lambda: copies.extend(copies_of(lambda: materialize_module(model))))
    assert not copies
    assert nbytes <= peak <= nbytes + ROUNDING * len(list(model.parameters())) + REMAINDER


def test_cuda_recordings_are_saved_one_tensor_at_a_time(tmp_path: Path) -> None:
    model = deferred_init(layers, "cuda")
    copies: list[Copy] = []
    peak = peak_of(lambda: copies.extend(copies_of(lambda: save_safetensors(model, tmp_path / "model.safetensors"))))
    assert sorted(copies) == sorted(Copy("D->H", parameter.nbytes) for parameter in model.parameters())
    assert peak <= max(parameter.nbytes for parameter in model.parameters()) + ROUNDING


@pytest.mark.parametrize("recorded_on", ["cuda", "cpu"])
def test_device_memory_is_not_counted_as_the_hosts(recorded_on: str, tmp_path: Path) -> None:
    model = deferred_init(lambda: nn.Linear(5000, 3000, device=recorded_on).cuda())
    copies = copies_of(lambda: save_safetensors(model, tmp_path / "model.safetensors", max_memory="20MiB"))
    to_host = [copy for copy in copies if copy.direction == "D->H"]
    assert sum(copy.nbytes for copy in to_host) == sum(parameter.nbytes for parameter in model.parameters())
    assert max(copy.nbytes for copy in to_host) < 3 * 2**20


def test_unread_results_on_a_device_are_not_the_hosts(tmp_path: Path) -> None:
    sorted_values = deferred_init(lambda: torch.randn(8 * 2**20, device="cuda").sort()[0])
    save_safetensors({"x": sorted_values}, tmp_path / "x.safetensors", max_memory="20MiB")


def test_files_are_loaded_by_one_copy_of_each_tensor(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_safetensors(deferred_init(layers, "cpu"), path)
    model = deferred_init(layers, "cpu")
    copies = copies_of(lambda: load_checkpoint(model, path, device="cuda"))
    assert sorted(copies) == sorted(Copy("H->D", parameter.nbytes) for parameter in model.parameters())
    assert all(parameter.is_cuda for parameter in model.parameters())


def test_a_shard_of_a_cuda_recording_is_cut_from_the_whole() -> None:
    weight = deferred_init(lambda: torch.randn(4000, 100, device="cuda"))
    shard = weight[1000:1500].clone()
    del weight
    peak = peak_of(lambda: materialize_tensor(shard))
    assert peak <= 4000 * 100 * 4 + shard.nbytes + REMAINDER
    again = deferred_init(lambda: torch.randn(4000, 100, device="cuda"))
    assert [draw.numel for draw in draws_of(lambda: materialize_tensor(again[1000:1500].clone()))] == [400_000]
