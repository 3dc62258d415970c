"""What the modes of the plugin do, one file a mode. Each has a function `enter(is_control)`, which is called once."""

from __future__ import annotations

from importlib import import_module

import torch

__all__ = ["enter_mode"]


def enter_mode(mode: str, is_control: bool = False) -> None:
    """Enters `mode` for the rest of the process. The random generators are left as they were.

    Args:
        mode: One of MODES.
        is_control: Replace what the mode replaces by what only hands on.
    """
    with torch.random.fork_rng(devices=[]):
        import_module(f".{mode.replace('-', '_')}", __name__).enter(is_control)
