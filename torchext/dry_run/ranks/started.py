"""Python processes that the program of a dry run starts: they have the same job and fake GPUs as the rank.

They begin without PyTorch. `files/startup/sitecustomize.py` calls `enter()` when one has imported it. The rank does not
count their memory, but reports the peaks of those that end by themselves.
"""

from __future__ import annotations

import base64
import os
import pickle
import sys
from contextlib import ExitStack, suppress
from multiprocessing.util import Finalize

import torch

from ...fake.fake_tensor_mode import threads_inherit_blocks
from ...reports.model import NOTES
from ..current import JOB
from ..saving import files_apart
from ..simulated_world import world

__all__ = ["enter"]

# A process of PyTorch's compiler, which gets source code only.
COMPILER = "torch/_inductor/compile_worker/__main__.py"


def enter() -> None:
    """Enter the announced job for the rest of this process, and note the peaks of its GPUs at the end.

    A process that was started as another rank stays that rank. Its environment does not change.
    """
    if any(word.endswith(COMPILER) for word in sys.orig_argv):
        return
    (size, rank, *arguments), keywords = pickle.loads(base64.b64decode(os.environ[JOB].partition(" ")[2]))
    environment = dict(os.environ)
    with suppress(KeyError, ValueError):
        named = int(environment["WORLD_SIZE"]), int(environment["RANK"])
        size, rank = named if 0 <= named[1] < named[0] else (size, rank)
    blocks = ExitStack()
    blocks.enter_context(world(size, rank, *arguments, backend=None, set_device=False, **keywords))
    blocks.enter_context(threads_inherit_blocks())
    os.environ.clear()
    os.environ.update(environment)
    Finalize(None, _leave, (blocks,), exitpriority=0)


def _leave(blocks: ExitStack) -> None:
    peaks = {i: torch.cuda.max_memory_allocated(i) for i in range(torch.cuda.device_count())}
    if any(peaks.values()):
        real = sys.modules["torchext_dry_run_files.originals"].real
        path = f"{files_apart().folder}/{NOTES}{os.getpid()}"
        note = real.open(f"{path}.part", os.O_CREAT | os.O_WRONLY, 0o600)
        real.write(note, pickle.dumps((sys.orig_argv, peaks)))
        real.close(note)
        real.rename(f"{path}.part", path)
    with suppress(RuntimeError):  # entered on another thread
        blocks.close()
