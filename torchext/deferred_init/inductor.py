"""Functions that inductor has compiled, in constructors.

Their kernels read memory without calling an operator. So their arguments are materialized, and their results are real.
"""

from __future__ import annotations

from typing import Any

from ..fake.patches.storages import make_real
from ..internals.dispatch_keys import is_constructing, without_our_keys
from ..internals.leases import while_fakes_live
from ..internals.patching import Function

__all__: list[str] = []


@while_fakes_live.replaces(
    "torch._inductor.output_code:CompiledFxGraph", "__call__", reason="runs kernels that read memory"
)
def _call(original: Function, self: object, inputs: Any) -> Any:
    if not is_constructing():
        return original(self, inputs)
    make_real(inputs)
    with without_our_keys():
        return original(self, inputs)
