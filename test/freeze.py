"""Writes calls, routes, plans and memory as text, to compare them before and after a change that must keep them.

    cd test
    python -m freeze BEFORE             # all of it: about 10 minutes
    python -m freeze AFTER calls plans  # some
    diff -r BEFORE AFTER

`calls`   calls of the samples of `op_db` on fakes, in six layouts, on the CPU and on a GPU, without and with the
          cache: metadata, storages and versions of arguments and results, peak memory, and errors
`routes`  the route of each operator that these samples call, on real, fake and deferred tensors
`plans`   the plans of 200 random programs
`memory`  the allocations of the programs of `make oracle` on fakes, and their memory reports
`help`    the help texts of all commands
`imports` the modules that each package and command imports
`patches` the patches that are installed in each state
`reports` the JSON reports of all dry runs that tests make

The texts have no times, addresses or paths. They depend on the release of PyTorch.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import freeze_python
import torch
from sweeps.checks.layouts import LAYOUTS
from sweeps.operators import Arguments, Visit, same_storage_copy, tensors_in
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._python_dispatch import TorchDispatchMode

from torchext import inspect
from torchext.deferred_init import deferred_init, plan
from torchext.fake import FakeGPU, fake_like, fake_mode

GPU = "H100"
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64)
SAMPLES = 6  # of an operator and a dtype
PLANS = 200


def visits() -> Iterator[Visit]:
    """Yield the first samples of each operator and dtype."""
    for op in op_db:
        for dtype in DTYPES:
            if dtype in op.dtypes:
                random.seed(0)  # meshgrid's samples
                torch.manual_seed(0)
                try:
                    samples = list(islice(op.sample_inputs("cpu", dtype), SAMPLES))
                except Exception:  # needs a package, or a device, that this machine does not have
                    continue
                yield from (Visit(op, dtype, "cpu", sample) for sample in samples)


def cleaned(text: str) -> str:
    """Remove what differs between runs: addresses, numbers of symbols, and lines after the first."""
    line = next(iter(text.splitlines()), "")
    return re.sub(r"0x[0-9a-f]+", "ADDRESS", line)


def described(visit: Visit, arguments: Arguments) -> str:
    """Describe the arguments of a call after it, its result, and its peak memory."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    try:
        result = arguments.call(visit.op)
    except Exception as error:
        return f"{type(error).__name__}: {cleaned(str(error))}"
    peak, after = torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before
    numbers: dict[int, int] = {}
    lists = (arguments.tensors, tensors_in(result))
    seen = [", ".join(one(tensor, numbers) for tensor in tensors) for tensors in lists]
    return f"{seen[0]} -> {type(result).__name__} {seen[1]}; {peak} bytes, {after} afterwards"


def one(tensor: Tensor, numbers: dict[int, int]) -> str:
    """Describe a tensor, and its storage by a number that grows with each new one."""
    names = ("is_conj", "is_neg", "is_inference", "is_leaf", "_is_view")
    flags = [name for name in names if getattr(tensor, name) not in (False, None)]
    flags = [name for name in flags if name == "is_leaf" or getattr(tensor, name)()]
    version = "" if tensor.is_inference() else f" v{tensor._version}"
    kind = f"{type(tensor).__name__} {tensor.dtype} {tensor.device} {tensor.layout} {[*tensor.shape]}{version} {flags}"
    if tensor.layout is not torch.strided:
        return kind
    storage = tensor.untyped_storage()
    number = numbers.setdefault(storage._cdata, len(numbers))
    return f"{kind} {tensor.stride()} at {tensor.storage_offset()} of %{number}, {storage.nbytes()} bytes"


def calls() -> Iterator[str]:
    for number, visit in enumerate(visits()):
        if not visit.is_strided:
            continue
        for change in (same_storage_copy, *LAYOUTS):
            try:
                real = visit.arguments(change)
            except Exception:  # the layout does not exist for these tensors
                continue
            for device in ("cpu", "cuda"):
                first, second = called_twice(visit, real, device)
                again = "" if first == second else f"; again: {second}"
                yield f"{visit.name} {visit.dtype} {number} {change.__name__} {device}: {first}{again}"


def called_twice(visit: Visit, real: Arguments, device: str) -> list[str]:
    texts = []
    with fake_mode(gpu=FakeGPU(GPU)):
        for _ in range(2):
            torch.manual_seed(0)
            texts.append(described(visit, real.map(lambda tensor: fake_like(tensor, device=device))))
    return texts


class Overloads(TorchDispatchMode):
    """Collects the overloads that are called, with their arguments."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def routes() -> Iterator[str]:
    done: set[str] = set()
    for visit in visits():
        with Overloads() as overloads:
            try:
                visit.arguments().call(visit.op)
            except Exception:
                continue
        for func, args, kwargs in overloads.seen:
            if str(func) not in done and Arguments(args, kwargs).are_strided:
                done.add(str(func))
                yield from routes_of(func, Arguments(args, kwargs))


def routes_of(func: Any, arguments: Arguments) -> Iterator[str]:
    def shown(name: str, given: Arguments) -> str:
        try:
            route = inspect.route(func, *given.args, **given.kwargs)
        except Exception as error:
            return f"{func} {name}: {type(error).__name__}: {cleaned(str(error))}"
        return f"{func} {name}: " + re.sub(r"\S+\.(cpp|h|py):\d+", "FILE", re.sub(r"\s+", " ", str(route)))

    yield shown("real", arguments)
    yield shown("fake", arguments.map(fake_like))
    with fake_mode(gpu=FakeGPU(GPU)):
        yield shown("on a GPU", arguments.map(lambda tensor: fake_like(tensor, device="cuda")))
    yield shown("deferred", arguments.map(lambda tensor: deferred_init(lambda: torch.empty_like(tensor))))


def plans() -> Iterator[str]:
    from fuzz.checks import seed_generators, steps_that_raise
    from fuzz.machine import Machine
    from sweeps.test_fuzz import random_program

    numbers = random.Random(0)
    for number in range(PLANS):
        program = random_program(numbers)
        skipped = steps_that_raise(program)
        seed_generators()
        try:
            found = deferred_init(Machine().run, program, skipped)
            lines = str(plan([tensor for tensor in found if isinstance(tensor, Tensor)])).splitlines()
        except Exception as error:
            lines = [f"{type(error).__name__}: {cleaned(str(error))}"]
        yield from (f"{number}: {line}" for line in lines)


def memory() -> Iterator[str]:
    """Run each program in a process, because allocators keep blocks."""
    from oracle.programs import PROGRAMS

    for name in PROGRAMS:
        command = [sys.executable, "-m", "oracle.report", name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        lines = done.stdout.splitlines() if done.returncode == 0 else done.stderr.splitlines()[-1:]
        yield from (f"{name}: {line}" for line in lines)


KINDS: dict[str, Callable[[], Iterator[str]]] = {
    "calls": calls,
    "routes": routes,
    "plans": plans,
    "memory": memory,
    "help": freeze_python.help_texts,
    "imports": freeze_python.imports,
    "patches": freeze_python.patches,
    "reports": freeze_python.reports,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("kinds", nargs="*", choices=[*KINDS, []], help="all by default")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    kinds = given.kinds or list(KINDS)
    if len(kinds) > 1 or os.environ.get("PYTHONHASHSEED") != "0":
        # A process for each, because kernels are registered when they are first needed. Samples depend on hashes.
        environment = {**os.environ, "PYTHONHASHSEED": "0"}
        commands = [[sys.executable, "-m", "freeze", str(given.folder), kind] for kind in kinds]
        return max(subprocess.run(command, env=environment, check=False).returncode for command in commands)
    warnings.simplefilter("ignore")
    path = given.folder / f"{kinds[0]}.txt"
    path.write_text("".join(f"{line}\n" for line in KINDS[kinds[0]]()))
    print(f"{kinds[0]}: {len(path.read_text().splitlines())} lines", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
