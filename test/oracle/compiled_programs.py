"""Programs that compile more or less than their model, for compare.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from oracle.training import Step, adamw, compiling, tokens, trainer
from torch import Tensor, nn
from torch._functorch import config
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

__all__ = ["COMPILED_PROGRAMS"]


class Layer(nn.Module):
    """A layer of a transformer, with a function for its attention."""

    def __init__(self, width: int, heads: int, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self.heads, self.attend = heads, attend
        self.norms = nn.ModuleList([nn.RMSNorm(width), nn.RMSNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, 3 * width, bias=False)
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor, *place: Tensor) -> Tensor:
        parts = self.qkv(self.norms[0](x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        x = x + self.out(self.attend(q, k, v, *place).transpose(1, 2).flatten(2))
        y = self.norms[1](x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Model(nn.Module):
    """A language model."""

    def __init__(self, layers: int = 4, attend: Callable[..., Tensor] = causal) -> None:
        super().__init__()
        self.words = nn.Embedding(5000, 256)
        self.layers = nn.ModuleList(Layer(256, 4, attend) for _ in range(layers))
        self.head = nn.Linear(256, 5000, bias=False)

    def forward(self, x: Tensor, *place: Tensor) -> Tensor:
        x = self.words(x)
        for layer in self.layers:
            x = layer(x, *place)
        return self.head(x)


def language_loss(x: Tensor) -> Callable[[nn.Module], Tensor]:
    return lambda model: F.cross_entropy(model(x)[:, :-1].float().flatten(0, 1), x[:, 1:].flatten())


def flex() -> Step:
    blocks = create_block_mask(lambda b, h, i, j: (i >= j) & (i - j < 300), None, None, 1024, 1024, device="cuda")
    slopes = torch.ones(4, device="cuda")

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex_attention(q, k, v, lambda score, b, h, i, j: score + slopes[h] * (j - i), blocks)

    with compiling():
        return trainer(Model(2, attend).cuda(), language_loss(tokens(2, 1024)), adamw(fused=True))


def budget(of: float) -> Step:
    """Let the partitioner keep this part of what it would keep."""
    step = blocks_alone(fullgraph=True)

    def limited() -> None:
        with config.patch(activation_memory_budget=of):
            step()

    return limited


def blocks_alone(**options: Any) -> Step:
    """Compile each layer alone, as torchtitan does."""
    model = Model().cuda()
    for layer in model.layers:
        layer.compile(**options)
    return trainer(model, language_loss(tokens(4, 512)), adamw(), autocast=torch.bfloat16)


def changing_lengths(**options: Any) -> Step:
    """Train on other lengths in each step."""
    model = Model().cuda()
    lengths = iter([500, 300, 777])
    with compiling(**options):
        return trainer(model, lambda model: language_loss(tokens(2, next(lengths)))(model), adamw())


def compiled_optimizer() -> Step:
    model = Model().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    update, compiled, loss_of = torch.compile(optimizer.step), torch.compile(model), language_loss(tokens(4, 512))

    def step() -> None:
        loss_of(compiled).backward()
        update()
        optimizer.zero_grad()

    return step


def compiled_autograd() -> Step:
    with compiling():
        step = trainer(Model(2).cuda(), language_loss(tokens(4, 512)), adamw())

    def under_autograd() -> None:
        with torch._dynamo.config.patch(compiled_autograd=True):
            step()

    return under_autograd


class Cached(nn.Module):
    """Attention to the keys and values of all earlier tokens, in tensors of a fixed size."""

    def __init__(self, batch: int, length: int) -> None:
        super().__init__()
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(batch, 4, length, 64, device="cuda"))
        self.at = torch.arange(length, device="cuda")

    def forward(self, q: Tensor, k: Tensor, v: Tensor, place: Tensor) -> Tensor:
        self.keys.index_copy_(2, place, k)
        self.values.index_copy_(2, place, v)
        return F.scaled_dot_product_attention(q, self.keys, self.values, attn_mask=self.at <= place[:, None])


def generation() -> Step:
    """Generate tokens with caches of a fixed size. Only single tokens are compiled."""
    model = Model().cuda().eval()
    for layer in model.layers:
        layer.attend = Cached(8, 128)
    compiled = torch.compile(model)

    def place(*places: int) -> Tensor:
        return torch.arange(*places, device="cuda")

    @torch.no_grad()
    def step() -> None:
        x = model(tokens(8, 64), place(64))[:, -1].argmax(-1, keepdim=True)
        for i in range(64, 80):
            x = compiled(x, place(i, i + 1))[:, -1].argmax(-1, keepdim=True)

    return step


COMPILED_PROGRAMS: dict[str, Callable[[], Step]] = {
    "flex": flex,
    "blocks_alone": blocks_alone,
    "budget_50": lambda: budget(0.5),
    "budget_10": lambda: budget(0.1),
    "dynamic_lengths": lambda: changing_lengths(dynamic=True),
    "changing_lengths": changing_lengths,
    "compiled_optimizer": compiled_optimizer,
    "compiled_autograd": compiled_autograd,
    "generation": generation,
}
