"""Train a small model in bfloat16 in each of the four ways to autocast, and show that the loss curves are equal.

    python examples/amp_training.py [--steps N]

The model learns to add two digits. The runs differ only in how the model autocasts, so the losses are equal to the last
bit.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import Tensor, nn

from torchext import amp

DIGITS = 10


class Adder(nn.Module):
    """Maps two digits to the logits of their sum."""

    def __init__(self) -> None:
        super().__init__()
        self.digits = nn.Embedding(DIGITS, 32)
        self.block = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.sums = nn.Linear(64, 2 * DIGITS - 1)

    def forward(self, pairs: Tensor) -> Tensor:
        """Take (batch, 2) digits, returns (batch, 19) logits."""
        result: Tensor = self.sums(self.block(self.digits(pairs)).flatten(1))
        return result


Forward = Callable[[Adder, Tensor], Tensor]


def context_manager(model: Adder, pairs: Tensor) -> Tensor:
    """1. A region. The program casts the results."""
    with amp.autocast("cpu", dtype=torch.bfloat16):
        logits: Tensor = model(pairs)
    return logits.float()


@amp.autocast("cpu", dtype=torch.bfloat16)
def decorator(model: Adder, pairs: Tensor) -> Tensor:
    """2. A function that autocasts, and returns float32."""
    logits: Tensor = model(pairs)
    return logits


def identity(model: Adder, pairs: Tensor) -> Tensor:
    """3. A model that autocasts wherever it is called."""
    amp.to_amp(model)
    logits: Tensor = model(pairs)
    return amp.to_normal(logits.float())


def self_cleaning(model: Adder, pairs: Tensor) -> Tensor:
    """4. A region whose results are cast by the first operator that uses them outside, here by the loss."""
    with amp.autocast("cpu", dtype=torch.bfloat16, self_cleaning=True):
        logits: Tensor = model(pairs)
    return logits


def train(forward: Forward, steps: int) -> list[float]:
    """Return the loss at each step."""
    torch.manual_seed(0)
    model = Adder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        pairs = torch.randint(DIGITS, (32, 2))
        loss = nn.functional.cross_entropy(forward(model, pairs), pairs.sum(1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    """Print the curves side by side."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    steps = parser.parse_args().steps
    ways: list[Forward] = [context_manager, decorator, identity, self_cleaning]
    curves = [train(forward, steps) for forward in ways]
    print("step " + "".join(f"{forward.__name__:>17}" for forward in ways))
    for step in range(0, steps, max(1, steps // 6)):
        print(f"{step:4} " + "".join(f"{curve[step]:17.6f}" for curve in curves))
    assert all(curve == curves[0] for curve in curves), "the curves differ"
    assert curves[0][-1] < curves[0][0], "the model has not learned"
    print("The four curves are equal, bit for bit.")


if __name__ == "__main__":
    main()
