"""PyTorch's parallel engines train for a step in a world, on any rank: the steps are in `training_steps.py`."""

from __future__ import annotations

import pytest
from training_steps import STEPS

from torchext.dry_run import world

# PyTorch's, on real tensors, too.
pytestmark = [
    pytest.mark.filterwarnings("ignore:DTensor random operators may not have complete support"),
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor"),
    pytest.mark.filterwarnings("ignore:find_unused_parameters=True was specified"),
]

READ_VALUES = {"grad_scaler"}
ON_GPUS_ONLY = {"fsdp2_offload_pinned", "fsdp1_sync", "fsdp1_offload", "grad_scaler", "sync_batch_norm"}
# PyTorch has no strategy for the attention of CPUs.
ON_GPUS_ONLY |= {"context_parallel"}


@pytest.mark.parametrize("rank", [0, 37, 63])
@pytest.mark.parametrize("name", STEPS)
def test_engine_trains_on_gpus(name: str, rank: int) -> None:
    with world(64, rank, values="zero" if name in READ_VALUES else "raise") as job:
        STEPS[name](job, "cuda")
    assert job.collectives
    assert {record.device for record in job.collectives} <= {f"cuda:{job.local_rank}", "cpu"}


@pytest.mark.parametrize("rank", [0, 37, 63])
@pytest.mark.parametrize("name", [name for name in STEPS if name not in ON_GPUS_ONLY])
def test_engine_trains_on_cpus(name: str, rank: int) -> None:
    with world(64, rank, gpus=None) as job:
        STEPS[name](job, "cpu")
    assert job.collectives
