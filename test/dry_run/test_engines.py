"""PyTorch's parallel engines train for a step in a world, on any rank: `training_steps.py` contains the steps."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiers import amount, chosen
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from training_steps import STEPS

from torchext.dry_run import world

pytestmark = [
    pytest.mark.usefixtures("frozen_past"),
    # PyTorch warns, also on real tensors.
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.. is deprecated"),
    pytest.mark.filterwarnings("ignore:DTensor random operators may not have complete support"),
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor"),
    pytest.mark.filterwarnings("ignore:find_unused_parameters=True was specified"),
]

READ_VALUES = {"grad_scaler"}
ON_GPUS_ONLY = {"fsdp2_offload_pinned", "fsdp1_sync", "fsdp1_offload", "grad_scaler", "sync_batch_norm"}
ON_GPUS_ONLY |= {name for name in STEPS if name.startswith("ddp_mixed")}  # the engine records events
# PyTorch has no strategy for the attention of CPUs.
ON_GPUS_ONLY |= {"context_parallel"}
if torch.__version__ < (2, 12):  # the first exchange includes the rank itself, which gloo rejects
    ON_GPUS_ONLY |= {"zero_bubble_v"}


@pytest.fixture(autouse=True)
def _free_flat_parameters() -> Iterator[None]:
    """Free the flat parameters of FSDP1. They are in a cycle with hooks that C++ holds, and would outlive the test."""
    yield
    for held in gc.get_objects():
        if type(held) is nn.Parameter and hasattr(held, "_is_flat_param"):
            vars(held).clear()


RANKS = (0, 37, 63)


@pytest.mark.scaled
@pytest.mark.parametrize("name", STEPS)
def test_engine_trains_on_gpus(name: str) -> None:
    for rank in amount(chosen(RANKS, 1, name), RANKS):
        with world(64, rank, values="assume" if name in READ_VALUES else "raise") as job:
            STEPS[name](job, "cuda")
        assert job.collectives
        assert {record.device for record in job.collectives} <= {f"cuda:{job.local_rank}", "cpu"}


@pytest.mark.cases(2)
@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("name", [name for name in STEPS if name not in ON_GPUS_ONLY])
def test_engine_trains_on_cpus(name: str, rank: int) -> None:
    with world(64, rank, gpu=None) as job:
        STEPS[name](job, "cpu")
    assert job.collectives


def test_stage_without_shapes_is_refused() -> None:
    """Its neighbors, which would send them, do not exist."""
    needs_them = "requires dynamic shape inference|returns objects of rank 0 of the group"
    with world(4, 1, gpu=None) as job:
        stage = PipelineStage(nn.Linear(4, 4), job.rank, job.size, torch.device("cpu"))
        with pytest.raises(RuntimeError, match=needs_them):
            ScheduleGPipe(stage, n_microbatches=2).step(target=torch.zeros(2, 4))


def logged(model: nn.Module, rows: int) -> dict[str, Any]:
    parallel = nn.parallel.DistributedDataParallel(model)
    for _ in range(3):
        parallel(torch.ones(rows, 8)).sum().backward()
    data = parallel._get_ddp_logging_data()
    return {name: data[name] for name in data if "time" not in name}


def test_logger_reports_what_the_real_one_does(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1)
    try:
        real = logged(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), 2)
    finally:
        torch.distributed.destroy_process_group()
    with world(1, 0, gpu=None):
        found = logged(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), 2)
    assert found == {name: real[name] for name in found}
    # Of single iterations, of the process, and of gloo.
    assert {name for name in real.keys() - found.keys() if "gloo" not in name} <= {
        "cuda_visible_devices",
        "dtypes",
        "is_multi_device_module",
        "iteration",
        "master_addr",
        "master_port",
        "num_buckets_reduced",
        "prev_iteration_grad_ready_order_indices",
        "torch_distributed_debug",
        "unused_parameter_size",
    }
