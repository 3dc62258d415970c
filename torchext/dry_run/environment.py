"""The environment that torchrun gives to each process of a job."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["torchrun_environment"]


@contextmanager
def torchrun_environment(size: int, rank: int, per_node: int) -> Iterator[None]:
    """Sets in the block what torchrun sets for process `rank` of `size`, `per_node` of which share a machine."""
    saved = dict(os.environ)
    os.environ.update(_variables(size, rank, per_node))
    # What decides about the store of a job that is real.
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    try:
        yield
    finally:
        for name in set(os.environ) - set(saved):
            del os.environ[name]
        os.environ.update(saved)


def _variables(size: int, rank: int, per_node: int) -> dict[str, str]:
    """As `torch.distributed.elastic.agent.server.local_elastic_agent` sets them for one role."""
    node, local_rank = divmod(rank, per_node)
    on_node = min(per_node, size - node * per_node)
    numbers = {
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": on_node,
        "GROUP_RANK": node,
        "GROUP_WORLD_SIZE": -(-size // per_node),
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": size,
        "MASTER_PORT": 29500,
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,
    }
    names = {"ROLE_NAME": "default", "MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "torchext-dry-run"}
    return names | {name: str(number) for name, number in numbers.items()}
