"""Names that a PyTorch without NCCL lacks, and that programs and PyTorch itself use.

`torch.distributed.ProcessGroupNCCL` exists in builds of PyTorch with NCCL. Programs construct its options, and PyTorch
checks whether a backend is an instance if `is_nccl_available()`, which is true in a world with GPUs. Groups of a world
are not instances.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace

import torch.distributed as dist
from torch.distributed import distributed_c10d

__all__ = ["NCCL_TIMEOUT", "NCCL_VERSION", "ProcessGroupNCCL", "names_of_nccl"]

# `ncclGetVersion()` of the NCCL in PyTorch's wheels. Programs check it for bfloat16 support.
NCCL_VERSION = (2, 27, 5)

NCCL_TIMEOUT = timedelta(minutes=10)  # `kProcessGroupNCCLDefaultTimeout`


class ProcessGroupNCCL:
    """A stand-in for the class. A world has no instances."""

    class Options:
        """Options of a group, which a world ignores.

        Attributes:
            is_high_priority_stream: Whether NCCL kernels run on a high-priority stream.
            config: The fields of `ncclConfig_t`, such as `cga_cluster_size`.
            _timeout: The timeout of collectives.
        """

        def __init__(self, is_high_priority_stream: bool = False) -> None:
            self.is_high_priority_stream = is_high_priority_stream
            self.config = SimpleNamespace()
            self._timeout = NCCL_TIMEOUT

        @property
        def backend(self) -> str:
            """The backend of the options."""
            return "nccl"


@contextmanager
def names_of_nccl() -> Iterator[None]:
    """Define the missing names in PyTorch's modules in the block."""
    modules = [module for module in (dist, distributed_c10d) if not hasattr(module, "ProcessGroupNCCL")]
    for module in modules:
        vars(module)["ProcessGroupNCCL"] = ProcessGroupNCCL
    try:
        yield
    finally:
        for module in modules:
            del vars(module)["ProcessGroupNCCL"]
