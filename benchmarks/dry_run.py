"""Time and memory for a dry run of a training step.

Prints four tables:

- For one rank of a Llama in a world: seconds until the end of the first step, including construction and sharding;
  seconds of a later step; the share of sharding propagation in the first step; and the resident memory.
- The overhead of tracking on a fake step.
- A step on the CPU, real and tracked, fake and tracked, and with PyTorch's MemTracker under FakeTensorMode: seconds,
  and the reported peak.
- The command line: wall and CPU seconds of commands, and CPU seconds over those of `import torch` and of the program in
  a process that has imported torch and torchext.

    python benchmarks/dry_run.py [--repeats N] [--only jobs|tracking|peers|commands]

Each line is a separate process; times are medians, for commands of interleaved runs. Jobs are bound by PyTorch's Python
code: modules, hooks, and sharding propagation, whose share is shown.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from torchext.dry_run import world
from torchext.fake import fake_mode
from torchext.memory import track_memory

MIB = 2**20
SHAPES = {  # layers, width, heads, heads of keys, hidden, vocabulary
    "8B": (32, 4096, 32, 8, 14336, 128256),
    "70B": (80, 8192, 64, 8, 28672, 128256),
    "small": (4, 256, 8, 2, 688, 4000),
    "medium": (8, 512, 8, 8, 2048, 16000),
}
JOBS = [("8B", 512, 1), ("70B", 1024, 8)]
SEQUENCE = 8192


class Layer(nn.Module):
    """A decoder layer with grouped heads."""

    def __init__(self, width: int, heads: int, key_heads: int, hidden: int) -> None:
        super().__init__()
        self.size = width // heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v = (
            nn.Linear(width, count * self.size, bias=False) for count in (heads, key_heads, key_heads)
        )
        self.out = nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`: (batch, sequence, width)."""
        y = self.norm1(x)
        q, k, v = (layer(y).unflatten(-1, (-1, self.size)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        result: Tensor = x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))
        return result


class Llama(nn.Module):
    """A language model."""

    def __init__(self, shape: str, checkpoints: bool = True) -> None:
        super().__init__()
        layers, width, heads, key_heads, hidden, vocabulary = SHAPES[shape]
        self.checkpoints = checkpoints
        self.words = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Layer(width, heads, key_heads, hidden) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (batch, sequence, vocabulary) for `tokens` (batch, sequence)."""
        x = self.words(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpoints else layer(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def make_step(model: nn.Module, tokens: Tensor) -> Callable[[], object]:
    """Return a step of AdamW."""
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        nn.functional.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def sharded(shape: str, size: int, tensor: int) -> nn.Module:
    """Return a model sharded by `tensor` ranks of tensor parallelism and FSDP2."""
    with torch.device("meta"):
        model = Llama(shape)
    mesh: DeviceMesh = init_device_mesh("cuda", (size // tensor, tensor), mesh_dim_names=("fsdp", "tp"))
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    plan: dict[str, ParallelStyle] = {
        **dict.fromkeys("qkv", ColwiseParallel()),
        "gate": ColwiseParallel(),
        "up": ColwiseParallel(),
    }
    plan |= {"out": RowwiseParallel(), "down": RowwiseParallel()}
    for layer in model.layers:
        if tensor > 1:
            parallelize_module(layer, mesh["tp"], plan)
        fully_shard(layer, mesh=mesh["fsdp"], mp_policy=precision)
    fully_shard(model, mesh=mesh["fsdp"], mp_policy=precision)
    return model.to_empty(device="cuda")


def time_of(function: Callable[[], object]) -> float:
    """Return the seconds of a call."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def watch(owner: Any, name: str) -> list[float]:
    """Record the seconds of each call of a method."""
    original, seconds = getattr(owner, name), [0.0]

    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return original(*args, **kwargs)
        finally:
            seconds[0] += time.perf_counter() - start

    setattr(owner, name, timed)
    return seconds


def measure_job(shape: str, size: int, tensor: int, repeats: int) -> dict[str, float]:
    """Return the measurements of a job."""
    propagation = watch(ShardingPropagator, "propagate_op_sharding_non_cached")
    with world(size, size // 2, gpu="H100-80GB"), track_memory() as memory:
        start = time.perf_counter()
        model = sharded(shape, size, tensor)
        step = make_step(model, torch.zeros(1, SEQUENCE, dtype=torch.int64, device="cuda"))
        construction = time.perf_counter() - start
        propagation[0] = 0.0
        first = time_of(step)
        share = propagation[0] / first
        later = statistics.median(time_of(step) for _ in range(repeats))
        gib = memory.peak_allocated().allocated / 2**30
    return {
        "construction": construction,
        "first": first,
        "share": share,
        "later": later,
        "gib": gib,
        "mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def measure_tracking(shape: str, how: str, repeats: int) -> dict[str, float]:
    """Return the seconds of a fake step on one GPU."""
    with fake_mode(gpu=True):
        model = Llama(shape, checkpoints=False).cuda()
        step = make_step(model, torch.zeros(2, 512, dtype=torch.int64, device="cuda"))
        step()
        if how == "untracked":
            return {"seconds": statistics.median(time_of(step) for _ in range(repeats))}
        with track_memory(trace=how == "lines"):
            step()
            return {"seconds": statistics.median(time_of(step) for _ in range(repeats))}


def measure_peer(shape: str, how: str, repeats: int) -> dict[str, float]:
    """Return the seconds of a tracked step on the CPU, and the peak in MiB."""

    def prepare() -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], object]]:
        model = Llama(shape, checkpoints=False)
        optimizer = torch.optim.AdamW(model.parameters())
        tokens = torch.zeros(2, 256, dtype=torch.int64)

        def step() -> None:
            nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()

        return model, optimizer, step

    if how == "MemTracker":
        with FakeTensorMode():
            model, optimizer, step = prepare()
            tracker = MemTracker()
            tracker.track_external(model, optimizer)
            with tracker:
                step()
                seconds = []
                for _ in range(repeats):
                    tracker.reset_mod_stats()
                    seconds.append(time_of(step))
            peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
            return {"seconds": statistics.median(seconds), "mib": peak / MIB}
    if how == "torchext":
        with fake_mode(), track_memory() as memory:
            _, _, step = prepare()
            step()
            seconds = [time_of(step) for _ in range(repeats)]
    else:
        with track_memory() as memory:
            _, _, step = prepare()
            step()
            seconds = [time_of(step) for _ in range(repeats)]
    return {"seconds": statistics.median(seconds), "mib": memory.peak_allocated("cpu").allocated / MIB}


# A dry run makes two steps of it, and one to count operations.
SMALL_PROGRAM = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8)).to("cuda")
optimizer = torch.optim.AdamW(model.parameters())
for step in range(1000):
    model(torch.randn(32, 64, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


# Prints the CPU seconds of a rank that runs a program after the imports of its process.
OWN_TIME = """
import sys, time
import torch
from torchext.descriptions import DEFAULT_VALUES, FakeGPU
from torchext.reports.model import Goal
from torchext.dry_run.ranks.running import run_rank
start = time.process_time()
run_rank(
    sys.argv[1:], is_module=False, size=1, rank=0, gpu=FakeGPU("H100-80GB"), per_node=8, is_launched=False, goal=Goal(),
    values=DEFAULT_VALUES, traces_lines=True, counts_flops=True, is_quiet=True,
)
print(time.process_time() - start)
"""


def own_time_of(path: str) -> float:
    """Return the CPU seconds of a program in a process that has imported torch and torchext."""
    command = [sys.executable, "-c", OWN_TIME, path]
    return float(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)


class Times(NamedTuple):
    """The seconds of a command."""

    wall: float
    cpu: float


def times_of(command: list[str]) -> Times:
    """Run a command with its child processes."""

    def spent() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    before, start = spent(), time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
    return Times(time.perf_counter() - start, spent() - before)


MEASURES: dict[str, Callable[..., dict[str, float]]] = {
    "job": measure_job,
    "tracking": measure_tracking,
    "peer": measure_peer,
}


def in_process(what: str, *arguments: object) -> dict[str, float]:
    """Return the result of a measurement in a new process."""
    command = [sys.executable, __file__, "--one", json.dumps([what, *arguments])]
    output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    result: dict[str, float] = json.loads(output.splitlines()[-1])
    return result


def print_jobs(repeats: int) -> None:
    """Print the table of jobs."""
    print("| job | construction, s | first step, s | of it shardings | later step, s | peak, GiB | resident, MiB |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for shape, size, tensor in JOBS:
        found = in_process("job", shape, size, tensor, repeats)
        name = f"Llama {shape}, TP {tensor} x FSDP2 {size // tensor}" if tensor > 1 else f"Llama {shape}, FSDP2 {size}"
        print(
            f"| {name} | {found['construction']:.2f} | {found['first']:.2f} | {found['share']:.0%} "
            f"| {found['later']:.2f} | {found['gib']:.1f} | {found['mib']:.0f} |",
            flush=True,
        )


def print_tracking(repeats: int) -> None:
    """Print the table of tracking overhead."""
    print("\n| fake step of a Llama | untracked, ms | tracked | with lines |\n| --- | ---: | ---: | ---: |")
    for shape in ("small", "medium"):
        base, tracked, lines = (
            in_process("tracking", shape, how, repeats)["seconds"] for how in ("untracked", "tracked", "lines")
        )
        print(f"| {shape} | {1000 * base:.1f} | {tracked / base:.2f} | {lines / base:.2f} |", flush=True)


def print_peers(repeats: int) -> None:
    """Print the table of peers."""
    print("\n| step on the CPU | real, s | peak, MiB | torchext | reported | MemTracker | reported |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for shape in ("small", "medium"):
        real = in_process("peer", shape, "real", repeats)
        cells = [f"| {shape} | {real['seconds']:.3f} | {real['mib']:.1f} |"]
        for how in ("torchext", "MemTracker"):
            found = in_process("peer", shape, how, repeats)
            error = found["mib"] / real["mib"] - 1
            cells.append(f" {found['seconds']:.3f} | {error:+.2%} |")
        print("".join(cells), flush=True)


def print_commands(repeats: int) -> None:
    """Print the table of the command line."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "program.py"
        path.write_text(SMALL_PROGRAM)
        torchext = [sys.executable, "-m", "torchext"]
        dry_run = [*torchext, "dry-run", "--quiet"]
        ranks = ["--world-size", "4", "--rank", "all"]
        commands = {
            'python -c "import torch"': [sys.executable, "-c", "import torch"],
            "torchext --help": [*torchext, "--help"],
            "torchext --version": [*torchext, "--version"],
            "torchext completion bash": [*torchext, "completion", "bash"],
            "torchext env": [*torchext, "env"],
            "torchext dry-run, 1 rank": [*dry_run, "--", str(path)],
            "torchext dry-run, 4 ranks": [*dry_run, *ranks, "--", str(path)],
            "torchext dry-run, 4 ranks, --jobs 1": [*dry_run, *ranks, "--jobs", "1", "--", str(path)],
        }
        found: dict[str, list[Times]] = {name: [] for name in commands}
        own: list[float] = []
        for _ in range(repeats):
            own.append(own_time_of(str(path)))
            for name, command in commands.items():
                found[name].append(times_of(command))
    floor = statistics.median(one.cpu for one in found['python -c "import torch"'])
    program = statistics.median(own)
    print(f"\n{os.cpu_count()} processors; the program itself takes {program:.2f} s")
    print("| command | wall, s | CPU, s | CPU over that of its floor |\n| --- | ---: | ---: | ---: |")
    for name, times in found.items():
        wall, cpu = (statistics.median(column) for column in zip(*times, strict=True))
        count = 4 if "4 ranks" in name else 1 if "1 rank" in name else 0
        ratio = cpu / (count * (floor + program) or floor)
        print(f"| {name} | {wall:.2f} | {cpu:.2f} | {ratio:.2f} |")


def main() -> None:
    """Run all measurements, or the selected one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", choices=["jobs", "tracking", "peers", "commands"])
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        what, *arguments = json.loads(options.one)
        print(json.dumps(MEASURES[what](*arguments)))
        return
    for name, show in (
        ("jobs", print_jobs),
        ("tracking", print_tracking),
        ("peers", print_peers),
        ("commands", print_commands),
    ):
        if options.only in (None, name):
            show(options.repeats)


if __name__ == "__main__":
    main()
