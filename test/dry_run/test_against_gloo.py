"""The memory of FSDP2 in a world, against real processes on gloo: shards, gathered parameters, buckets."""

from __future__ import annotations

import fsdp_on_gloo
import pytest
import torch.distributed
from processes import PROGRAMS, run_program

pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()),
    reason="this build of PyTorch has no gloo",
)
NAMES = [name for name, it in PROGRAMS.items() if it.function.__module__ == fsdp_on_gloo.__name__]


@pytest.mark.ci
@pytest.mark.parametrize("name", NAMES)
def test_fakes_hold_as_much_as_real_processes(name: str) -> None:
    run_program(fsdp_on_gloo.__name__, name)
