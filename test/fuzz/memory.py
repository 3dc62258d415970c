"""Actions on memory: views in other dtypes, bytes and single elements, and `out=` arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from fuzz.machine import Machine
    from fuzz.vocabulary import Action

__all__ = ["ACTIONS"]

# Not bool: kernels disagree on bytes other than 0 and 1.
VIEW_DTYPES = (torch.uint8, torch.int16, torch.int32, torch.float16, torch.int64, torch.float32, torch.complex64)


def bytes_of(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def some_bytes(tensor: Tensor, n: int) -> Tensor:
    """Return up to three bytes, which may span two elements."""
    begin = n % tensor.nbytes
    return bytes_of(tensor)[begin : begin + 1 + n % 3]


def element(tensor: Tensor, n: int) -> Tensor:
    return tensor.view(-1)[n % tensor.numel()]


def unfolded(tensor: Tensor, n: int) -> Tensor:
    """Return windows over `tensor`. Those of large tensors do not overlap: threads would write them in any order."""
    size = 1 + n % 3
    return tensor.unfold(-1, size, size if tensor.numel() >= 2**15 else 1 + n % 2)


def normal(a: Tensor, n: int, **out: Tensor) -> Tensor:
    """Draw into floats. For other dtypes and empty tensors the Meta kernel's error differs."""
    if not all(tensor.is_floating_point() for tensor in out.values()):
        raise ValueError("draws floats only")
    return torch.normal(0.0, 1 + n % 2, a.shape, **out)


def mean(a: Tensor, **out: Tensor) -> Tensor:
    """Return means. CUDA kernels write them into any dtype; CPU and Meta kernels reject some."""
    if not all(tensor.is_floating_point() or tensor.is_cpu for tensor in out.values()):
        raise ValueError("is refused when deferred")
    return torch.mean(a, -1, keepdim=True, **out)


Outer = Callable[..., Tensor]


def refuse_overlap(inputs: list[Tensor], outputs: Iterable[Tensor]) -> None:
    """Raise an error if an output of a call shares memory with an input."""
    read = {tensor.untyped_storage()._cdata for tensor in inputs}
    if any(result.untyped_storage()._cdata in read for result in outputs):
        raise ValueError("PyTorch accepts this, but the result is ambiguous")


def product(a: Tensor, b: Tensor, **out: Tensor) -> Tensor:
    """Return the product of matrices, which depends on the address if the output overlaps an input."""
    refuse_overlap([a, b], out.values())
    return torch.matmul(a, b, **out)


def lower_triangle(a: Tensor, **out: Tensor) -> Tensor:
    """Return the lower triangle, which contains unwritten memory if an output grows that overlaps the input."""
    refuse_overlap([a], out.values())
    return torch.tril(a, **out)


# Calls that take `out=`, of two tensors and a number.
OUTERS: tuple[Outer, ...] = (
    lambda a, b, n, **out: torch.add(a, n % 3, **out),
    lambda a, b, n, **out: torch.mul(a, b, **out),
    lambda a, b, n, **out: torch.exp(a, **out),
    lambda a, b, n, **out: torch.abs(a.t(), **out),
    lambda a, b, n, **out: torch.sum(a, 0, **out),
    lambda a, b, n, **out: mean(a, **out),
    lambda a, b, n, **out: torch.cat([a, b], **out),
    lambda a, b, n, **out: torch.stack([a, a], -1, **out),
    lambda a, b, n, **out: product(a, a.t(), **out),
    lambda a, b, n, **out: product(a, b, **out),
    lambda a, b, n, **out: torch.cumsum(a, 0, **out),
    lambda a, b, n, **out: torch.gt(a, n % 2, **out),
    lambda a, b, n, **out: torch.clamp(a, -1, n % 3, **out),
    lambda a, b, n, **out: torch.index_select(a, 0, torch.tensor([0, 0]), **out),
    lambda a, b, n, **out: torch.argmax(a, 0, **out),
    lambda a, b, n, **out: torch.bernoulli(torch.full(a.shape, 0.5), **out),
    lambda a, b, n, **out: normal(a, n, **out),
    lambda a, b, n, **out: torch.arange(n % 7, **out),
    lambda a, b, n, **out: torch.ones(a.shape, **out),
    lambda a, b, n, **out: torch.linspace(0, 1, n % 9, **out),
    lambda a, b, n, **out: torch.flatten(lower_triangle(a, **out)),
    lambda a, b, n, **out: torch.where(a > 0, a, b, **out),
    lambda a, b, n, **out: torch.sigmoid(a, **out),
    lambda a, b, n, **out: torch.linalg.vector_norm(a, **out),
)


def resizable(out: Tensor) -> Tensor:
    """Return `out`, unless PyTorch's result for it is ambiguous."""
    if not out.untyped_storage().resizable():
        raise ValueError("PyTorch would raise after it has given it a shape that its memory does not hold")
    if out.numel() == 0:
        raise ValueError("an input that is the same tensor would be read before anything is written to it")
    if out.is_conj() or out.is_neg():
        raise ValueError("PyTorch's fallbacks for these bits resize it natively, which fakes refuse")
    return out


def write_fitting_out(machine: Machine, a: Tensor, b: Tensor, n: int) -> Tensor:
    call = OUTERS[n % len(OUTERS)]
    out = torch.zeros_like(call(a, b, n))
    return call(a, b, n, out=out)


def write_non_contiguous_out(machine: Machine, a: Tensor, b: Tensor, n: int) -> Tensor:
    call = OUTERS[n % len(OUTERS)]
    out = torch.zeros_like(call(a, b, n).t().contiguous()).t()
    return call(a, b, n, out=out)


def write_view_as_out(machine: Machine, a: Tensor, b: Tensor, n: int) -> list[Tensor]:
    call = OUTERS[n % len(OUTERS)]
    base = torch.zeros(2, *call(a, b, n).shape, dtype=a.dtype)
    return [call(a, b, n, out=base[1]), base]


ACTIONS: dict[str, Action] = {
    "view_dtype": lambda m, a, b, n: a.view(VIEW_DTYPES[n % len(VIEW_DTYPES)]),
    "some_bytes": lambda m, a, b, n: some_bytes(a, n),
    "copy_of_bytes": lambda m, a, b, n: some_bytes(a, n).clone(),
    "strided_bytes": lambda m, a, b, n: bytes_of(a)[n % 3 :: 1 + n % 7],
    "fill_bytes": lambda m, a, b, n: some_bytes(a, n).fill_(n),
    "write_byte": lambda m, a, b, n: bytes_of(a).__setitem__(n % a.nbytes, n),
    "add_to_words_": lambda m, a, b, n: a.view(torch.int16).add_(n),
    "element": lambda m, a, b, n: element(a, n),
    "copy_of_element": lambda m, a, b, n: element(a, n).clone(),
    "fill_element": lambda m, a, b, n: element(a, n).fill_(n % 5),
    "normal_element": lambda m, a, b, n: element(a, n).normal_(),
    "row": lambda m, a, b, n: a.select(-1, n % a.shape[-1]),
    "copy_of_row": lambda m, a, b, n: a.select(-1, n % a.shape[-1]).clone(),
    "as_complex": lambda m, a, b, n: torch.view_as_complex(a[..., :2]),
    "unfold": lambda m, a, b, n: unfolded(a, n),
    "overlap": lambda m, a, b, n: a.as_strided((3, 2), (1, 1), n % 2),
    "movedim": lambda m, a, b, n: a.movedim(0, -1),
    "on_storage": lambda m, a, b, n: torch.empty(0, dtype=torch.uint8).set_(a.untyped_storage()),
    "fill_of_view": lambda m, a, b, n: a.view(torch.int32).random_(0, 1 + n),
    "fitting_out": write_fitting_out,
    "non_contiguous_out": write_non_contiguous_out,
    "view_as_out": write_view_as_out,
    "out_of_any_shape": lambda m, a, b, n: OUTERS[n % len(OUTERS)](a, b, n, out=resizable(b)),
    "out_of_no_elements": lambda m, a, b, n: OUTERS[n % len(OUTERS)](a, b, n, out=torch.empty(0, dtype=a.dtype)),
    "out_of_a_view": lambda m, a, b, n: OUTERS[n % len(OUTERS)](a, a, n, out=resizable(b).t()),
}
