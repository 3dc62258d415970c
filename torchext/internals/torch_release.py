"""The installed release of PyTorch, which is the one that torchext was built for, and its differences."""

from __future__ import annotations

from typing import NamedTuple

from .. import _C

__all__ = ["DIFFERENCES", "TORCH_RELEASE", "Difference"]

TORCH_RELEASE: tuple[int, ...] = tuple(int(part) for part in _C.built_for_torch.split(".")[:2])
"""The major and the minor version. Nightly builds and release candidates count as their release."""


class Difference(NamedTuple):
    """A behavior of PyTorch in a range of releases, both ends included. Release 2.11 is written 211."""

    since: int
    until: int
    what: str

    @property
    def applies(self) -> bool:
        """Return true if it applies to the installed release."""
        return self.since <= 100 * TORCH_RELEASE[0] + TORCH_RELEASE[1] <= self.until

    @property
    def releases(self) -> str:
        """Return the range of releases in words."""
        since, until = (f"{release // 100}.{release % 100}" for release in self[:2])
        return f"since {since}" if until == "99.0" else f"{since} to {until}"


DIFFERENCES = {name: Difference(*row) for name, row in _C.differences_between_releases.items()}
"""All differences by name: the table in csrc/core/torch_internals/torch_compat.h."""
