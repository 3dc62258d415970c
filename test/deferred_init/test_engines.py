"""PyTorch's parallel engines on deferred modules: several processes on gloo, compared with eager construction."""

from __future__ import annotations

import pytest
import torch.distributed
from processes import run_program

pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()),
    reason="this build of PyTorch has no gloo",
)


def run(name: str) -> None:
    run_program("engine_programs", name)


@pytest.mark.ci
@pytest.mark.parametrize("name", ["fully_shard", "fully_shard_hybrid", "fsdp1_hybrid"])
def test_fully_sharded_module_has_the_values_of_the_eager_one_and_trains_like_it(name: str) -> None:
    run(name)


@pytest.mark.ci
def test_fully_sharded_module_trains_before_it_is_materialized() -> None:
    run("fully_shard_that_trains_deferred")


@pytest.mark.ci
@pytest.mark.parametrize("name", ["tensor_parallel", "tensor_parallel_and_fully_shard"])
def test_tensor_parallel_module_has_the_values_of_the_eager_one_and_trains_like_it(name: str) -> None:
    run(name)


@pytest.mark.ci
@pytest.mark.parametrize(
    "name",
    [
        "tensor_parallel_from_rank_0",
        "tensor_parallel_from_rank_0_and_fully_shard",
        "expert_parallel_from_rank_0",
        "distributed_module_from_rank_0",
    ],
)
def test_module_that_is_distributed_from_rank_0_has_the_values_of_the_eager_one(name: str) -> None:
    run(name)


@pytest.mark.ci
@pytest.mark.parametrize(
    "name",
    [
        "tensor_parallel_from_another_rank_0",
        "distributed_tensors_from_another_rank_0",
        "data_parallel_of_deferred_from_another_rank_0",
    ],
)
def test_processes_that_construct_other_values_get_those_of_rank_0(name: str) -> None:
    run(name)


def test_ranks_with_different_draws_are_reported() -> None:
    run("ranks_that_are_compared")


@pytest.mark.ci
def test_ranks_without_elements_of_a_tensor_have_no_other_draws() -> None:
    run("ranks_without_elements_that_are_compared")


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore:A process of the group")
def test_deferred_tensors_are_distributed_from_a_process_that_holds_real_ones() -> None:
    run("distribution_of_real_and_deferred_tensors")


@pytest.mark.ci
@pytest.mark.parametrize(
    "name",
    [
        "data_parallel_of_materialized",
        "data_parallel_without_broadcast",
        "data_parallel_of_deferred",
    ],
)
def test_data_parallel_module_has_the_values_of_the_eager_one_and_trains_like_it(name: str) -> None:
    run(name)


@pytest.mark.ci
def test_pipeline_stage_has_the_eager_values_and_dropped_modules_are_not_computed() -> None:
    run("pipeline")


@pytest.mark.ci
def test_expert_parallel_module_has_the_values_of_the_eager_one_and_trains_like_it() -> None:
    run("expert_parallel")


def test_slices_of_a_deferred_tensor_leave_it_deferred() -> None:
    run("slices_of_a_deferred_tensor_leave_it_deferred")


@pytest.mark.ci
@pytest.mark.parametrize(
    "name",
    [
        "distributed_tensors",
        "distributed_module",
        "distributed_tensors_from_rank_0",
    ],
)
def test_parts_of_distributed_tensors_are_those_of_the_eager_ones(name: str) -> None:
    run(name)


@pytest.mark.ci
@pytest.mark.parametrize(
    "name",
    [
        "redistribution_without_communication",
        "redistribution",
        "full_tensors",
    ],
)
def test_deferred_tensors_are_redistributed_as_real_ones_are(name: str) -> None:
    run(name)


@pytest.mark.parametrize(
    "name",
    [
        "state_dicts_of_tensor_parallel",
        pytest.param("state_dicts_of_tensor_parallel_and_fully_shard", marks=pytest.mark.ci),
        pytest.param("full_state_dicts_of_deferred", marks=pytest.mark.ci),
    ],
)
def test_deferred_distributed_modules_load_and_save(name: str) -> None:
    run(name)
