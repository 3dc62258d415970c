"""Runs the ranks of a job one after the other, with real tensors on the CPU.

Each rank runs in a forked process, in the simulated world of dry runs (`dry_run/current.py`), whose other ranks do not
run. `messages.py` gives it the values of ranks that ran before.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import random
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar

import torch

from ..deferred_init import ranks
from ..dry_run import ddp_reducer  # noqa: F401  (declares a replacement)
from ..dry_run.current import Job as World
from ..dry_run.current import being_rank_of
from ..dry_run.process_groups import communicating
from ..dry_run.recorder import Recorder
from ..errors import RankFailedError
from .messages import FileMessages, Job

__all__ = ["run_rank"]

T = TypeVar("T")

PATIENCE = timedelta(seconds=1)
"""The time after which a read of the store raises an error: no other rank runs."""
DEVICE_FOLDERS = tuple(f"{Path(torch.__file__).parent / one}{os.sep}" for one in ("cuda", "accelerator"))
ON_CPU = "\ncheck-init runs on the CPU: use the mesh that is passed, and guard set_device()."
PR_SET_PDEATHSIG = 1
FRESH_SEED = 67280421310721  # `c10::default_rng_seed_val`


def run_rank(job: Job, function: Callable[[Job], T]) -> T:
    """Return the result of `function(job)` in a forked process that is a rank of a job.

    Raises:
        RankFailedError: It raised an error, or the process died.
    """
    parent = os.getpid()
    context = multiprocessing.get_context("fork")  # closures need no pickling, and the program is imported once
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(job, function, sender, parent))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of threads; the child does not use them
        process.start()
    sender.close()
    try:
        is_done, result = receiver.recv()
    except EOFError:
        process.join()
        raise RankFailedError(f"The process of {job.name} ended with exit code {process.exitcode}.") from None
    finally:
        receiver.close()
        if sys.exc_info()[0] is not None:
            process.kill()
        process.join()
    if not is_done:
        raise RankFailedError(f"The program failed in {job.name}:\n{result}")
    return result  # type: ignore[no-any-return]


def _run(job: Job, function: Callable[[Job], object], sender: Connection, parent: int) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call
        os._exit(1)
    gc.freeze()  # collections would copy the memory that is shared with the parent
    os.dup2(2, 1)  # the output of the program must not mix with the report
    result: tuple[bool, object]
    try:
        world = _become(job)
        with being_rank_of(world), communicating(world, "gloo"):
            world.store.set_timeout(PATIENCE)  # `init_process_group()` has set another one
            result = True, function(job)
    except BaseException as error:  # also SystemExit, so that the parent can report it
        result = False, _text_of(error)
    sender.send(result)
    sender.close()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # the program may have replaced or closed them
            stream.flush()
    os._exit(0)  # no destructors and exit handlers of the parent


def _text_of(error: BaseException) -> str:
    """Return the traceback from the first frame outside of this package, or only the message of our own errors."""
    files = [one.filename for one in traceback.extract_tb(error.__traceback__)]
    needs_device = "CUDA" in str(error) or any(one.startswith(DEVICE_FOLDERS) for one in files)
    return _traceback_of(error).rstrip() + (ON_CPU if needs_device else "")


def _traceback_of(error: BaseException) -> str:
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename.startswith(str(Path(__file__).parents[1])):
        frame = frame.tb_next
    if frame is None and isinstance(error, ValueError | TypeError):
        return "".join(traceback.format_exception_only(error))
    return "".join(traceback.format_exception(type(error), error, frame or error.__traceback__))


def _become(job: Job) -> World:
    """Give this process the state of a new one. Return its world."""
    if job.rank > 0 or job.size == 1:
        warnings.simplefilter("ignore")  # rank 0 has shown them
    torch.set_num_threads(1)  # the OpenMP threads of the parent do not exist after fork
    torch.manual_seed(FRESH_SEED)
    random.seed(job.rank + 1 if job.size > 1 else 0)  # new processes have different seeds in Python and NumPy
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(random.getrandbits(32))
    world = World(job.size, job.rank, job.size, None, torch._C._distributed_c10d.HashStore(), Recorder(False))
    world.is_real = True
    world.messages = messages = FileMessages(job)
    ranks.agrees_on = messages.agrees_on
    return world
