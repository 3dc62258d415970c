"""Operators that PyTorch computes by other operators on CUDA allocate the memory of those operators."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch.nn import functional

from torchext.fake import FakeGPU, fake_mode

pytestmark = pytest.mark.usefixtures("empty_devices")

MIB = 2**20
WORKSPACE = 32 * MIB  # of cuBLAS, on this device


@pytest.fixture
def cuda() -> Iterator[None]:
    with fake_mode(gpu=FakeGPU("H100-80GB")):
        yield


class TestBilinear:
    """`_trilinear()` multiplies slice by slice."""

    def test_needs_the_workspace_of_its_products(self, cuda: None) -> None:
        x, y, weight = (torch.empty(sizes, device="cuda") for sizes in ((64, 128), (64, 256), (16, 128, 256)))
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = functional.bilinear(x, y, weight)
        column = 512  # of the result; the smallest allocation
        assert torch.cuda.max_memory_allocated() - before == WORKSPACE + result.nbytes + y.nbytes + column

    def test_needs_it_in_the_backward_pass(self, cuda: None) -> None:
        layer = torch.nn.Bilinear(128, 256, 16, device="cuda")
        result = layer(torch.empty(64, 128, device="cuda"), torch.empty(64, 256, device="cuda"))
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result.sum().backward()
        assert torch.cuda.max_memory_allocated() - before >= WORKSPACE + layer.weight.nbytes

    def test_returns_the_results_of_the_meta_kernel(self, cuda: None) -> None:
        x, y, weight, bias = (torch.empty(s, device="cuda") for s in ((2, 5, 3), (2, 5, 4), (6, 3, 4), (6,)))
        result = functional.bilinear(x, y, weight, bias)
        assert result.shape == (2, 5, 6)
        assert result.stride() == functional.bilinear(*(t.to("meta") for t in (x, y, weight, bias))).stride()


def peak_of(call: Callable[[], object]) -> int:
    """Return the most bytes that `call` has allocated at once."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return torch.cuda.max_memory_allocated() - before


class TestOthers:
    def test_a_mask_is_counted_before_it_scatters(self, cuda: None) -> None:
        x, mask = torch.empty(300, 1024, device="cuda"), torch.ones(300, 1024, dtype=torch.bool, device="cuda")
        scan = 6656  # of CUB
        assert peak_of(lambda: x.masked_scatter(mask, x)) == x.nbytes + 8 * x.numel() + scan

    def test_nonzero_elements_are_counted_as_integers(self, cuda: None) -> None:
        x = torch.empty(300, 1024, device="cuda")
        assert peak_of(lambda: torch.count_nonzero(x, 0)) == x.numel() + 8 * x.numel() + 8 * 1024

    def test_a_distance_is_the_norm_of_a_difference(self, cuda: None) -> None:
        x = torch.empty(300, 1024, device="cuda")
        assert peak_of(lambda: torch.dist(x, x)) >= x.nbytes + 512

    def test_a_grid_is_a_product(self, cuda: None) -> None:
        theta = torch.empty(8, 2, 3, device="cuda")
        assert peak_of(lambda: functional.affine_grid(theta, [8, 16, 32, 32], align_corners=False)) > WORKSPACE


class TestResults:
    def test_a_log_sigmoid_keeps_only_its_argument(self, cuda: None) -> None:
        x = torch.empty(256, 1024, device="cuda", requires_grad=True)
        before = torch.cuda.memory_allocated()
        result = functional.logsigmoid(x)
        assert torch.cuda.memory_allocated() - before == result.nbytes

    def test_folded_patches_stay_on_the_memory_of_the_patches(self, cuda: None) -> None:
        patches = torch.empty(8, 16 * 9, 324, device="cuda")
        before = torch.cuda.memory_allocated()
        image = functional.fold(patches, (20, 20), 3)
        assert image.untyped_storage().nbytes() == patches.nbytes
        assert torch.cuda.memory_allocated() - before == patches.nbytes


class TestDevices:
    def test_other_devices_get_the_results_immediately(self) -> None:
        with fake_mode():
            x, y, weight = torch.empty(7, 3), torch.empty(7, 4), torch.empty(6, 3, 4)
            assert functional.bilinear(x, y, weight).shape == (7, 6)
