"""Snapshots of the simulated allocators, as `torch._C._cuda_memorySnapshot()` returns them."""

from __future__ import annotations

from typing import Any

from .. import _C

__all__ = ["segments", "snapshot", "traceback"]


def snapshot(pool: tuple[int, ...] | None) -> dict[str, Any]:
    """Return the segments of a pool, or of all for the pool (0, 0), and all traces."""
    found = segments()
    if pool is not None and any(pool[:2]):
        found = [segment for segment in found if segment["segment_pool_id"] == pool[:2]]
    traces = [[_entry(*row) for row in _C.cuda_memory_trace(device)] for device in range(_C.fake_cuda_devices())]
    return {"segments": found, "device_traces": traces, "allocator_settings": {}, "external_annotations": []}


def segments() -> list[dict[str, Any]]:
    """Return the segments of all devices that have memory."""
    devices = range(_C.fake_cuda_devices())
    return [_segment(device, *row) for device in devices for row in _C.cuda_memory_segments(device) if row[-1]]


def traceback(address: int) -> list[dict[str, Any]] | None:
    """Return the frames that allocated the block at an address, or none."""
    blocks = (block for segment in segments() for block in segment["blocks"])
    return next((block["frames"] for block in blocks if block["address"] == address and block["frames"]), None)


def _segment(
    device: int, stream: int, is_small: bool, pool: tuple[int, int], is_expandable: bool, blocks: list[_C.BlockRow]
) -> dict[str, Any]:
    used = [block for block in blocks if block[3] or block[4]]
    return {
        "device": device,
        "address": blocks[0][0],
        "total_size": sum(block[1] for block in blocks),
        "allocated_size": sum(block[1] for block in blocks if block[3]),
        "active_size": sum(block[1] for block in used),
        "requested_size": sum(block[2] for block in used),
        "stream": stream,
        "segment_type": "small" if is_small else "large",
        "segment_pool_id": pool,
        "is_expandable": is_expandable,
        "frames": [],
        "blocks": [_block(*block) for block in blocks],
    }


def _block(
    address: int, size: int, requested: int, is_allocated: bool, is_awaited: bool, frames: list[_C.Frame]
) -> dict[str, Any]:
    state = "active_allocated" if is_allocated else "active_pending_free" if is_awaited else "inactive"
    return {"address": address, "size": size, "requested_size": requested, "state": state, "frames": _frames(frames)}


def _entry(
    action: str, address: int, size: int, stream: int, time_us: int, metadata: str, frames: list[_C.Frame]
) -> dict[str, Any]:
    return {
        "action": action,
        "device_free" if action == "oom" else "addr": address,
        "size": size,
        "stream": stream,
        "time_us": time_us,
        "compile_context": "N/A",
        "user_metadata": metadata,
        "pool_id": (0, 0),
        "frames": _frames(frames),
    }


def _frames(frames: list[_C.Frame]) -> list[dict[str, Any]]:
    return [{"filename": file, "line": line, "name": function} for file, line, function in frames]
