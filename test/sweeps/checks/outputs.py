"""Operators with an `out` of another size or layout: fakes and deferred tensors end like eager ones.

The arguments are those of the sample, and the same with reversed strides. The long sweeps have more kinds of `out`.
"""

from __future__ import annotations

from collections.abc import Callable

import tiers
import torch
from common import assert_same_tensor
from comparisons import LOOSE_PROPERTIES, metadata, reversed_strides
from sweeps.checks.fakes import NEEDS_VALUES, UNSUPPORTED
from sweeps.operators import Arguments, Visit, check, same_storage_copy, tensors_in
from torch import Tensor

from torchext.deferred_init import deferred_init, is_deferred, materialize_tensor
from torchext.fake import DataDependentError, UnsupportedOperatorError, fake_like, fake_mode

# Results are uninitialized, depend on addresses of matrices, or differ between eager calls, because the kernel reads
# the `out` before it writes it.
NO_VALUES = {"empty", "linalg.lstsq", "native_batch_norm", "_native_batch_norm_legit"}

# An `out` that grows has the strides of the Meta kernel if the values of all arguments are known. Other fakes raise.
OTHER_STRIDES = {"linalg.lstsq"}

COMPARED = LOOSE_PROPERTIES | {"storage_offset", "storage_size"}

Outputs = list[Tensor]
OnTensor = Callable[[Tensor], Tensor]

FEW: dict[str, OnTensor] = {
    "empty": lambda t: t.new_empty(0),
    "turned": lambda t: t.new_zeros(tuple(reversed(t.shape))),
    "permuted": lambda t: t.new_zeros(tuple(reversed(t.shape))).permute(tuple(reversed(range(t.dim())))),
}
MANY: dict[str, OnTensor] = {
    **FEW,
    "small": lambda t: t.new_zeros(max(t.numel() // 2, 1)),
    "large": lambda t: t.new_zeros(t.numel() * 2 + 3),
    "flat": lambda t: t.new_zeros(t.numel()),
    "with gaps": lambda t: t.new_zeros((*t.shape, 2))[..., 0],
    "view": lambda t: t.new_zeros(t.numel() + 7)[3:5],
    "column": lambda t: t.new_zeros(3, t.numel() + 2)[:, 1],
}


@check(samples=(1, 1, 5), concerns=lambda op: bool(op.supports_out), release=(2, 13))
def out_ends_like_the_eager_one(visit: Visit) -> None:
    if not visit.is_strided:
        return
    for change in (same_storage_copy, reversed_strides):
        arguments = visit.arguments(lambda tensor, change=change: change(tensor.detach()))  # type: ignore[misc]
        results = results_of(visit, arguments)
        for name, make in (MANY if tiers.is_long() else FEW).items() if results else ():
            compare(visit, arguments, [make(result) for result in results], f"{change.__name__}, {name}")


def results_of(visit: Visit, arguments: Arguments) -> Outputs:
    try:
        return tensors_in(arguments.map(same_storage_copy).call(visit.op))
    except Exception:  # a sample that this build of PyTorch cannot run
        return []


def compare(visit: Visit, arguments: Arguments, outputs: Outputs, what: str) -> None:
    def run(copy: OnTensor) -> Outputs:
        written = [copy(output) for output in outputs]
        arguments.map(copy).call(visit.op.op, out=written[0] if len(written) == 1 else tuple(written))
        return written

    wanted = outcome(lambda: run(same_storage_copy))
    try:
        with fake_mode():
            found = outcome(lambda: run(fake_like))
    except (DataDependentError, UnsupportedOperatorError):
        assert visit.name in NEEDS_VALUES | UNSUPPORTED, what
        found = wanted
    assert (found is None) == (wanted is None), what
    compared = COMPARED - ({"strides_that_matter"} if visit.op.name in OTHER_STRIDES else set())
    assert metadata(found, compared) == metadata(wanted, compared), what
    deferred = outcome(lambda: deferred_init(run, recorded_copy))
    assert (deferred is None) == (wanted is None), what
    for tensor, expected in zip(deferred or [], wanted or [], strict=True):
        assert metadata(tensor, COMPARED) == metadata(expected, COMPARED), what
        assert_fits(tensor)
        assert is_deferred(tensor), what
        materialize_tensor(tensor)
        assert metadata(tensor, COMPARED) == metadata(expected, COMPARED), what
        if visit.op.name not in NO_VALUES:
            assert_same_tensor(tensor.contiguous(), expected.contiguous(), what, strictly=False)


def recorded_copy(tensor: Tensor) -> Tensor:
    """Return a copy with the same strides, storage offset and storage size, which `deferred_init` records."""
    size = tensor.untyped_storage().nbytes() // tensor.element_size()
    whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.detach().untyped_storage(), 0, (size,), (1,))
    copy = torch.empty(size, dtype=tensor.dtype).copy_(whole)
    return copy.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())


def outcome(run: Callable[[], Outputs]) -> Outputs | None:
    torch.manual_seed(0)
    try:
        return run()
    except (DataDependentError, UnsupportedOperatorError):
        raise
    except Exception:
        return None


def assert_fits(tensor: Tensor) -> None:
    if tensor.numel():
        last = tensor.storage_offset() + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        assert (last + 1) * tensor.element_size() <= tensor.untyped_storage().nbytes()
