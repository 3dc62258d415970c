"""The environment that torchrun gives to each process of a job, and the job that a rank gives to its processes."""

from __future__ import annotations

import base64
import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .current import Job

__all__ = ["JOB", "announce", "torchrun_environment"]

JOB = "TORCHEXT_DRY_RUN_JOB"
ENTERS = "torchext.dry_run.ranks.started"  # the module whose `enter()` such processes call


@contextmanager
def torchrun_environment(job: Job, is_launched: bool) -> Iterator[None]:
    """Set the variables that torchrun sets for the process of `job` in the block, or remove them if not launched."""
    saved = dict(os.environ)
    variables = _variables(job)
    if is_launched:
        os.environ.update(variables)
    else:
        for name in variables:
            os.environ.pop(name, None)
    # This variable of a real job selects its store.
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    try:
        yield
    finally:
        for name in set(os.environ) - set(saved):
            del os.environ[name]
        os.environ.update(saved)


def _variables(job: Job) -> dict[str, str]:
    """Return the variables that `torch.distributed.elastic.agent.server.local_elastic_agent` sets for one role."""
    numbers = {
        "RANK": job.rank,
        "WORLD_SIZE": job.size,
        "LOCAL_RANK": job.local_rank,
        "LOCAL_WORLD_SIZE": job.on_node,
        "GROUP_RANK": job.rank // job.per_node,
        "GROUP_WORLD_SIZE": -(-job.size // job.per_node),
        "ROLE_RANK": job.rank,
        "ROLE_WORLD_SIZE": job.size,
        "MASTER_PORT": 29500,
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,
    }
    names = {"ROLE_NAME": "default", "MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "torchext-dry-run"}
    return names | {name: str(number) for name, number in numbers.items()}


def announce(*arguments: Any, **keywords: Any) -> None:
    """Let Python processes that start from now on enter `world()` with these arguments."""
    os.environ[JOB] = f"{ENTERS} {base64.b64encode(pickle.dumps((arguments, keywords))).decode()}"
