"""The release of PyTorch that torchext was built for, which is the one that is installed."""

from __future__ import annotations

from .. import _C

__all__ = ["TORCH_RELEASE"]

TORCH_RELEASE: tuple[int, ...] = tuple(int(part) for part in _C.built_for_torch.split(".")[:2])
"""The major and the minor version. The nightly builds and candidates of a release count as that release."""
