"""FSDP1 and FSDP2 on deferred modules: two processes on gloo, compared with the eager module."""

from __future__ import annotations

import pytest
import torch.distributed
from processes import run_program

PROGRAMS = "fsdp_programs"

pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()),
    reason="this build of PyTorch has no gloo",
)


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", ["fsdp1", "fsdp1_that_was_imported_before"])
def test_fully_sharded_data_parallel_has_the_parameters_of_the_eager_module(name: str) -> None:
    run_program(PROGRAMS, name)


def test_every_shard_of_fully_shard_is_that_of_the_eager_module() -> None:
    run_program(PROGRAMS, "fully_shard")


@pytest.mark.ci
def test_sharded_tensors_cannot_be_placed_off_their_mesh() -> None:
    run_program(PROGRAMS, "fully_sharded_parts_stay_on_their_mesh")


@pytest.mark.ci
@pytest.mark.parametrize("name", ["sharded_modules_load_whole_state_dicts", "sharded_modules_load_checkpoints"])
def test_deferred_sharded_modules_load(name: str) -> None:
    run_program(PROGRAMS, name)
