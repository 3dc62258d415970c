"""Compares the allocations of single operators on fake GPUs with those in a CUDA build.

    cd test python -m oracle.compare_operators                      # all operators that PyTorch tests
    python -m oracle.compare_operators softmax cumsum       # some

It has the requirements of compare.py. The calls are the samples in PyTorch's tests (`op_db`), forward and backward.
They are small, so that differences are in the number of allocations, not in their sizes. Differences may be correct for
operators that depend on values, because kernels of the CUDA build compute nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from oracle.compare import TEST, environment, why_impossible, world
from torch import Tensor
from torch.utils._pytree import tree_leaves

DTYPES = (torch.float32, torch.bfloat16)
SAMPLES = 10  # per operator and dtype
ROUNDED = 512  # rounding unit of the allocator
# Families whose libraries have no null implementation, and operators that read values.
LEFT_OUT = ("linalg", "fft", "stft", "istft", "sparse", "cholesky", "lu", "svd", "qr", "nonzero", "masked_select")

Events = list[str]


def recorded(call: Callable[[], Any]) -> tuple[Events, Any]:
    """Return the allocator's actions during a call, and the result of the call."""
    torch.cuda.memory._record_memory_history(None)
    torch.cuda.memory._record_memory_history(max_entries=10**6, context=None)
    before = len(torch.cuda.memory._snapshot()["device_traces"][0])
    result = call()
    trace = torch.cuda.memory._snapshot()["device_traces"][0][before:]
    events: Events = []
    addresses: set[int] = set()  # existing tensors may be collected during the call
    for event in trace:
        rounded = -(-event["size"] // ROUNDED) * ROUNDED
        if event["action"] == "alloc":
            addresses.add(event["addr"])
            events.append(f"+{rounded}")
        elif event["action"] == "free_requested" and event["addr"] in addresses:
            events.append(f"-{rounded}")
    return events, result


def both_passes(op: Any, sample: Any) -> dict[str, Events]:
    """Return the allocations of a sample, forward and backward."""
    forward, results = recorded(lambda: op(sample.input, *sample.args, **sample.kwargs))

    def differentiable(values: Any) -> list[Tensor]:
        return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.requires_grad]

    outputs, inputs = differentiable(results), differentiable((sample.input, sample.args, sample.kwargs))
    if not outputs or not inputs:
        return {"forward": forward}
    ones = [torch.ones_like(output) for output in outputs]
    backward, _ = recorded(lambda: torch.autograd.grad(outputs, inputs, ones, allow_unused=True))
    return {"forward": forward, "backward": backward}


def samples_of(op: Any, dtype: torch.dtype) -> Iterator[Any]:
    """Return the first samples, equal in both worlds."""
    torch.manual_seed(0)
    random.seed(0)
    needs_grad = op.supports_autograd and dtype in op.supported_backward_dtypes("cuda")
    return itertools.islice(op.sample_inputs("cuda", dtype, requires_grad=needs_grad), SAMPLES)


def run_operators(names: list[str], file: Path, *, is_fake: bool) -> None:
    """Write a line for each sample that runs, and before that the name of its operator."""
    warnings.simplefilter("ignore")
    with world(is_fake=is_fake), file.open("a") as out:
        for op in wanted_operators(names):
            out.write(json.dumps([op.formatted_name]) + "\n")
            out.flush()  # the operator may end the process
            for dtype in DTYPES:
                # Samples that fail in one of the worlds are not compared.
                with contextlib.suppress(Exception):
                    for i, sample in enumerate(samples_of(op, dtype)):
                        with contextlib.suppress(Exception):
                            line = [f"{op.formatted_name}, {dtype}, sample {i}", both_passes(op, sample)]
                            out.write(json.dumps(line) + "\n")


def wanted_operators(names: list[str]) -> list[Any]:
    """Return the operators of these names, or all, after those of `TORCHEXT_ORACLE_DONE`."""
    from torch.testing._internal.common_methods_invocations import op_db

    done = set(os.environ.get("TORCHEXT_ORACLE_DONE", "").split())
    chosen = [op for op in op_db if (op.name in names if names else not op.name.startswith(LEFT_OUT))]
    return [op for op in chosen if op.formatted_name not in done]


def in_processes(names: list[str], *, is_fake: bool) -> dict[str, dict[str, Events]]:
    """Return the allocations of all samples. If an operator ends the process, another process continues without it."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "samples.jsonl"
        file.touch()
        variables = environment(is_fake=is_fake)
        while True:
            before = file.stat().st_size
            lines = [json.loads(line) for line in file.read_text().splitlines()]
            variables["TORCHEXT_ORACLE_DONE"] = " ".join(line[0] for line in lines if len(line) == 1)
            arguments = [sys.executable, "-m", "oracle.compare_operators", f"--file={file}", *names]
            done = subprocess.run(arguments, cwd=TEST, env=variables, capture_output=True, text=True, check=False)
            if done.returncode != 0 and file.stat().st_size == before:
                raise RuntimeError(done.stderr[-3000:])
            if done.returncode == 0:
                return {line[0]: line[1] for line in map(json.loads, file.read_text().splitlines()) if len(line) == 2}


def compare(names: list[str]) -> bool:
    """Print the differences, and return whether there are no differences."""
    real, fake = (in_processes(names, is_fake=is_fake) for is_fake in (False, True))
    common = [name for name in real if name in fake]
    different = [name for name in common if real[name] != fake[name]]
    for name in different:
        for direction, events in real[name].items():
            if events != fake[name].get(direction):
                print(f"{name}, {direction}\n  CUDA build {' '.join(events)}\n  fakes      ", end="")
                print(" ".join(fake[name].get(direction, [])))
    print(f"{len(common)} samples, of which {len(different)} differ")
    return not different


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("operators", nargs="*", help="as op_db names them; all by default")
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    child = os.environ.get("TORCHEXT_ORACLE_CHILD")
    if child is not None:
        run_operators(given.operators, given.file, is_fake=child == "fake")
        sys.stdout.flush()
        os._exit(0)
    if (reason := why_impossible()) is not None:
        parser.error(reason)
    return 0 if compare(given.operators) else 1


if __name__ == "__main__":
    sys.exit(main())
