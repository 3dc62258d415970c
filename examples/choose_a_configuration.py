"""Search for changes of a training step that make it fit on a smaller GPU.

A GPT is trained on a fake CUDA device. The search simulates the step with changes such as activation checkpointing:

    python examples/choose_a_configuration.py [--picture front.svg]

`--picture docs/how_to/front.svg` draws the picture in docs/how_to/choose_a_configuration.md, which needs matplotlib.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from torchext.memory import Advice, advise

WIDTH, HEADS, LAYERS, VOCABULARY, LENGTH = 1024, 16, 12, 32000, 1024


class Gpt(nn.Module):
    """A GPT."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        layers = (nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, 0.0, "gelu", 1e-5, True) for _ in range(LAYERS))
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (batch, length, vocabulary) for `tokens` (batch, length)."""
        x = self.words(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x)
        return logits


def make_step() -> Callable[[], None]:
    """Return a function that runs one training step."""
    model = Gpt().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.zeros(16, LENGTH, dtype=torch.int64, device="cuda")

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def draw(advice: Advice, path: Path) -> None:
    """Draw the front of peaks and operations."""
    import matplotlib as mpl  # type: ignore[import-not-found, unused-ignore]
    from matplotlib import pyplot as plt

    mpl.use("svg")
    mpl.rcParams.update({"svg.hashsalt": "torchext", "svg.fonttype": "none"})  # the same file each time
    figure, axes = plt.subplots(figsize=(7, 3.5), layout="constrained")
    base = advice.baseline.flops or 1

    def points(outcomes: tuple[object, ...]) -> tuple[list[float], list[float]]:
        known = [one for one in advice.outcomes if one in outcomes and one.pinned <= advice.baseline.pinned]
        known.sort(key=lambda one: one.flops or 0)
        return [100 * ((one.flops or 0) / base - 1) for one in known], [one.peak_reserved / 2**30 for one in known]

    axes.scatter(*points(advice.outcomes), color="silver", label="simulated")
    axes.plot(*points(advice.trade_offs), "o-", color="tab:blue", label="front")
    axes.axhline(advice.limit / 2**30, color="tab:red", linestyle="--", label="limit")
    axes.set(xlabel="additional operations of a step (%)", ylabel="peak of reserved memory (GiB)")
    axes.legend(frameon=False)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Print the advice, and draw the front if requested."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--picture", type=Path, help="output file that ends with .svg")
    options = parser.parse_args()
    advice = advise(make_step, "RTX-4090-24GB", target="10GiB", seconds=None)
    print(advice)
    if options.picture is not None:
        draw(advice, options.picture)
        print(f"The picture is in {options.picture}.")


if __name__ == "__main__":
    main()
