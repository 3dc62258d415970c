"""Fake tensors on a machine that has a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from torchext.fake import fake_mode
from torchext.memory import fits

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_networks_of_fakes_run_on_a_real_device(kind: Callable[..., nn.RNNBase]) -> None:
    with fake_mode():
        network = kind(3, 4, num_layers=2, bidirectional=True).to("cuda")
        network.flatten_parameters()
        output, _ = network(torch.empty(5, 2, 3, device="cuda"))
        output.sum().backward()
    assert (output.shape, output.device.type) == ((5, 2, 8), "cuda")
    assert all(parameter.grad is not None for parameter in network.parameters())


def test_fake_devices_and_foreign_generators_are_errors_on_a_real_device() -> None:
    with fake_mode():
        with pytest.raises(RuntimeError, match="invalid device ordinal"):
            torch.empty(2, device=f"cuda:{torch.cuda.device_count()}")
        with pytest.raises(RuntimeError, match="Expected a 'cuda' device type for generator but found 'cpu'"):
            torch.empty(3, device="cuda").normal_(generator=torch.Generator("cpu"))
    with pytest.raises(RuntimeError, match="this machine has real ones"):
        fits(lambda: None, "A100-40GB")
