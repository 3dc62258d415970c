"""Fake results, gradients and written arguments have the metadata of real ones. The tables are the exceptions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from comparisons import LOOSE_PROPERTIES, metadata
from sweeps.checks.layouts import LAYOUTS
from sweeps.operators import Arguments, Eager, OnTensor, Visit, check, gradients, same_storage_copy, tensors_in
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo
from torch.utils._pytree import tree_flatten

from torchext import _C
from torchext.fake import DataDependentError, UnsupportedOperatorError, fake_like, fake_mode
from torchext.internals.patching import TORCH_RELEASE

__all__ = ["DTYPES", "EXPECTED_ERRORS", "fake_without_values"]

DTYPES = (torch.float32, torch.int64, torch.complex64, torch.bool, torch.bfloat16)

COMPARED = (LOOSE_PROPERTIES | {"is_view", "storage_offset"}) - {"value"}

# The result, its shape, or a check of the arguments depends on values.
NEEDS_VALUES = {
    "__getitem__",  # with masks
    "allclose",
    "argwhere",
    "bincount",
    "cov",  # checks the weights
    "equal",
    "istft",  # checks the window
    "linalg.lstsq",
    "linalg.lstsq.grad_oriented",
    "masked_select",
    *(["nanquantile", "quantile"] if TORCH_RELEASE < (2, 12) else []),  # checks a tensor of quantiles
    "nn.functional.ctc_loss",  # with tensors of lengths
    "nn.functional.gaussian_nll_loss",  # checks the variances
    "nn.functional.one_hot",  # without a number of classes
    "nonzero",
    "repeat_interleave",  # without an output_size
    "tensor_split",  # with a tensor of indices
    "unique",
    "unique_consecutive",
}

# PyTorch has no Meta kernel, and the CPU kernel cannot be used. No operators today.
UNSUPPORTED: set[str] = set()

# The formula of the gradient reads values.
GRADIENT_NEEDS_VALUES = {"index_fill", "index_put"}

# PyTorch has no Meta kernel for the gradient, and the CPU kernel cannot be used. No operators today.
GRADIENT_UNSUPPORTED: set[str] = set()

# Samples have zeros. Fakes are assumed to have none.
GRADIENT_LAYOUT_DIFFERS = {"prod"}

# On CUDA, the order of dimensions of equal strides depends on how cuFFT's transforms are divided.
GRADIENT_LAYOUT_DIFFERS_ON_CUDA = {f"fft.{name}" for name in ("hfft", "hfft2", "hfftn", "irfft", "irfft2", "irfftn")}

# On CUDA, whether complex vectors are lazily conjugated depends on which function of cuSOLVER computes them.
CONJUGATION_DIFFERS_ON_CUDA = {"linalg.svd", "pca_lowrank", "svd", "svd_lowrank"}

# CUDA's kernel returns no gradients for sequences of different lengths in float32.
GRADIENT_DIFFERS_ON_CUDA = {"torch.ops.aten._efficient_attention_forward"}

# `torch.cuda.jiterator` launches its kernels outside of the dispatcher, and reads the addresses of fakes.
JITERATED = {op.name for op in op_db if op.name.startswith("jiterator")}

EXPECTED_ERRORS: list[tuple[set[str], type[Exception]]] = [
    (NEEDS_VALUES, DataDependentError),
    (UNSUPPORTED, UnsupportedOperatorError),
]


def expected_error(name: str, table: list[tuple[set[str], type[Exception]]]) -> type[Exception] | tuple[()]:
    return next((error for names, error in table if name in names), ())


def fake_without_values(tensor: Tensor) -> Tensor:
    """Drop known values, which another check covers."""
    fake = fake_like(tensor)
    if fake.numel() > 1:  # numbers are read like in eager PyTorch
        _C.note_foreign_write([fake])
    return fake


def shared_with(result: object, arguments: list[Tensor]) -> list[int]:
    """Return the numbers of the arguments whose storage is that of a result."""
    if not isinstance(result, Tensor):
        return []
    storage = result.untyped_storage()._cdata
    return [i for i, argument in enumerate(arguments) if argument.untyped_storage()._cdata == storage]


def is_strided(result: object) -> bool:
    return all(tensor.layout is torch.strided for tensor in tensors_in(result))


def writes_its_arguments(op: OpInfo) -> bool:
    """Return true for `resize_` and `resize_as_`: they change the arguments' metadata, so a second call differs."""
    return op.name.endswith("_")


@check(samples=(6, 120, None), dtypes=DTYPES, devices=("cpu", "cuda"))
def results_and_gradients_have_the_metadata_of_real_ones(visit: Visit) -> None:
    eager = visit.eager
    if not visit.is_strided or eager.error is not None or not is_strided(eager.result):
        return
    fakes = visit.arguments(fake_without_values)
    differs = {"is_conj"} if visit.device == "cuda" and visit.name in CONJUGATION_DIFFERS_ON_CUDA else set()
    # The second time the results come from the cache, which all samples before have filled.
    for _ in range(1 if writes_its_arguments(visit.op) else 2):
        try:
            with fake_mode():
                found = fakes.call(visit.op)
        except expected_error(visit.name, [*EXPECTED_ERRORS, (JITERATED, RuntimeError)]):
            return
        (found_leaves, found_spec), (wanted_leaves, wanted_spec) = tree_flatten(found), tree_flatten(eager.result)
        assert found_spec == wanted_spec
        for one, other in zip(found_leaves, wanted_leaves, strict=True):
            assert metadata(one, COMPARED - differs) == metadata(other, COMPARED - differs)
            assert shared_with(one, fakes.tensors) == shared_with(other, eager.arguments.tensors)
        if not (visit.device == "cuda" and visit.name in GRADIENT_DIFFERS_ON_CUDA):
            compare_gradients(visit, eager, found, fakes)


def compare_gradients(visit: Visit, eager: Eager, result: object, fakes: Arguments) -> None:
    wanted = eager.gradients
    if wanted is None:
        return
    try:
        with fake_mode():
            found = gradients(result, fakes)
    except (DataDependentError, UnsupportedOperatorError) as error:
        needs_values = isinstance(error, DataDependentError)
        assert visit.name in (GRADIENT_NEEDS_VALUES if needs_values else GRADIENT_UNSUPPORTED)
        return
    if is_strided(wanted):
        names = GRADIENT_LAYOUT_DIFFERS | (GRADIENT_LAYOUT_DIFFERS_ON_CUDA if visit.device == "cuda" else set())
        differs = {"strides_that_matter", "is_view"} if visit.name in names else set()
        assert metadata(found, COMPARED - differs) == metadata(wanted, COMPARED - differs)


@check(samples=(0, 3, None), concerns=lambda op: op.supports_autograd)
def gradients_in_other_layouts_have_the_strides_of_real_ones(visit: Visit) -> None:
    if not visit.is_strided:
        return
    copies = visit.arguments(lambda tensor: tensor.detach().clone(memory_format=torch.contiguous_format))
    compared = COMPARED - ({"strides_that_matter"} if visit.name in GRADIENT_LAYOUT_DIFFERS else set())
    for change in LAYOUTS:
        for are_dense in (False, True):

            def laid_out(tensor: Tensor, change: OnTensor = change) -> Tensor:
                return change(tensor).requires_grad_(tensor.is_floating_point())

            real = copies.map(Tensor.clone).map(laid_out)
            wanted = gradients_of(visit, real, are_dense)
            if wanted is None or not is_strided(wanted):
                continue
            with fake_mode():
                found = gradients_of(visit, copies.map(fake_without_values).map(laid_out), are_dense)
            if found is not None:
                assert metadata(found, compared) == metadata(wanted, compared), (change.__name__, are_dense)


def gradients_of(visit: Visit, arguments: Arguments, are_dense: bool) -> list[Tensor | None] | None:
    try:
        return gradients(arguments.call(visit.op.op), arguments, are_dense)
    except Exception:  # other checks compare errors
        return None


@check(
    samples=(4, None, None),
    dtypes=(torch.float32, torch.int64),
    devices=("cpu", "cuda"),
    concerns=lambda op: op.get_inplace() is not None,
)
def in_place_variants_change_the_same_arguments(visit: Visit) -> None:
    if not isinstance(visit.sample.input, Tensor) or visit.sample.input.layout is not torch.strided:
        return
    in_place = visit.op.get_inplace()
    wanted = written_by(in_place, visit.arguments(lambda tensor: same_storage_copy(tensor.detach())))
    for _ in range(2):
        found = written_by(in_place, visit.arguments(lambda tensor: fake_like(tensor.detach())))
        if wanted is not None and visit.name not in NEEDS_VALUES:
            assert found == wanted


def written_by(in_place: Callable[..., Any], arguments: Arguments) -> object:
    """Return the metadata of a clone of the first argument that an operator has written, or None if it raises."""
    written = arguments.args[0].clone()
    try:
        result = arguments._replace(args=(written, *arguments.args[1:])).call(in_place)
    except Exception:
        return None
    return result is written, metadata(written, COMPARED | {"version"})
