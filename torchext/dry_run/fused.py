"""Calls whose kernels do less than the operators that fakes run: TorchScript, and recurrent networks of cuDNN.

TorchScript fuses operators on GPUs. cuDNN computes the gradients of weights for all time steps at once, and has its own
setting for TF32. So the bound of time counts neither these operators nor their gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..fake.higher_order import that_may_not_run
from ..internals.patching import Function
from .current import while_world_is_open

__all__: list[str] = []

_torch: Any = torch._C


def _uncounted(original: Function, /, *args: Any, **kwargs: Any) -> Any:
    with that_may_not_run():
        return original(*args, **kwargs)


for _kind in (_torch.ScriptFunction, _torch.ScriptMethod):
    while_world_is_open.replaces(_kind, "__call__", reason="fuses operators on GPUs")(_uncounted)
for _module in (nn.RNN, nn.LSTM, nn.GRU):
    while_world_is_open.replaces(_module, "forward", reason="calls kernels of cuDNN on GPUs")(_uncounted)
