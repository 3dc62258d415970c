"""Calls of operators on CUDA with each dtype. `cuda_dtypes.tsv` lists the rejected dtypes.

The facts come from PyTorch's host code (test/cuda_host/dtype_facts.py), and test_cuda_dtypes.py compares fake devices
with them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["DTYPES", "Call", "facts", "name_of", "refusal_in"]

# The numbers are those of `c10::ScalarType`.
DTYPES: dict[torch.dtype, int] = {
    **dict(zip((torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64), range(5), strict=True)),
    **dict(zip((torch.float16, torch.float32, torch.float64), range(5, 8), strict=True)),
    **dict(zip((torch.complex32, torch.complex64, torch.complex128, torch.bool), range(8, 12), strict=True)),
    torch.bfloat16: 15,
    **dict(zip((torch.float8_e5m2, torch.float8_e4m3fn), (23, 24), strict=True)),
    **dict(zip((torch.float8_e5m2fnuz, torch.float8_e4m3fnuz), (25, 26), strict=True)),
    **dict(zip((torch.uint16, torch.uint32, torch.uint64), range(27, 30), strict=True)),
    torch.float8_e8m0fnu: 44,
}
REFUSAL = re.compile(r'^"(.+)" not implemented for \'(\w+)\'$')


def name_of(dtype: torch.dtype) -> str:
    """Return the C++ name, such as `Long`, which errors contain."""
    return torch.empty(0, dtype=dtype).type().removeprefix("torch.").removesuffix("Tensor")


def refusal_in(error: Exception) -> tuple[str, str] | None:
    """Return the names of the kernel and the dtype if `error` reports a missing kernel."""
    found = REFUSAL.match(str(error).splitlines()[0]) if isinstance(error, NotImplementedError) else None
    return (found[1], found[2]) if found else None


class Call(NamedTuple):
    """A call of an overload. In `arguments`, `t(2, 3)` is a tensor of the dtype, `t(2, dtype=int64)` is not."""

    op: str
    arguments: str

    def exists(self) -> bool:
        name, overload = self.op.split(".")
        return hasattr(getattr(torch.ops.aten, name, None), overload)

    def run(self, dtype: torch.dtype, make: Callable[..., Tensor] = torch.empty) -> object:
        def tensor(*size: int, dtype: torch.dtype = dtype) -> Tensor:
            return make(size, dtype=dtype, device="cuda")

        name, overload = self.op.split(".")
        operator = getattr(getattr(torch.ops.aten, name), overload)
        names = {**vars(torch), "t": tensor, "D": dtype, "operator": operator}
        return eval(f"operator({self.arguments})", names)


def facts() -> list[tuple[Call, list[torch.dtype], list[torch.dtype]]]:
    """Return the calls of `cuda_dtypes.tsv` in this release, with their rejected and accepted dtypes."""
    found = []
    for line in (Path(__file__).parent / "fake" / "cuda_dtypes.tsv").read_text().splitlines():
        op, arguments, *masks = line.split("\t")
        refused, accepted = ([dtype for dtype, bit in DTYPES.items() if int(mask, 16) >> bit & 1] for mask in masks)
        if (call := Call(op, arguments)).exists():
            found.append((call, refused, accepted))
    return found
