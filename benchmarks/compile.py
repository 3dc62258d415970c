"""What guards cost in compiled code: a step of a small transformer in ours, against PyTorch's.

Prints, for each backend, the ratio of the times of one step, ours to PyTorch's, measured in turns in this run, and how
often each has been compiled for the same calls.

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
    """A layer that is small enough for overhead to be seen."""
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)


def compiled(function: Any) -> Step:
    """Compiles `function`, on a line of its own: what is compiled and learned of a line counts for all its closures."""
    code = function.__code__.replace(co_firstlineno=next(_lines))
    own = FunctionType(code, function.__globals__, closure=function.__closure__)
    return torch.compile(own, backend=_backend, fullgraph=True)


def training(region: Any) -> Step:
    """A forward pass in a region, compiled, and a backward pass."""
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
    """A forward pass in a block around the compiled code: inside, PyTorch's cannot be compiled here, for its views."""
    layer = model()
    run = compiled(lambda x: layer(x))

    def step(x: Tensor) -> None:
        with mode():
            run(x)

    return step


def inside(mode: Any) -> Step:
    """The same with the block in the compiled code."""
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
    """Compiles for inputs of two sizes, and returns how many graphs that took."""
    before = counters["stats"]["unique_graphs"]
    for size in (8, 8, 4, 4, 2):
        step(torch.ones(size, 16, 64))
    return int(counters["stats"]["unique_graphs"] - before)


def fastest(steps: list[Step], calls: int, repeats: int) -> list[float]:
    """Returns the seconds of the fastest run of each, measured in turns: noise only adds to them."""
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
    """Measures and prints."""
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
