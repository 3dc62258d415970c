"""Operators that PyTorch computes by other operators on CUDA allocate what those allocate."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.nn import functional

from torchext.fake import FakeGPU, fake_mode

pytestmark = pytest.mark.usefixtures("empty_devices")

MIB = 2**20
WORKSPACE = 32 * MIB  # of cuBLAS, on this device


@pytest.fixture
def cuda() -> Iterator[None]:
    with fake_mode(fake_cuda=FakeGPU("H100-80GB")):
        yield


class TestBilinear:
    """`_trilinear()` multiplies slice by slice."""

    def test_needs_the_workspace_of_its_products(self, cuda: None) -> None:
        x, y, weight = (torch.empty(sizes, device="cuda") for sizes in ((64, 128), (64, 256), (16, 128, 256)))
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = functional.bilinear(x, y, weight)
        column = 512  # of the result; the least that is allocated
        assert torch.cuda.max_memory_allocated() - before == WORKSPACE + result.nbytes + y.nbytes + column

    def test_needs_it_in_the_backward_pass(self, cuda: None) -> None:
        layer = torch.nn.Bilinear(128, 256, 16, device="cuda")
        result = layer(torch.empty(64, 128, device="cuda"), torch.empty(64, 256, device="cuda"))
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result.sum().backward()
        assert torch.cuda.max_memory_allocated() - before >= WORKSPACE + layer.weight.nbytes

    def test_tells_the_results_that_the_meta_kernel_tells(self, cuda: None) -> None:
        x, y, weight, bias = (torch.empty(s, device="cuda") for s in ((2, 5, 3), (2, 5, 4), (6, 3, 4), (6,)))
        result = functional.bilinear(x, y, weight, bias)
        assert result.shape == (2, 5, 6)
        assert result.stride() == functional.bilinear(*(t.to("meta") for t in (x, y, weight, bias))).stride()


class TestDevices:
    def test_other_devices_are_told_the_results_at_once(self) -> None:
        with fake_mode():
            x, y, weight = torch.empty(7, 3), torch.empty(7, 4), torch.empty(6, 3, 4)
            assert functional.bilinear(x, y, weight).shape == (7, 6)
