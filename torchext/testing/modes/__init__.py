"""The modes of the plugin, one file each, with a function `enter(is_control)` that is called once."""

from __future__ import annotations

from importlib import import_module

import torch

__all__ = ["enter_mode"]


def enter_mode(mode: str, is_control: bool = False) -> None:
    """Enter `mode` for the rest of the process. The state of random generators does not change.

    Args:
        mode: One of MODES.
        is_control: Replace the mode's functions by pass-through wrappers.
    """
    with torch.random.fork_rng(devices=[]):
        import_module(f".{mode.replace('-', '_')}", __name__).enter(is_control)
