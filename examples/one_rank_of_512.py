"""Report the memory and the communication of one rank of 512.

A Llama of 8 billion parameters is sharded over 512 GPUs with FSDP2, and one rank trains for two steps. It needs no GPU,
and the other 511 ranks do not exist:

    python examples/one_rank_of_512.py [--rank 511] [--layers 32]
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from torchext.dry_run import world
from torchext.memory import track_memory

WIDTH, HEADS, KEY_HEADS, HIDDEN, VOCABULARY, SEQUENCE = 4096, 32, 8, 14336, 128256, 8192


class Layer(nn.Module):
    """A decoder layer with grouped heads."""

    def __init__(self) -> None:
        super().__init__()
        size = WIDTH // HEADS
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q, self.kv = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, 2 * KEY_HEADS * size, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate, self.up = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`: (batch, sequence, width)."""
        y = self.norm1(x)
        q = self.q(y).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        k, v = (part.unflatten(-1, (KEY_HEADS, -1)).transpose(1, 2) for part in self.kv(y).chunk(2, dim=-1))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        result: Tensor = x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))
        return result


class Llama(nn.Module):
    """A language model."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (batch, sequence, vocabulary) for `tokens` (batch, sequence)."""
        x = self.words(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        logits: Tensor = self.head(self.norm(x))
        return logits


def train(layers: int, world_size: int) -> None:
    """Train as every process of the job would under torchrun."""
    mesh = init_device_mesh("cuda", (world_size,), mesh_dim_names=("fsdp",))
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with torch.device("meta"):
        model = Llama(layers)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(model, mesh=mesh, mp_policy=precision)
    model.to_empty(device="cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.zeros(1, SEQUENCE, dtype=torch.int64, device="cuda")
    for _ in range(2):
        nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def main() -> None:
    """Print the memory and the communication of the rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, default=511)
    parser.add_argument("--layers", type=int, default=32)
    options = parser.parse_args()

    with world(512, options.rank, gpu="H100-80GB") as job, track_memory() as memory:
        train(options.layers, job.size)

    print(memory.report(largest=5))
    print("\ncollectives             group            calls     sent (MiB)  received (MiB)")
    for row in job.summary():
        sent, received = row.bytes_sent / 2**20, row.bytes_received / 2**20
        print(
            f"{row.operator:<23} {row.group:<6} of {row.group_size:<6} {row.calls:>6} {sent:>14.1f} {received:>15.1f}"
        )


if __name__ == "__main__":
    main()
