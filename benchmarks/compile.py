"""Overhead of guards in compiled code: a step of a small transformer with our guards, compared with PyTorch's.

Prints, for each backend, the ratio of our time of one step to PyTorch's, measured alternately in this run, and the
number of compilations for the same calls.

    python benchmarks/compile.py [--calls N] [--repeats N] [--backends aot_eager inductor]
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from torchext import amp
from torchext.inference import inference_mode

Step = Callable[[Tensor], Any]


def model() -> nn.Module:
    """Return a layer that is small enough to make overhead visible."""
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)


def compiled(function: Any) -> Step:
    """Compile `function` on its own source line, because Dynamo's caches for a line apply to all its closures."""
    code = function.__code__.replace(co_firstlineno=next(_lines))
    own = FunctionType(code, function.__globals__, closure=function.__closure__)
    return torch.compile(own, backend=_backend, fullgraph=True)


def training(region: Any) -> Step:
    """Return a compiled forward pass in a region, and its backward pass."""
    layer = model()

    def forward(x: Tensor) -> Tensor:
        with region:
            result: Tensor = layer(x)
        return result.float().sum()

    run = compiled(forward)

    def step(x: Tensor) -> None:
        run(x).backward()
        layer.zero_grad()

    return step


def around(mode: Any) -> Step:
    """Return a forward pass in a block around the compiled code. Inside, PyTorch's block cannot be compiled (views)."""
    layer = model()
    run = compiled(lambda x: layer(x))

    def step(x: Tensor) -> None:
        with mode():
            run(x)

    return step


def inside(mode: Any) -> Step:
    """Return the same with the block in the compiled code."""
    layer = model()

    def forward(x: Tensor) -> Tensor:
        with mode():
            result: Tensor = layer(x)
        return result

    return compiled(forward)


STEPS: dict[str, tuple[Callable[[], Step], Callable[[], Step]]] = {
    "training in a region": (lambda: training(torch.autocast("cpu")), lambda: training(amp.autocast("cpu"))),
    "inference mode around": (lambda: around(torch.inference_mode), lambda: around(inference_mode)),
    "inference mode, ours inside": (lambda: around(torch.inference_mode), lambda: inside(inference_mode)),
}


def graphs_for(step: Step) -> int:
    """Compile for inputs of two sizes, and return the number of graphs."""
    before = counters["stats"]["unique_graphs"]
    for size in (8, 8, 4, 4, 2):
        step(torch.ones(size, 16, 64))
    return int(counters["stats"]["unique_graphs"] - before)


def fastest(steps: list[Step], calls: int, repeats: int) -> list[float]:
    """Return the seconds of the fastest run of each, measured alternately, because noise only adds time."""
    x = torch.ones(8, 16, 64)
    samples: list[list[float]] = [[] for _ in steps]
    for _ in range(repeats):
        for step, times in zip(steps, samples, strict=True):
            start = time.perf_counter()
            for _ in range(calls):
                step(x)
            times.append(time.perf_counter() - start)
    return [min(times) / calls for times in samples]


_backend = "inductor"
_lines = itertools.count(1000)


def main() -> None:
    """Measure and print."""
    global _backend
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--backends", nargs="*", default=["aot_eager", "inductor"])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print("| backend | step | PyTorch's, ms | ours, ms | ours / PyTorch's | graphs, PyTorch's | graphs, ours |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: |")
    for _backend in arguments.backends:
        for name, makers in STEPS.items():
            torch._dynamo.reset()
            steps = [make() for make in makers]
            graphs = [graphs_for(step) for step in steps]
            theirs, ours = fastest(steps, arguments.calls, arguments.repeats)
            print(
                f"| {_backend} | {name} | {theirs * 1e3:.2f} | {ours * 1e3:.2f} | {ours / theirs:.2f} | "
                f"{graphs[0]} | {graphs[1]} |"
            )


if __name__ == "__main__":
    main()
