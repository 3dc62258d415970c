"""Fakes that are sent to other processes: queues, pipes, pools and executors, with each way to start a process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import pytest
import torch
import torch.multiprocessing  # registers how tensors are sent
from common import assert_same_tensor
from torch import nn

from torchext.deferred_init import deferred_init, is_deferred

PROGRAM = """
import concurrent.futures
import multiprocessing
import sys
import torch

def contents():
    return [
        torch.arange(3), torch.randn(3), torch.randn(2, device="cuda" if torch.cuda.is_available() else "cpu"),
        torch.ones(4, 4).t()[1:], torch.nn.Parameter(torch.zeros(2)), {"loss": torch.tensor(0.5), "count": 3},
        torch.nn.Linear(2, 3), torch.sparse_coo_tensor([[0, 1]], [1.0, 2.0], (3,)), torch.zeros(0),
    ]

def described(value):
    if isinstance(value, torch.nn.Module):
        return [described(parameter) for parameter in value.parameters()]
    if isinstance(value, dict):
        return {key: described(one) for key, one in value.items()}
    if not isinstance(value, torch.Tensor):
        return value
    strides = value.stride() if value.layout == torch.strided else None
    return type(value), value.shape, strides, value.dtype, value.device.type, value.requires_grad

def send(queue, pipe):
    for value in contents():
        queue.put(value)
    pipe.send(contents())
    pipe.recv()  # PyTorch keeps real tensors in the process that has sent them

def same(value):
    return value

def make(i):
    return contents()[i]

def check(found, wanted):
    assert [described(one) for one in found] == [described(one) for one in wanted], found
    assert found[0].tolist() == [0, 1, 2]
    assert found[5]["loss"].item() == 0.5

def main(how):
    context, wanted = multiprocessing.get_context(how), contents()
    makes_alike = how == "fork" or not torch.cuda.is_available()  # new interpreters see no fake GPU
    for queue in (context.Queue(), context.SimpleQueue()) if makes_alike else ():
        here, there = context.Pipe()
        process = context.Process(target=send, args=(queue, there))
        process.start()
        check([queue.get() for _ in wanted], wanted)
        check(here.recv(), wanted)
        here.send(None)
        process.join()
        assert process.exitcode == 0
    with context.Pool(1) as pool, concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as executor:
        for run in (pool.map, executor.map):
            check(list(run(same, wanted)), wanted)
            if makes_alike:
                check(list(run(make, range(len(wanted)))), wanted)

if __name__ == "__main__":
    if "fake_mode" in sys.argv:
        from torchext.fake import fake_mode
        with fake_mode(gpu=True):
            main(sys.argv[1])
    else:
        main(sys.argv[1])
    print("all were received")
"""


@pytest.mark.parametrize(
    ("how", "where"),
    [
        ("fork", "fake_mode"),
        *[
            pytest.param(how, where, marks=pytest.mark.ci)
            for how in ("fork", "spawn", "forkserver")
            for where in ("fake_mode", "dry run", "plain Python")
            if (how, where) != ("fork", "fake_mode")
        ],
    ],
)
def test_other_processes_receive_and_send_fakes(how: str, where: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    dry_run = ["-m", "torchext", "dry-run", "--gpu=H100", "--to-end", "--quiet"] if where == "dry run" else []
    command = [sys.executable, *dry_run, "program.py", how, where.replace(" ", "_")]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "all were received" in run.stdout


@pytest.mark.parametrize(
    "make", [lambda: torch.randn(3), lambda: torch.arange(6).view(2, 3).t(), lambda: nn.Linear(2, 3)]
)
def test_deferred_tensors_are_sent_with_their_values(make: Callable[[], torch.Tensor | nn.Module]) -> None:
    torch.manual_seed(0)
    deferred = deferred_init(make)
    received = ForkingPickler.loads(ForkingPickler.dumps(deferred))
    torch.manual_seed(0)
    eager = make()
    pairs = [(received, eager, deferred)]
    if isinstance(eager, nn.Module):
        pairs = list(zip(received.parameters(), eager.parameters(), deferred.parameters(), strict=True))
    for found, wanted, sent in pairs:
        assert_same_tensor(found, wanted, strictly=False)  # `set_()` counts as a write
        assert is_deferred(sent)
