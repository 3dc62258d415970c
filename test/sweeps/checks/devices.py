"""Calls with fakes on a CUDA device end alike, whichever device is the current one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from comparisons import LOOSE_PROPERTIES, metadata, outcome
from sweeps.operators import Arguments, Visit, check, gradients
from torch import Tensor

from torchext.fake import fake_like, fake_mode

OTHER = "cuda:1"

COMPARED = LOOSE_PROPERTIES | {"is_view", "storage_offset"}


def on_other_device(tensor: Tensor) -> Tensor:
    return fake_like(tensor, device=OTHER)


def ends_alike(run: Callable[[], Any]) -> None:
    """Check that the results of a call, or its error, do not depend on the current device."""
    ends = []
    for current in (1, 0):
        with torch.cuda.device(current), torch.random.fork_rng(devices=[]):
            ends.append(metadata(outcome(run), COMPARED))
    assert ends[0] == ends[1]


# Real CUDA devices are not faked.
@check(samples=(1, 4, None), concerns=lambda op: not torch.cuda.is_available())
def results_do_not_depend_on_the_current_device(visit: Visit) -> None:
    def arguments() -> Arguments:
        made = visit.arguments(on_other_device)
        return made._replace(kwargs={**made.kwargs, "device": OTHER}) if "device" in made.kwargs else made

    def run() -> Any:
        called = arguments()
        result = called.call(visit.op)
        return result, outcome(lambda: gradients(result, called))

    with fake_mode(gpu=2):
        ends_alike(run)
        in_place = visit.op.get_inplace()
        if in_place is not None:
            ends_alike(lambda: arguments().map(Tensor.detach).call(in_place))
