"""What fakes cannot do, as errors that a program can tell apart. `torchext.fake` is where they are public."""

from __future__ import annotations

from .. import _C

__all__ = ["DataDependentError", "UnsupportedOperatorError"]


class DataDependentError(RuntimeError):
    """An operator needs the values of a fake tensor, which has none."""


class UnsupportedOperatorError(NotImplementedError):
    """PyTorch cannot tell what an operator makes of fake tensors: it has no Meta kernel, or none for the arguments."""


for _error in (DataDependentError, UnsupportedOperatorError):
    _error.__module__ = __package__
_C.provide("data_dependent_error", DataDependentError)
_C.provide("unsupported_operator_error", UnsupportedOperatorError)
