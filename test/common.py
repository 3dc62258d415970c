"""Helpers for several test modules: comparing deferred with eager construction, and models."""

from __future__ import annotations

import ctypes
import os
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import psutil
import torch
from comparisons import strides_that_matter
from torch import Tensor
from torch.nn import GELU, LayerNorm, Linear, Module, Parameter, Sequential
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from torchext.deferred_init import deferred_init, is_deferred, materialize_module, materialize_tensor
from torchext.fake import fake_mode

__all__ = [
    "COMPUTES_ON_CUDA",
    "BuiltOn",
    "RecordFunctions",
    "RecordOperators",
    "Wrapper",
    "assert_defers_exactly",
    "assert_same_module",
    "assert_same_tensor",
    "assert_tensors_defer_exactly",
    "build_both",
    "feed_forward",
    "gradients",
    "has_same_bits",
    "in_fake_mode",
    "in_forked_process",
    "kept_threads",
    "memory_in_use",
    "some",
    "too_large_to_copy",
]


Value = TypeVar("Value")

# Under the null driver of `make cuda-host`, kernels do nothing, and values on CUDA devices are not compared.
COMPUTES_ON_CUDA = "nullcuda" not in os.environ.get("LD_PRELOAD", "")


def some(values: Iterable[Value], count: int | None) -> list[Value]:
    """Return at most `count` of the values, always the same ones; all if it is None."""
    every = list(values)
    return every if count is None or len(every) <= count else random.Random(0).sample(every, count)


@contextmanager
def kept_threads() -> Iterator[None]:
    """Restore the number of threads of kernels at the end of the block."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)


def in_forked_process(run: Callable[[], None]) -> int:
    """Return the exit status of a forked process that calls `run`: 0, or 1 if that raises an error."""
    pid = os.fork()
    if pid == 0:
        try:
            run()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def memory_in_use() -> int:
    """Return the memory of the process in bytes, without malloc's free memory, which may be large after other tests."""
    ctypes.CDLL(None).malloc_trim(0)
    return int(psutil.Process().memory_info().rss)


class BuiltOn(Module):
    """Three parameters. The middle one is computed from `outside`, which fails once `outside` has changed."""

    def __init__(self, outside: Tensor) -> None:
        super().__init__()
        self.first = Parameter(torch.rand(2))
        self.broken = Parameter(torch.zeros(2) + outside)
        self.last = Parameter(torch.rand(2))


def too_large_to_copy() -> Tensor:
    """Return two ones, too far apart to be copied by a recording (csrc/core/deferred_init/graph/external_tensor.h)."""
    return torch.empty(2, 2**18)[:, 0].fill_(1)


class RecordFunctions(TorchFunctionMode):
    """Records the names of functions."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


class RecordOperators(TorchDispatchMode):
    """Records the names of operators."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def in_fake_mode(fn: Callable[[], Value]) -> Value:
    """Return the result of `fn`, called in fake mode."""
    with fake_mode():
        return fn()


def build_both(fn: Callable[[], Any], seed: int = 0) -> tuple[Any, Any]:
    """Return the results of `fn`, eager and deferred, from the same seed.

    Checks that construction leaves the default generator in the same state.
    """
    torch.manual_seed(seed)
    eager = fn()
    eager_state = torch.get_rng_state()
    torch.manual_seed(seed)
    deferred = deferred_init(fn)
    assert torch.equal(torch.get_rng_state(), eager_state), "deferred construction left the generator elsewhere"
    return eager, deferred


def assert_defers_exactly(fn: Callable[[], Module], seed: int = 0, in_reverse: bool = False) -> None:
    """Assert that `materialize(deferred_init(fn))` equals `fn()`, bit for bit.

    If `in_reverse`, parameters and buffers are materialized one at a time, from last to first.
    """
    eager, deferred = build_both(fn, seed)
    state = torch.get_rng_state()
    if in_reverse:
        for tensor in reversed([*deferred.parameters(), *deferred.buffers()]):
            materialize_tensor(tensor)
    materialize_module(deferred)  # in reverse: plain attributes
    assert torch.equal(torch.get_rng_state(), state), "materializing moved the generator"
    assert not is_deferred(deferred)
    assert_same_module(deferred, eager)


def assert_tensors_defer_exactly(fn: Callable[[], object]) -> None:
    """Assert that the tensors returned by `fn` are equal eagerly and deferred, materialized first to last."""
    eager, deferred = (torch.utils._pytree.tree_leaves(built) for built in build_both(fn))
    assert len(eager) == len(deferred)
    for wanted, found in zip(eager, deferred, strict=True):
        assert is_deferred(found)
        assert materialize_tensor(found) is found
        assert_same_tensor(found, wanted)


def assert_same_module(actual: Module, expected: Module, strictly: bool = True) -> None:
    """Assert that two modules have equal names, ties, classes and tensors: see `assert_same_tensor`."""
    assert [n for n, _ in actual.named_modules()] == [n for n, _ in expected.named_modules()]
    for kind in ("named_parameters", "named_buffers"):
        found = dict(getattr(actual, kind)(remove_duplicate=False))
        wanted = dict(getattr(expected, kind)(remove_duplicate=False))
        assert list(found) == list(wanted)
        assert _groups(found) == _groups(wanted), "ties differ"
        assert _groups(found, by_storage=True) == _groups(wanted, by_storage=True), "shared storages differ"
        for name, tensor in found.items():
            assert_same_tensor(tensor, wanted[name], name, strictly)
    assert list(actual.state_dict()) == list(expected.state_dict())


def assert_same_tensor(actual: Tensor, expected: Tensor, name: str = "tensor", strictly: bool = True) -> None:
    """Assert equal bits and equal metadata.

    Unless `strictly`, version counters may differ, and so may metadata without effect: strides of dimensions of length
    1, and the strides and storage offset of tensors without elements.
    """
    assert type(actual) is type(expected), f"{name}: is a {type(actual)}, expected a {type(expected)}"
    if is_lazy(expected):  # has neither a shape nor values yet
        assert (actual.dtype, actual.device) == (expected.dtype, expected.device)
        return
    for what in ("shape", "dtype", "device", "layout", "requires_grad", "is_leaf", *(["_version"] if strictly else [])):
        found, wanted = (_attribute(tensor, what) for tensor in (actual, expected))
        assert found == wanted, f"{name}: {what} is {found}, expected {wanted}"
    found, wanted = (t.stride() if strictly else strides_that_matter(t) for t in (actual, expected))
    assert found == wanted, f"{name}: strides {actual.stride()} != {expected.stride()}"
    if strictly or expected.numel() > 0:
        assert actual.storage_offset() == expected.storage_offset(), f"{name}: storage offsets differ"
    assert actual.untyped_storage().nbytes() == expected.untyped_storage().nbytes(), f"{name}: storage sizes differ"
    assert has_same_bits(actual, expected), f"{name}: values differ"


def _attribute(tensor: Tensor, name: str) -> object:
    """Return the attribute. Some raise for a view that autograd forbids; then return the message."""
    try:
        return getattr(tensor, name)
    except RuntimeError as error:
        return str(error)


def has_same_bits(actual: Tensor, expected: Tensor) -> bool:
    """Return true if two tensors have the same shape, dtype and bits, also for NaNs."""
    if (actual.shape, actual.dtype) != (expected.shape, expected.dtype):
        return False
    if expected.is_cuda and not COMPUTES_ON_CUDA:
        return True
    return torch.equal(_bits(actual), _bits(expected))


def _bits(tensor: Tensor) -> Tensor:
    values = tensor.detach().resolve_conj().resolve_neg().flatten().clone(memory_format=torch.contiguous_format)
    return values.view(torch.uint8)


def _groups(tensors: dict[str, Tensor], by_storage: bool = False) -> set[frozenset[str]]:
    """Return the names that share a tensor, or a storage."""
    groups: dict[int, set[str]] = {}
    for name, tensor in tensors.items():
        key = tensor.untyped_storage()._cdata if by_storage and not is_lazy(tensor) else id(tensor)
        groups.setdefault(key, set()).add(name)
    return {frozenset(group) for group in groups.values()}


def feed_forward() -> Module:
    """Return a small network, always with the same weights. Some of its layers are on autocast's lists."""
    torch.manual_seed(0)
    return Sequential(Linear(4, 8), LayerNorm(8), GELU(), Linear(8, 4))


def gradients(net: Module) -> list[Tensor]:
    """Return the gradients of all parameters. Each parameter must have one."""
    found = [parameter.grad for parameter in net.parameters()]
    assert all(grad is not None for grad in found)
    return cast("list[Tensor]", found)


class Wrapper(torch.Tensor):
    """The smallest wrapper of a tensor that PyTorch accepts. After `swap_tensors(wrapper, part)` it contains itself."""

    @staticmethod
    def __new__(cls: Any, part: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, part.shape, dtype=part.dtype)

    def __init__(self, part: torch.Tensor) -> None:
        self.part = part

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["part"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: None, size: Any, stride: Any) -> Any:
        return Wrapper(inner["part"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError("is not called")
