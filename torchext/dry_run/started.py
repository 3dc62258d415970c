"""Python processes that the program of a dry run starts: they have the same job and fake GPUs as the rank.

They begin without PyTorch. `files/startup/sitecustomize.py` calls `enter()` when one has imported it. The rank does not
count their memory, but reports their peaks.
"""

from __future__ import annotations

import atexit
import base64
import os
import pickle
import sys
from contextlib import ExitStack

import torch

from ..fake.threads import carry_blocks_to_threads
from .environment import JOB
from .rank_report import NOTES
from .saving import files_apart
from .simulated_world import world

__all__ = ["enter"]

# Processes of PyTorch's compiler, which get source code only.
WITHOUT_TENSORS = "torch/_inductor"


def enter() -> None:
    """Enter the announced job for the rest of this process, and note the peaks of its GPUs at the end."""
    if WITHOUT_TENSORS in " ".join(sys.orig_argv):
        return
    arguments, keywords = pickle.loads(base64.b64decode(os.environ[JOB].partition(" ")[2]))
    blocks = ExitStack()
    blocks.enter_context(world(*arguments, backend=None, set_device=False, **keywords))
    blocks.enter_context(carry_blocks_to_threads())
    atexit.register(_leave, blocks)


def _leave(blocks: ExitStack) -> None:
    peaks = {i: torch.cuda.max_memory_allocated(i) for i in range(torch.cuda.device_count())}
    blocks.close()
    if any(peaks.values()):
        real = sys.modules["torchext_dry_run_files.originals"].real
        note = real.open(f"{files_apart().folder}/{NOTES}{os.getpid()}", os.O_CREAT | os.O_WRONLY, 0o600)
        real.write(note, pickle.dumps((sys.orig_argv, peaks)))
        real.close(note)
