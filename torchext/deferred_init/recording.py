"""The block in which operators are recorded."""

from __future__ import annotations

from .. import _C
from ..internals.leases import while_fakes_live

__all__ = ["Recording"]


class Recording:
    """Records operators on the tensors that are constructed in the block, with their source lines if `trace` is set."""

    def __init__(self, *, trace: bool = False) -> None:
        self._trace = trace

    def __enter__(self) -> None:
        while_fakes_live.acquire()
        if self._trace:
            _C.enter_tracing()
        try:
            _C.enter_deferred_init()
        except BaseException:
            self._leave()
            raise

    def __exit__(self, *error: object) -> None:
        try:
            _C.leave_deferred_init()
        finally:
            self._leave()

    def _leave(self) -> None:
        if self._trace:
            _C.leave_tracing()
        while_fakes_live.release()
