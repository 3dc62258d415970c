"""Compares recording of an operator that reads a real tensor with eager construction.

A large real tensor is copied into a new one, eagerly and deferred. Eager loading reads and writes it once. Recording
reads it once to compute a digest; materializing reads it again to compare, and then copies. The limit is the memory
bandwidth for reads; `sum()` of the same bytes is shown for comparison.

    python benchmarks/external_tensors.py [--mebibytes N] [--repeats N]

The columns are medians of alternating measurements.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from torchext.deferred_init import deferred_init, materialize_tensor


def seconds(run: Callable[[], object]) -> float:
    """Return the duration of `run()`."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def load(source: Tensor) -> Tensor:
    """Copy like a constructor that loads a checkpoint."""
    return torch.empty_like(source).copy_(source)


def measure(source: Tensor) -> dict[str, float]:
    """Return the seconds of one round."""
    deferred: list[Tensor] = []
    return {
        "read (sum)": seconds(lambda: source.view(torch.int64).sum()),
        "eager": seconds(lambda: load(source)),
        "record": seconds(lambda: deferred.append(deferred_init(load, source))),
        "materialize": seconds(lambda: materialize_tensor(deferred[0])),
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mebibytes", type=int, default=512, help="size of the tensor")
    parser.add_argument("--repeats", type=int, default=9, help="number of rounds for the median")
    options = parser.parse_args()
    source = torch.rand(options.mebibytes * 2**18)
    measure(source)  # touches the pages
    turns = [measure(source) for _ in range(options.repeats)]
    medians = {name: statistics.median(turn[name] for turn in turns) for name in turns[0]}
    print(f"{options.mebibytes} MiB, {torch.get_num_threads()} threads, medians of {options.repeats}")
    for name, duration in medians.items():
        rate = source.nbytes / duration / 1e9
        print(f"{name:12} {duration:7.3f} s  {rate:6.1f} GB/s  {duration / medians['eager']:5.2f} of eager")
    both = medians["record"] + medians["materialize"]
    print(f"{'both':12} {both:7.3f} s               {both / medians['eager']:5.2f} of eager")


if __name__ == "__main__":
    main()
