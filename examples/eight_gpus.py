"""Check whether a training step runs on eight GPUs that you do not have, and print its shapes and dtypes.

A Llama of 13 billion parameters is split into eight stages, one per GPU, and trained for a step in mixed precision with
checkpointing. Nothing is computed and no memory is used, so it runs on any laptop:

    python examples/eight_gpus.py [--gpus N] [--batch N] [--sequence N]

It prints the memory of each GPU, the results of the step, and the error of a common bug: a tensor on the wrong device.
On a machine with the GPUs, run the same functions without `fake_mode`.
"""

from __future__ import annotations

import argparse
from collections import Counter

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from torchext.fake import fake_mode

HIDDEN, HEADS, LAYERS, FEED_FORWARD, VOCABULARY = 5120, 40, 40, 13824, 32000


class Block(nn.Module):
    """A decoder layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_attention = nn.RMSNorm(HIDDEN)
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)
        self.out = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.norm_feed_forward = nn.RMSNorm(HIDDEN)
        self.gate_up = nn.Linear(HIDDEN, 2 * FEED_FORWARD, bias=False)
        self.down = nn.Linear(FEED_FORWARD, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the shape of `x`: (batch, sequence, hidden)."""
        query, key, value = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for part in self.qkv(self.norm_attention(x)).chunk(3, dim=-1)
        )
        attention = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attention.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.norm_feed_forward(x)).chunk(2, dim=-1)
        result: torch.Tensor = x + self.down(nn.functional.silu(gate) * up)
        return result


class Pipeline(nn.Module):
    """A language model whose layers are spread over GPUs."""

    def __init__(self, gpus: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN, device="cuda:0")
        self.devices = [torch.device("cuda", layer * gpus // LAYERS) for layer in range(LAYERS)]
        self.blocks = nn.ModuleList(Block().to(device) for device in self.devices)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False, device=f"cuda:{gpus - 1}")

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits (batch, sequence, vocabulary) for `tokens` (batch, sequence)."""
        x = self.embedding(tokens)
        for block, device in zip(self.blocks, self.devices, strict=True):
            x = checkpoint(block, x.to(device), use_reentrant=False)
        logits: torch.Tensor = self.head(x)
        return logits


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> torch.Tensor:
    """Run the training step."""
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        logits = model(tokens.to("cuda:0"))
        print(f"logits: {tuple(logits.shape)}, {logits.dtype}, on {logits.device}")
        targets = tokens[:, 1:].to(logits.device)
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets.flatten())
    loss.backward()
    optimizer.step()
    return loss


def print_memory(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Print the memory of the parameters, gradients and optimizer states on each GPU."""
    held: Counter[torch.device] = Counter()
    for parameter in model.parameters():
        states = [state for state in optimizer.state[parameter].values() if isinstance(state, torch.Tensor)]
        for tensor in (parameter, parameter.grad, *states):
            if tensor is not None:
                held[tensor.device] += tensor.untyped_storage().nbytes()
    for device, nbytes in sorted(held.items(), key=lambda item: str(item[0])):
        if device.type == "cuda":
            total = torch.cuda.get_device_properties(device).total_memory
            print(f"  {device}: {nbytes / 2**30:6.1f} GiB of {total / 2**30:.0f}")


def main() -> None:
    """Run the step, and a faulty one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=4096)
    options = parser.parse_args()

    with fake_mode(gpu=options.gpus):
        model = Pipeline(options.gpus)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        tokens = torch.zeros(options.batch, options.sequence, dtype=torch.int64)
        print(
            f"{sum(p.numel() for p in model.parameters()) / 1e9:.1f} B parameters on {torch.cuda.device_count()} GPUs"
        )

        loss = train_step(model, optimizer, tokens)
        print(f"loss: {tuple(loss.shape)}, {loss.dtype}, on {loss.device}")
        print_memory(model, optimizer)

        try:
            model.head(model.embedding(tokens.to("cuda:0")))
        except RuntimeError as error:
            print(f"and with the hidden states left on cuda:0: {error}")


if __name__ == "__main__":
    main()
