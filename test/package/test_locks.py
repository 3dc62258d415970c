"""The locks of the library: the NOTE [The order of locks] of csrc/libraries/support/locks.h."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import bindings
import forked
import pytest
import torch
from torch import nn

from torchext import _C, amp
from torchext.deferred_init import deferred_init, materialize_module, materialize_tensor
from torchext.fake import fake_like, fake_mode
from torchext.inference import inference_mode
from torchext.memory import track_memory

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # since Python 3.12


# ---- All locks are in the table.

# The mutexes in PyTorch's dispatcher and generators belong to PyTorch.
OF_PYTORCH = {"extensions/dispatch/foreign_fakes.cpp"}


def test_every_lock_is_in_the_table() -> None:
    lock = re.compile(
        r"std::\w*mutex|std::condition_variable|once_flag|call_once|pthread_(mutex|rwlock|spin)|atomic_flag"
    )
    sources = {path.relative_to(ROOT / "csrc").as_posix(): path for path in (ROOT / "csrc").rglob("*.[ch]*")}
    found = {name for name, path in sources.items() if lock.search(path.read_text())}
    assert found - OF_PYTORCH == {"libraries/support/locks.cpp"}


def test_python_code_has_no_other_locks() -> None:
    lock = re.compile(r"threading\.(R?Lock|Condition|Semaphore|Barrier)\b")
    # The child of `torchext.testing` runs in other processes.
    assert not [str(path) for path in (ROOT / "torchext").rglob("*.py") if lock.search(path.read_text())]


# ---- In the child of a fork, all locks are free.


def use_everything() -> None:
    """Take all locks except rare ones. Taking them successfully is the test."""
    for name in bindings.lock_names():
        assert not bindings.is_lock_held(name), name
    with fake_mode(gpu=1):
        (torch.ones(3, device="cuda") @ torch.ones(3, device="cuda")).record_stream(torch.cuda.current_stream())
        torch.randn(3, device="cuda")
    table = torch.arange(4.0)
    model = deferred_init(lambda: nn.Sequential(nn.Linear(64, 64), nn.Dropout()).requires_grad_(False))
    drawn = deferred_init(lambda: torch.multinomial(torch.rand(5) * table.sum() + 1, 2))
    materialize_module(model)
    materialize_tensor(drawn)
    with track_memory(), inference_mode(trace=True):
        fake_like(torch.ones(3)).resize_(7)
    with amp.autocast("cpu"):
        torch.ones(2, 2) @ torch.ones(2, 2)


def fork_and(run: Callable[[], object]) -> None:
    """Fail unless a child of this process runs `run`."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.alarm(60)  # ends a child that waits forever
            run()
            status = 0
        finally:
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == 0, f"the child has ended with {status}"


@pytest.fixture(scope="module")
def _warm() -> None:
    """Import and cache the requirements of `use_everything()` for the children."""
    use_everything()


@pytest.mark.cases(7)
@pytest.mark.usefixtures("_warm")
@pytest.mark.parametrize("name", bindings.lock_names())
def test_a_child_runs_although_another_thread_held_a_lock(name: str) -> None:
    thread = threading.Thread(target=bindings.hold_lock, args=(name, 0.1))
    thread.start()
    while not bindings.is_lock_held(name) and thread.is_alive():
        pass
    fork_and(use_everything)
    thread.join()


@pytest.mark.ci
@pytest.mark.usefixtures("_warm")
def test_forks_while_threads_materialize_and_record() -> None:
    @torch.library.custom_op("test_locks::slow", mutates_args=())
    def slow(x: torch.Tensor) -> torch.Tensor:
        deferred_init(torch.rand, 2).sum().item()  # records and replays below a replay
        return x.clone()

    slow.register_fake(torch.empty_like)
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            materialize_tensor(deferred_init(lambda: slow(torch.randn(2000).add_(1))))
            deferred_init(lambda: torch.multinomial(torch.rand(50), 5))

    slow(torch.ones(2))
    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(8):
            fork_and(use_everything)
    finally:
        stop.set()
        for thread in threads:
            thread.join()


@pytest.mark.ci
@pytest.mark.usefixtures("_warm")
def test_forks_while_threads_begin_to_observe_gradients() -> None:
    """The mutex is PyTorch's, and other threads hold it for a moment, so one of 300 forks met it."""
    for _ in range(600):
        x = torch.ones(3, requires_grad=True)
        (x * 2).sum().backward()  # ends the observation, because no fake is alive
        stop = threading.Event()

        def work(stop: threading.Event = stop) -> None:
            while not stop.is_set():
                materialize_tensor(deferred_init(lambda: torch.randn(200).add_(1)))

        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        try:
            fork_and(lambda: torch.ones(3) + 1)
        finally:
            stop.set()
            for thread in threads:
                thread.join()


def run(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return forked.run([sys.executable, "-c", program], timeout=120, env={**os.environ, **environment})


def test_functions_that_python_calls_before_a_fork_may_use_deferred_tensors() -> None:
    program = """
import os, signal
import torch
used = []
use = lambda: used.append(materialize_tensor(deferred_init(torch.rand, 3)))
os.register_at_fork(before=use, after_in_parent=use, after_in_child=use)
from torchext.deferred_init import deferred_init, materialize_tensor
os.register_at_fork(before=use, after_in_parent=use, after_in_child=use)
signal.alarm(60)
child = os.fork()
if child == 0:
    os._exit(len(used))
print(len(used), os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    result = run(program)
    assert result.stdout.split() == ["4", "4"], result.stderr


def test_a_kernel_in_python_may_fork() -> None:
    program = """
import os, signal
import torch
from torchext.deferred_init import deferred_init, materialize_tensor

@torch.library.custom_op("test_locks::forks", mutates_args=())
def forks(x: torch.Tensor) -> torch.Tensor:
    child = os.fork()
    if child == 0:
        os._exit(int(materialize_tensor(deferred_init(torch.ones, 3)).sum()))
    return x + os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

forks.register_fake(torch.empty_like)
signal.alarm(60)
print(materialize_tensor(deferred_init(lambda: forks(torch.zeros(1)))).item())
"""
    result = run(program)
    assert result.stdout.split() == ["3.0"], result.stderr


# ---- The order is checked.


def hold(*names: str) -> str:
    takes = "".join(f"_C.Lock({name!r}).acquire()\n" for name in names)
    return f"from torchext import _C\n{takes}print('done')"


def test_an_inversion_ends_the_process_with_both_names() -> None:
    result = run(hold("keys", "replay"), TORCHEXT_CHECK_LOCKS="1")
    assert result.returncode == -signal.SIGABRT
    assert 'a thread waits for the lock "replay" while it holds "keys"' in result.stderr


def test_the_order_is_not_checked_in_programs() -> None:
    assert run(hold("keys", "replay"), TORCHEXT_CHECK_LOCKS="0").stdout == "done\n"


def test_locks_in_order_may_be_held_together() -> None:
    assert run(hold("replay", "replay", "draws", "patches", "keys"), TORCHEXT_CHECK_LOCKS="1").stdout == "done\n"


def test_a_lock_that_guards_a_change_in_progress_is_not_taken_twice() -> None:
    result = run(hold("keys", "keys"), TORCHEXT_CHECK_LOCKS="0")
    assert result.returncode == -signal.SIGABRT
    assert 'a thread takes again the lock "keys"' in result.stderr


def test_python_code_does_not_run_under_locks_that_exclude_it() -> None:
    with pytest.raises(ValueError, match='Python code must not run while "storages" is held'):
        _C.Lock("storages")
    with pytest.raises(ValueError, match='There is no lock "doors"'):
        _C.Lock("doors")


@pytest.mark.ci
def test_threads_and_forks_share_the_cache_while_locks_are_not_checked() -> None:
    program = """
import os, signal, threading
import torch
from torchext.fake import fake_mode

def call() -> None:
    with fake_mode():
        x = torch.empty(8, 8)
        for _ in range(2000):
            assert x.view(-1).detach()[2:].unsqueeze(0).shape == (1, 62)
            assert torch.arange(6)[3].item() == 3
    done.append(1)

done = []
signal.alarm(120)
call()  # PyTorch initializes static variables in its first calls. A fork during that locks them in the child forever
done.clear()
threads = [threading.Thread(target=call) for _ in range(4)]
for thread in threads:
    thread.start()
children = 0
while len(done) < 4:
    child = os.fork()
    if child == 0:
        with fake_mode():
            os._exit(torch.zeros(3, 4).view(-1).detach().dim())
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    children += 1
    if not any(thread.is_alive() for thread in threads):
        break
print(len(done), children > 0)
"""
    result = run(program, TORCHEXT_CHECK_LOCKS="0")
    assert result.stdout == "4 True\n", result.stderr


def test_locks_are_held_by_one_thread() -> None:
    lock = _C.Lock("patches")
    assert lock.acquire()
    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.append(lock.acquire(blocking=False)))
    thread.start()
    thread.join()
    lock.release()
    assert answers == [False]
    with pytest.raises(RuntimeError, match='this thread does not hold the lock "patches"'):
        lock.release()
