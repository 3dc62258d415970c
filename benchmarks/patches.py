"""Overhead of patched PyTorch functions on real tensors.

Prints one row for each function, with the microseconds of a call in three states: the process has only imported torch;
it has used every feature of torchext but holds none of its tensors; fake and deferred tensors are alive. The columns
are measured alternately in separate processes. The fastest of each counts, because noise only adds time. Both ratios
should be 1.

    python benchmarks/patches.py [--calls N] [--repeats N]
"""

from __future__ import annotations

import argparse
import copy
import gc
import io
import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

STATES = ("before", "after", "alive")


def calls() -> dict[str, Callable[[], Any]]:
    """Return calls that programs make at each step, of functions that are patched while fakes are alive."""
    x = torch.ones(8)
    storage = x.untyped_storage()
    parameter = torch.nn.Parameter(torch.ones(8))

    def backward() -> None:
        parameter.grad = None
        (parameter * 2).sum().backward()

    return {
        "data_ptr": lambda: x.data_ptr(),
        "storage.data_ptr": lambda: storage.data_ptr(),
        "numpy": lambda: x.numpy(),
        "tolist": lambda: x.tolist(),
        "new_zeros": lambda: x.new_zeros(8),
        "new_tensor": lambda: x.new_tensor([1.0, 2.0]),
        "torch.save": lambda: torch.save(x, io.BytesIO()),
        "deepcopy": lambda: copy.deepcopy(x),
        "repr": lambda: repr(x),
        "backward": backward,
    }


def use_everything() -> list[Any]:
    """Use each feature, and return fake and deferred tensors."""
    from torchext import amp, inference
    from torchext.deferred_init import deferred_init, materialize_module
    from torchext.fake import fake_like, fake_mode

    with fake_mode(gpu=True):
        torch.nn.Linear(2, 2, device="cuda")(torch.ones(1, 2, device="cuda")).sum().backward()
    materialize_module(deferred_init(torch.nn.Linear, 2, 2))
    with amp.autocast("cpu", self_cleaning=True):
        torch.nn.Linear(2, 2)(torch.ones(1, 2))
    amp.to_amp(torch.nn.Linear(2, 2))(torch.ones(1, 2)).sum().backward()
    with inference.inference_mode(trace=True):
        torch.ones(2)
    return [fake_like(torch.ones(2)), deferred_init(torch.nn.Linear, 2, 2)]


def measure(state: str, number: int) -> dict[str, float]:
    """Return the fastest microseconds of each call in `state`."""
    alive = [] if state == "before" else use_everything()
    if state == "after":
        alive.clear()
        gc.collect()
    found = {}
    for name, call in calls().items():
        call()
        times = []
        for _ in range(7):
            start = time.perf_counter()
            for _ in range(number):
                call()
            times.append(time.perf_counter() - start)
        found[name] = min(times) / number * 1e6
    return found


def in_a_process(state: str, number: int) -> dict[str, float]:
    """Return the same from a separate process."""
    command = [sys.executable, "-W", "ignore", __file__, "--calls", str(number), "--state", state]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Overhead of patched functions on real tensors.")
    parser.add_argument("--calls", type=int, default=3000)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--state", choices=STATES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.state:
        print(json.dumps(measure(arguments.state, arguments.calls)))
        return
    runs: dict[str, list[dict[str, float]]] = {state: [] for state in STATES}
    for _ in range(arguments.repeats):
        for state in STATES:
            runs[state].append(in_a_process(state, arguments.calls))
    print(f"torch {torch.__version__}, microseconds, the fastest of {arguments.repeats} processes in turn")
    print(f"{'':18}{'before':>9}{'after':>9}{'alive':>9}{'after/before':>14}{'alive/before':>14}")
    for name in calls():
        before, after, alive = (min(run[name] for run in runs[state]) for state in STATES)
        print(f"{name:18}{before:9.3f}{after:9.3f}{alive:9.3f}{after / before:14.2f}{alive / before:14.2f}")


if __name__ == "__main__":
    main()
