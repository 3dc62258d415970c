"""Overhead and savings of inference mode: torchext's, PyTorch's, and `torch.no_grad`.

Prints a table of entering and leaving, one of single operators and a transformer block inside, and one of tracing, all
measured in this run. The columns of a row are measured alternately, so that noise affects all of them.

    python benchmarks/inference_mode.py [--calls N] [--repeats N]
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from torchext.inference import inference_mode, trace_origins

Mode = Callable[[], AbstractContextManager[Any]]
Measure = Callable[[], float]

MODES: dict[str, Mode] = {
    "torch.no_grad": torch.no_grad,
    "torch.inference_mode": torch.inference_mode,
    "ours": inference_mode,
}


def fastest(measures: dict[str, Measure], repeats: int) -> dict[str, float]:
    """Return the fastest of each, measured alternately, because noise only adds time."""
    gc.collect()
    samples: dict[str, list[float]] = {name: [] for name in measures}
    for _ in range(repeats):
        for name, measure in measures.items():
            samples[name].append(measure())
    return {name: min(values) for name, values in samples.items()}


def timer(run: Callable[[], Any], calls: int, mode: Mode = nullcontext) -> Measure:
    """Return a function that returns the microseconds of one call inside `mode`."""

    def measure() -> float:
        with mode():
            run()
            start = time.perf_counter()
            for _ in range(calls):
                run()
            return (time.perf_counter() - start) / calls * 1e6

    return measure


def entering(mode: Mode) -> Callable[[], None]:
    """Return a function that enters and leaves a new block."""

    def run() -> None:
        with mode():
            pass

    return run


def entering_again(mode: Mode) -> Callable[[], None]:
    """Return a function that enters and leaves the same block."""
    block = mode()

    def run() -> None:
        with block:
            pass

    return run


def decorated(mode: Mode) -> Callable[[], None]:
    """Return a function that does nothing, decorated by a block."""

    def run() -> None:
        pass

    decorate: Any = mode()
    result: Callable[[], None] = decorate(run)
    return result


def print_row(name: str, row: dict[str, float], last: str, precision: int = 3) -> None:
    """Print the columns, and the ratio of the column `last` to PyTorch's."""
    reference = row["torch.inference_mode"]
    print(
        name.ljust(28)
        + "".join(f"{value:22.{precision}f}" for value in row.values())
        + f"{row[last] / reference:12.2f}",
        flush=True,
    )


def print_header(title: str, columns: list[str], ratio: str) -> None:
    """Print the header of a table."""
    print(f"\n{title}\n")
    print(" " * 28 + "".join(column.rjust(22) for column in columns) + ratio.rjust(12))


def print_entering(calls: int, repeats: int) -> None:
    """Print the first table."""
    print_header("Entering and leaving, microseconds", list(MODES), "ours/torch")
    cases = {"a new block": entering, "the same block": entering_again, "a decorated function": decorated}
    for name, make in cases.items():
        row = fastest({mode: timer(make(enter), calls * 10) for mode, enter in MODES.items()}, repeats)
        print_row(name, row, "ours")


def operators() -> dict[str, Callable[[Tensor], Callable[[], Any]]]:
    """Return the rows of the second table, as functions of their tensor."""
    return {
        "functional: t + t": lambda t: lambda: t + t,
        "view: t.view(-1)": lambda t: lambda: t.view(-1),
        "in-place: t.add_(t)": lambda t: lambda: t.add_(t),
    }


def print_operators(calls: int, repeats: int) -> None:
    """Print the second table."""
    print_header("One call inside, microseconds", list(MODES), "ours/torch")
    for kind in ("a normal tensor", "an inference tensor"):
        print(f"on {kind}")
        for name, make in operators().items():
            measures = {}
            for mode, enter in MODES.items():
                with enter() if kind == "an inference tensor" else nullcontext():
                    tensor = torch.zeros(10, 10)
                measures[mode] = timer(make(tensor), calls, enter)
            print_row(f"  {name}", fastest(measures, repeats), "ours")
    block = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True).eval()
    x = torch.ones(1, 16, 64)
    measures = {mode: timer(lambda: block(x), calls // 20, enter) for mode, enter in MODES.items()}
    print_row("a transformer block", fastest(measures, repeats), "ours", precision=1)


def print_tracing(calls: int, repeats: int) -> None:
    """Print the third table."""
    modes: dict[str, Mode] = {
        "torch.inference_mode": torch.inference_mode,
        "never traced": inference_mode,
        "traced": lambda: inference_mode(trace=True),
    }
    print_header("Remembering origins, microseconds", [*modes, "off again"], "off/torch")
    block = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True).eval()
    x = torch.ones(1, 16, 64)
    runs: dict[str, tuple[Callable[[], Any], int]] = {
        "entering and leaving": (lambda: None, calls),
        "functional: t + t": (operators()["functional: t + t"](torch.zeros(10, 10)), calls),
        "view: t.view(-1)": (operators()["view: t.view(-1)"](torch.zeros(10, 10)), calls),
        "a transformer block": (lambda: block(x), calls // 20),
    }
    for name, (run, count) in runs.items():
        measures = {
            mode: timer(entering(enter), calls) if name.startswith("entering") else timer(run, count, enter)
            for mode, enter in modes.items()
        }
        row = fastest(measures, repeats)
        trace_origins()
        trace_origins(False)
        off = {mode: measures[mode] for mode in ("torch.inference_mode", "never traced")}
        row = {**row, "off again": fastest(off, repeats)["never traced"]}
        print_row(name, row, "off again")


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=2000, help="calls per measurement")
    parser.add_argument("--repeats", type=int, default=25, help="measurements; the fastest counts")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print_entering(options.calls, options.repeats)
    print_operators(options.calls, options.repeats)
    print_tracing(options.calls, options.repeats)


if __name__ == "__main__":
    main()
