"""The optional libraries for checkpoint files."""

from __future__ import annotations

from typing import Any

__all__ = ["hub_serialization", "safetensors_torch"]


def safetensors_torch() -> Any:
    """Return `safetensors.torch`.

    Raises:
        ImportError: safetensors is not installed.
    """
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError(
            "torchext.checkpoint reads and writes safetensors files. Install it: pip install safetensors"
        ) from error
    return safetensors.torch


def hub_serialization() -> Any:
    """Return the module of huggingface_hub that divides checkpoints into files.

    Raises:
        ImportError: huggingface_hub is not installed.
    """
    try:
        import huggingface_hub.serialization._base as base
    except ImportError as error:
        raise ImportError(
            "huggingface_hub divides checkpoints into several files. Install it: pip install huggingface_hub"
        ) from error
    return base
