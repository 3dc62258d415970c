"""Deferred modules are materialized in place with tensors from files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from checkpoint_programs import grow_while_loading, several_tensors
from processes import run_alone
from torch import nn

from torchext import CheckpointError
from torchext.checkpoint import LoadedKeys, load_checkpoint, save_safetensors
from torchext.deferred_init import deferred_init, is_deferred


class Model(nn.Module):
    """Ties, views, buffers of all kinds, plain attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 16)
        self.head = nn.Linear(16, 100, bias=False)
        self.head.weight = self.embedding.weight
        self.transposed = nn.Parameter(torch.randn(30, 40).t())
        self.convolution = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm1d(5)
        fused = torch.randn(20, 10)
        self.first, self.second = nn.Parameter(fused[:12]), nn.Parameter(fused[12:])
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.scalar = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("not_saved", torch.randn(4), persistent=False)
        self.plain = torch.randn(3)


def construct(seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return Model()


@pytest.fixture
def saved() -> Model:
    return construct(seed=1)


def of_a_file(saved: nn.Module, folder: Path) -> Any:
    save_safetensors(saved, folder / "model.safetensors")
    return folder / "model.safetensors"


def of_a_folder(saved: nn.Module, folder: Path) -> Any:
    save_safetensors(saved, folder / "model", max_shard_size="3KB")
    assert (folder / "model" / "model.safetensors.index.json").exists()
    return folder / "model"


def of_torch_save(saved: nn.Module, folder: Path) -> Any:
    torch.save(saved.state_dict(), folder / "model.pt")
    return folder / "model.pt"


def of_a_state_dict(saved: nn.Module, folder: Path) -> Any:
    return saved.state_dict()


SOURCES = [of_a_file, of_a_folder, of_torch_save, of_a_state_dict]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["recorded", "bfloat16"])
@pytest.mark.parametrize("source", SOURCES)
def test_module_is_the_one_that_loads_after_eager_construction(
    source: Callable[..., Any], dtype: Any, saved: Model, tmp_path: Path
) -> None:
    wanted = construct()
    wanted.load_state_dict(saved.state_dict())
    wanted = wanted.to(dtype)
    path = source(saved, tmp_path)
    model = deferred_init(construct)
    weight = model.embedding.weight
    optimizer = torch.optim.SGD(model.parameters())
    assert load_checkpoint(model, path, dtype=dtype) == LoadedKeys([], [])
    assert not is_deferred(model)
    assert model.head.weight is model.embedding.weight is weight
    assert sum(parameter is weight for parameter in optimizer.param_groups[0]["params"]) == 1
    assert model.first.untyped_storage()._cdata == model.second.untyped_storage()._cdata
    for name, tensor in wanted.state_dict().items():
        found = model.state_dict()[name]
        assert torch.equal(found, tensor), name
        assert (found.dtype, found.stride()) == (tensor.dtype, tensor.stride()), name
    assert torch.equal(model.not_saved, wanted.not_saved)
    assert torch.equal(model.plain, construct().plain)


def test_tensors_map_the_file_and_writes_stay_in_the_process(saved: Model, tmp_path: Path) -> None:
    path = of_a_file(saved, tmp_path)
    before = path.read_bytes()
    model = deferred_init(construct)
    load_checkpoint(model, path)
    assert not model.embedding.weight.untyped_storage().resizable()
    with torch.no_grad():
        model.embedding.weight.fill_(7)
    assert path.read_bytes() == before
    another = deferred_init(construct)
    load_checkpoint(another, path)
    assert torch.equal(another.embedding.weight, saved.embedding.weight)


@pytest.mark.ci
def test_loading_takes_no_memory_and_reading_takes_it_once(tmp_path: Path) -> None:
    torch.manual_seed(0)
    save_safetensors(deferred_init(several_tensors), tmp_path / "model.safetensors")
    size = (tmp_path / "model.safetensors").stat().st_size
    loaded, read = run_alone(grow_while_loading, tmp_path / "model.safetensors")
    assert loaded < size / 4
    assert read < size * 5 / 4


def test_missing_tensors_keep_their_constructed_values(tmp_path: Path) -> None:
    safetensors.torch.save_file({"0.weight": torch.ones(3, 3), "other": torch.ones(1)}, tmp_path / "part.safetensors")

    def two() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))

    model = deferred_init(two)
    keys = load_checkpoint(model, tmp_path / "part.safetensors", strict=False)
    assert keys.missing_keys == ["0.bias", "1.weight", "1.bias"]
    assert keys.unexpected_keys == ["other"]
    assert (*keys,) == (keys.missing_keys, keys.unexpected_keys)
    assert torch.equal(model[0].weight, torch.ones(3, 3))
    assert torch.equal(model[1].weight, two()[1].weight)


def test_keys_are_plain_values_too() -> None:
    keys = LoadedKeys(["a"], [])
    assert keys.to_dict() == {"missing_keys": ["a"], "unexpected_keys": []}


def test_all_that_does_not_fit_is_in_one_error_and_nothing_has_changed(tmp_path: Path) -> None:
    safetensors.torch.save_file({"weight": torch.ones(3, 4), "more": torch.ones(1)}, tmp_path / "bad.safetensors")
    model = deferred_init(nn.Linear, 3, 3)
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(model, tmp_path / "bad.safetensors")
    message = str(caught.value)
    assert 'Missing key(s) in state_dict: "bias"' in message
    assert 'Unexpected key(s) in state_dict: "more"' in message
    assert "size mismatch for weight: copying a param with shape torch.Size([3, 4])" in message
    assert all(map(is_deferred, model.parameters()))
    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        load_checkpoint(model, tmp_path / "bad.safetensors", strict=False)
    assert all(map(is_deferred, model.parameters()))


def test_real_tensors_of_the_module_are_copied_into(tmp_path: Path) -> None:
    path = of_a_file(nn.Linear(3, 3), tmp_path)
    model = nn.Linear(3, 3)
    weight, address = model.weight, model.weight.data_ptr()
    load_checkpoint(model, path)
    assert model.weight is weight
    assert weight.data_ptr() == address
    assert torch.equal(weight, safetensors.torch.load_file(path)["weight"])


def test_values_pass_through_the_recorded_dtype() -> None:
    """Like `load_state_dict()` followed by `to()`: a module converted to half keeps half precision."""
    model = deferred_init(lambda: nn.Linear(2, 2, bias=False).half())
    load_checkpoint(model, {"weight": torch.full((2, 2), 1 / 3)}, dtype=torch.float32)
    assert torch.equal(model.weight, torch.full((2, 2), 1 / 3).half().float())


def test_parameters_that_are_not_tied_do_not_come_to_share_memory() -> None:
    shared = torch.ones(3, 3)
    model = deferred_init(lambda: nn.ParameterDict({"a": torch.zeros(3, 3), "b": torch.zeros(3, 3)}))
    load_checkpoint(model, {"a": shared, "b": shared})
    with torch.no_grad():
        model["a"].zero_()
    assert torch.equal(model["b"], torch.ones(3, 3))


def test_views_of_loaded_tensors_are_not_missing(tmp_path: Path) -> None:
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6, 4))
            self.copy = nn.Parameter(self.weight.data)
            self.register_buffer("rows", self.weight.data[2:4])
            self.register_buffer("turned", self.weight.data.t())

    torch.manual_seed(3)
    saved = Views()
    save_safetensors(saved, tmp_path / "model.safetensors")
    assert safetensors.torch.load_file(tmp_path / "model.safetensors").keys() == {"copy"}
    model = deferred_init(Views)
    load_checkpoint(model, tmp_path / "model.safetensors")
    for name, tensor in saved.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
    assert model.rows.untyped_storage()._cdata == model.weight.untyped_storage()._cdata


class Versioned(nn.Linear):
    """Older checkpoints of it have the transpose."""

    _version = 2

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any) -> None:
        if (local_metadata.get("version") or 1) < 2:
            state_dict[prefix + "weight"] = state_dict[prefix + "weight"].t()
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


@pytest.mark.parametrize("source", [of_torch_save, of_a_state_dict])
def test_versions_of_modules_are_those_of_the_state_dict(source: Callable[..., Any], tmp_path: Path) -> None:
    saved = Versioned(2, 2)
    model = deferred_init(Versioned, 2, 2)
    load_checkpoint(model, source(saved, tmp_path))
    assert torch.equal(model.weight, saved.weight)


def test_state_dict_of_the_caller_is_not_written() -> None:
    whole, rows = torch.ones(4, 2), torch.zeros(2, 2)

    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 2))
            self.register_buffer("rows", self.weight.data[:2])

    model = deferred_init(Views)
    load_checkpoint(model, {"weight": whole, "rows": rows})
    assert torch.equal(model.weight, torch.cat([rows, whole[2:]]))
    assert torch.equal(whole, torch.ones(4, 2))


def test_views_pass_through_the_recorded_dtype_alike() -> None:
    def halves() -> nn.ParameterDict:
        fused = torch.zeros(4, dtype=torch.half)
        return nn.ParameterDict({"a": fused[:2], "b": fused[2:]})

    model = deferred_init(halves)
    load_checkpoint(model, {"a": torch.full((2,), 1 / 3), "b": torch.full((2,), 1 / 3)}, dtype=torch.float32)
    wanted = torch.full((2,), 1 / 3).half().float()
    assert torch.equal(model["a"], wanted)
    assert torch.equal(model["b"], wanted)


def test_dtypes_without_promotion_are_converted() -> None:
    model = deferred_init(nn.Linear, 2, 2)
    load_checkpoint(model, {"weight": torch.ones(2, 2).to(torch.float8_e4m3fn), "bias": torch.ones(2)})
    assert torch.equal(model.weight, torch.ones(2, 2))


UNLOADABLE: dict[str, tuple[Callable[[], torch.Tensor], dict[str, Any], str]] = {
    "sparse": (lambda: torch.ones(2).to_sparse(), {}, "has no strided values: its layout is torch.sparse_coo"),
    "meta": (lambda: torch.ones(2, device="meta"), {}, "has no strided values: .* its device meta"),
    "to meta": (lambda: torch.ones(2), {"device": "meta"}, "cannot be loaded to the device `meta`"),
}


@pytest.mark.parametrize("name", UNLOADABLE)
def test_unloadable_values_change_nothing(name: str) -> None:
    make, options, message = UNLOADABLE[name]
    model = deferred_init(nn.Linear, 2, 2)
    with pytest.raises(ValueError, match=message):
        load_checkpoint(model, {"weight": torch.ones(2, 2), "bias": make()}, **options)
    assert all(map(is_deferred, model.parameters()))


def test_default_device_does_not_matter(tmp_path: Path) -> None:
    with torch.device("meta"):
        save_safetensors({"weight": deferred_init(torch.ones, 3, device="cpu")}, tmp_path / "model.safetensors")
        model = deferred_init(lambda: nn.ParameterDict({"weight": torch.zeros(3, device="cpu")}))
        load_checkpoint(model, tmp_path / "model.safetensors")
    assert torch.equal(model["weight"], torch.ones(3))


def header(**entries: Any) -> bytes:
    content = json.dumps(entries).encode()
    return len(content).to_bytes(8, "little") + content


FLOATS = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}

# The content of a file, and the error message.
DAMAGED: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is not a safetensors file, or is damaged"),
    "a pickle": (b"\x80\x02}q\x00.", "is not a safetensors file, or is damaged"),
    "a huge header": ((1 << 60).to_bytes(8, "little") + b"{}", "is not a safetensors file, or is damaged"),
    "truncated": (header(weight=FLOATS) + bytes(4), "is not a safetensors file, or is damaged"),
    "too long": (header(weight=FLOATS) + bytes(12), "is not a safetensors file, or is damaged"),
    "overlapping": (
        header(weight=FLOATS, bias={**FLOATS, "data_offsets": [4, 12]}) + bytes(12),
        "(weight|bias)",
    ),
    "of another size": (header(weight={**FLOATS, "shape": [3]}) + bytes(8), "is damaged"),
    "of a negative size": (header(weight={**FLOATS, "shape": [-2]}) + bytes(8), "is damaged"),
    "of an unknown dtype": (header(weight={**FLOATS, "dtype": "F33"}) + bytes(8), "unknown variant `F33`"),
    "of a dtype that PyTorch does not know": (
        header(weight={**FLOATS, "dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}) + bytes(3),
        "`weight` in .* has the dtype F6_E2M3, which PyTorch does not have",
    ),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_files_are_named_and_change_nothing(name: str, tmp_path: Path) -> None:
    content, message = DAMAGED[name]
    (tmp_path / "model.safetensors").write_bytes(content)
    model = deferred_init(nn.Linear, 2, 2)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_checkpoint(model, tmp_path)
    assert "model.safetensors" in str(caught.value)
    assert all(map(is_deferred, model.parameters()))


INDEXES: dict[str, tuple[str, str]] = {
    "no JSON": ("{", "is not the index of a checkpoint"),
    "no map": ("{}", "is not the index of a checkpoint: it has no `weight_map`"),
    "another folder": (
        '{"weight_map": {"weight": "../x.safetensors"}}',
        "`weight` to '../x.safetensors', which is not a file in",
    ),
    "an absolute path": ('{"weight_map": {"weight": "/etc/passwd"}}', "`weight` to '/etc/passwd', which is not"),
    "another format": ('{"weight_map": {"weight": "x.pt"}}', "`weight` to 'x.pt', which is not"),
    "a missing tensor": (
        '{"weight_map": {"weight": "a.safetensors", "bias": "a.safetensors"}}',
        "maps `bias` to a.safetensors, which does not contain it",
    ),
    "a tensor twice": (
        '{"weight_map": {"weight": "a.safetensors", "x": "b.safetensors"}}',
        "b.safetensors has a tensor `weight`, which is also in another file",
    ),
}


@pytest.mark.parametrize("name", INDEXES)
def test_wrong_indexes_are_refused(name: str, tmp_path: Path) -> None:
    for file in "ab":
        safetensors.torch.save_file({"weight": torch.ones(2, 2)}, tmp_path / f"{file}.safetensors")
    content, message = INDEXES[name]
    (tmp_path / "model.safetensors.index.json").write_text(content)
    model = deferred_init(nn.Linear, 2, 2)
    with pytest.raises(ValueError, match=message):
        load_checkpoint(model, tmp_path)
    assert all(map(is_deferred, model.parameters()))


def test_pickles_run_no_code_and_hold_a_state_dict(tmp_path: Path) -> None:
    model = deferred_init(nn.Linear, 2, 2)
    torch.save(nn.Linear(2, 2), tmp_path / "module.pt")
    with pytest.raises(CheckpointError, match="module.pt is not a file of torch.save\\(\\) that holds tensors"):
        load_checkpoint(model, tmp_path / "module.pt")
    torch.save([torch.ones(2)], tmp_path / "list.pt")
    with pytest.raises(CheckpointError, match="list.pt was expected to hold a state dict, but it holds a list"):
        load_checkpoint(model, tmp_path / "list.pt")
    (tmp_path / "garbage.pt").write_bytes(b"garbage")
    with pytest.raises(CheckpointError, match="garbage.pt is not a file of torch.save"):
        load_checkpoint(model, tmp_path / "garbage.pt")


def test_missing_files_are_named(tmp_path: Path) -> None:
    model = deferred_init(nn.Linear, 2, 2)
    with pytest.raises(FileNotFoundError, match="There is neither `model.safetensors` nor"):
        load_checkpoint(model, tmp_path)
    for name in ("x.safetensors", "x.pt"):
        with pytest.raises(FileNotFoundError, match=f"There is no file .*{name}"):
            load_checkpoint(model, tmp_path / name)
    with pytest.raises(TypeError, match="takes a module, but `module` is a dict"):
        load_checkpoint({}, tmp_path)


def test_file_whose_tensors_are_not_aligned_is_copied(tmp_path: Path) -> None:
    content = json.dumps(
        {"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}, "w": {**FLOATS, "data_offsets": [1, 9]}}
    )
    data = b"\x01" + torch.tensor([1.0, 2.0]).numpy().tobytes()
    (tmp_path / "odd.safetensors").write_bytes(len(content).to_bytes(8, "little") + content.encode() + data)
    model = deferred_init(lambda: nn.ParameterDict({"w": torch.zeros(2)}))
    load_checkpoint(model, tmp_path / "odd.safetensors", strict=False)
    assert torch.equal(model["w"], torch.tensor([1.0, 2.0]))
