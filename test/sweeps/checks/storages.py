"""The storages of fake results and gradients have the sizes of eager ones, for arguments in several layouts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from comparisons import metadata, reversed_strides, with_gaps
from sweeps.checks.fakes import GRADIENT_NEEDS_VALUES, NEEDS_VALUES
from sweeps.operators import Arguments, Visit, check, gradients, tensors_in
from torch import Tensor
from torch.testing._internal.opinfo.core import OpInfo

from torchext.fake import DataDependentError, fake_like, fake_mode

LARGEST = 5000

CHANGES: tuple[Callable[[Tensor], Tensor], ...] = (torch.clone, reversed_strides, with_gaps)


def sizes_of_call(op: OpInfo, arguments: Arguments) -> Any:
    """Return the shapes and the storage sizes of the results and of the gradients."""
    result = arguments.call(op)
    return metadata(
        (tensors_in(result), tensors_in(gradients(result, arguments, are_dense=True))), {"shape", "storage_size"}
    )


@check(samples=(1, 1, 8), release=(2, 13))
def storages_have_the_sizes_of_eager_ones(visit: Visit) -> None:
    if not visit.is_strided or any(tensor.numel() > LARGEST for tensor in visit.arguments().tensors):
        return
    for change in CHANGES:

        def changed(tensor: Tensor, change: Callable[[Tensor], Tensor] = change) -> Tensor:
            return change(tensor.detach()).requires_grad_(tensor.requires_grad)

        arguments = visit.arguments(changed)
        fakes = arguments.map(fake_like)
        try:
            wanted = sizes_of_call(visit.op, arguments)
        except Exception:  # PyTorch refuses the layout
            continue
        try:
            with fake_mode():
                found = sizes_of_call(visit.op, fakes)
        except DataDependentError:
            assert visit.name in NEEDS_VALUES | GRADIENT_NEEDS_VALUES | {"item", "to_sparse"}, change.__name__
            continue
        assert found == wanted, change.__name__
