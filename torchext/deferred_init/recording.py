"""The block in which operators are recorded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from .. import _C
from ..tools.leases import while_fakes_live
from ..tools.source_lines import tracing
from . import inductor, ranks

__all__ = ["recording"]


@contextmanager
def recording(*, trace: bool = False) -> Iterator[None]:
    """Record operators on the tensors that are constructed in the block, with their source lines if `trace` is set."""
    inductor.teach_inductor()
    ranks.teach_distributed_tensors()
    with tracing() if trace else nullcontext(), while_fakes_live.hold():
        _C.enter_deferred_init()
        try:
            yield
        finally:
            _C.leave_deferred_init()
