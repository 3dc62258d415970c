"""Exported programs are the same as with PyTorch's own regions, or there is an error."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from compiled import check_same
from torch import Tensor, nn

from torchext import amp
from torchext.inference import inference_mode

W = torch.eye(2) + 0.5


@pytest.fixture(autouse=True)
def _reset() -> Iterator[None]:
    yield
    torch._dynamo.reset()


class Model(nn.Module):
    def __init__(self, region: Any) -> None:
        super().__init__()
        self.region = region
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Any:
        with self.region("cpu"):
            y = self.layer(x)
            with self.region("cpu", enabled=False):
                z = x @ W
            with self.region("cpu", dtype=torch.float16):
                return y, z, x @ W


class SelfCleaning(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        with amp.autocast("cpu", self_cleaning=True):
            return x @ W


class Inference(nn.Module):
    @inference_mode
    def forward(self, x: Tensor) -> Tensor:
        return x @ W


def targets(program: torch.export.ExportedProgram) -> list[str]:
    return [str(node.target) for node in program.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("strict", [True, False])
class TestExport:
    def test_regions_are_exported_as_those_of_pytorch(self, strict: bool) -> None:
        x = torch.eye(2)
        model = Model(amp.autocast)
        program = torch.export.export(model, (x,), strict=strict)
        check_same(program.module()(x), model(x))
        assert targets(program) == targets(torch.export.export(Model(torch.autocast), (x,), strict=strict))

    def test_inference_mode_has_its_values(self, strict: bool) -> None:
        program = torch.export.export(Inference(), (W,), strict=strict)
        assert torch.equal(program.module()(W), W @ W)

    def test_self_cleaning_regions_are_refused(self, strict: bool) -> None:
        with pytest.raises((NotImplementedError, torch._dynamo.exc.Unsupported), match="self-cleaning region"):
            torch.export.export(SelfCleaning(), (W,), strict=strict)
        assert not torch.is_autocast_enabled("cpu")

    def test_amp_tensors_are_refused(self, strict: bool) -> None:
        layer, x = nn.Linear(2, 2), torch.ones(2, 2)
        for model, argument in ((amp.to_amp(nn.Linear(2, 2)), x), (layer, amp.to_amp(torch.ones(2, 2)))):
            with pytest.raises(NotImplementedError, match=r"torch.export was given AmpTensors.*amp.to_normal\(\)"):
                torch.export.export(model, (argument,), strict=strict)

    def test_decorated_modules_are_exported(self, strict: bool) -> None:
        if strict:
            pytest.skip("PyTorch exports a cast behind a region with the dtype that there would be without it")
        model = amp.autocast(nn.Linear(2, 2))
        check_same(torch.export.export(model, (W,), strict=strict).module()(W), model(W))
