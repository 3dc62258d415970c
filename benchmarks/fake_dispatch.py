"""Compares calls on fake tensors with real calls, the meta device and PyTorch's FakeTensorMode.

Prints one table of single calls and one of the phases of training a Llama-2-7B shape, all measured in this run.

    python benchmarks/fake_dispatch.py [--layers N] [--calls N] [--repeats N]

Needs `transformers` for the second table. The columns of a row are measured alternately, so that noise affects all of
them.
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from torchext.fake import cache_clear, cache_info, fake_like, fake_mode

Operator = Callable[..., Any]
Measure = Callable[[], float]


class Case(NamedTuple):
    """An operator and the shapes of its arguments."""

    run: Operator
    shapes: list[tuple[int, ...]]
    last_is_index: bool = False


CASES: dict[str, Case] = {
    "add": Case(torch.add, [(10, 10), (10, 10)]),
    "mm": Case(torch.mm, [(10, 10), (10, 10)]),
    "view": Case(lambda x: x.view(-1), [(10, 10)]),
    "empty": Case(lambda: torch.empty(10, 10), []),
    "cat": Case(lambda x, y: torch.cat([x, y]), [(10, 10), (10, 10)]),
    "layer_norm": Case(lambda x, w: functional.layer_norm(x, (10,), w), [(10, 10), (10,)]),
    "sdpa": Case(functional.scaled_dot_product_attention, [(1, 2, 8, 8)] * 3),
    "index": Case(lambda x, i: x[i], [(10, 10), (3,)], last_is_index=True),
    "sum": Case(torch.sum, [(10, 10)]),
    "detach": Case(lambda x: x.detach(), [(10, 10)]),
    "zeros": Case(lambda: torch.zeros(10, 10), []),
    "conv2d": Case(functional.conv2d, [(1, 3, 8, 8), (4, 3, 3, 3)]),
}
GETTERS: dict[str, Operator] = {
    "dim()": lambda x: x.dim(),
    "numel()": lambda x: x.numel(),
    "shape": lambda x: x.shape,
    "size(0)": lambda x: x.size(0),
}


def make_arguments(case: Case) -> list[torch.Tensor]:
    """Return real arguments of float32, and int64 for an index."""
    arguments = [torch.ones(shape) for shape in case.shapes]
    if case.last_is_index:
        arguments[-1] = torch.zeros(case.shapes[-1], dtype=torch.int64)
    return arguments


def timer(run: Operator, arguments: list[torch.Tensor], calls: int, mode: AbstractContextManager[Any]) -> Measure:
    """Return a function that returns the microseconds of one call."""

    def measure() -> float:
        with mode:
            run(*arguments)
            start = time.perf_counter()
            for _ in range(calls):
                run(*arguments)
            return (time.perf_counter() - start) / calls * 1e6

    return measure


def cold_timer(run: Operator, arguments: list[torch.Tensor], calls: int) -> Measure:
    """Return the same for a call that is not in the cache."""

    def measure() -> float:
        total = 0.0
        with fake_mode():
            for _ in range(calls):
                cache_clear()
                start = time.perf_counter()
                run(*arguments)
                total += time.perf_counter() - start
        return total / calls * 1e6

    return measure


class FakeMode:
    """A reusable `fake_mode()`."""

    def __enter__(self) -> None:
        self.mode = fake_mode()
        self.mode.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.mode.__exit__(None, None, None)


def medians(measures: dict[str, Measure], repeats: int) -> dict[str, float]:
    """Return the median of each, measured alternately."""
    gc.collect()
    samples: dict[str, list[float]] = {name: [] for name in measures}
    for _ in range(repeats):
        for name, measure in measures.items():
            samples[name].append(measure())
    return {name: statistics.median(values) for name, values in samples.items()}


def measure_case(case: Case, calls: int, repeats: int) -> dict[str, float]:
    """Return the microseconds in a row of the first table."""
    real = make_arguments(case)
    meta_mode = torch.device("meta")
    theirs = FakeTensorMode()
    return medians(
        {
            "real": timer(case.run, real, calls, nullcontext()),
            "meta": timer(case.run, [t.to("meta") for t in real], calls // 20, meta_mode),
            "FakeTensorMode": timer(case.run, [theirs.from_tensor(t) for t in real], calls // 20, theirs),
            "warm": timer(case.run, [fake_like(t) for t in real], calls, FakeMode()),
            "cold": cold_timer(case.run, [fake_like(t) for t in real], calls // 20),
        },
        repeats,
    )


def print_operators(calls: int, repeats: int) -> None:
    """Print the first table."""
    print("One call, microseconds (medians); torchext with a warm and with a cold cache\n")
    columns = ("real", "meta", "FakeTensorMode", "warm", "cold")
    print("operator".ljust(12) + "".join(name.rjust(16) for name in columns) + "warm/real".rjust(12))
    for name, case in CASES.items():
        row = measure_case(case, calls, repeats)
        print(
            name.ljust(12)
            + "".join(f"{row[column]:16.2f}" for column in columns)
            + f"{row['warm'] / row['real']:12.2f}",
            flush=True,
        )
    real = torch.ones(10, 10)
    fake = fake_like(real)
    for name, getter in GETTERS.items():
        row = medians(
            {
                "real": timer(getter, [real], calls * 10, nullcontext()),
                "warm": timer(getter, [fake], calls * 10, nullcontext()),
            },
            repeats,
        )
        print(
            name.ljust(12)
            + f"{row['real']:16.3f}{'-':>16}{'-':>16}{row['warm']:16.3f}{'-':>16}{row['warm'] / row['real']:12.2f}"
        )


PHASES = ("construction", "forward", "backward", "AdamW, first step", "AdamW, next step")


def train_llama(layers: int) -> dict[str, float]:
    """Train the shape of Llama-2-7B for a step, and return the seconds of each phase that ran."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    config = transformers.LlamaConfig(num_hidden_layers=layers)
    seconds: list[float] = []
    start = time.perf_counter()

    def finish_phase() -> None:
        nonlocal start
        now = time.perf_counter()
        seconds.append(now - start)
        start = now

    model = transformers.LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.ones(1, 128, dtype=torch.int64)
    finish_phase()
    loss = model(tokens, labels=tokens).loss
    finish_phase()
    loss.backward()
    finish_phase()
    # AdamW reads its step counters, which is not possible on the meta device.
    with suppress(RuntimeError):
        for _ in range(2):
            optimizer.step()
            finish_phase()
    return dict(zip(PHASES, seconds, strict=False))


def print_llama(layers: int, repeats: int) -> None:
    """Print the second table."""
    samples: dict[str, list[dict[str, float]]] = {"meta": [], "FakeTensorMode": [], "cold": [], "warm": []}
    for _ in range(repeats):
        cache_clear()
        modes = (torch.device("meta"), FakeTensorMode(allow_non_fake_inputs=True), fake_mode(), fake_mode())
        for runs, mode in zip(samples.values(), modes, strict=True):
            with mode:  # type: ignore[attr-defined]
                runs.append(train_llama(layers))
            gc.collect()
    print(f"\nLlama-2-7B shape, {layers} layers, sequence of 128, seconds (medians)\n")
    print("phase".ljust(20) + "".join(name.rjust(16) for name in samples) + "warm/FakeTensorMode".rjust(22))
    for phase in PHASES:
        row = {
            name: statistics.median(sample.get(phase, math.nan) for sample in runs) for name, runs in samples.items()
        }
        print(
            phase.ljust(20)
            + "".join(f"{value:16.4f}".replace("nan", "  -") for value in row.values())
            + f"{row['warm'] / row['FakeTensorMode']:22.3f}"
        )
    print(f"\n{cache_info()}")


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32, help="layers of the Llama shape")
    parser.add_argument("--calls", type=int, default=2000, help="calls per measurement")
    parser.add_argument("--repeats", type=int, default=7, help="number of measurements for the median")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print_operators(options.calls, options.repeats)
    print_llama(options.layers, min(options.repeats, 3))


if __name__ == "__main__":
    main()
