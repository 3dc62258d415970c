"""The guards launch on CUDA what PyTorch's own launch: autocast in its four ways, and inference mode."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from torchext import amp
from torchext.inference import inference_mode

pytestmark = [
    pytest.mark.cuda_host,
    pytest.mark.skipif("NULLCUDA_TRACE" not in os.environ, reason="needs the null driver: make cuda-host"),
]
if "NULLCUDA_TRACE" in os.environ:
    from ledger import launches_of


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True) for _ in range(2)))

    def forward(self, x: Tensor) -> Tensor:
        with sdpa_kernel([SDPBackend.MATH]):
            return self.layers(x)  # type: ignore[no-any-return]


class Mixed(nn.Module):
    """Operators of all of autocast's lists, and a region that is switched off."""

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


def train(make: Callable[[], nn.Module], way: str, dtype: torch.dtype) -> list[str]:
    """The launches of two steps with gradient scaling, in `way`."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = make()
        x = torch.ones(2, 8, 64)
    if way == "identity":
        amp.wrap(model)
    call = amp.autocast("cuda", dtype=dtype)(model) if way == "decorator" else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    scaler = torch.amp.GradScaler("cuda")

    def region() -> AbstractContextManager[object]:
        if way.startswith("torch"):
            return torch.autocast("cuda", dtype=dtype, cache_enabled=way == "torch")
        if way in ("region", "self-cleaning"):
            return amp.autocast("cuda", dtype=dtype, self_cleaning=way == "self-cleaning")
        return nullcontext()

    def steps() -> None:
        for _ in range(2):
            with region():
                y = call(x)
            scaler.scale(y.float().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    usual = torch.get_autocast_dtype("cuda")
    torch.set_autocast_dtype("cuda", dtype)
    try:
        return launches_of(steps)
    finally:
        torch.set_autocast_dtype("cuda", usual)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_autocast_launches_what_pytorchs_launches(name: str, way: str, dtype: torch.dtype) -> None:
    # AmpTensors have no region at whose end a cache could be cleared.
    expected = train(PROGRAMS[name], "torch without cache" if way == "identity" else "torch", dtype)
    assert len(expected) > 10
    assert train(PROGRAMS[name], way, dtype) == expected


@pytest.mark.parametrize("name", PROGRAMS)
def test_inference_mode_launches_what_pytorchs_launches(name: str) -> None:
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = PROGRAMS[name]().eval()
        x = torch.ones(2, 8, 64)

    def run(mode: Callable[[], AbstractContextManager[object]]) -> list[str]:
        def call() -> None:
            with mode():
                y = model(x)
                y.add_(1)[0].mul_(2)

        return launches_of(call)

    assert run(inference_mode) == run(torch.inference_mode)
