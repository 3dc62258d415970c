"""PyTorch's Python functions that need help with fakes: they reject them, raise misleading errors, or read values."""

from __future__ import annotations

import inspect
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any, NoReturn, ParamSpec, TypeVar, cast

import torch
import torch._compile
import torch._library.fake_impl
import torch._library.simple_registry
import torch._lobpcg
import torch._meta_registrations
import torch._prims_common.wrappers
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from .. import _C
from ..errors import DataDependentError
from ..internals.dispatch_keys import without_our_keys
from ..internals.imports import when_imported
from ..internals.leases import while_fakes_live
from ..internals.patching import DIFFERENCES, Function, patching_lock
from .fake_tensor_mode import is_fake_tensor, is_wrapper_of_fakes
from .values import assumes_values

__all__ = ["CHUNK", "Sampler", "count_draws", "sample"]

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


# ---- `torch.nn.init.trunc_normal_`, which redraws rejected elements


P = ParamSpec("P")
R = TypeVar("R")


def _define_sampling() -> None:
    """Define operators for `trunc_normal_` and its number of draws, so that it is recorded for deferred tensors."""
    quiet = _without_warnings(torch.nn.init._no_grad_trunc_normal_)
    library = torch.library.Library("torchext", "FRAGMENT")
    library.define(
        "trunc_normal_(Tensor(a!) self, float mean, float std, float a, float b, *, Generator? generator=None)"
        " -> Tensor(a!)",
        tags=(torch.Tag.nondeterministic_seeded,),
    )

    library.define(
        "trunc_normal_draws(int numel, ScalarType dtype, float mean, float std, float a, float b, Generator generator)"
        " -> int"
    )

    def run(
        self: Tensor, mean: float, std: float, a: float, b: float, *, generator: torch.Generator | None = None
    ) -> Tensor:
        in_chunks = self.is_cpu and self.is_contiguous() and self.numel() >= 2 * CHUNK
        if generator is None or not in_chunks:
            return quiet(self, mean, std, a, b, generator)
        sample(partial(draw, mean, std, a, b), self, generator)
        return self

    def draws(
        numel: int, dtype: torch.dtype, mean: float, std: float, a: float, b: float, generator: torch.Generator
    ) -> int:
        return count_draws(partial(draw, mean, std, a, b), numel, dtype, generator)

    def draw(mean: float, std: float, a: float, b: float, tensor: Tensor, generator: torch.Generator) -> object:
        return quiet(tensor, mean, std, a, b, generator)

    def fake(
        self: Tensor, mean: float, std: float, a: float, b: float, *, generator: torch.Generator | None = None
    ) -> Tensor:
        return self

    for key in ("CPU", "CUDA"):
        library.impl("trunc_normal_", run, key)
    library.impl("trunc_normal_draws", draws, "CompositeExplicitAutograd")
    library.impl("trunc_normal_", fake, "Meta")
    _libraries.append(library)


def _trunc_normal_(
    original: Function,
    tensor: Tensor,
    mean: float,
    std: float,
    a: float,
    b: float,
    generator: torch.Generator | None = None,
) -> Any:
    """Since 2.12 `trunc_normal_` loops while `mask.any()`, a read that would compute the tensor."""
    if is_fake_tensor(tensor) and (tensor.is_conj() or tensor.is_neg()):
        _call_on_nothing(original, _conjugated if tensor.is_conj() else _negated, mean, std, a, b)  # raises
    if is_wrapper_of_fakes(tensor):
        with torch.no_grad():
            return tensor.normal_(mean, std, generator=generator)
    if not is_fake_tensor(tensor) or not tensor.is_floating_point():
        return original(tensor, mean, std, a, b, generator)
    if torch._C._functorch.peek_interpreter_stack() is not None:
        torch.empty(0).normal_()  # raises unless vmap() allows equal draws for all entries
    with torch.no_grad():
        if _never_rejects(mean, std, a, b):
            return tensor.normal_(mean, std, generator=generator)
        if not a - 2 * std <= mean <= b + 2 * std:
            _call_on_nothing(original, torch.clone, mean, std, a, b)  # warns
        torch.ops.torchext.trunc_normal_(tensor, mean, std, a, b, generator=generator)
        # One version for the first draw, and one for writing redrawn elements, which PyTorch skips only without
        # rejections.
        for _ in range(min(tensor.numel(), 1) + 1):
            torch.autograd.graph.increment_version(tensor)
        return tensor


if DIFFERENCES["masks_of_truncated_normals"].applies:
    while_fakes_live.declare(_define_sampling)
    while_fakes_live.replaces(torch.nn.init, "_no_grad_trunc_normal_", reason="reads whether it must draw again")(
        _trunc_normal_
    )


def _without_warnings(function: Callable[P, R]) -> Callable[P, R]:
    """Return a copy of `function` that does not warn: it may run often for one call of the user.

    `warnings.catch_warnings()` would suppress warnings on all threads.
    """
    if type(function) is not FunctionType:
        return function
    names = {**function.__globals__, "warnings": SimpleNamespace(warn=lambda *args, **kwargs: None)}
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return cast("Callable[P, R]", copy)


def _conjugated(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex64).conj()


def _negated(tensor: Tensor) -> Tensor:
    return _conjugated(tensor).imag


def _call_on_nothing(function: Callable[..., Any], view: Callable[[Tensor], Tensor], *args: Any) -> None:
    """Call `function` with `view` of an empty real tensor, hidden from the user's modes."""
    with torch._C.DisableTorchFunction(), _disable_current_modes(), without_our_keys():
        function(view(torch.empty(0)), *args)


# Freeing a `torch.library.Library` unregisters its operators.
_libraries: list[torch.library.Library] = []


def _never_rejects(mean: float, std: float, a: float, b: float) -> bool:
    """Return true if `trunc_normal_` surely accepts its first draw of every element.

    Box-Muller's radius is sqrt(-2 log u), where the uniform u has at most 53 bits (`normal_distribution<double>`). So
    no draw is farther than sqrt(2 * 53 * log 2) = 8.57 standard deviations from the mean. The bounds and the draws are
    rounded to the tensor's dtype; a margin of one standard deviation plus one percent more than covers this.
    """
    reach = (math.sqrt(2 * 53 * math.log(2)) + 1) * std
    slack = 0.01 * (abs(mean) + reach)
    return std > 0 and mean - reach - slack > a and mean + reach + slack < b


# ---- Rejection samplers in bounded memory
#
# Such a sampler fills a tensor, finds the elements to reject, fills a second tensor of that size, replaces those
# elements, and repeats. The number of draws is known only after it has run. Each element depends only on its own
# element of the fills. The sampler can therefore run chunk by chunk, if each fill of a chunk gets the numbers that the
# chunk would get in a fill of the whole tensor.


Sampler = Callable[[Tensor, torch.Generator], object]
"""Fills a tensor in place, by `normal_` and `uniform_` of tensors of its size with the given generator."""

CHUNK = 2**20
"""Number of elements that are sampled at a time. `normal_` gives the pieces of a tensor the same bits as the whole if
their lengths are multiples of 16. The last piece may have any length from 16 on (`normal_fill`)."""

_DEFAULTS = {"normal_": (0.0, 1.0), "uniform_": (0.0, 1.0)}


class _FillsOfAChunk(TorchFunctionMode):
    """A mode in which each fill of a chunk at `start` gets that chunk's numbers in a fill of `numel` elements."""

    def __init__(self, start: int, numel: int) -> None:
        super().__init__()
        self._start = start
        self._numel = numel
        self.draws = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name not in _DEFAULTS:
            return func(*args, **kwargs)
        chunk, *given = args
        numbers = [float(number) for number in (*given, *_DEFAULTS[name][len(given) :])]
        generator = kwargs["generator"]
        at_chunk = generator.clone_state()
        _C.skip_fill(name, self._start, chunk.dtype, numbers, at_chunk)
        func(chunk, *numbers, generator=at_chunk)
        self.draws += _C.skip_fill(name, self._numel, chunk.dtype, numbers, generator)
        return chunk


def count_draws(sampler: Sampler, numel: int, dtype: torch.dtype, generator: torch.Generator) -> int:
    """Return the number of 32-bit draws for sampling `numel` elements of `dtype`. `generator` does not advance."""

    def draws(start: int, size: int) -> int:
        fills = _FillsOfAChunk(start, numel)
        with fills:
            sampler(torch.empty(size, dtype=dtype), generator.clone_state())
        return fills.draws

    return max(draws(start, size) for start, size in _chunks(numel))


def sample(sampler: Sampler, tensor: Tensor, generator: torch.Generator) -> None:
    """Fill the contiguous `tensor` and advance `generator` exactly like `sampler`, chunk by chunk."""
    flat = tensor.view(-1)
    end, most_draws = generator, -1
    for start, size in _chunks(tensor.numel()):
        at_start = generator.clone_state()
        fills = _FillsOfAChunk(start, tensor.numel())
        with fills:
            sampler(flat[start : start + size], at_start)
        if fills.draws > most_draws:
            end, most_draws = at_start, fills.draws
    generator.set_state(end.get_state())


def _chunks(numel: int) -> Iterator[tuple[int, int]]:
    """Yield the start and the size of each chunk. The last one is up to twice as long."""
    starts = range(0, max(numel - CHUNK, 1), CHUNK)
    for start in starts:
        yield start, (numel if start == starts[-1] else start + CHUNK) - start
