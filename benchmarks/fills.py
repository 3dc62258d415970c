"""Compares random fills with PyTorch's on one thread, and with `zero_` as the limit.

Prints nanoseconds per value for each distribution and dtype, on touched and on fresh memory, on one thread and on
several, all measured in this run. Then it prints the CPU time of more threads, relative to one. The speedup of N
threads on N free processors is N divided by this ratio.

    python benchmarks/fills.py [--numel N] [--threads N] [--repeats N]

The columns of a row are medians of alternating measurements, so that noise affects all of them.
"""

from __future__ import annotations

import argparse
import mmap
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Generator, Tensor

sys.path.append(str(Path(__file__).parents[1] / "test"))
import bindings

Fill = Callable[[Tensor, Generator], object]

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def ours(is_normal: bool) -> Fill:
    """Return our fill."""
    return lambda tensor, generator: bindings.fill_randomly(tensor, is_normal, 0.0, 1.0, generator)


def pytorchs(is_normal: bool) -> Fill:
    """Return PyTorch's operator."""
    if is_normal:
        return lambda tensor, generator: tensor.normal_(0.0, 1.0, generator=generator)
    return lambda tensor, generator: tensor.uniform_(0.0, 1.0, generator=generator)


def zeros(tensor: Tensor, _generator: Generator) -> object:
    """Write the memory without computing."""
    return tensor.zero_()


def fresh(numel: int, dtype: torch.dtype) -> Tensor:
    """Return a tensor on untouched pages. The allocator may reuse touched ones."""
    return torch.frombuffer(mmap.mmap(-1, numel * dtype.itemsize), dtype=dtype)


def nanoseconds(fill: Fill, threads: int, tensor: Tensor | None, numel: int, dtype: torch.dtype) -> float:
    """Fill a tensor once, or a new one if none is given, and return the time per value."""
    torch.set_num_threads(threads)
    generator = Generator().manual_seed(0)
    target = fresh(numel, dtype) if tensor is None else tensor
    start = time.perf_counter_ns()
    fill(target, generator)
    return (time.perf_counter_ns() - start) / numel


def row(is_normal: bool, dtype: torch.dtype, is_fresh: bool, options: argparse.Namespace) -> list[float]:
    """Return the times of PyTorch, ours on one thread, ours on several, and `zero_` on one and on several."""
    tensor = None if is_fresh else torch.zeros(options.numel, dtype=dtype)
    columns = [
        (pytorchs(is_normal), 1),
        (ours(is_normal), 1),
        (ours(is_normal), options.threads),
        (zeros, 1),
        (zeros, options.threads),
    ]
    times: list[list[float]] = [[] for _ in columns]
    for _ in range(options.repeats):
        for column, (fill, threads) in zip(times, columns, strict=True):
            column.append(nanoseconds(fill, threads, tensor, options.numel, dtype))
    return [statistics.median(column) for column in times]


def first_use() -> None:
    """Print the time of the self-test that checks whether our kernels are exact."""
    for dtype in DTYPES:
        for is_normal in (True, False):
            start = time.perf_counter_ns()
            is_own, is_cut = bindings.is_fill_exact(is_normal, dtype), bindings.is_cut_fill_exact(is_normal, dtype)
            spent = (time.perf_counter_ns() - start) / 1e6
            name = "normal_" if is_normal else "uniform_"
            print(f"{name:9} {dtype!s:15} own kernel: {is_own!s:5} in pieces: {is_cut!s:5} tested in {spent:.2f} ms")


def processor_seconds(is_normal: bool, threads: int, tensor: Tensor) -> float:
    """Return the CPU time of all threads for one fill."""
    torch.set_num_threads(threads)
    generator = Generator().manual_seed(0)
    start = time.process_time_ns()
    ours(is_normal)(tensor, generator)
    return (time.process_time_ns() - start) / 1e9


def scaling(options: argparse.Namespace) -> None:
    """Print the CPU time of several threads relative to one."""
    counts = [1, 2, 4, 8, 16]
    print("\nCPU time relative to one thread" + "".join(f"{count:>12} threads" for count in counts[1:]))
    for is_normal in (True, False):
        tensor = torch.zeros(8 * options.numel)
        spent: dict[int, list[float]] = {count: [] for count in counts}
        for _ in range(options.repeats):
            for count in counts:
                spent[count].append(processor_seconds(is_normal, count, tensor))
        one, *others = (statistics.median(seconds) for seconds in spent.values())
        name = f"{'normal_' if is_normal else 'uniform_'} float32, {tensor.numel()} values"
        print(f"{name:38}" + "".join(f"{other / one:20.2f}" for other in others))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=1 << 23)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    first_use()
    many = f"{options.threads} threads"
    print(f"\nns per value ({options.numel} values)    PyTorch    ours  ratio  {many:>9}  ratio   zero_  {many:>9}")
    for is_fresh in (False, True):
        for is_normal in (True, False):
            for dtype in DTYPES:
                theirs, one, several, limit, limits = row(is_normal, dtype, is_fresh, options)
                name = f"{'normal_' if is_normal else 'uniform_'} {dtype!s:15} {'fresh' if is_fresh else 'touched'}"
                print(
                    f"{name:33} {theirs:8.2f} {one:7.2f} {theirs / one:6.1f} {several:10.2f} {theirs / several:6.1f} "
                    f"{limit:7.2f} {limits:10.2f}"
                )
    scaling(options)


if __name__ == "__main__":
    main()
