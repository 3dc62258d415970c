"""The names of NCCL that a PyTorch without it does not have, and that programs and PyTorch itself use.

`torch.distributed.ProcessGroupNCCL` exists where PyTorch has been built with NCCL. Programs make its options, and
PyTorch asks whether a backend is one wherever `is_nccl_available()`, which is true in a world with GPUs. No group of a
world is one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace

import torch.distributed as dist
from torch.distributed import distributed_c10d

__all__ = ["NCCL_TIMEOUT", "NCCL_VERSION", "ProcessGroupNCCL", "names_of_nccl"]

# `ncclGetVersion()` of the NCCL that PyTorch's wheels of these releases bring. Programs ask whether it knows bfloat16.
NCCL_VERSION = (2, 27, 5)

NCCL_TIMEOUT = timedelta(minutes=10)  # `kProcessGroupNCCLDefaultTimeout`


class ProcessGroupNCCL:
    """Stands for the class, of which a world has no objects."""

    class Options:
        """What a group is asked for, which a world does not need.

        Attributes:
            is_high_priority_stream: Whether kernels of NCCL are to come first.
            config: What `ncclConfig_t` has, such as `cga_cluster_size`.
            _timeout: How long collectives may take.
        """

        def __init__(self, is_high_priority_stream: bool = False) -> None:
            self.is_high_priority_stream = is_high_priority_stream
            self.config = SimpleNamespace()
            self._timeout = NCCL_TIMEOUT

        @property
        def backend(self) -> str:
            """What the options are for."""
            return "nccl"


@contextmanager
def names_of_nccl() -> Iterator[None]:
    """Lets modules of PyTorch have the names in the block, where they do not."""
    modules = [module for module in (dist, distributed_c10d) if not hasattr(module, "ProcessGroupNCCL")]
    for module in modules:
        vars(module)["ProcessGroupNCCL"] = ProcessGroupNCCL
    try:
        yield
    finally:
        for module in modules:
            del vars(module)["ProcessGroupNCCL"]
