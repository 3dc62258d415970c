"""Compares calls on fake tensors with real calls, the meta device and PyTorch's FakeTensorMode.

Prints one table of single calls and one of the phases of training a Llama-2-7B shape, all measured in this run.

    python benchmarks/fake_dispatch.py [--layers N] [--calls N] [--repeats N] [--only PATTERN] [--no-comparison]

Needs `transformers` for the second table. The columns of a row are measured alternately, so that noise affects all of
them.
"""

from __future__ import annotations

import argparse
import functools
import gc
import math
import re
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from torchext.fake import cache_clear, cache_info, fake_mode

Operator = Callable[..., Any]
Measure = Callable[[], float]


Factory = Callable[..., torch.Tensor]


class Case(NamedTuple):
    """An operation, and a function that makes its arguments.

    `make` gets the factory for plain tensors: `torch.ones` for real ones, whose values must be valid, and
    `torch.empty` for all others, since torchext computes with known values.
    """

    run: Operator
    make: Callable[[Factory], Sequence[Any]] = lambda new: [new(10, 10)]
    share: float = 1.0  # of the calls


def like(*shapes: tuple[int, ...]) -> Callable[[Factory], list[torch.Tensor]]:
    """Return a function that makes float32 tensors of these shapes."""
    return lambda new: [new(*shape) for shape in shapes]


def make_optimizer(
    optimizer: Callable[..., torch.optim.Optimizer], shape: tuple[int, ...]
) -> Callable[[Factory], list[torch.optim.Optimizer]]:
    """Return a function that makes an optimizer of twenty parameters with gradients."""

    def make(new: Factory) -> list[torch.optim.Optimizer]:
        parameters = [torch.nn.Parameter(new(*shape)) for _ in range(20)]
        for parameter in parameters:
            parameter.grad = new(*shape)
        return [optimizer(parameters, foreach=True)]

    return make


def make_coo(new: Factory) -> list[torch.Tensor]:
    """Return a coalesced COO tensor and a dense one."""
    indices = torch.arange(10).expand(2, 10)
    return [torch.sparse_coo_tensor(indices, new(10), (10, 10), is_coalesced=True), new(10, 10)]


def make_csr(new: Factory) -> list[torch.Tensor]:
    """Return a CSR tensor and a dense one."""
    return [torch.sparse_csr_tensor(torch.arange(11), torch.arange(10), new(10), (10, 10)), new(10, 10)]


def resize_twice(x: torch.Tensor) -> None:
    """Shrink a tensor, and give it its size again."""
    x.resize_(5, 10)
    x.resize_(10, 10)


def set_data(x: torch.Tensor, y: torch.Tensor) -> None:
    """Assign to `.data`."""
    x.data = y


TWO = like((10, 10), (10, 10))
ADAMW: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
SGD = functools.partial(torch.optim.SGD, momentum=0.9)
CASES: dict[str, Case] = {
    "add": Case(torch.add, TWO),
    "add, known values": Case(torch.add, lambda _: [torch.ones(10, 10), torch.ones(10, 10)]),
    "add_": Case(lambda x, y: x.add_(y), TWO),
    "mm": Case(torch.mm, TWO),
    "sum": Case(torch.sum),
    "cat": Case(lambda x, y: torch.cat([x, y]), TWO),
    "layer_norm": Case(lambda x, w: functional.layer_norm(x, (10,), w), like((10, 10), (10,))),
    "sdpa": Case(functional.scaled_dot_product_attention, like(*[(1, 2, 8, 8)] * 3)),
    "conv2d": Case(functional.conv2d, like((1, 3, 8, 8), (4, 3, 3, 3))),
    "index": Case(lambda x, i: x[i], lambda new: [new(10, 10), new(3, dtype=torch.int64)]),
    "to": Case(lambda x: x.to(torch.float64)),
    "view": Case(lambda x: x.view(-1)),
    "detach": Case(lambda x: x.detach()),
    "t": Case(lambda x: x.t()),
    "slice": Case(lambda x: x[2:4]),
    "select": Case(lambda x: x[2]),
    "transpose": Case(lambda x: x.transpose(0, 1)),
    "permute": Case(lambda x: x.permute(1, 0)),
    "expand": Case(lambda x: x.expand(3, 10, 10)),
    "reshape": Case(lambda x: x.reshape(5, 20)),
    "unsqueeze": Case(lambda x: x.unsqueeze(0)),
    "squeeze": Case(lambda x: x.squeeze(0), like((1, 10))),
    "split": Case(lambda x: x.split(5)),
    "chunk": Case(lambda x: x.chunk(2)),
    "as_strided": Case(lambda x: x.as_strided((5, 5), (1, 5))),
    ".data": Case(lambda x: x.data),
    "empty": Case(lambda: torch.empty(10, 10), like()),
    "empty_like": Case(torch.empty_like),
    "zeros": Case(lambda: torch.zeros(10, 10), like()),
    "ones": Case(lambda: torch.ones(10, 10), like()),
    "arange": Case(lambda: torch.arange(10), like()),
    "zeros, 1000": Case(lambda: torch.zeros(1000), like()),
    "arange, 1000": Case(lambda: torch.arange(1000), like()),
    "t_()": Case(lambda x: x.t_()),
    "resize_(), twice": Case(resize_twice),
    "out= that grows": Case(lambda x, y: torch.add(x, y, out=torch.empty(0)), TWO),
    "set_()": Case(lambda x, y: x.set_(y), TWO),
    ".data =": Case(set_data, TWO),
    "COO * 2": Case(lambda s, _: s * 2, make_coo, 0.1),
    "COO @ dense": Case(torch.mm, make_coo, 0.1),
    "CSR * 2": Case(lambda s, _: s * 2, make_csr, 0.1),
    "CSR @ dense": Case(torch.mm, make_csr, 0.1),
    "AdamW, 10 x 10": Case(lambda optimizer: optimizer.step(), make_optimizer(ADAMW, (10, 10)), 0.02),
    "AdamW, 1000": Case(lambda optimizer: optimizer.step(), make_optimizer(ADAMW, (1000,)), 0.02),
    "SGD, 10 x 10": Case(lambda optimizer: optimizer.step(), make_optimizer(SGD, (10, 10)), 0.05),
    "SGD, 1000": Case(lambda optimizer: optimizer.step(), make_optimizer(SGD, (1000,)), 0.05),
}
GETTERS: dict[str, Operator] = {
    "dim()": lambda x: x.dim(),
    "numel()": lambda x: x.numel(),
    "shape": lambda x: x.shape,
    "size(0)": lambda x: x.size(0),
}


def timer(run: Operator, arguments: Sequence[Any], calls: int, mode: AbstractContextManager[Any]) -> Measure:
    """Return a function that returns the microseconds of one call."""

    def measure() -> float:
        with mode:
            run(*arguments)
            start = time.perf_counter()
            for _ in range(calls):
                run(*arguments)
            return (time.perf_counter() - start) / calls * 1e6

    return measure


def cold_timer(run: Operator, arguments: Sequence[Any], calls: int) -> Measure:
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


def nan_if_refused(make: Callable[[], Measure]) -> Measure:
    """Return the measure that `make` returns, or one of NaN if it or its first call raises an error."""
    try:
        measure = make()
        measure()
    except (RuntimeError, NotImplementedError):
        return lambda: math.nan
    return measure


def measure_case(case: Case, calls: int, repeats: int, *, is_compared: bool = True) -> dict[str, float]:
    """Return the microseconds in a row of the first table."""
    calls = max(20, int(calls * case.share))
    few = max(5, calls // 20)
    real = case.make(torch.ones)
    with fake_mode():
        fake = case.make(torch.empty)

    def timer_in(mode: Any) -> Measure:
        with mode:
            arguments = case.make(torch.empty)
        return timer(case.run, arguments, few, mode)

    measures = {
        "real": timer(case.run, real, calls, nullcontext()),
        "warm": timer(case.run, fake, calls, FakeMode()),
    }
    if is_compared:
        measures["meta"] = nan_if_refused(lambda: timer_in(torch.device("meta")))
        measures["FakeTensorMode"] = nan_if_refused(lambda: timer_in(FakeTensorMode()))
        measures["cold"] = cold_timer(case.run, fake, few)
    return medians(measures, repeats)


def print_operators(calls: int, repeats: int, only: str, *, is_compared: bool) -> None:
    """Print the first table."""
    print("One call, microseconds (medians); torchext with a warm and with a cold cache\n")
    columns = ("real", "meta", "FakeTensorMode", "warm", "cold") if is_compared else ("real", "warm")
    print("operator".ljust(20) + "".join(name.rjust(16) for name in columns) + "warm/real".rjust(12))

    def print_row(name: str, row: dict[str, float]) -> None:
        cells = "".join(f"{row.get(column, math.nan):16.3f}" for column in columns).replace("nan", "  -")
        print(name.ljust(20) + cells + f"{row['warm'] / row['real']:12.2f}", flush=True)

    for name, case in CASES.items():
        if re.search(only, name):
            print_row(name, measure_case(case, calls, repeats, is_compared=is_compared))
    for name, getter in GETTERS.items():
        if re.search(only, name):
            print_row(name, measure_case(Case(getter, share=10), calls, repeats, is_compared=False))


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
    parser.add_argument("--only", default="", metavar="PATTERN", help="rows of the first table alone, without others")
    parser.add_argument("--no-comparison", action="store_true", help="leave out all but real and warm calls")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print_operators(options.calls, options.repeats, options.only, is_compared=not options.no_comparison)
    if not options.only:
        print_llama(options.layers, min(options.repeats, 3))


if __name__ == "__main__":
    main()
