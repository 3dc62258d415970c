"""Compares materializing with constructing eagerly, and with writing the memory once.

Prints a line for each model: seconds to construct it eagerly, to materialize it, and to write as much fresh memory with
`zero_`, which is the limit; the ratio to eager construction; and the time of materializing its tensors one by one in
reverse order, as a ratio to materializing the module. All columns are measured alternately in one run, with one thread
and with several.

    python benchmarks/materialize.py [--device D] [--millions N] [--threads N ...] [--repeats N] [--models NAME ...]

Fresh memory from the system can cost more than all computing, especially in virtual machines, and varies: compare the
ratio with the limit's. `--fresh` measures that: user, system and wall seconds for a model of 512 MiB, as minimum,
median and maximum of 20 alternating runs. Each run begins without freed memory, in one process or in separate ones,
with and without transparent huge pages. The host of a virtual machine may take back memory that is free for seconds,
so the runs in one process are repeated with a pause before each.

    python benchmarks/materialize.py --fresh [--runs N] [--fresh-models NAME ...]
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from torchext.deferred_init import deferred_init, materialize_module, materialize_tensor

Build = Callable[[], nn.Module]


class Block(nn.Module):
    """The parameters of a block of a transformer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attention = nn.ModuleList([nn.Linear(width, 3 * width), nn.Linear(width, width)])
        self.mlp = nn.ModuleList([nn.Linear(width, 4 * width), nn.Linear(4 * width, width)])


class Transformer(nn.Module):
    """The parameters of a transformer of about `millions` of parameters."""

    def __init__(self, millions: int, width: int = 1024) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8 * width, width)
        layers = max(1, round((millions * 1e6 - 8 * width**2) / (12 * width**2)))
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))


def initialized_again(millions: int) -> nn.Module:
    """Return a transformer whose `_init_weights` overwrites the values from the constructors of its modules."""

    def init_weights(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    return Transformer(millions).apply(init_weights)


def filled(millions: int, fill: Callable[[torch.Tensor], object], dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return parameters of four million elements, written once."""
    parameters = nn.ParameterList(torch.empty(2048, 2048, dtype=dtype) for _ in range(max(1, millions // 4)))
    for parameter in parameters:
        fill(parameter.data)
    return parameters


def converted(millions: int) -> nn.Module:
    """Return a transformer that is written once and converted as a whole."""
    return Transformer(millions).bfloat16()


def scaled(millions: int) -> nn.Module:
    """Return parameters of four million elements, each drawn and scaled."""
    return nn.ParameterList(nn.Parameter(torch.randn(2048, 2048) * 0.02) for _ in range(max(1, millions // 4)))


def vision_model(millions: int) -> nn.Module:
    """Return convolutions, initialized as in a ResNet."""
    count = max(1, millions // 9)
    model = nn.Sequential(*(nn.Sequential(nn.Conv2d(1024, 1024, 3), nn.BatchNorm2d(1024)) for _ in range(count)))
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model


MODELS: dict[str, Callable[[int], nn.Module]] = {
    "normal_": lambda millions: filled(millions, torch.Tensor.normal_),
    "normal_, bfloat16": lambda millions: filled(millions, torch.Tensor.normal_, torch.bfloat16),
    "uniform_": lambda millions: filled(millions, torch.Tensor.uniform_),
    "trunc_normal_ that rejects": lambda millions: filled(millions, nn.init.trunc_normal_),
    "randn() * 0.02": scaled,
    "transformer, written once": Transformer,
    "transformer, written twice": initialized_again,
    "transformer, into bfloat16": converted,
    "vision model": vision_model,
    "10,000 small tensors": lambda _: nn.ModuleList(nn.Linear(16, 16) for _ in range(5000)),
}


def seconds(run: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the duration of one call until all devices are done. Its result is freed afterwards."""
    gc.collect()
    start = clock()
    result = run()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    duration = clock() - start
    del result
    return duration


def one_by_one(module: nn.Module) -> None:
    """Materialize the tensors of `module` one by one, from last to first."""
    for tensor in reversed([*module.parameters(), *module.buffers()]):
        materialize_tensor(tensor)


def fresh_zeros(nbytes: int) -> torch.Tensor:
    """Write as much memory as the model has, without computing."""
    return torch.empty(nbytes, dtype=torch.uint8).zero_()


def compare(name: str, build: Build, repeats: int) -> None:
    """Print the line of one model, constructed on the default device."""
    nbytes = sum(tensor.nbytes for tensor in deferred_init(build).parameters())
    measured: dict[str, list[float]] = {"eager": [], "ours": [], "singly": [], "limit": []}
    for _ in range(repeats + 1):
        measured["eager"].append(seconds(build))
        measured["ours"].append(seconds(partial(materialize_module, deferred_init(build))))
        measured["singly"].append(seconds(partial(one_by_one, deferred_init(build))))
        measured["limit"].append(seconds(partial(fresh_zeros, nbytes)))
    eager, ours, singly, limit = (statistics.median(values[1:]) for values in measured.values())
    print(
        f"{name:28}{nbytes / 2**20:8.0f}{eager:9.3f}{ours:9.3f}{limit:9.3f}{ours / eager:9.3f}"
        f"{limit / eager:9.3f}{singly / ours:9.2f}",
        flush=True,
    )


# ---- Fresh memory ----


class Cost(NamedTuple):
    """The seconds of one run."""

    user: float
    system: float
    wall: float


def cost(run: Callable[[], object], pause: float) -> Cost:
    """Return the cost of one call without freed memory, after a pause."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    time.sleep(pause)
    before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    result = run()
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF)
    del result
    return Cost(after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime, wall)


def materialized(build: Build) -> Callable[[], object]:
    """Return a function that materializes a new recording."""
    return partial(materialize_module, deferred_init(build))


class FreshRuns(NamedTuple):
    """The runs of one process: materializing, eager construction, or both in turn."""

    model: str
    has_huge_pages: bool
    pause: float
    runs: int
    is_ours: bool | None = None  # None: both in turn

    def measure(self) -> list[Cost]:
        """Measure in this process."""
        libc = ctypes.CDLL(None)
        libc.prctl(41, int(not self.has_huge_pages), 0, 0, 0)  # PR_SET_THP_DISABLE
        libc.mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD: larger blocks return to the system when they are freed
        torch.set_default_device("cpu")
        small = partial(MODELS[self.model], 4)
        cost(materialized(small), 0), cost(small, 0)  # first-use checks
        build = partial(MODELS[self.model], 128)  # 512 MiB
        costs = []
        for _ in range(self.runs):
            if self.is_ours is not False:
                costs.append(cost(materialized(build), self.pause))
            if self.is_ours is not True:
                costs.append(cost(build, self.pause))
        return costs

    def in_process(self) -> list[Cost]:
        """Measure in a new process."""
        command = [sys.executable, __file__, "--one", json.dumps(self)]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return [Cost(*one) for one in json.loads(output)]


def spread(values: list[float], digits: int = 2) -> str:
    """Return minimum, median and maximum."""
    return " ".join(f"{one:.{digits}f}" for one in (min(values), statistics.median(values), max(values)))


def fresh_row(name: str, costs: list[Cost]) -> None:
    """Print the row of alternating costs of materializing and of eager construction."""
    ours, eager = costs[::2], costs[1::2]
    columns = [spread([getattr(one, field) for one in side]) for side in (ours, eager) for field in Cost._fields]
    pairs = list(zip(ours, eager, strict=True))
    processor = [(a.user + a.system) / (b.user + b.system) for a, b in pairs]
    print(f"| {name} | {' | '.join(columns)} | {spread(processor)} | {spread([a.wall / b.wall for a, b in pairs])} |")
    sys.stdout.flush()


def fresh_memory(models: list[str], runs: int) -> None:
    """Compare with eager construction on fresh memory."""
    print(f"\nFresh memory, 512 MiB, {torch.get_num_threads()} threads: minimum, median, maximum of {runs} runs\n")
    columns = ["user, ours", "system", "wall", "user, eager", "system", "wall", "CPU ratio", "wall ratio"]
    print(f"| model, huge pages, memory | {' | '.join(columns)} |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for model in models:
        for has_huge_pages in (True, False):
            pages = f"{model}, {'on' if has_huge_pages else 'off'}"
            for pause in (0, 3):
                costs = FreshRuns(model, has_huge_pages, pause, runs).in_process()
                fresh_row(f"{pages}, freed {'before' if pause == 0 else f'{pause} s before'}", costs)
            costs = []
            for _ in range(runs):
                for is_ours in (True, False):
                    costs += FreshRuns(model, has_huge_pages, 0, 1, is_ours).in_process()
            fresh_row(f"{pages}, fresh processes", costs)


def main() -> None:
    """Run all comparisons."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=int, default=100, help="millions of parameters of the large models")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--device", default="cpu", help="device on which the models are constructed")
    parser.add_argument("--fresh", action="store_true", help="compare only on fresh memory")
    parser.add_argument("--fresh-models", nargs="+", choices=MODELS, default=["normal_"])
    parser.add_argument("--runs", type=int, default=20, help="runs on fresh memory")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(FreshRuns(*json.loads(options.one)).measure()))
        return
    if options.fresh:
        fresh_memory(options.fresh_models, options.runs)
        return
    torch.set_default_device(options.device)
    where = torch.cuda.get_device_name() if options.device.startswith("cuda") else "CPU"
    for threads in options.threads:
        torch.set_num_threads(threads)
        print(f"\ntorch {torch.__version__}, {where}, {threads} threads, medians of {options.repeats}\n")
        print(f"{'':28}{'MiB':>8}{'eager':>9}{'ours':>9}{'limit':>9}{'/ eager':>9}{'limit':>9}{'singly':>9}")
        for name in options.models:
            compare(name, partial(MODELS[name], options.millions), options.repeats)


if __name__ == "__main__":
    main()
