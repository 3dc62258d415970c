"""Files that describe fakes: they have the size of real ones, and give back all that is known."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from torchext import _C
from torchext.dry_run import world
from torchext.dry_run.placeholders import load_placeholder, save_placeholder
from torchext.fake import fake_mode, is_fake

pytestmark = pytest.mark.usefixtures("empty_devices")

DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)} - {torch.bits16}, key=str)
UNUSUAL = [dtype for dtype in DTYPES if str(dtype).startswith(("torch.float8", "torch.float4", "torch.uint"))]


def saved(value: Any, path: Path, **options: Any) -> Any:
    save_placeholder(value, path)
    return load_placeholder(path, **options)


@pytest.mark.cases(3)
@pytest.mark.parametrize("dtype", UNUSUAL, ids=str)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_tensors_of_each_dtype_are_read_again(dtype: torch.dtype, device: str, tmp_path: Path) -> None:
    with fake_mode(gpu="H100"):
        fake = torch.empty_strided((2, 3), (1, 2), dtype=dtype, device=device)
        copies = [saved(fake, tmp_path / "file", weights_only=weights_only) for weights_only in (False, True)]
        copies.append(ForkingPickler.loads(ForkingPickler.dumps(fake)))  # PyTorch's `pickle` lacks these dtypes
        for copy in copies:
            assert (copy.dtype, copy.device, copy.stride()) == (fake.dtype, fake.device, fake.stride())


KNOWN: dict[str, Callable[[], Tensor]] = {
    "all": lambda: torch.arange(70_000)[3:5],  # of 550 kB
    "a part of integers": lambda: changed(torch.empty(9, dtype=torch.int64))[2:5],
    "parts": lambda: changed(torch.empty(9, dtype=torch.int64))[::2][1:3],
    "a bool": lambda: torch.zeros(4, dtype=torch.bool)[1:],
}


def changed(tensor: Tensor) -> Tensor:
    tensor[2:5] = torch.tensor([7, 8, 9])
    return tensor


@pytest.mark.parametrize("name", KNOWN)
def test_known_values_are_read_again(name: str, tmp_path: Path) -> None:
    with world(1, gpu=None):
        fake = KNOWN[name]()
        known = _C.known_value(fake)
        assert known is not None
        for copy in (saved(fake, tmp_path / "file"), pickle.loads(pickle.dumps(fake))):
            assert is_fake(copy)
            assert copy.tolist() == known.tolist()


def test_unknown_elements_stay_unknown(tmp_path: Path) -> None:
    with fake_mode():
        copy = saved(changed(torch.randint(0, 9, (9,))), tmp_path / "file")
        assert copy[2:5].tolist() == [7, 8, 9]
        assert _C.known_value(copy) is None
        assert _C.known_value(copy[:2]) is None


@pytest.mark.parametrize("make", [torch.zeros, torch.randn], ids=["known", "unknown"])
def test_file_has_the_size_of_the_values(make: Callable[..., Tensor], tmp_path: Path) -> None:
    with fake_mode():
        tensors = {str(i): make(50_000 + i) for i in range(20)}
        save_placeholder(tensors, tmp_path / "file")
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    assert nbytes <= (tmp_path / "file").stat().st_size < 1.01 * nbytes


def test_loading_sparse_tensors_keeps_none(tmp_path: Path) -> None:
    with fake_mode(gpu="H100"):
        sparse = torch.sparse_coo_tensor([[0, 1]], [1.0, 2.0], (2,), device="cuda", check_invariants=False)
        save_placeholder(sparse, tmp_path / "file")
        before = torch.cuda.memory_allocated()
        for _ in range(2):
            assert load_placeholder(tmp_path / "file").layout is torch.sparse_coo
        assert torch.cuda.memory_allocated() == before
    assert torch._utils._sparse_tensors_to_validate == []
