"""The exceptions and warnings of torchext.

Every exception also derives from the builtin class that earlier releases raised, so `except RuntimeError` keeps
working. Invalid arguments raise `TypeError` and `ValueError`, as in PyTorch.
"""

from __future__ import annotations

__all__ = [
    "CheckpointError",
    "DataDependentError",
    "MaterializationError",
    "PatchError",
    "RankFailedError",
    "RanksDifferError",
    "TorchextDeprecationWarning",
    "TorchextError",
    "TorchextFutureWarning",
    "TorchextWarning",
    "UnsupportedOperatorError",
]


def __dir__() -> list[str]:
    return __all__


class TorchextError(Exception):
    """Base class of all exceptions that torchext defines."""


class MaterializationError(TorchextError, RuntimeError):
    """A deferred tensor cannot be computed, for example because a recorded input has changed since."""


class RanksDifferError(TorchextError, RuntimeError):
    """The ranks of a process group have recorded different initial values."""


class RankFailedError(TorchextError, RuntimeError):
    """A rank that `check_init` ran has failed. The message is its traceback."""


class CheckpointError(TorchextError, ValueError, RuntimeError):
    """A checkpoint is malformed, does not match the model that it is loaded into, or cannot be written for a model."""


class DataDependentError(TorchextError, RuntimeError):
    """An operator needs the values of a fake tensor."""


class UnsupportedOperatorError(TorchextError, NotImplementedError):
    """An operator cannot run on fake tensors: it has no Meta kernel, or none for these arguments."""


class PatchError(TorchextError, RuntimeError, AttributeError):
    """A PyTorch function that torchext replaces is not the one that it expects."""


class TorchextWarning(UserWarning):
    """Base class of all warnings that torchext issues."""


class TorchextDeprecationWarning(TorchextWarning, DeprecationWarning):
    """A name or an argument is deprecated. The message names its replacement."""


class TorchextFutureWarning(TorchextWarning, FutureWarning):
    """The behavior will change in a later release, or is an error in a later release of PyTorch."""


for _class in map(globals().__getitem__, __all__):
    _class.__module__ = __package__
