"""The release of PyTorch that torchext was built for, which is the one that is installed, and what is its own."""

from __future__ import annotations

from typing import NamedTuple

from .. import _C

__all__ = ["DIFFERENCES", "TORCH_RELEASE", "Difference"]

TORCH_RELEASE: tuple[int, ...] = tuple(int(part) for part in _C.built_for_torch.split(".")[:2])
"""The major and the minor version. The nightly builds and candidates of a release count as that release."""


class Difference(NamedTuple):
    """What PyTorch does from one release to another, both included. The release 2.11 is written 211."""

    since: int
    until: int
    what: str

    @property
    def applies(self) -> bool:
        """Whether the installed release is one of them."""
        return self.since <= 100 * TORCH_RELEASE[0] + TORCH_RELEASE[1] <= self.until

    @property
    def releases(self) -> str:
        """The releases in words."""
        since, until = (f"{release // 100}.{release % 100}" for release in self[:2])
        return f"since {since}" if until == "99.0" else f"{since} to {until}"


DIFFERENCES = {name: Difference(*row) for name, row in _C.differences_between_releases.items()}
"""All of them by name: the table of csrc/torch_internals/torch_compat.h."""
