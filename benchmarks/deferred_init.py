"""Compares deferred initialization with the other ways to construct a model.

Prints tables of medians, all measured in one run:

- Construction: torchext, `torch.device("meta")`, PyTorch's FakeTensorMode, accelerate's `init_empty_weights` and eager,
  on transformers' Llama-2-7B shape, and on linear layers of the same shape, which do initialize. Eager construction is
  scaled up from one layer.
- Recording: time and memory of one operator.
- Materialization: against eager construction on about 1 B parameters, and its peak of resident memory.
- Small models: time of recording and of materializing, and peak of resident memory, against eager construction.

    python benchmarks/deferred_init.py [--repeats N] [--calls N] [--operators N]

Needs `transformers` and `psutil`. The rows of a table are measured alternately, so that noise affects all of them.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import resource
import statistics
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple, TypeVar

import psutil
import torch
import transformers
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from torchext.deferred_init import deferred_init, explain, is_deferred, materialize_module
from torchext.fake import fake_mode

LAYERS = 32
MIB = 2**20
T = TypeVar("T")
Build = Callable[[int], nn.Module]

# Operators on an existing tensor.
OPERATORS: dict[str, Callable[[Tensor], object]] = {
    "add_": lambda x: x.add_(1.0),
    "normal_": lambda x: x.normal_(),
    "zeros": lambda x: torch.zeros(10, 10),
    "view": lambda x: x.view(-1),
}


class Memory(NamedTuple):
    """Memory for materializing a model, in bytes."""

    model: int
    largest: int
    peak: int


class Few(nn.Module):
    """Three parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Parameter(torch.randn(8)) for _ in range(3))


class Tiny(nn.Module):
    """Many tensors of 8 elements in a list."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.tensors = [torch.randn(8) for _ in range(count)]


def small_layers(count: int) -> nn.Module:
    """Return layers with `count` parameters together."""
    return nn.ModuleList(nn.Linear(16, 16) for _ in range(count // 2))


# Models whose cost is that of calls, not of elements, and how many of each are constructed in one measurement.
SMALL: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "one Linear(4, 4)": (partial(nn.Linear, 4, 4), 200),
    "three parameters of 8": (Few, 200),
    "10,000 in Linear(16, 16)": (partial(small_layers, 10_000), 1),
    "10,000 of 8 in a list": (partial(Tiny, 10_000), 1),
    "100,000 of 8 in a list": (partial(Tiny, 100_000), 1),
}


class Recording(NamedTuple):
    """Memory of a recording."""

    bytes: int
    operators: int
    tensors: int


def llama(layers: int, hidden_size: int = 4096) -> nn.Module:
    """Return a Llama with the proportions of Llama-2-7B."""
    config = transformers.LlamaConfig(
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 43 // 16,
        num_hidden_layers=layers,
        num_attention_heads=32,
        vocab_size=32000,
    )
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return model


def linears(layers: int, hidden_size: int = 4096) -> nn.Module:
    """Return the matrices of a Llama as plain modules, whose constructors initialize them on any device."""
    inner = hidden_size * 43 // 16
    linear = partial(nn.Linear, bias=False)
    attention = [(hidden_size, hidden_size)] * 4
    shapes = [*attention, (hidden_size, inner), (hidden_size, inner), (inner, hidden_size)]
    return nn.Sequential(
        nn.Embedding(32000, hidden_size),
        *(linear(*shape) for _ in range(layers) for shape in shapes),
        linear(hidden_size, 32000),
    )


def seconds(run: Callable[[], object]) -> float:
    """Return the duration of one call."""
    gc.collect()
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def medians(runs: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, float]:
    """Return the medians of `runs`, measured alternately, after one warm-up round."""
    rounds = [{name: run() for name, run in runs.items()} for _ in range(repeats + 1)]
    return {name: statistics.median(measured[name] for measured in rounds[1:]) for name in runs}


def in_subprocess(fn: Callable[..., T], *args: object) -> T:
    """Call `fn` in a fresh process with clean memory."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(fn, *args).result()


def construct_under(context: Callable[[], AbstractContextManager[Any]], build: Build) -> None:
    """Construct the 7 B shape inside a context manager."""
    with context():
        build(LAYERS)


def empty_weights() -> Callable[[], AbstractContextManager[Any]] | None:
    """Return accelerate's context manager, including buffers, or None if it is not installed."""
    try:
        from accelerate import init_empty_weights
    except ImportError:
        return None
    return partial(init_empty_weights, include_buffers=True)


def construction(title: str, build: Build, repeats: int) -> None:
    """Print a table of construction times."""
    contexts: dict[str, Callable[[], AbstractContextManager[Any]] | None] = {
        "meta device": lambda: torch.device("meta"),
        "FakeTensorMode": FakeTensorMode,
        "accelerate, init_empty_weights": empty_weights(),
    }
    runs = {"torchext": lambda: seconds(lambda: deferred_init(build, LAYERS))}
    for name, context in contexts.items():
        if context is not None:
            runs[name] = partial(seconds, partial(construct_under, context, build))
    measured = medians(runs, repeats)
    # The difference is one layer.
    eager = medians({str(layers): partial(seconds, partial(build, layers)) for layers in (1, 2)}, 3)
    measured["eager (one layer, scaled)"] = (eager["2"] - eager["1"]) * LAYERS
    print(f"\nConstruction of {title}, medians of {repeats}\n")
    print(f"{'':32}{'seconds':>9}{'ratio':>9}")
    for name in ["torchext", *contexts, "eager (one layer, scaled)"]:
        print_row(name, measured.get(name), measured["torchext"])


def print_row(name: str, value: float | None, unit: float) -> None:
    """Print a duration and its ratio to another, or dashes."""
    columns = f"{'-':>9}{'-':>9}" if value is None else f"{value:9.3f}{value / unit:9.2f}"
    print(f"{name:32}{columns}")


def microseconds(operator: Callable[[Tensor], object], tensor: Tensor, calls: int) -> float:
    """Return the duration of one call."""

    def run() -> None:
        for _ in range(calls):
            operator(tensor)

    return seconds(run) / calls * 1e6


def microseconds_fake(operator: Callable[[Tensor], object], calls: int) -> float:
    """Return the duration of one call on a fake."""
    with fake_mode():
        return microseconds(operator, torch.zeros(10, 10), calls)


def microseconds_deferred(operator: Callable[[Tensor], object], calls: int) -> float:
    """Return the duration of one recorded call."""
    return deferred_init(lambda: microseconds(operator, torch.zeros(10, 10), calls))


def recording_time(calls: int, repeats: int) -> None:
    """Print the table of single operators."""
    print(f"\nOne operator, microseconds, medians of {repeats} times {calls} calls\n")
    print(f"{'':12}{'real':>9}{'fake':>9}{'recorded':>10}{'recording':>11}{'recorded / real':>17}")
    for name, operator in OPERATORS.items():
        runs = {
            "real": partial(microseconds, operator, torch.zeros(10, 10), calls),
            "fake": partial(microseconds_fake, operator, calls),
            "recorded": partial(microseconds_deferred, operator, calls),
        }
        real, fake, recorded = medians(runs, repeats).values()
        print(f"{name:12}{real:9.2f}{fake:9.2f}{recorded:10.2f}{recorded - fake:11.2f}{recorded / real:17.2f}")


def resident() -> int:
    """Return the resident memory of this process, in bytes."""
    gc.collect()
    size: int = psutil.Process().memory_info().rss
    return size


def recorded_in_place(name: str, numel: int, operators: int, tensors: int) -> Recording:
    """Measure a recording of `operators` in-place operators, spread over `tensors` tensors of `numel` elements."""
    operator = OPERATORS[name]
    deferred_init(lambda: operator(torch.empty(numel)))
    before = resident()

    def record() -> list[Tensor]:
        held = [torch.empty(numel) for _ in range(tensors)]
        for tensor in held:
            for _ in range(operators // tensors):
                operator(tensor)
        return held

    held = deferred_init(record)
    return Recording(resident() - before, operators + len(held), len(held))


def recorded_model(build: Build) -> Recording:
    """Measure a 7 B shape that is deferred: modules, fake tensors and their recording."""
    deferred_init(build, 1)
    before = resident()
    model = deferred_init(build, LAYERS)
    taken = resident() - before
    tensors = [*model.parameters(), *model.buffers()]
    return Recording(taken, count_operators(tensors), len(tensors))


def bytes_on_meta(build: Build) -> int:
    """Measure the 7 B shape on the meta device, which records nothing."""
    with torch.device("meta"):
        build(1)
        before = resident()
        model = build(LAYERS)
    taken = resident() - before
    del model
    return taken


def above_meta(build: Build) -> Recording:
    """Measure how much more memory the deferred 7 B shape needs than the one on the meta device."""
    recording = in_subprocess(recorded_model, build)
    return recording._replace(bytes=recording.bytes - in_subprocess(bytes_on_meta, build))


def count_operators(tensors: list[Tensor]) -> int:
    """Return the number of recorded operators of these tensors."""
    return sum(len(explain(tensor)) for tensor in tensors if is_deferred(tensor))


def recording_memory(operators: int) -> None:
    """Print the table of the memory of recordings."""
    rows = {
        **{
            f"`{name}` of {numel}, {what}": in_subprocess(recorded_in_place, name, numel, operators, tensors)
            # Fewer than 16 normally distributed values are drawn by another algorithm, which caches a value.
            for name, numel in (("normal_", 100), ("normal_", 10), ("add_", 100))
            for what, tensors in {"one tensor": 1, "four per tensor": operators // 4}.items()
        },
        "Llama-2-7B shape, transformers": above_meta(llama),
        "Llama-2-7B shape, linear layers": above_meta(linears),
    }
    print("\nResident memory of recordings, bytes; of models, above the same model on the meta device\n")
    print(f"{'':34}{'operators':>10}{'tensors':>9}{'MiB':>7}{'/ operator':>12}{'/ tensor':>10}")
    for name, row in rows.items():
        print(
            f"{name:34}{row.operators:10}{row.tensors:9}{row.bytes / MIB:7.1f}"
            f"{row.bytes / row.operators:12.0f}{row.bytes / row.tensors:10.0f}"
        )


def materialization(repeats: int) -> None:
    """Print the table of materialization times."""
    rows = {
        "eager construction": lambda: seconds(one_billion),
        "deferred and materialized": lambda: seconds(lambda: materialize_module(deferred_init(one_billion))),
    }
    measured = medians(rows, repeats)
    numel = sum(parameter.numel() for parameter in deferred_init(one_billion).parameters())
    print(f"\nA Llama of {numel / 1e9:.2f} B parameters, medians of {repeats}\n")
    print(f"{'':32}{'seconds':>9}{'ratio':>9}")
    for name, value in measured.items():
        print_row(name, value, measured["eager construction"])


def one_billion() -> nn.Module:
    """Return a Llama of about 1 B parameters."""
    return llama(16, 2048)


def peak_of_materializing() -> Memory:
    """Measure the growth of resident memory during materialization."""
    materialize_module(deferred_init(llama, 1, 64))  # loads everything that is loaded on first use
    model = deferred_init(one_billion)
    before = resident()
    materialize_module(model)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    sizes = [tensor.nbytes for tensor in (*model.parameters(), *model.buffers())]
    return Memory(sum(sizes), max(sizes), peak)


def materialization_memory() -> None:
    """Print the peak of materializing."""
    memory = in_subprocess(peak_of_materializing)
    target = memory.model + memory.largest
    print("\nPeak of resident memory while that model is materialized, MiB\n")
    print(f"{'model':32}{memory.model / MIB:9.1f}")
    print(f"{'model and its largest tensor':32}{target / MIB:9.1f}")
    print(f"{'peak':32}{memory.peak / MIB:9.1f}{memory.peak / target:9.2f}")


def small_times(build: Callable[[], nn.Module], calls: int, repeats: int) -> dict[str, float]:
    """Return the durations of one construction, of recording it, and of materializing it, in seconds."""

    def materialize() -> float:
        deferred = [deferred_init(build) for _ in range(calls)]
        return seconds(lambda: [materialize_module(model) for model in deferred])

    runs = {
        "eager": lambda: seconds(lambda: [build() for _ in range(calls)]),
        "recording": lambda: seconds(lambda: [deferred_init(build) for _ in range(calls)]),
        "materializing": materialize,
        # One after another: PyTorch's functions are replaced and given back each time.
        "both": lambda: seconds(lambda: [materialize_module(deferred_init(build)) for _ in range(calls)]),
    }
    return {name: value / calls for name, value in medians(runs, repeats).items()}


def peak_of_small(name: str, is_deferred: bool) -> int:
    """Return the growth of the peak of resident memory by one small model, in bytes."""
    build, _ = SMALL[name]
    for warm_up in (partial(nn.Linear, 4, 4), Few):  # loads everything that is loaded on first use
        materialize_module(deferred_init(warm_up))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    model = materialize_module(deferred_init(build)) if is_deferred else build()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    del model
    return peak * 1024


def small_models(repeats: int) -> None:
    """Print the table of small models."""
    peaks = {name: [in_subprocess(peak_of_small, name, way) / MIB for way in (False, True)] for name in SMALL}
    print(f"\nSmall models, medians of {repeats}; peaks of resident memory, MiB\n")
    names = ("eager, ms", "recording", "materializing", "both")
    print(f"{'':26}{names[0]:>11}" + "".join(f"{name + ' / eager':>23}" for name in names[1:]), end="")
    print(f"{'eager peak':>13}{'deferred peak':>15}")
    for name, (build, calls) in SMALL.items():
        eager, *others = small_times(build, calls, repeats).values()
        print(f"{name:26}{eager * 1e3:11.3f}" + "".join(f"{value / eager:23.2f}" for value in others), end="")
        print(f"{peaks[name][0]:13.1f}{peaks[name][1]:15.1f}")


def main() -> None:
    """Run all comparisons."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--calls", type=int, default=20_000, help="calls of one operator in one measurement")
    parser.add_argument("--operators", type=int, default=200_000, help="operators to record for their memory")
    options = parser.parse_args()
    repeats = options.repeats
    transformers.logging.set_verbosity_error()
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {torch.get_num_threads()} threads")
    # First, because a subprocess inherits the peak of its parent.
    small_models(repeats)
    recording_memory(options.operators)
    materialization_memory()
    construction("the Llama-2-7B shape (transformers)", llama, repeats)
    construction("the Llama-2-7B shape (linear layers)", linears, repeats)
    recording_time(options.calls, repeats)
    materialization(max(3, repeats // 2))


if __name__ == "__main__":
    main()
