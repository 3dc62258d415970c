"""Time and memory for a dry run of a training step.

Prints three tables:

- For one rank of a Llama in a world: seconds until the end of the first step, including construction and sharding;
  seconds of a later step; the share of sharding propagation in the first step; and the resident memory.
- The overhead of tracking on a fake step.
- A step on the CPU, real and tracked, fake and tracked, and with PyTorch's MemTracker under FakeTensorMode: seconds,
  and the reported peak.

    python benchmarks/dry_run.py [--repeats N] [--only jobs|tracking|peers]

Each line is a separate process; times are medians. Jobs are bound by PyTorch's Python code: modules, hooks, and
sharding propagation, whose share is shown.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

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


def main() -> None:
    """Run all measurements, or the selected one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", choices=["jobs", "tracking", "peers"])
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        what, *arguments = json.loads(options.one)
        print(json.dumps(MEASURES[what](*arguments)))
        return
    for name, show in (("jobs", print_jobs), ("tracking", print_tracking), ("peers", print_peers)):
        if options.only in (None, name):
            show(options.repeats)


if __name__ == "__main__":
    main()
