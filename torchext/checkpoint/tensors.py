"""The storage of a tensor, and its dtype in a checkpoint."""

from __future__ import annotations

import torch

from .. import _C
from ..tools.checks import check_is_dtype

__all__ = ["check_dtype", "converted_dtype", "lacks_values", "shows_all", "storage_of"]


def storage_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return a number for the storage of a strided tensor, and its size in bytes."""
    with torch._C.DisableTorchFunctionSubclass():  # lazy parameters raise for their storage
        storage = tensor.untyped_storage()
        return storage._cdata, storage.nbytes()


def lacks_values(tensor: torch.Tensor) -> bool:
    """Return True if a tensor cannot be saved or loaded: it is on the device `meta`, or fake outside of a dry run."""
    is_only_fake = _C.is_fake(tensor) and not _C.is_deferred(tensor) and not _C.materializes_as_fakes()
    return tensor.is_meta or is_only_fake


def shows_all(tensor: torch.Tensor) -> bool:
    """Return True if a tensor shows each byte of its storage once. An expanded tensor may only have the same size."""
    return tensor.numel() * tensor.itemsize == storage_of(tensor)[1] and _is_dense(tensor)


def _is_dense(tensor: torch.Tensor) -> bool:
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def check_dtype(dtype: torch.dtype | None) -> None:
    """Raise TypeError for a dtype that is neither floating point nor complex."""
    check_is_dtype(dtype)
    if dtype is not None and not (dtype.is_floating_point or dtype.is_complex):
        raise TypeError(f"`dtype` was expected to be floating point or complex, but it is {dtype}.")


def converted_dtype(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype after `Module.to(dtype)`, which does not change integers."""
    is_converted = tensor.is_floating_point() or tensor.is_complex()
    return dtype if dtype is not None and is_converted else tensor.dtype
