"""Meshes and the engines that shard models on them, by the names that commands take."""

from __future__ import annotations

import re
from collections.abc import Mapping

__all__ = ["ENGINES", "parse_mesh"]

ENGINES = {
    "fsdp2": ((1, 2), "one dimension to shard, or one to replicate and one to shard,"),
    "hsdp": ((2,), "one dimension to replicate and one to shard"),
    "tp": ((0,), "no dimension"),
    "ddp": ((1,), "one dimension"),
    "none": ((), "any dimensions"),
}
"""For each engine, how many dimensions of the mesh it may use besides tensor parallelism, in numbers and in words."""


def parse_mesh(mesh: str | Mapping[str, int]) -> dict[str, int]:
    """Return the sizes of the dimensions of a mesh by name.

    Raises:
        ValueError: It is not of the form `fsdp=8,tp=2`, or a size is less than 1.
    """
    pairs = list(mesh.items()) if isinstance(mesh, Mapping) else [one.partition("=")[::2] for one in mesh.split(",")]
    sizes = {str(name).strip(): int(size) if re.fullmatch(r"\s*\d+\s*", str(size)) else 0 for name, size in pairs}
    if len(sizes) < len(pairs) or not all(name.isidentifier() and size > 0 for name, size in sizes.items()):
        raise ValueError(f"mesh: expected sizes by name such as fsdp=8,tp=2, got {mesh!r}")
    return sizes
