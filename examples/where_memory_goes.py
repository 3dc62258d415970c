"""Report what occupies the memory of a training step, and when.

A ViT is trained for two steps on a fake CUDA device, while its allocations are tracked:

    python examples/where_memory_goes.py [--picture memory.html]

`--picture docs/tutorials/memory.svg` draws the plot in docs/tutorials/will_it_fit.md, which needs matplotlib.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn

from torchext.fake import FakeGPU, fake_mode
from torchext.memory import Category, track_memory

WIDTH, LAYERS, PATCH, SIZE, CLASSES = 1024, 12, 16, 224, 1000


class Vit(nn.Module):
    """A vision transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, PATCH, stride=PATCH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, WIDTH // 64, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (batch, classes) for `images` (batch, 3, size, size)."""
        logits: Tensor = self.head(self.layers(self.patches(images).flatten(2).transpose(1, 2)).mean(1))
        return logits


def train(model: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor, labels: Tensor) -> None:
    """Train for two steps."""
    for _ in range(2):
        with torch.autocast("cuda", torch.bfloat16):
            loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def main() -> None:
    """Print the report, and draw a plot if requested."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--picture", type=Path, help="output file that ends with .html, .svg or .png")
    options = parser.parse_args()

    with fake_mode(gpu=FakeGPU("A100-40GB")), track_memory(trace=True) as memory:
        model = Vit().cuda()
        images = torch.zeros(64, 3, SIZE, SIZE, device="cuda")
        labels = torch.zeros(64, dtype=torch.int64, device="cuda")
        train(model, torch.optim.AdamW(model.parameters()), images, labels)

    print(memory.report(largest=5))
    peak = memory.peak_allocated()
    print(f"\nThe peak is at {peak.event} of {memory.now().event} events, and")
    print(f"{peak.by_category[Category.ACTIVATION] / peak.allocated:.0%} of it are kept for the backward pass.")
    if options.picture is not None:
        memory.plot(options.picture)
        print(f"The plot is in {options.picture}.")


if __name__ == "__main__":
    main()
