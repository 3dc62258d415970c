"""Calls of PyTorch's Meta kernels that torchext/fake/meta_overrides.py replaces or corrects."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

import pytest
import torch
from comparisons import PROPERTIES, metadata
from torch import Tensor, nn

from torchext.fake import fake_mode

COMPARED = (PROPERTIES | {"storage_offset", "storage_size"}) - {"class"}


def test_call_that_a_traceback_keeps_has_ended() -> None:
    with pytest.raises(IndexError, match="Dimension out of range") as raised, fake_mode(gpu=1):
        torch.batch_norm_stats(torch.ones(3, device="cuda"), 1e-5)
    traceback: TracebackType | None = raised.tb
    calls: list[Any] = []
    while traceback is not None:
        calls += [value for name, value in traceback.tb_frame.f_locals.items() if name == "call"]
        traceback = traceback.tb_next
    assert len(calls) == 1
    with pytest.raises(RuntimeError, match=r"The call of `aten::batch_norm_stats` has ended\."):
        calls[0].run()


@pytest.mark.parametrize(
    ("operator", "arguments", "message"),
    [
        ("batch_norm_stats", [()], "Dimension specified as 1 but tensor has no dimensions"),
        ("batch_norm_stats", [(3,)], "Dimension out of range"),
        ("_thnn_fused_gru_cell", [(3,), (3,), (3,)], "Dimension out of range"),
    ],
)
def test_wrong_dimensions_are_refused_as_by_kernels(operator: str, arguments: list[Any], message: str) -> None:
    more = [1e-5] if operator == "batch_norm_stats" else []
    with fake_mode(gpu=1), torch.device("cuda"), pytest.raises(IndexError, match=message):
        getattr(torch.ops.aten, operator)(*map(torch.ones, arguments), *more)


def test_properties_of_subclasses_are_not_read() -> None:
    class Packed(Tensor):
        @property
        def shape(self) -> Any:
            raise RuntimeError("packed")

    with fake_mode():
        x = torch.ones(3, 4)
        assert torch.ops.aten.mse_loss(x.as_subclass(Packed), x, 1).untyped_storage().nbytes() == 48


@pytest.mark.parametrize(
    "call",
    [
        lambda: torch.kaiser_window(7),
        lambda: nn.functional.mse_loss(torch.ones(3, 4), torch.ones(3, 4)),
        lambda: torch.linspace(0, 1, 4, out=torch.empty(2, 2)),
        lambda: torch.poisson(torch.ones(2, 3).t()),
        lambda: torch.ones(2, 3).t() // 2,
        lambda: nn.functional.conv2d(torch.ones(1, 2, 4, 4), torch.ones(2, 2, 3, 3), torch.ones(3)),  # a wrong bias
    ],
)
@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_meta_tensors_are_described_by_meta_kernels(call: Callable[[], Tensor]) -> None:
    with torch.device("meta"):
        expected = metadata(call(), COMPARED)
        with fake_mode():
            assert metadata(call(), COMPARED) == expected
