"""What random fills of memory cost, compared with PyTorch's on one thread, and with `zero_` as the limit.

Prints nanoseconds a value for each distribution and dtype, on memory that has been touched before and on fresh memory,
by one thread and by several, all measured in this run. Then, for more threads than the machine may have processors, the
processor time that they need together, over that of one: threads are as many times as fast as their number is larger
than that ratio, where there are processors for them.

    python benchmarks/fills.py [--numel N] [--threads N] [--repeats N]

The columns of one row are measured in turns, again and again, so that noise does not affect only one of them; what is
shown is the median.
"""

from __future__ import annotations

import argparse
import mmap
import statistics
import time
from collections.abc import Callable

import torch
from torch import Generator, Tensor

from torchext import _C

Fill = Callable[[Tensor, Generator], object]

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def ours(is_normal: bool) -> Fill:
    """Returns our fill."""
    return lambda tensor, generator: _C.fill_randomly(tensor, is_normal, 0.0, 1.0, generator)


def pytorchs(is_normal: bool) -> Fill:
    """Returns PyTorch's operator."""
    if is_normal:
        return lambda tensor, generator: tensor.normal_(0.0, 1.0, generator=generator)
    return lambda tensor, generator: tensor.uniform_(0.0, 1.0, generator=generator)


def zeros(tensor: Tensor, _generator: Generator) -> object:
    """Writes the memory, and computes nothing."""
    return tensor.zero_()


def fresh(numel: int, dtype: torch.dtype) -> Tensor:
    """Returns a tensor on pages that nobody has touched. The allocator may hand out others."""
    return torch.frombuffer(mmap.mmap(-1, numel * dtype.itemsize), dtype=dtype)


def nanoseconds(fill: Fill, threads: int, tensor: Tensor | None, numel: int, dtype: torch.dtype) -> float:
    """Fills a tensor once, a new one if there is none, and returns the time for a value."""
    torch.set_num_threads(threads)
    generator = Generator().manual_seed(0)
    target = fresh(numel, dtype) if tensor is None else tensor
    start = time.perf_counter_ns()
    fill(target, generator)
    return (time.perf_counter_ns() - start) / numel


def row(is_normal: bool, dtype: torch.dtype, is_fresh: bool, options: argparse.Namespace) -> list[float]:
    """Returns what PyTorch takes, we on one thread, we on several, and `zero_` on one and on several."""
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
    """Prints how long it takes to find out whether our kernels are exact."""
    for dtype in DTYPES:
        for is_normal in (True, False):
            start = time.perf_counter_ns()
            is_own, is_cut = _C.is_fill_exact(is_normal, dtype), _C.is_cut_fill_exact(is_normal, dtype)
            spent = (time.perf_counter_ns() - start) / 1e6
            name = "normal_" if is_normal else "uniform_"
            print(f"{name:9} {dtype!s:15} own kernel: {is_own!s:5} in pieces: {is_cut!s:5} found out in {spent:.2f} ms")


def processor_seconds(is_normal: bool, threads: int, tensor: Tensor) -> float:
    """Returns what all threads together take for one fill."""
    torch.set_num_threads(threads)
    generator = Generator().manual_seed(0)
    start = time.process_time_ns()
    ours(is_normal)(tensor, generator)
    return (time.process_time_ns() - start) / 1e9


def scaling(options: argparse.Namespace) -> None:
    """Prints the processor time of more threads over that of one."""
    counts = [1, 2, 4, 8, 16]
    print("\nprocessor time over that of one thread" + "".join(f"{count:>12} threads" for count in counts[1:]))
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
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=1 << 23)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    first_use()
    many = f"{options.threads} threads"
    print(f"\nns a value ({options.numel} values)      PyTorch    ours  ratio  {many:>9}  ratio   zero_  {many:>9}")
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
