"""Every operator of `op_db`, every sample: fake results have the metadata of real results.

The exceptions are in the tables below, and each entry is checked to be needed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from common import some
from torch import Tensor
from torch.testing._internal.common_device_type import instantiate_device_type_tests, ops
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_utils import TestCase
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from torchext import _C
from torchext.fake import DataDependentError, UnsupportedOperatorError, fake_like, fake_mode
from torchext.tools.torch_release import TORCH_RELEASE

DTYPES = (torch.float32, torch.int64, torch.complex64, torch.bool, torch.bfloat16)

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

# The formula that does not read values returns a view. Along a dimension of one element it returns the incoming
# gradient, which may be expanded. `FakeTensorMode` has the same difference.
GRADIENT_LAYOUT_DIFFERS = {"masked.prod", "prod"}

# On CUDA, the order of dimensions of equal strides depends on how cuFFT's transforms are divided.
GRADIENT_LAYOUT_DIFFERS_ON_CUDA = {f"fft.{name}" for name in ("hfft", "hfft2", "hfftn", "irfft", "irfft2", "irfftn")}

# On CUDA, whether complex vectors are lazily conjugated depends on which function of cuSOLVER computes them.
CONJUGATION_DIFFERS_ON_CUDA = {"linalg.svd", "pca_lowrank", "svd", "svd_lowrank"}

# CUDA's kernel returns no gradients for sequences of different lengths in float32.
GRADIENT_DIFFERS_ON_CUDA = {"torch.ops.aten._efficient_attention_forward"}

# The operator resizes its argument by broadcasting, which its Meta kernel rejects.
GROWS_IN_PLACE = {"addbmm"}

# `torch.cuda.jiterator` launches its kernels outside of the dispatcher, and reads the addresses of fakes.
JITERATED = {op.name for op in op_db if op.name.startswith("jiterator")}

EXPECTED_ERRORS: list[tuple[set[str], type[Exception]]] = [
    (NEEDS_VALUES, DataDependentError),
    (UNSUPPORTED, UnsupportedOperatorError),
]
EXPECTED_GRADIENT_ERRORS: list[tuple[set[str], type[Exception]]] = [
    (GRADIENT_NEEDS_VALUES, DataDependentError),
    (GRADIENT_UNSUPPORTED, UnsupportedOperatorError),
]


def full_name(op: OpInfo) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else str(op.name)


# Most operators have fewer samples.
SAMPLES = 120


class Call(NamedTuple):
    """A call of an operator, ready to be made, and its tensor arguments."""

    run: Callable[[], Any]
    tensors: list[Tensor]


def calls(
    op: OpInfo, dtype: torch.dtype, device: str = "cpu", count: int | None = SAMPLES
) -> Iterator[tuple[Call, Call]]:
    """Return `count` samples twice, on real tensors and on fakes, except samples that are not strided."""
    requires_grad = dtype is torch.float32 and op.supports_autograd
    for sample in some(op.sample_inputs(device, dtype, requires_grad=requires_grad), count):
        real = call_of(op, sample)
        if any(tensor.layout != torch.strided for tensor in real.tensors):
            continue
        fakes: dict[int, Tensor] = {}

        def to_fake(value: object, fakes: dict[int, Tensor] = fakes) -> object:
            return fakes.setdefault(id(value), fake_without_values(value)) if isinstance(value, Tensor) else value

        arguments, kwargs = tree_map(to_fake, ((sample.input, *sample.args), sample.kwargs))

        def run_fake(arguments: Any = arguments, kwargs: Any = kwargs) -> Any:
            with fake_mode():
                return op(*arguments, **kwargs)

        yield real, Call(run_fake, [fakes[id(tensor)] for tensor in real.tensors])


def fake_without_values(tensor: Tensor) -> Tensor:
    """Drop known values, which test_known_values.py covers."""
    fake = fake_like(tensor)
    if fake.numel() > 1:  # numbers are read like in eager PyTorch
        _C.note_foreign_write([fake])
    return fake


def call_of(op: OpInfo, sample: SampleInput) -> Call:
    arguments = (sample.input, *sample.args)
    tensors = [value for value in tree_leaves((arguments, sample.kwargs)) if isinstance(value, Tensor)]
    return Call(lambda: op(*arguments, **sample.kwargs), tensors)


def metadata(value: object, arguments: list[Tensor]) -> object:
    """Return everything about a result except its values; strides only of dimensions longer than 1."""
    if not isinstance(value, Tensor):
        return type(value)
    strides = tuple(s for s, n in zip(value.stride(), value.shape, strict=True) if n > 1) if value.numel() else ()
    storage = value.untyped_storage()._cdata
    return {
        "shape": tuple(value.shape),
        "dtype": value.dtype,
        "device": value.device,
        "strides": strides,
        "storage_offset": value.storage_offset(),
        "requires_grad": value.requires_grad,
        "conj": value.is_conj(),
        "neg": value.is_neg(),
        "is_view": value._is_view(),
        "shares_storage_of": [i for i, a in enumerate(arguments) if a.untyped_storage()._cdata == storage],
    }


def without(found: object, names: set[str]) -> object:
    return {name: value for name, value in found.items() if name not in names} if isinstance(found, dict) else found


def gradients(result: object, arguments: list[Tensor]) -> list[Tensor | None]:
    outputs = [t for t in tree_leaves(result) if isinstance(t, Tensor) and t.requires_grad]
    inputs = [t for t in arguments if t.requires_grad]
    if not outputs or not inputs:
        return []
    losses = [t.abs().sum() if t.is_complex() else t.sum() for t in outputs]
    return list(torch.autograd.grad(losses, inputs, allow_unused=True))


def expected_error(name: str, table: list[tuple[set[str], type[Exception]]]) -> type[Exception] | tuple[()]:
    return next((error for names, error in table if name in names), ())


def writes_its_arguments(op: OpInfo) -> bool:
    """Return true for `resize_` and `resize_as_`: they change the sample's metadata, so a second call differs."""
    return op.name.endswith("_")


def is_strided(result: object) -> bool:
    return all(t.layout == torch.strided for t in tree_leaves(result) if isinstance(t, Tensor))


class TestOpDb(TestCase):
    @ops(op_db, allowed_dtypes=DTYPES)
    def test_fakes_have_the_metadata_of_real_results(self, device: str, dtype: torch.dtype, op: OpInfo) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of samples that provoke them
            for real, fake in calls(op, dtype, device):
                self.compare(op, real, fake)

    @pytest.mark.long
    @ops(op_db, allowed_dtypes=DTYPES)
    def test_all_samples(self, device: str, dtype: torch.dtype, op: OpInfo) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for real, fake in calls(op, dtype, device, count=None):
                self.compare(op, real, fake)

    @ops([op for op in op_db if op.get_inplace() is not None], allowed_dtypes=(torch.float32, torch.int64))
    def test_in_place_variants_change_the_same_arguments(self, device: str, dtype: torch.dtype, op: OpInfo) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of samples that provoke them
            for sample in op.sample_inputs(device, dtype):
                self.compare_in_place(op, sample)

    def compare_in_place(self, op: OpInfo, sample: SampleInput) -> None:
        def run(inputs: Any) -> object:
            (input_, *args), kwargs = inputs
            try:
                result = op.get_inplace()(input_, *args, **kwargs)
            except Exception:
                return None
            return result is input_, metadata(input_, []), input_._version

        if not isinstance(sample.input, Tensor) or sample.input.layout is not torch.strided:
            return
        wanted = run(((sample.input.clone(), *sample.args), sample.kwargs))
        for _ in range(2):
            inputs = tree_map(
                lambda value: fake_like(value) if isinstance(value, Tensor) else value,
                ((sample.input.clone(), *sample.args), sample.kwargs),
            )
            found = run(inputs)
            if wanted is not None and full_name(op) not in NEEDS_VALUES | GROWS_IN_PLACE:
                assert found == wanted

    def compare(self, op: OpInfo, real: Call, fake: Call) -> None:
        try:
            wanted = real.run()
        except Exception:  # a sample that this build of PyTorch cannot run
            return
        if not is_strided(wanted):
            return
        # The second time the results come from the cache, which all samples before have filled.
        for _ in range(1 if writes_its_arguments(op) else 2):
            try:
                found = fake.run()
            except expected_error(full_name(op), [*EXPECTED_ERRORS, (JITERATED, RuntimeError)]):
                return
            (found_leaves, found_spec), (wanted_leaves, wanted_spec) = tree_flatten(found), tree_flatten(wanted)
            assert found_spec == wanted_spec
            is_on_cuda = any(tensor.is_cuda for tensor in real.tensors)
            differs = {"conj"} if is_on_cuda and full_name(op) in CONJUGATION_DIFFERS_ON_CUDA else set()
            for found_leaf, wanted_leaf in zip(found_leaves, wanted_leaves, strict=True):
                found_data, wanted_data = metadata(found_leaf, fake.tensors), metadata(wanted_leaf, real.tensors)
                assert without(found_data, differs) == without(wanted_data, differs)
            if not (is_on_cuda and full_name(op) in GRADIENT_DIFFERS_ON_CUDA):
                self.compare_gradients(op, (wanted, real), (found, fake))

    def compare_gradients(self, op: OpInfo, real: tuple[Any, Call], fake: tuple[Any, Call]) -> None:
        try:
            wanted = gradients(real[0], real[1].tensors)
        except Exception:  # a sample whose gradient PyTorch cannot compute
            return
        try:
            with fake_mode():
                found = gradients(fake[0], fake[1].tensors)
        except expected_error(full_name(op), EXPECTED_GRADIENT_ERRORS):
            return
        if is_strided(wanted):
            is_on_cuda = any(tensor.is_cuda for tensor in real[1].tensors)
            names = GRADIENT_LAYOUT_DIFFERS | (GRADIENT_LAYOUT_DIFFERS_ON_CUDA if is_on_cuda else set())
            differs = {"strides", "is_view"} if full_name(op) in names else set()
            assert [without(metadata(g, []), differs) for g in found] == [
                without(metadata(g, []), differs) for g in wanted
            ]


instantiate_device_type_tests(TestOpDb, globals(), only_for=("cpu", "cuda"))
if "TestOpDbCUDA" in globals():
    globals()["TestOpDbCUDA"].pytestmark = pytest.mark.cuda


@pytest.mark.filterwarnings("ignore:A window was not provided")
@pytest.mark.parametrize(
    ("name", "error"), [(name, error) for names, error in EXPECTED_ERRORS for name in sorted(names)], ids=str
)
def test_entry_of_the_table_is_needed(name: str, error: type[Exception]) -> None:
    def raises(fake: Call) -> bool:
        try:
            fake.run()
        except error:
            return True
        return False

    candidates = [op for op in op_db if full_name(op) == name]
    dtypes = [(op, dtype) for op in candidates for dtype in DTYPES if dtype in op.supported_dtypes("cpu")]
    assert any(raises(fake) for op, dtype in dtypes for _, fake in calls(op, dtype))
