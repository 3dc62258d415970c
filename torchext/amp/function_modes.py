"""Report regions to PyTorch's function modes, as `torch.autocast` does, for non-strict `torch.export`."""

from __future__ import annotations

import sys
from typing import Any

import torch

from .. import _C

__all__: list[str] = []

_torch: Any = torch


def _tell_modes(region: _C.AutocastRegion, begins: bool) -> None:
    """Report a region. The core calls this when a region begins or ends while a function mode is active."""
    module: Any = sys.modules.get("torch.fx.experimental.proxy_tensor")
    if module is None:
        return  # nothing is being exported
    for mode in _torch.overrides._get_current_function_mode_stack():
        if isinstance(mode, module.PreDispatchTorchFunctionMode):
            _trace(mode, region, begins)


def _trace(mode: Any, region: _C.AutocastRegion, begins: bool) -> None:
    if region.self_cleaning:
        raise NotImplementedError(
            "torch.export cannot trace a self-cleaning region: an exported program has no AmpTensors. Export with "
            "amp.autocast(), and cast what leaves the region."
        )
    if begins:
        device_type = region.device_type or _C.autocast_device_type_in_use()
        state = (
            device_type,
            torch.get_autocast_dtype(device_type),
            torch.is_autocast_enabled(device_type),
            torch.is_autocast_cache_enabled(),
        )
        mode.__torch_function__(_torch.amp._enter_autocast, (), state)
    else:
        mode.__torch_function__(_torch.amp._exit_autocast, (), ())


_C.provide("notify_modes", _tell_modes)
