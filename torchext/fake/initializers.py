"""`torch.nn.init.trunc_normal_`, which redraws rejected elements, and other samplers that reject."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from types import FunctionType, SimpleNamespace
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from .. import _C
from ..internals.dispatch_keys import without_our_keys
from ..internals.leases import while_fakes_live
from ..internals.patching import Function
from ..internals.torch_release import DIFFERENCES
from .checks import is_fake_tensor, is_wrapper_of_fakes

__all__ = ["CHUNK", "Sampler", "count_draws", "sample"]

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
        self: torch.Tensor, mean: float, std: float, a: float, b: float, *, generator: torch.Generator | None = None
    ) -> torch.Tensor:
        in_chunks = self.is_cpu and self.is_contiguous() and self.numel() >= 2 * CHUNK
        if generator is None or not in_chunks:
            return quiet(self, mean, std, a, b, generator)
        sample(partial(draw, mean, std, a, b), self, generator)
        return self

    def draws(
        numel: int, dtype: torch.dtype, mean: float, std: float, a: float, b: float, generator: torch.Generator
    ) -> int:
        return count_draws(partial(draw, mean, std, a, b), numel, dtype, generator)

    def draw(mean: float, std: float, a: float, b: float, tensor: torch.Tensor, generator: torch.Generator) -> object:
        return quiet(tensor, mean, std, a, b, generator)

    def fake(
        self: torch.Tensor, mean: float, std: float, a: float, b: float, *, generator: torch.Generator | None = None
    ) -> torch.Tensor:
        return self

    for key in ("CPU", "CUDA"):
        library.impl("trunc_normal_", run, key)
    library.impl("trunc_normal_draws", draws, "CompositeExplicitAutograd")
    library.impl("trunc_normal_", fake, "Meta")
    _libraries.append(library)


def _trunc_normal_(
    original: Function,
    tensor: torch.Tensor,
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


def _conjugated(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.complex64).conj()


def _negated(tensor: torch.Tensor) -> torch.Tensor:
    return _conjugated(tensor).imag


def _call_on_nothing(function: Callable[..., Any], view: Callable[[torch.Tensor], torch.Tensor], *args: Any) -> None:
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


Sampler = Callable[[torch.Tensor, torch.Generator], object]
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


def sample(sampler: Sampler, tensor: torch.Tensor, generator: torch.Generator) -> None:
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
