"""Snapshots for PyTorch's memory viewer."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ..internals.text import source_line
from .timeline import Allocation

__all__ = ["Action", "save"]


class Action(NamedTuple):
    """An allocation or a free.

    Attributes:
        device: The index of the CUDA device.
        is_allocation: True for an allocation.
        address: The address of the memory.
        stream: The stream of the allocation.
        time_ns: The time in nanoseconds.
        allocation: The allocation.
    """

    device: int
    is_allocation: bool
    address: int
    stream: int
    time_ns: int
    allocation: Allocation


def save(path: Path, actions: Iterable[Action], segments: list[dict[str, Any]]) -> None:
    """Write the actions of each device and the segments, as `torch.cuda.memory._dump_snapshot()` does."""
    traces: list[list[dict[str, Any]]] = []
    for action in actions:
        while len(traces) <= action.device:
            traces.append([])
        traces[action.device].extend(_entries(action))
    snapshot = {
        "segments": segments,
        "device_traces": traces,
        "allocator_settings": {},
        "external_annotations": [],
    }
    with path.open("wb") as file:
        pickle.dump(snapshot, file)


def _entries(action: Action) -> Iterator[dict[str, Any]]:
    for name in ["alloc"] if action.is_allocation else ["free_requested", "free_completed"]:
        yield {
            "action": name,
            "addr": action.address,
            "size": action.allocation.requested,
            "stream": action.stream,
            "time_us": action.time_ns // 1000,
            "frames": _frames(action.allocation),
            "category": action.allocation.category.label,
        }


def _frames(allocation: Allocation) -> list[dict[str, Any]]:
    """Return the category, owner, operator and module of an allocation, in place of the stack that PyTorch records."""
    described = [(allocation.category.label, allocation.owner), (allocation.operator, allocation.module)]
    frames = [{"filename": text, "line": 0, "name": name} for name, text in described if text]
    if allocation.line:
        line = source_line(allocation.line)
        frames.append({"filename": line.file, "line": line.number, "name": line.function})
    return frames
