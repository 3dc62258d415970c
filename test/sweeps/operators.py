"""Visits of operators: the samples of `op_db`, made once, and the checks that use them.

A check is a function of a `Visit` with the decorator `check`, in a file of `checks`. `test_operators.py` calls each
check with the samples of each operator and dtype.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import tiers
import torch
from common import kept_threads
from torch import Tensor
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils._pytree import tree_leaves, tree_map

from torchext.internals.patching import TORCH_RELEASE

__all__ = [
    "CHECKS",
    "UNINITIALIZED",
    "Arguments",
    "Check",
    "Counts",
    "OnTensor",
    "Visit",
    "check",
    "concerning",
    "failures",
    "full_name",
    "gradients",
    "same_storage_copy",
    "tensors_in",
]

Value = TypeVar("Value")
OnTensor = Callable[[Tensor], Tensor]

# The values of their results are uninitialized memory.
UNINITIALIZED = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}


def full_name(op: OpInfo) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else str(op.name)


def tensors_in(values: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def same_storage_copy(tensor: Tensor) -> Tensor:
    """Return a copy with the same strides, storage offset, storage size and lazy bits; a clone if it is not strided.

    In `deferred_init` the copy is real, because its storage is.
    """
    values = tensor.detach()
    if tensor.layout is not torch.strided:
        copy = values.clone()
    elif values.is_conj():
        copy = same_storage_copy(values.conj()).conj()
    elif values.is_neg():
        copy = torch._neg_view(same_storage_copy(torch._neg_view(values)))
    else:
        storage = tensor.untyped_storage().clone()
        copy = values.new_empty(0).set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
    return copy.requires_grad_(tensor.requires_grad)


class Arguments(NamedTuple):
    """The arguments of a call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def tensors(self) -> list[Tensor]:
        return tensors_in(self)

    @property
    def are_strided(self) -> bool:
        return all(tensor.layout is torch.strided for tensor in self.tensors)

    def map(self, change: OnTensor) -> Arguments:
        """Return the arguments with changed tensors. A tensor that is passed twice is changed once."""
        changed: dict[int, Tensor] = {}

        def leaf(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if id(value) not in changed:
                changed[id(value)] = change(value)
            return changed[id(value)]

        return Arguments(*tree_map(leaf, (self.args, self.kwargs)))

    def call(self, function: Callable[..., Any], **more: Any) -> Any:
        return function(*self.args, **self.kwargs, **more)


class Eager:
    """An eager call of an operator.

    Attributes:
        arguments: Its arguments, which it may have changed.
        result: Its result, or None after an error.
        error: Its error, or None.
    """

    def __init__(self, op: OpInfo, arguments: Arguments) -> None:
        self.arguments = arguments
        self.result: Any = None
        self.error: Exception | None = None
        try:
            self.result = arguments.call(op)
        except Exception as error:  # a sample that this build of PyTorch cannot run
            self.error = error

    @cached_property
    def gradients(self) -> list[Tensor | None] | None:
        """The gradients of the arguments, or None if PyTorch cannot compute them."""
        try:
            return gradients(self.result, self.arguments)
        except Exception:
            return None


def gradients(result: object, arguments: Arguments, are_dense: bool = False) -> list[Tensor | None]:
    """Return the gradients of the sum of all results, for each argument that requires one.

    The gradient of a sum is an expanded number. With `are_dense`, the sum is that of absolute values.
    """
    outputs = [tensor for tensor in tensors_in(result) if tensor.requires_grad]
    inputs = [tensor for tensor in arguments.tensors if tensor.requires_grad]
    if not outputs or not inputs:
        return []
    losses = [output.abs().sum() if are_dense or output.is_complex() else output.sum() for output in outputs]
    return list(torch.autograd.grad(losses, inputs, allow_unused=True))


class Visit:
    """One sample of an operator and a dtype, for all checks. No check changes it."""

    def __init__(self, op: OpInfo, dtype: torch.dtype, device: str, sample: SampleInput) -> None:
        self.op, self.dtype, self.device = op, dtype, device
        self.name = full_name(op)
        self.sample = sample
        self._arguments = Arguments((sample.input, *sample.args), sample.kwargs)

    def arguments(self, change: OnTensor = same_storage_copy) -> Arguments:
        """Return new arguments: copies with equal strides, unless `change` makes others."""
        return self._arguments.map(change)

    @property
    def is_strided(self) -> bool:
        return self._arguments.are_strided

    @cached_property
    def eager(self) -> Eager:
        """The eager call. Checks may differentiate it, but do not change its tensors."""
        return Eager(self.op, self.arguments())


class Counts(NamedTuple):
    """How many samples a check gets: every day, in `make ci`, and in the long sweeps. None is all of them."""

    everyday: int | None
    everything: int | None
    long: int | None


@dataclass(frozen=True)
class Check:
    """A property of operators. See `check`."""

    function: Callable[[Visit], None]
    dtypes: tuple[torch.dtype, ...]
    samples: Counts
    devices: tuple[str, ...]
    concerns: Callable[[OpInfo], bool]
    release: tuple[int, int] | None = None

    @property
    def name(self) -> str:
        return self.function.__name__

    def visits(self, every: Sequence[Visit]) -> Sequence[Visit]:
        """Return the visits that it gets in this run."""
        everyday, everything, long = self.samples
        return spread(every, long if tiers.is_long() else tiers.amount(everyday, everything))


CHECKS: list[Check] = []


def check(
    *,
    samples: tuple[int | None, int | None, int | None],
    dtypes: tuple[torch.dtype, ...] = (torch.float32,),
    devices: tuple[str, ...] = ("cpu",),
    concerns: Callable[[OpInfo], bool] = lambda op: True,
    release: tuple[int, int] | None = None,
) -> Callable[[Callable[[Visit], None]], Callable[[Visit], None]]:
    """Register a check of all operators. It raises if the property does not hold.

    Args:
        samples: The number of samples of an operator and a dtype in each tier: `Counts`. They are spread evenly.
        dtypes: The dtypes of the samples.
        devices: The devices of the samples.
        concerns: Returns whether to check an operator.
        release: The only PyTorch release to check, because Meta kernels differ between releases.
    """

    def register(function: Callable[[Visit], None]) -> Callable[[Visit], None]:
        CHECKS.append(Check(function, dtypes, Counts(*samples), devices, concerns, release))
        return function

    return register


def spread(values: Sequence[Value], count: int | None) -> Sequence[Value]:
    """Return at most `count` values, from the first one on, in equal distances."""
    if count is None or len(values) <= count:
        return values
    return [values[place * len(values) // count] for place in range(count)]


class Failure(NamedTuple):
    """A check that does not hold for a sample."""

    check: str
    sample: str
    error: Exception


def is_deterministic(visit: Visit) -> bool:
    """Return False if PyTorch alerts that equal calls may have other results.

    `max_unpool3d`, for example, writes elements that it is given twice from several threads.
    """
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        visit.arguments().call(visit.op)
    except Exception as error:
        return "does not have a deterministic implementation" not in str(error)
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    return True


def concerning(op: OpInfo, dtype: torch.dtype, device: str, checks: Iterable[Check] = CHECKS) -> list[Check]:
    """Return the checks that concern an operator."""
    return [one for one in checks if dtype in one.dtypes and device in one.devices and one.concerns(op)]


def failures(op: OpInfo, dtype: torch.dtype, device: str, checks: Iterable[Check] = CHECKS) -> list[Failure]:
    """Run the checks that concern an operator on its samples, and return those that do not hold."""
    wanted = [one for one in concerning(op, dtype, device, checks) if one.release in (None, TORCH_RELEASE)]
    if not wanted:
        return []
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of samples that provoke them
        requires_grad = dtype is torch.float32 and op.supports_autograd
        samples = list(op.sample_inputs(device, dtype, requires_grad=requires_grad))
        visits = [Visit(op, dtype, device, sample) for sample in samples]
        with kept_threads():
            if not all(map(is_deterministic, spread(visits, 4))):
                torch.set_num_threads(1)
            for one in wanted:
                for visit in one.visits(visits):
                    torch.manual_seed(0)
                    try:
                        one.function(visit)
                    except Exception as error:
                        found.append(Failure(one.name, f"{visits.index(visit)}: {visit.sample.summary()}", error))
    return found
