"""The memory that PyTorch's CUDA kernels allocate besides their results.

These are workspaces, buffers for reductions, and copies of arguments.

NOTE [Allocations of kernels]

A CUDA kernel allocates more than its results from the same allocator: copies of arguments in a layout that the library
cannot read, buffers that combine the partial results of a reduction, temporary storage of sorts, and the cuBLAS
workspace. A peak is often inside such a call, and the freed blocks decide where the next tensors are placed. So each
kernel that allocates has a rule that repeats its allocations and frees in order.

The rules come from PyTorch's sources and from the CUDA build of PyTorch 2.15: test/oracle/record_kernels.py runs calls
there without a GPU, and test/memory/test_kernel_memory.py compares its records with the rules. A kernel without a rule
is assumed to allocate only its results, in the order in which they are returned.

The counter calls the rule of an operator if the call is not cached (csrc/extensions/memory/memory_counter.h).
That may happen in any thread and inside of any mode. So a rule reads the descriptions that it gets, and calls neither
operators nor functions of `torch` that a mode could observe.
"""

from __future__ import annotations

from .... import _C
from ....internals.calls import skip_frames
from . import blas, buffers, convolution, reduction, sorting  # noqa: F401
from .calls import RULES, Geometry, steps_of

__all__: list[str] = []

skip_frames(steps_of.__code__, with_callees=True)
_C.provide("kernel_geometry", Geometry)
_C.provide("kernel_steps", steps_of)
_C.set_kernel_operators([*RULES])
