"""Check whether a training step fits on a GPU, find the largest batch, and try changes that make it fit.

A GPT of 1.3 billion parameters is trained for two steps on fake CUDA devices, once for each question. Kernels do not
run, but memory is allocated as on the GPU, by PyTorch's own rules. It runs on any laptop:

    python examples/will_it_fit.py [--gpus A100-40GB H100-80GB RTX-4090-24GB]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from torchext.memory import fits, max_batch

WIDTH, HEADS, LAYERS, VOCABULARY = 2048, 16, 24, 50304


@dataclass(frozen=True)
class Setup:
    """The settings that are varied."""

    batch: int = 4
    sequence: int = 1024
    dtype: torch.dtype = torch.float32  # of parameters and optimizer; the step computes in bfloat16
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    checkpoints: bool = False


class Layer(nn.Module):
    """A decoder layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`: (batch, sequence, width)."""
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        result: Tensor = x + self.mlp(self.norm2(x))
        return result


class GPT(nn.Module):
    """A language model."""

    def __init__(self, checkpoints: bool) -> None:
        super().__init__()
        self.checkpoints = checkpoints
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (batch, sequence, vocabulary) for `tokens` (batch, sequence)."""
        x = self.words(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpoints else layer(x)
        logits: Tensor = self.head(x)
        return logits


def make_step(setup: Setup) -> Callable[[], object]:
    """Return a function that trains for one step. This is the code that would run on the GPU."""
    model = GPT(setup.checkpoints).to("cuda", setup.dtype)
    optimizer = setup.optimizer(model.parameters())
    tokens = torch.zeros(setup.batch, setup.sequence, dtype=torch.int64, device="cuda")

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def train_two_steps(setup: Setup) -> None:
    """Train for two steps: the optimizer allocates its state in the first step."""
    step = make_step(setup)
    step()
    step()


def main() -> None:
    """Print the answers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", nargs="+", default=["RTX-4090-24GB", "A100-40GB", "H100-80GB"])
    options = parser.parse_args()

    usual = Setup()
    setups = {
        "as it is": usual,
        "checkpointing": replace(usual, checkpoints=True),
        "SGD": replace(usual, optimizer=torch.optim.SGD),
        "parameters in bfloat16": replace(usual, dtype=torch.bfloat16),
        "both": replace(usual, checkpoints=True, dtype=torch.bfloat16),
    }
    for gpu in options.gpus:
        print(gpu)
        for name, setup in setups.items():
            found = fits(lambda setup=setup: train_two_steps(setup), gpu)  # type: ignore[misc]
            answer = f"fits, {found.headroom / 2**30:.1f} GiB are left" if found else "does not fit"
            print(f"  {name:<24}{answer}")
        largest = max_batch(lambda batch: make_step(replace(usual, batch=batch, checkpoints=True)), gpu, limit=64)
        print(f"  the largest batch with checkpointing, up to 64: {largest}")


if __name__ == "__main__":
    main()
