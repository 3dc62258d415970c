"""Overhead of autocast: regions, unaffected operators, and the four ways to use it.

Each line is a ratio to a peer. The two are measured alternately, and the fastest runs are compared, because noise only
adds time.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from torchext import amp

Work = Callable[[], object]


def seconds(work: Work, repeat: int) -> float:
    """Return the duration of one call of `work`."""
    start = time.perf_counter()
    for _ in range(repeat):
        work()
    return (time.perf_counter() - start) / repeat


def compare(name: str, ours: Work, peer: Work, repeat: int, turns: int) -> None:
    """Print both durations and their ratio."""
    ours(), peer()
    pairs = [(seconds(ours, repeat), seconds(peer, repeat)) for _ in range(turns)]
    mine, other = (min(side) * 1e6 for side in zip(*pairs, strict=True))
    print(f"{name:58} {mine:10.2f} {other:10.2f} {mine / other:8.2f}", flush=True)


def enter_and_leave(make: Callable[[], AbstractContextManager[object]]) -> Work:
    """Enter and leave an empty region."""

    def work() -> None:
        with make():
            pass

    return work


def inside(work: Work) -> Work:
    """Repeat `work` in one region."""

    def run() -> None:
        with amp.autocast("cpu"):
            for _ in range(100):
                work()

    return run


def outside(work: Work) -> Work:
    """Repeat `work` as often outside of regions."""

    def run() -> None:
        with nullcontext():
            for _ in range(100):
                work()

    return run


def compare_regions(turns: int) -> None:
    """Compare entering and leaving a region."""
    peer = enter_and_leave(lambda: torch.autocast("cpu"))
    compare("entering and leaving, by torch.autocast", enter_and_leave(lambda: amp.autocast("cpu")), peer, 2000, turns)
    region = amp.autocast("cpu")
    kept = torch.autocast("cpu")
    compare(
        "the same with a reused object",
        enter_and_leave(lambda: region),
        enter_and_leave(lambda: kept),
        2000,
        turns,
    )


def compare_decorators(turns: int) -> None:
    """Compare calls of a decorated function that does nothing."""

    def nothing(x: Tensor) -> Tensor:
        return x

    x, ours, theirs = torch.ones(2), amp.autocast("cpu")(nothing), torch.autocast("cpu")(nothing)
    compare("a decorated function, by torch.autocast's", lambda: ours(x), lambda: theirs(x), 2000, turns)


def compare_operators(turns: int) -> None:
    """Compare operators that autocast does not affect."""
    x, weight, buffer = torch.ones(8, 8), torch.ones(8, 8, requires_grad=True), torch.ones(8, 8)
    operators: dict[str, Work] = {
        "add": lambda: x + x,
        "relu": lambda: torch.relu(x),
        "view": lambda: x.view(64),
        "mul of a weight": lambda: weight * x,
        "add_": lambda: buffer.add_(0),
    }
    for name, work in operators.items():
        compare(f"{name} in a region, by outside", inside(work), outside(work), 20, turns)


class Steps:
    """A training step of a transformer block in each of the four ways."""

    def __init__(self, width: int, length: int) -> None:
        self.x = torch.randn(2, length, width)
        self.plain, self.wrapped = self._block(width), amp.to_amp(self._block(width))
        self.decorated = amp.autocast("cpu")(self._block(width))

    @staticmethod
    def _block(width: int) -> nn.Module:
        torch.manual_seed(0)
        return nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)

    def in_torch(self) -> Tensor:
        """Run the step with torch.autocast, the peer of all."""
        with torch.autocast("cpu"):
            loss = self.plain(self.x).sum()
        return self._backward(loss)

    def in_region(self) -> Tensor:
        """Run the step in a region."""
        with amp.autocast("cpu"):
            loss = self.plain(self.x).sum()
        return self._backward(loss)

    def in_decorator(self) -> Tensor:
        """Run the step with a decorator."""
        return self._backward(self.decorated(self.x).sum())

    def with_identity(self) -> Tensor:
        """Run the step with an identity."""
        return self._backward(self.wrapped(self.x).sum())

    def in_self_cleaning_region(self) -> Tensor:
        """Run the step in a self-cleaning region."""
        with amp.autocast("cpu", self_cleaning=True):
            loss = self.plain(self.x).sum()
        return self._backward(loss)

    @staticmethod
    def _backward(loss: Tensor) -> Tensor:
        loss.backward()
        return loss


def compare_ways(turns: int) -> None:
    """Compare the four ways."""
    for width, length in ((64, 16), (256, 64)):
        steps = Steps(width, length)
        what = f"transformer block of width {width}"
        repeat = 20 if width == 64 else 5
        compare(f"{what}, region by torch.autocast", steps.in_region, steps.in_torch, repeat, turns)
        compare(f"{what}, decorator by region", steps.in_decorator, steps.in_region, repeat, turns)
        compare(f"{what}, identity by region", steps.with_identity, steps.in_region, repeat, turns)
        compare(f"{what}, self-cleaning by region", steps.in_self_cleaning_region, steps.in_region, repeat, turns)


def main() -> None:
    """Print all comparisons."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=40, help="measurements of each pair")
    turns = parser.parse_args().turns
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}\n{'':58} {'us':>10} {'peer, us':>10} {'ratio':>8}")
    compare_regions(turns)
    compare_decorators(turns)
    compare_operators(turns)
    compare_ways(turns)


if __name__ == "__main__":
    main()
