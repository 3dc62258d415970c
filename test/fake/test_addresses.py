"""Addresses of fakes: simulated by the allocator in a dry run, errors elsewhere."""

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from torch import nn

from torchext.deferred_init import deferred_init
from torchext.dry_run import world
from torchext.fake import fake_mode
from torchext.memory import track_memory


@pytest.fixture
def job() -> Iterator[None]:
    with world(8, 3):
        yield


def reads(tensor: torch.Tensor) -> list[int]:
    addresses = [tensor.data_ptr(), tensor.untyped_storage().data_ptr()]
    if hasattr(tensor, "const_data_ptr"):
        addresses.append(tensor.const_data_ptr())
    return addresses


DEVICES = ("cpu", "cuda:0", "cuda:7")
ALIGNMENT = {"cpu": 64, "cuda": 512}


@pytest.mark.parametrize("device", DEVICES)
def test_live_storages_have_stable_addresses_that_do_not_overlap(device: str, job: None) -> None:
    tensors = [torch.empty(n, device=device) for n in (1, 3, 200, 5000, 3 * 2**20, 20 * 2**20)]
    before = [reads(tensor) for tensor in tensors]
    places = sorted((a[0], a[0] + t.nbytes) for a, t in zip(before, tensors, strict=True))
    assert all(len(set(addresses)) == 1 for addresses in before)
    assert all(end <= begin for (_, end), (begin, _) in pairwise(places))
    assert all(a[0] % ALIGNMENT[tensors[0].device.type] == 0 for a in before)
    assert [reads(tensor) for tensor in tensors] == before


@pytest.mark.parametrize("device", DEVICES)
def test_views_have_the_addresses_of_their_elements(device: str, job: None) -> None:
    x = torch.empty(4, 6, dtype=torch.bfloat16, device=device)
    assert x[1, 2:].data_ptr() == x.data_ptr() + 2 * (6 + 2)
    assert x[1].untyped_storage().data_ptr() == x.detach().data_ptr() == x.T.data_ptr() == x.data_ptr()
    assert nn.Parameter(x).data_ptr() == x.data_ptr()
    assert x.view(torch.uint8)[3, 1].data_ptr() == x.data_ptr() + 3 * 12 + 1


@pytest.mark.parametrize("device", DEVICES)
def test_empty_tensors_have_address_zero_as_real_ones(device: str, job: None) -> None:
    x = torch.empty(4, device=device)
    assert [torch.empty(0, device=device).data_ptr(), x[:0].data_ptr(), x[4:].data_ptr()] == [0, 0, 0]
    assert (
        torch.empty(0, device=device).untyped_storage().data_ptr() == torch.empty(0).untyped_storage().data_ptr() == 0
    )


@pytest.mark.parametrize("device", DEVICES)
def test_freed_and_allocated_storage_has_memory_again(device: str, job: None) -> None:
    x = torch.empty(2**20, device=device)
    storage = x.untyped_storage()
    storage.resize_(0)
    assert storage.data_ptr() == 0
    storage.resize_(2**22)
    assert storage.data_ptr() == x.data_ptr() != 0


def test_blocks_of_a_segment_are_contiguous(job: None) -> None:
    """Like `CUDACachingAllocator`, which splits a segment of 2 MiB: three blocks of 512 bytes each."""
    a, b, c = (torch.empty(100, device="cuda:1") for _ in range(3))
    assert [b.data_ptr() - a.data_ptr(), c.data_ptr() - b.data_ptr()] == [512, 512]


def test_freed_block_is_used_again(job: None) -> None:
    x = torch.empty(100, device="cuda:2")
    address = x.data_ptr()
    del x
    assert torch.empty(101, device="cuda:2").data_ptr() == address


def test_addresses_are_those_of_the_snapshot(job: None) -> None:
    x = torch.empty(3000, device="cuda:4")
    blocks = [block for segment in torch.cuda.memory_snapshot() for block in segment["blocks"]]
    assert x.data_ptr() in [block["address"] for block in blocks if block["state"] == "active_allocated"]
    raw = torch.cuda.caching_allocator_alloc(1000, 4)
    assert raw % 512 == 0 and raw != x.data_ptr()  # noqa: PT018
    torch.cuda.caching_allocator_delete(raw)


def test_gradient_buckets_find_their_parameters_by_address(job: None) -> None:
    """Like ZeRO's optimizers, which flatten parameters and replace them by views of the flat tensor."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)).cuda()
    flat = torch.cat([p.detach().view(-1) for p in model.parameters()])
    offset = 0
    for parameter in model.parameters():
        parameter.data = flat[offset : offset + parameter.numel()].view_as(parameter)
        assert parameter.data_ptr() - flat.data_ptr() == offset * 4
        offset += parameter.numel()
    by_address = sorted(model.parameters(), key=lambda parameter: parameter.data_ptr(), reverse=True)
    assert list(reversed(by_address)) == list(model.parameters())


def test_addresses_are_shown_where_memory_is_tracked() -> None:
    with fake_mode(gpu=True), track_memory():
        x = torch.empty(3, device="cuda")
        assert x.data_ptr() == x.untyped_storage().data_ptr() > 0
    with pytest.raises(RuntimeError, match="This tensor is fake"):
        x.data_ptr()


def test_address_of_a_deferred_tensor_still_needs_its_values(job: None) -> None:
    module = deferred_init(nn.Linear, 2, 2)
    with pytest.raises(RuntimeError, match="materialize_tensor"):
        module.weight.data_ptr()
