"""`torch.inference_mode` is torchext's."""

from __future__ import annotations

import torch

from torchext.inference import inference_mode

from .replacing import replace_everywhere

__all__ = ["enter"]


def enter(is_control: bool) -> None:
    """Enter the mode."""
    replace_everywhere(torch.inference_mode, inference_mode)
    torch._C._InferenceMode = inference_mode  # type: ignore[assignment, misc]
