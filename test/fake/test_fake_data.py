"""Reading, saving or sharing the data of fakes raises an error that names the remedy."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.dlpack
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from torchext import _C
from torchext.deferred_init import deferred_init, is_deferred, materialize_module, materialize_tensor
from torchext.dry_run import world
from torchext.fake import fake_like, fake_mode, is_fake

IS_FAKE = "[Tt]his (tensor is fake|storage .* fake tensors).*materialize_tensor.*outside of fake_mode"


@pytest.fixture
def fake() -> torch.Tensor:
    with fake_mode():
        return torch.empty(4, 4)


@pytest.fixture
def fake_cuda() -> torch.Tensor:
    with fake_mode(gpu=True):
        return torch.empty(4, 4, device="cuda")


TENSOR_USES: dict[str, Callable[[torch.Tensor], Any]] = {
    "data_ptr": lambda t: t.data_ptr(),
    "numpy": lambda t: t.numpy(),
    "numpy-force": lambda t: t.numpy(force=True),
    "asarray": lambda t: np.asarray(t),
    "array-of-list": lambda t: np.array([t, t]),
    "ufunc": lambda t: np.add(t, 1),
    "tolist": lambda t: t.tolist(),
    "pickle": lambda t: pickle.dumps(t),
    "pickle-parameter": lambda t: pickle.dumps(nn.Parameter(t)),
    "share_memory_": lambda t: t.share_memory_(),
    "to_dlpack": lambda t: torch.utils.dlpack.to_dlpack(t),
    "typed-storage": lambda t: t._typed_storage().data_ptr(),
    "apply_": lambda t: t.apply_(lambda x: x),
}

STORAGE_USES: dict[str, Callable[[torch.UntypedStorage], Any]] = {
    "data_ptr": lambda s: s.data_ptr(),
    "tolist": lambda s: s.tolist(),
    "index": lambda s: s[0],
    "slice": lambda s: s[:2],
    "assign": lambda s: s.__setitem__(0, 1),
    "fill_": lambda s: s.fill_(0),
    "copy-to": lambda s: s.copy_(torch.ones(16).untyped_storage()),
    "copy-from": lambda s: torch.ones(16).untyped_storage().copy_(s),
    "pickle": lambda s: pickle.dumps(s),
    "share_memory_": lambda s: s.share_memory_(),
    "share-by-name": lambda s: s._share_filename_cpu_(),
    "convert": lambda s: s.half(),
    "construct-from": lambda s: torch.UntypedStorage(s),
    "pin_memory": lambda s: s.pin_memory(),
}


class TestReading:
    @pytest.mark.parametrize("use", TENSOR_USES.values(), ids=TENSOR_USES)
    @pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
    def test_tensors_refuse(self, use: Callable[[torch.Tensor], Any], fake: torch.Tensor) -> None:
        with pytest.raises(RuntimeError, match=IS_FAKE):
            use(fake)

    @pytest.mark.parametrize("use", STORAGE_USES.values(), ids=STORAGE_USES)
    @pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
    def test_storages_refuse(self, use: Callable[[torch.UntypedStorage], Any], fake: torch.Tensor) -> None:
        with pytest.raises(RuntimeError, match=IS_FAKE):
            use(fake.untyped_storage())

    @pytest.mark.parametrize("use", [torch.from_dlpack, np.from_dlpack, lambda t: t.__dlpack__()])
    def test_dlpack_refuses_with_the_error_of_the_protocol(
        self, use: Callable[[torch.Tensor], Any], fake: torch.Tensor
    ) -> None:
        with pytest.raises(BufferError, match=IS_FAKE):
            use(fake)

    @pytest.mark.parametrize("name", ["data_ptr", "numpy", "asarray", "tolist", "pickle"])
    def test_fakes_on_cuda_refuse(self, name: str, fake_cuda: torch.Tensor) -> None:
        with pytest.raises(RuntimeError, match=IS_FAKE):
            TENSOR_USES[name](fake_cuda)

    @pytest.mark.parametrize("name", ["data_ptr", "tolist", "index", "fill_", "pickle"])
    def test_storages_on_cuda_refuse(self, name: str, fake_cuda: torch.Tensor) -> None:
        with pytest.raises(RuntimeError, match=IS_FAKE):
            STORAGE_USES[name](fake_cuda.untyped_storage())

    def test_cuda_array_interface_refuses(self, fake: torch.Tensor, fake_cuda: torch.Tensor) -> None:
        with pytest.raises(RuntimeError, match=IS_FAKE):
            fake_cuda.__cuda_array_interface__  # noqa: B018
        assert not hasattr(fake, "__cuda_array_interface__")

    def test_real_tensors_are_read_as_before(self, fake: torch.Tensor) -> None:
        real = torch.arange(4.0)
        storage = real.untyped_storage()
        assert np.asarray(real).tolist() == real.tolist() == [0.0, 1.0, 2.0, 3.0]
        assert torch.from_dlpack(real).data_ptr() == real.data_ptr()
        assert storage[:4].tolist() == storage.tolist()[:4] == [0, 0, 0, 0]
        assert torch.UntypedStorage(storage).tolist() == storage.tolist()
        assert pickle.loads(pickle.dumps(real)).tolist() == real.tolist()
        assert copy.copy(real).data_ptr() == real.data_ptr()
        assert copy.deepcopy(storage).tolist() == storage.tolist()
        assert real.is_set_to(real)
        assert not real.is_set_to(fake)


class TestWhatNeedsNoData:
    def test_shared_matches_real_tensors(self, fake: torch.Tensor, fake_cuda: torch.Tensor) -> None:
        assert fake.is_shared() is torch.ones(1).is_shared() is False
        assert fake.untyped_storage().is_shared() is False
        assert fake_cuda.is_shared() is True

    def test_storages_print(self, fake: torch.Tensor) -> None:
        assert repr(fake.untyped_storage()) == "...\n[torch.storage.UntypedStorage(device=cpu) of size 64, fake]"

    def test_device_of_dlpack_is_known(self, fake: torch.Tensor) -> None:
        assert fake.__dlpack_device__() == torch.ones(1).__dlpack_device__()

    def test_copy_shares_the_storage_as_for_real_tensors(self) -> None:
        for original in (torch.ones(4)[1:], fake_like(torch.ones(4))[1:]):
            clone = copy.copy(original)
            assert clone is not original
            assert is_fake(clone) == is_fake(original)
            assert clone.is_set_to(original)
            assert not clone.is_set_to(original[1:])

    def test_copy_keeps_class_and_gradient(self, fake: torch.Tensor, fake_cuda: torch.Tensor) -> None:
        weight = copy.copy(nn.Parameter(fake))
        assert type(weight) is nn.Parameter
        assert weight.requires_grad
        assert is_fake(copy.copy(fake_cuda))
        assert copy.copy(fake_cuda).device == fake_cuda.device

    def test_copy_of_a_deferred_tensor_is_deferred(self) -> None:
        deferred = deferred_init(torch.ones, 3)
        clone = copy.copy(deferred)
        assert is_deferred(clone)
        deferred.mul_(2)
        assert materialize_tensor(clone).tolist() == [2.0, 2.0, 2.0]

    def test_storages_are_copied_with_their_tensors(self, fake: torch.Tensor) -> None:
        storage, tensor = copy.deepcopy([fake.untyped_storage(), fake])
        assert storage._cdata == tensor.untyped_storage()._cdata != fake.untyped_storage()._cdata
        assert fake.untyped_storage().clone().nbytes() == 64


class TestSaving:
    @pytest.mark.parametrize(
        "hold",
        [
            lambda t: t,
            lambda t: {"model": [t]},
            lambda t: nn.ParameterList([nn.Parameter(t)]),
            lambda t: t.untyped_storage(),
            lambda t: TwoTensor(t, t),
        ],
        ids=["tensor", "container", "module", "storage", "wrapper"],
    )
    @pytest.mark.parametrize("is_new", [True, False], ids=["zip", "legacy"])
    def test_no_file_is_written(
        self, hold: Callable[[torch.Tensor], Any], is_new: bool, fake: torch.Tensor, tmp_path: Path
    ) -> None:
        path = tmp_path / "checkpoint.pt"
        with pytest.raises(RuntimeError, match=rf"torch.save\(\) needs the data.*{IS_FAKE}"):
            torch.save(hold(fake), path, _use_new_zipfile_serialization=is_new)
        assert not path.exists()

    def test_the_last_checkpoint_is_kept(self, fake: torch.Tensor, tmp_path: Path) -> None:
        path = tmp_path / "checkpoint.pt"
        torch.save(torch.ones(2), path)
        with pytest.raises(RuntimeError, match=IS_FAKE):
            torch.save([torch.ones(2), fake], path)
        assert torch.load(path).tolist() == [1.0, 1.0]

    def test_skipping_data_does_not_help(self, fake: torch.Tensor) -> None:
        with torch.serialization.skip_data(), pytest.raises(RuntimeError, match=IS_FAKE):
            torch.save(fake, io.BytesIO())

    def test_deferred_modules_are_saved_once_they_are_real(self, tmp_path: Path) -> None:
        module, path = deferred_init(nn.Linear, 2, 2), tmp_path / "checkpoint.pt"
        with pytest.raises(RuntimeError, match=r"torch.save\(\) needs the data.*materialize_module\(\) first"):
            torch.save(module.state_dict(), path)
        with pytest.raises(RuntimeError, match=IS_FAKE):
            pickle.dumps(module)
        assert is_deferred(module)
        materialize_module(module)
        torch.save(module.state_dict(), path)
        assert torch.equal(torch.load(path)["weight"], module.weight)

    def test_real_tensors_are_saved_as_before(self, fake: torch.Tensor, tmp_path: Path) -> None:
        real: dict[str, Any] = {"a": torch.arange(3), "wide": torch.ones(2, dtype=torch.uint16)}
        real["self"] = real
        torch.save(real, tmp_path / "checkpoint.pt")
        loaded = torch.load(tmp_path / "checkpoint.pt")
        assert loaded["a"].tolist() == [0, 1, 2]
        assert loaded["wide"].dtype == torch.uint16
        assert loaded["self"] is loaded


class TestSharedMemory:
    def test_is_only_marked_in_a_dry_run(self) -> None:
        with world(2, 1):
            epoch, module = torch.tensor(3), torch.nn.Linear(2, 2)
            assert not epoch.is_shared()
            assert epoch.share_memory_() is epoch
            module.share_memory()
            assert epoch.is_shared()
            assert epoch.view(1).is_shared()
            assert all(parameter.is_shared() for parameter in module.parameters())
            assert epoch.item() == 3
            epoch += 1
            assert epoch.item() == 4
            assert _C.known_value(pickle.loads(ForkingPickler.dumps(epoch))) is None
            assert pickle.loads(ForkingPickler.dumps(torch.tensor(4))).item() == 4

    def test_of_cuda_is_shared_already(self, fake_cuda: torch.Tensor) -> None:
        assert fake_cuda.share_memory_() is fake_cuda
        assert fake_cuda.is_shared()

    def test_of_numpy_and_storages(self) -> None:
        with world(2, 1):
            shared = torch.zeros(3)
            assert shared.untyped_storage().share_memory_().is_shared()
            assert shared.is_shared()
            assert not torch.zeros(3).is_shared()
