"""Functions that checkpoint tests run in separate processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import psutil
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from torchext.checkpoint import load_checkpoint, save_safetensors
from torchext.deferred_init import deferred_init


def grow_while_saving(construct: Callable[[], nn.Module], folder: Path, max_memory: int) -> int:
    """Return the growth of the process in bytes beyond its previous peak, in a separate process."""
    model = deferred_init(construct)
    save_safetensors(deferred_init(nn.Linear, 500, 500), folder / "first", max_memory=max_memory)  # first-use costs
    return _growth(lambda: save_safetensors(model, folder / "model", max_memory=max_memory))


def one_large_tensor() -> nn.Module:
    model = nn.Module()
    model.weight = nn.Parameter((torch.randn(4096, 8192) * 0.02).bfloat16())
    return model


def several_tensors() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(12)])


def several_layouts() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
    model.turned = nn.Parameter(torch.randn(30, 40).t())
    model.rows = nn.Parameter(torch.randn(20, 10)[4:9])
    model.register_buffer("conjugate", torch.randn(3, dtype=torch.complex64).conj())
    return model


def save_until_killed(folder: Path, is_ready: Path) -> None:
    """Save the model of `four_files()`, after announcing it."""
    model = deferred_init(four_files)
    is_ready.touch()
    save_safetensors(model, folder, max_shard_size="1MB", max_memory="4MiB", resume=True)


def four_files() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(450, 500) for _ in range(4)])


def grow_while_loading(path: Path) -> tuple[int, int]:
    """Return the growth of the process in bytes while it loads, and after it has read all of the model."""
    model = deferred_init(several_tensors)
    load_checkpoint(deferred_init(nn.Linear, 2, 2), {"weight": torch.ones(2, 2), "bias": torch.ones(2)})
    before = psutil.Process().memory_info().rss
    load_checkpoint(model, path)
    loaded = psutil.Process().memory_info().rss - before
    for parameter in model.parameters():
        parameter.sum()
    return loaded, psutil.Process().memory_info().rss - before


def grow_while_saving_distributed(folder: Path) -> tuple[int, int]:
    """Return the growth of the process in bytes, and the size of the checkpoint."""
    dcp.save(deferred_init(nn.Linear, 500, 500).state_dict(), checkpoint_id=folder / "first")
    model = deferred_init(several_tensors)
    size = sum(parameter.nbytes for parameter in model.parameters())
    return _growth(lambda: dcp.save(model.state_dict(), checkpoint_id=folder / "model")), size


def _growth(function: Callable[[], object]) -> int:
    """Return the growth of the process in bytes during the call.

    Pages of libraries are excluded: code that runs for the first time is mapped and stays mapped.
    """
    before = _resident()
    Path("/proc/self/clear_refs").write_text("5")
    function()
    after = _resident()
    return after["VmHWM"] - after["RssFile"] - before["RssAnon"]


def _resident() -> dict[str, int]:
    """Return the resident memory of this process in bytes, by the names of proc_pid_status(5)."""
    lines = (line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return {name: int(value.split()[0]) * 1024 for name, value in lines if name.startswith(("VmHWM", "Rss"))}
