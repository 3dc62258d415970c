"""Programs with the guards on CUDA: training in the ways of autocast, and calls in the modes of inference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from torchext import amp

__all__ = ["PROGRAMS", "WAYS", "inference", "peer_of", "training"]


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True) for _ in range(2)))

    def forward(self, x: Tensor) -> Tensor:
        with sdpa_kernel([SDPBackend.MATH]):
            return self.layers(x)  # type: ignore[no-any-return]


class Mixed(nn.Module):
    """Operators of all autocast lists, and a disabled region."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.norm = nn.LayerNorm(64)
        self.second = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.first(x)).softmax(-1)
        with torch.autocast("cuda", enabled=False):
            y = y.float() @ self.second.weight
        low = y.to(torch.get_autocast_dtype("cuda"))
        z = torch.addcmul(low, y, self.second(y)).exp().sum(-1, keepdim=True)
        return torch.cat([z, low], -1).cumsum(-1)


PROGRAMS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(64, 64),
    "perceptron": lambda: nn.Sequential(
        nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 64), nn.LayerNorm(64)
    ),
    "shared weights": lambda: nn.Sequential(*(2 * [nn.Linear(64, 64)]), nn.ReLU()),
    "transformer": Transformer,
    "mixed": Mixed,
}
WAYS = ["region", "decorator", "identity", "self-cleaning"]


def peer_of(way: str) -> str:
    """Return PyTorch's equivalent of `way`."""
    # AmpTensors have no region whose end could clear a cache.
    return "torch without cache" if way == "identity" else "torch"


def training(
    make: Callable[[], nn.Module], way: str, dtype: torch.dtype
) -> tuple[nn.Module, Callable[[], list[Tensor]]]:
    """Return a model, and a function that trains it in `way` for two scaled steps and returns the outputs."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = make()
        x = torch.randn(2, 8, 64)
    if way == "identity":
        amp.to_amp(model)
    call = amp.autocast("cuda", dtype=dtype)(model) if way == "decorator" else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    scaler = torch.amp.GradScaler("cuda")

    def region() -> AbstractContextManager[object]:
        if way.startswith("torch"):
            return torch.autocast("cuda", dtype=dtype, cache_enabled=way == "torch")
        if way in ("region", "self-cleaning"):
            return amp.autocast("cuda", dtype=dtype, self_cleaning=way == "self-cleaning")
        return nullcontext()

    def steps() -> list[Tensor]:
        torch.manual_seed(1)
        outputs = []
        with autocast_dtype(dtype):
            for _ in range(2):
                with region():
                    y = call(x)
                outputs.append(y.detach())
                scaler.scale((y.float() * torch.linspace(-1, 2, y.shape[-1], device="cuda")).mean()).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        return outputs

    return model, steps


@contextmanager
def autocast_dtype(dtype: torch.dtype) -> Iterator[None]:
    usual = torch.get_autocast_dtype("cuda")
    torch.set_autocast_dtype("cuda", dtype)
    try:
        yield
    finally:
        torch.set_autocast_dtype("cuda", usual)


def inference(
    make: Callable[[], nn.Module], mode: Callable[[], AbstractContextManager[object]]
) -> Callable[[], Tensor]:
    """Return a function that calls a model in `mode`, and writes into its output there."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = make().eval()
        x = torch.randn(2, 8, 64)

    def call() -> Tensor:
        with mode():
            y: Tensor = model(x)
            y.add_(1)[0].mul_(2)
        return y

    return call
