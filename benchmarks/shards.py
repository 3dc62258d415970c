"""Time and memory for the shards of one rank.

Prints a line for each initializer, and for rows and columns of a matrix that is sharded over the ranks of a world: the
time to materialize the shard of a middle rank, the growth of resident memory, and both relative to the whole matrix.
Then the same for one rank of a Llama of 8 billion parameters that is sharded by `fully_shard`, and by tensor
parallelism of 8 ranks and `fully_shard`; a world of 1 is not measured (32 GB).

    python benchmarks/shards.py [--size N] [--worlds N ...] [--repeats N] [--no-llama]

Each line is a separate process, because of the memory; times are medians. Only one rank exists, with PyTorch's backend
"fake". Columns are bound by skipping the random numbers between them. The floor is the processor time for that and for
the values of the shard, at the best prices that this process measures. It excludes fresh memory.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from torchext import _C
from torchext.deferred_init import deferred_init, materialize_tensor

sys.path.append(str(Path(__file__).parents[1] / "test"))
import bindings

INITIALIZERS: dict[str, Callable[[Tensor], object]] = {
    "normal_": lambda t: t.normal_(0, 0.02),
    "kaiming_uniform_": nn.init.kaiming_uniform_,
    "trunc_normal_": lambda t: nn.init.trunc_normal_(t, std=0.02, a=-0.04, b=0.04),
}
EXAMPLE = Path(__file__).parents[1] / "examples" / "sharded_llama.py"
LLAMA = ["--hidden", "4096", "--layers", "32", "--vocabulary", "128256"]


def memory(name: str) -> float:
    """Return a memory statistic of this process, in MiB."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith(name))


def build(initializer: str, size: int, world: int, is_row: bool) -> Tensor:
    """Return the shard of a middle rank."""
    weight = torch.empty(size, size)
    INITIALIZERS[initializer](weight)
    if world == 1:
        return weight
    begin = world // 2 * (size // world)
    part = weight.narrow(0 if is_row else 1, begin, size // world)
    return part.clone(memory_format=torch.contiguous_format)


class Cost(NamedTuple):
    """The medians and the peak memory of one materialization."""

    seconds: float
    processor_seconds: float  # of all threads, which is robust to other load
    grown: float  # MiB of growth
    least: float  # the least processor seconds


def measure(initializer: str, size: int, world: int, is_row: bool, is_eager: bool, repeats: int) -> Cost:
    """Measure a shard, or its eager construction."""
    materialize_tensor(deferred_init(build, initializer, 512, 1, True))  # first-use checks
    seconds = []
    processor_seconds = []
    grown = 0.0
    for _ in range(repeats):
        shard = None if is_eager else deferred_init(build, initializer, size, world, is_row)
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        before = memory("VmRSS")
        start, processor_start = time.perf_counter(), time.process_time()
        shard = build(initializer, size, world, is_row) if shard is None else materialize_tensor(shard)
        seconds.append(time.perf_counter() - start)
        processor_seconds.append(time.process_time() - processor_start)
        grown = max(grown, memory("VmHWM") - before)
        del shard
    return Cost(statistics.median(seconds), statistics.median(processor_seconds), grown, min(processor_seconds))


class Prices(NamedTuple):
    """The processor time of the parts of a shard, in nanoseconds."""

    skipped: float  # a random number that is skipped
    values: dict[str, float]  # a value of each initializer

    def floor(self, initializer: str, size: int, world: int) -> float:
        """Return the seconds that columns need: the walks over all random numbers, and the values of the shard."""
        values = size * (size // world)
        return 1e-9 * (walks(initializer, size, world) * size**2 * self.skipped + values * self.values[initializer])


def walks(initializer: str, size: int, world: int) -> int:
    """Return how often the random numbers between rows are walked.

    `trunc_normal_` redraws the values outside two standard deviations, round by round. The last rounds have so few of
    them that the generator jumps from one to the next.
    """
    if not initializer.startswith("trunc"):
        return 1
    jump = 1024 * 624
    rounds, outside = 1, 0.0455
    while size / (1 - (1 - outside**rounds) ** (size // world)) < jump:
        rounds += 1
    return rounds


def measure_prices(repeats: int) -> Prices:
    """Measure the prices on one thread, at their best, since other programs only add to them."""
    torch.set_num_threads(1)
    generator = torch.Generator()
    skipped, memory = 1000 * 624, torch.zeros(1 << 18)  # less than a jump; in the cache

    def best(run: Callable[[], object], numbers: int) -> float:
        times = []
        for _ in range(8 * repeats):
            start = time.process_time_ns()
            run()
            times.append(time.process_time_ns() - start)
        return min(times) / numbers

    def fill(is_normal: bool) -> float:
        return best(lambda: bindings.fill_randomly(memory, is_normal, 0.0, 1.0, generator), memory.numel())

    walk = best(lambda: _C.skip_fill("uniform_", skipped, torch.float32, [0.0, 1.0], generator), skipped)
    normal = fill(is_normal=True)
    return Prices(walk, {"normal_": normal, "kaiming_uniform_": fill(is_normal=False), "trunc_normal_": normal})


def in_process(*arguments: object) -> Cost:
    """Return the result of `measure()` in a new process."""
    command = [sys.executable, __file__, "--one", json.dumps(arguments)]
    return Cost(*json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout))


def row(initializer: str, shard: str, cost: Cost, whole: Cost | None, mib: float, floor: float = 0) -> None:
    """Print a row of the table, compared with `whole` and with the processor time `floor`."""
    ratios = ["", ""] if whole is None else [f"1/{b / a:.0f}" for a, b in zip(cost[:2], whole[:2], strict=True)]
    limit = f"{1000 * floor:.1f} | {cost.least / floor:.2f}" if floor else " | "
    print(
        f"| {initializer} | {shard} | {1000 * cost.seconds:.1f} | {ratios[0]} | {1000 * cost.processor_seconds:.1f} "
        f"| {ratios[1]} | {1000 * cost.least:.1f} | {limit} | {cost.grown:.0f} | {mib:.1f} |",
        flush=True,
    )


def main() -> None:
    """Run all measurements, or one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=16384, help="rows and columns of the matrix (1 GiB)")
    parser.add_argument("--worlds", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--no-llama", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(*json.loads(options.one))))
        return
    print(f"{torch.get_num_threads()} threads; a matrix of {options.size}^2 in float32")
    threads, prices = torch.get_num_threads(), measure_prices(options.repeats)
    torch.set_num_threads(threads)
    values = ", ".join(f"{name} {price:.2f}" for name, price in prices.values.items())
    print(f"ns on one thread: {prices.skipped:.3f} to skip a random number; a value of {values}\n")
    print(
        "| initializer | shard | ms | of the whole | CPU ms | of the whole | least | floor | ratio | MiB | shard, MiB |"
    )
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    size_mib = options.size**2 / 2**18
    for name in INITIALIZERS:
        eager = in_process(name, options.size, 1, True, True, min(options.repeats, 3))
        row(f"`{name}`", "whole, eager", eager, None, size_mib)
        whole = in_process(name, options.size, 1, True, False, options.repeats)
        row("", "whole", whole, None, size_mib)
        for kind in ("rows", "columns"):
            for world in options.worlds:
                cost = in_process(name, options.size, world, kind == "rows", False, options.repeats)
                floor = prices.floor(name, options.size, world) if kind == "columns" else 0
                row("", f"{kind} of {world}", cost, whole, size_mib / world, floor)
    if not options.no_llama:
        print("\nLlama 8B, with construction:")
        for world in options.worlds:
            for tensor in (1, 8):
                arguments = ["--world", str(world), "--rank", str(world // 2), "--tensor", str(tensor), *LLAMA]
                result = subprocess.run(
                    [sys.executable, str(EXAMPLE), *arguments], capture_output=True, text=True, check=True
                )
                print(f"tensor parallelism of {tensor}: {result.stdout.strip()}", flush=True)


if __name__ == "__main__":
    main()
