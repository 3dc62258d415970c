"""PyTorch's Python functions that reject fakes although real tensors are accepted, or raise misleading errors."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch._compile
import torch._library.fake_impl
import torch._library.simple_registry
import torch._lobpcg
import torch._meta_registrations
import torch._prims_common.wrappers
from torch import Tensor

from .. import _C
from ..errors import DataDependentError
from ..internals.imports import when_imported
from ..internals.leases import while_fakes_live
from ..internals.patching import Function, patching_lock
from .values import assumes_values

__all__: list[str] = []

_HAS_CUDA_KERNEL = re.compile(r"\n(  structured_delegate:|    [^:\n]*CUDA)")


def _native_functions() -> tuple[set[str], set[str]]:
    """Return the operators whose CUDA kernels compare devices, and those that share code between CPU and CUDA.

    Source: native_functions.yaml (see csrc/extensions/kernels/device_kernels.h).
    """
    comparing, shared = set(), set()
    path = Path(torch.__file__).parents[1] / "torchgen/packaged/ATen/native/native_functions.yaml"
    for entry in path.read_text().split("\n- func: ")[1:] if path.exists() else ():
        name = f"aten::{entry[: entry.index('(')]}"
        if "\n  device_check: NoCheck" not in entry and _HAS_CUDA_KERNEL.search(entry):
            comparing.add(name)
        if "\n    CPU, CUDA" in entry or "\n  structured_inherits: TensorIteratorBase" in entry:
            shared.add(name)
    return comparing, shared


_C.set_native_functions(_native_functions)


def _has_fake_implementation(name: str) -> bool:
    """Return whether `torch.library.register_fake` has registered a function for an operator."""
    return torch._library.simple_registry.singleton.find(name).fake_impl.kernel is not None


_C.provide("has_fake_implementation", _has_fake_implementation)


# ---- Functions of Meta kernels. Calls that do not involve our fakes go to the originals, unchanged


@while_fakes_live.replaces(torch._lobpcg.LOBPCG, "run", reason="iterates until values converge")
def _run(original: Function, self: torch._lobpcg.LOBPCG) -> None:
    """End at the first read of a value.

    Values decide how often `torch.lobpcg` iterates, but not the metadata of its results.
    """
    try:
        original(self)
    except DataDependentError:
        if assumes_values():  # by a policy that refuses this line
            raise
        if self.X.numel() == 0:
            raise ZeroDivisionError("0.0 cannot be raised to a negative power") from None  # the norm of X is 0
        matmul = torch._linalg_utils.matmul
        product = matmul(self.A, self.X) - matmul(self.B, self.X) * self.E  # raises the errors of dtypes
        if self.method == "ortho":
            self.X = product
        else:
            self.X[:] = product


class _LikeBFloat16:
    """A matrix that claims to be bfloat16, for the Meta function of `grouped_mm`."""

    dtype = torch.bfloat16

    def __init__(self, matrix: Tensor) -> None:
        self._matrix = matrix

    def __getattr__(self, name: str) -> Any:
        return getattr(self._matrix, name)


_registrations: Any = torch._meta_registrations
_PARAMETERS = inspect.signature(_registrations._meta_grouped_mm_common)


@while_fakes_live.replaces(_registrations, "_meta_grouped_mm_common", reason="takes bfloat16 only")
def _grouped_mm(original: Function, /, *args: Any, **kwargs: Any) -> Any:
    """`aten::_grouped_mm` also supports float32 and float16, by a loop over the groups; its Meta function does not."""
    given = _PARAMETERS.bind(*args, **kwargs).arguments
    a, b = given["mat_a"], given["mat_b"]
    is_looped = a.dtype == b.dtype and a.dtype in (torch.float32, torch.float16) and given.get("scale_a") is None
    if _C.meta_call_device() is None or not is_looped or given.get("out_dtype") not in (None, a.dtype):
        return original(*args, **kwargs)
    # checks the arguments
    original(**{**given, "mat_a": _LikeBFloat16(a), "mat_b": _LikeBFloat16(b), "out_dtype": None})
    return _registrations._create_grouped_mm_output_tensor(a, b, given.get("offs"), None)


@while_fakes_live.replaces(
    _registrations, "device_hint", reason="returns CUDA for tensors other than PyTorch's FakeTensors"
)
def _device_hint(original: Function, tensor: object) -> Any:
    """Python Meta kernels need the device of a FakeTensor."""
    return _C.meta_call_device() or original(tensor)


@while_fakes_live.replaces(torch._prims_common, "alert_not_deterministic", reason="warns outside of C++")
def _alert_not_deterministic(original: Function, caller: str) -> None:
    """Warn like `Context::alertNotDeterministic()`, so that the warning of a Meta kernel can be captured."""
    if _C.meta_call_device() is None or not torch.is_deterministic_algorithms_warn_only_enabled():
        original(caller)
    else:
        _C.warn_of_meta_kernel(
            f"{caller} does not have a deterministic implementation, but you set "
            "'torch.use_deterministic_algorithms(True, warn_only=True)'. You can file an issue at "
            "https://github.com/pytorch/pytorch/issues to help us prioritize adding deterministic support for this "
            "operation."
        )


@while_fakes_live.replaces(torch._prims_common.wrappers, "_resize_output_check", reason="warns outside of C++")
def _resize_output_check(original: Function, out: Tensor, shape: Sequence[int]) -> Any:
    """Warn like `resize_output_check()` (Resize.cpp)."""
    if _C.meta_call_device() is None:
        return original(out, shape)
    is_needed = tuple(out.shape) != tuple(shape)
    if is_needed and out.numel() != 0:
        _C.warn_of_meta_kernel(
            "An output with one or more elements was resized since it had shape "
            f"{list(out.shape)}, which does not match the required output shape {list(shape)}. This behavior is "
            "deprecated, and in a future PyTorch release outputs will not be resized unless they have zero "
            "elements. You can explicitly reuse an out tensor t by resizing it, inplace, to zero elements with "
            "t.resize_(0)."
        )
    return is_needed


# ---- Fake functions of custom operators that need a size that depends on values (`torch.library.get_ctx()`)


@while_fakes_live.replaces(torch._library.fake_impl, "set_ctx_getter", reason="mistakes our fakes for meta tensors")
def _set_ctx_getter(original: Function, /, *args: Any, **kwargs: Any) -> Any:
    if _C.meta_call_device() is None:
        return original(*args, **kwargs)  # errors about arguments quote its name
    return original(lambda: _Context(*args, **kwargs))


class _Context:
    """The context of a fake function while it runs for our fakes."""

    def __init__(self, ctx_getter: Callable[[], object]) -> None:
        self._refuse = ctx_getter

    def new_dynamic_size(self, **bounds: int | None) -> NoReturn:
        """Raise, because no symbolic number can represent the size."""
        raise DataDependentError(
            f"`{self._operator()}` returns a tensor whose shape depends on the values of its arguments, but at least "
            "one is a fake tensor, which has none. Run it on real tensors, or move it out of the code that runs on "
            "fake tensors."
        )

    create_unbacked_symint = new_dynamic_size  # its previous name

    def _operator(self) -> str:
        try:
            self._refuse()
        except RuntimeError as error:  # begins with the operator's name
            return str(error).split(" ", 1)[0]
        return "the operator"


# ---- Meta kernels without Dynamo
#
# PyTorch wraps many of them in `torch._disable_dynamo`, so that the first call imports `torch._dynamo`, which takes as
# long as importing `torch`. Real kernels do not. As long as Dynamo has not been imported, there is nothing to disable.


# The attribute with which `torch._compile` caches `torch._dynamo.disable(function)` after the first call.
CACHE = "__dynamo_disable"


def _call_directly() -> None:
    """Let the wrappers call their functions directly until Dynamo is imported."""
    if "torch._dynamo" in sys.modules:
        return
    patch = while_fakes_live.patch(
        torch._compile, "getattr", _find_the_function, "wrappers without a cached function import Dynamo"
    )
    # Other threads may wait for the import.
    when_imported("torch._dynamo", partial(patching_lock.run_soon, partial(while_fakes_live.withdraw, [patch])))


def _find_the_function(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `getattr` that finds the function itself where no disabled one is cached."""

    def find(owner: Any, name: str, *default: Any) -> Any:
        value = original(owner, name, *default)
        return owner if value is None and name == CACHE and "torch._dynamo" not in sys.modules else value

    return find


while_fakes_live.declare(_call_directly)
