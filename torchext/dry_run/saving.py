"""Saving and loading in a dry run: PyTorch files, safetensors, and distributed checkpoints."""

from __future__ import annotations

import inspect
import io
import json
import os
import pickle
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from .. import _C
from ..fake import fake_mode
from ..fake.addresses import storage_description, storage_from, typed
from ..fake.values import note_reading, while_values_are_assumed
from ..internals.held_tensors import parts_of
from ..internals.patching import Function
from .current import current, while_world_is_open
from .files import PLACEHOLDER
from .objects import root_sending
from .placeholders import (
    is_placeholder,
    known_list,
    load_placeholder,
    opened,
    read_header,
    save_placeholder,
    write_placeholder,
)

__all__ = ["MovedFile", "PlaceholderFile", "is_moved", "load_bytes", "placeholder_bytes", "save_file"]


# ---- Files of safetensors without values: names, shapes and types, and a hole as long as the values
#
# They begin like all placeholders (`placeholders.py`), so safetensors rejects them outside of dry runs.


FRAMEWORK = ("pt", "torch", "pytorch")  # the names of safetensors for PyTorch


def save_file(tensors: Mapping[str, torch.Tensor], file: Any, metadata: Any = None) -> None:
    """Write the description of `tensors` to a path or a file."""
    codes = {dtype: code for code, dtype in _dtypes().items()}
    described = {
        name: [codes[tensor.dtype], list(tensor.shape), known_list(tensor)] for name, tensor in tensors.items()
    }
    header = json.dumps({"metadata": metadata, "tensors": described}).encode()
    with opened(file, "wb") as new:
        write_placeholder(new, header, sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()))


def placeholder_bytes(tensors: Mapping[str, torch.Tensor], metadata: Any = None) -> bytes:
    """Return the description of `tensors`, as `safetensors.torch.save()` returns their values."""
    content = io.BytesIO()
    save_file(tensors, content, metadata)
    return content.getvalue()


def load_bytes(data: bytes) -> dict[str, torch.Tensor]:
    """Return the tensors that `placeholder_bytes()` has described, as fakes on the CPU."""
    return PlaceholderFile(io.BytesIO(data)).get_tensors()


class PlaceholderFile:
    """The result of `safetensors.safe_open` for a file without values: its tensors are fakes.

    Args:
        filename: The path.
        framework: The framework, which must be PyTorch.
        device: The device of the fakes.
    """

    def __init__(self, filename: Any, framework: str = "pt", device: Any = "cpu", **options: Any) -> None:
        if framework not in FRAMEWORK:
            raise ValueError(
                f"safe_open: {filename} was written by a dry run and has no values, which framework={framework!r} "
                "requires; use framework='pt'"
            )
        with opened(filename, "rb") as content:
            header = json.loads(read_header(content))
        self._device = _device(device)
        self._metadata: dict[str, str] | None = header["metadata"]
        self._described: dict[str, tuple[str, list[int], list[Any] | None]] = header["tensors"]

    def __enter__(self) -> PlaceholderFile:
        return self

    def __exit__(self, *error: object) -> None:
        return

    def keys(self) -> list[str]:
        """Return the names, sorted."""
        return sorted(self._described)

    def offset_keys(self) -> list[str]:
        """Return the names in the order of the file."""
        return list(self._described)

    def metadata(self) -> dict[str, str] | None:
        """Return the metadata of the program."""
        return self._metadata

    def get_tensor(self, name: str) -> torch.Tensor:
        """Return a tensor."""
        code, shape, values = self._find(name)
        dtype = _dtypes()[code]
        with fake_mode():
            if values is not None:
                return torch.tensor(values, dtype=dtype).view(shape).to(self._device)
            return torch.empty(shape, dtype=dtype, device=self._device)

    def get_tensors(self) -> dict[str, torch.Tensor]:
        """Return all tensors by name."""
        return {name: self.get_tensor(name) for name in self._described}

    def get_slice(self, name: str) -> _Slice:
        """Return a view for reading parts of a tensor."""
        code, shape, _ = self._find(name)
        return _Slice(self, name, code, shape)

    def _find(self, name: str) -> tuple[str, list[int], list[Any] | None]:
        if name not in self._described:
            raise sys.modules["safetensors"].SafetensorError(f"File does not contain tensor {name}")
        return self._described[name]


class MovedFile:
    """A file of safetensors whose tensors are read on the CPU, and moved to a fake device.

    The library itself would allocate device memory, and copy to its address.

    Args:
        file: The result of `safetensors.safe_open` on the CPU.
        device: The device.
    """

    def __init__(self, file: Any, device: Any) -> None:
        self._file = file
        self._device = _device(device)

    def __enter__(self) -> MovedFile:
        self._file.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._file.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def get_tensor(self, name: str) -> torch.Tensor:
        """Return a tensor."""
        tensor: torch.Tensor = self._file.get_tensor(name)
        return tensor.to(self._device)

    def get_tensors(self) -> dict[str, torch.Tensor]:
        """Return all tensors by name."""
        return {name: self.get_tensor(name) for name in self._file.keys()}  # noqa: SIM118 (it is not a mapping)

    def get_slice(self, name: str) -> _MovedSlice:
        """Return a view for reading parts of a tensor."""
        return _MovedSlice(self._file.get_slice(name), self._device)


class _MovedSlice:
    def __init__(self, part: Any, device: torch.device) -> None:
        self._part = part
        self._device = device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)

    def __getitem__(self, index: Any) -> torch.Tensor:
        part: torch.Tensor = self._part[index]
        return part.to(self._device)


class _Slice:
    def __init__(self, file: PlaceholderFile, name: str, code: str, shape: list[int]) -> None:
        self._file = file
        self._name = name
        self._code = code
        self._shape = shape

    def get_shape(self) -> list[int]:
        """Return the shape of the whole tensor."""
        return list(self._shape)

    def get_dtype(self) -> str:
        """Return the name of the dtype in the file."""
        return self._code

    def __getitem__(self, index: Any) -> torch.Tensor:
        part: torch.Tensor = self._file.get_tensor(self._name)[index]
        return part.clone()  # has only the memory of that part


def is_moved(framework: Any, device: Any) -> bool:
    """Return true if `safetensors.safe_open` with these arguments returns tensors on another device than the CPU."""
    return framework in FRAMEWORK and _device(device).type != "cpu"


def _device(device: Any) -> torch.device:
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)


def _dtypes() -> dict[str, torch.dtype]:
    types: dict[str, torch.dtype] = sys.modules["safetensors.torch"]._TYPES
    return types


# ---- Objects that hold fakes, which have no values to write
#
# `torch.save()` truncates the file before it reads the memory of the first tensor. So objects are searched for fakes
# first. On the command line, which keeps files apart, a description is written that can be read again
# (`placeholders.py`). In `world()` nothing is written, existing files are unchanged, and each place is counted and
# reported like a read of a value.


replaces: Callable[..., Callable[[Function], Function]] = while_values_are_assumed.replaces

NOT_WRITTEN = "not written"


def holds_fakes(value: object) -> bool:
    """Return true if pickling `value` would reach a fake tensor."""
    search = _Search()
    try:
        search.dump(value)
    except Exception:  # `value` cannot be pickled, so saving it will fail
        return False
    return search.has_found


class _Nowhere:
    def write(self, data: Any) -> int:
        return len(data)


class _Search(pickle.Pickler):
    def __init__(self) -> None:
        super().__init__(_Nowhere())
        self.has_found = False

    def persistent_id(self, value: object) -> str | None:
        """Continue with objects that are not tensors. The data of real tensors need not be copied."""
        if not isinstance(value, torch.Tensor):
            return None
        shards = getattr(value, "_local_shards", None)  # of a `ShardedTensor`
        members = parts_of(value) if shards is None else (shard.tensor for shard in shards)
        self.has_found |= any(map(_C.is_fake, members))
        return "tensor"


def files_apart() -> Any:
    """Return the files of this process (`files.Overlay`) if they are kept apart, or None."""
    files = sys.modules.get("torchext_dry_run_files")
    return None if files is None else files.active()


# ---- Files of PyTorch


@replaces(torch, "save", reason="truncates the file, and then reads memory")
def _save(original: Function, /, obj: object, f: Any, *args: Any, **kwargs: Any) -> Any:
    if not holds_fakes(obj):
        return original(obj, f, *args, **kwargs)
    if files_apart() is None:
        return note_reading("torch.save", NOT_WRITTEN, sys._getframe(1))
    return save_placeholder(obj, f)


@replaces(torch, "load", reason="cannot read the files that describe fakes")
def _load(original: Function, /, f: Any, map_location: Any = None, pickle_module: Any = None, **kwargs: Any) -> Any:
    if not is_placeholder(f):
        return original(f, map_location, pickle_module, **kwargs)
    return load_placeholder(f, map_location, weights_only=_loads_weights_only(pickle_module, **kwargs))


def _loads_weights_only(pickle_module: Any, *, weights_only: bool | None = None, **kwargs: Any) -> bool:
    """Decide as `torch.load()` does."""
    if os.environ.get("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "0").lower() in ("1", "y", "yes", "true"):
        return True
    if os.environ.get("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "0").lower() in ("1", "y", "yes", "true"):
        return bool(weights_only)
    return pickle_module is None if weights_only is None else weights_only


@replaces(torch.UntypedStorage, "__reduce__", reason="writes memory into a pickle")
def _reduce_storage(original: Function, self: torch.UntypedStorage) -> Any:
    return (storage_from, storage_description(self)) if _C.is_storage_of_fakes(self) else original(self)


@replaces(torch.TypedStorage, "__reduce__", reason="writes memory into a pickle")
def _reduce_typed_storage(original: Function, self: torch.TypedStorage) -> Any:
    untyped = self._untyped_storage
    if not _C.is_storage_of_fakes(untyped):
        return original(self)
    return _typed_from, (self.dtype, *storage_description(untyped))  # a copy for each tensor, as of real ones


def _typed_from(dtype: torch.dtype, *description: Any) -> torch.TypedStorage:
    return typed(storage_from(*description), dtype)


# ---- Calls of safetensors


@replaces("safetensors.torch", "safe_open", reason="cannot read files without values")
@replaces("safetensors", "safe_open", reason="cannot read files without values")
def _safe_open(original: Function, /, filename: Any, framework: Any, device: Any = "cpu", **options: Any) -> Any:
    if is_placeholder(filename):
        return PlaceholderFile(filename, framework, device)
    if is_moved(framework, device):
        return MovedFile(original(filename, framework, "cpu", **options), device)
    return original(filename, framework, device, **options)


@replaces("safetensors.torch", "save_file", reason="reads the memory of tensors")
def _save_file(
    original: Function, /, tensors: Mapping[str, torch.Tensor], filename: Any, *args: Any, **kwargs: Any
) -> Any:
    if not holds_fakes(dict(tensors)):
        return original(tensors, filename, *args, **kwargs)
    if files_apart() is None:
        return note_reading("safetensors.save_file", NOT_WRITTEN, sys._getframe(1))
    return save_file(tensors, filename, *args, **kwargs)


@replaces("safetensors.torch", "save", reason="reads the memory of tensors")
def _save_bytes(original: Function, /, tensors: Mapping[str, torch.Tensor], *args: Any, **kwargs: Any) -> Any:
    describes = holds_fakes(dict(tensors))
    return (placeholder_bytes if describes else original)(tensors, *args, **kwargs)


@replaces("safetensors.torch", "load", reason="cannot read tensors without values")
def _load_bytes(original: Function, data: bytes) -> Any:
    is_described = data.startswith(PLACEHOLDER)
    return load_bytes(data) if is_described else original(data)


# ---- Checkpoints of torchext


@replaces("torchext.checkpoint.loading", "read_file", reason="maps values")
def _read_file(original: Function, path: Any) -> Any:
    if not is_placeholder(path):
        return original(path)
    return None, PlaceholderFile(path).get_tensors().items()


@replaces("torchext.checkpoint.saving", "write_plan", reason="writes files")
def _write_plan(original: Function, plan: Any, progress: bool, resume: bool) -> Any:
    if plan.contents.are_described and files_apart() is None:
        return note_reading("checkpoint.save_safetensors", NOT_WRITTEN, sys._getframe(2))
    return original(plan, progress, resume)


@replaces("torchext.checkpoint.saving", "write_files", reason="computes tensors")
def _write_files(original: Function, plan: Any, complete: set[str], progress: bool) -> None:
    if not plan.contents.are_described:
        original(plan, complete, progress)
        return
    for file in plan.files.files:
        if file.name not in complete:
            described = {name: _described(plan.contents, name) for name, *_ in file.header.places}
            metadata = json.loads(file.header.content[8:]).get("__metadata__")
            save_file(described, plan.place / file.name, metadata)


def _described(contents: Any, name: str) -> torch.Tensor:
    """Return a tensor with the shape and the dtype that the file would have, and with the values that are known."""
    tensor, dtype = contents.tensors[name], contents.dtype_of(name)
    is_same = tensor.dtype == dtype and not _C.is_deferred(tensor)
    return tensor if is_same else torch.empty(tensor.shape, dtype=dtype, device="meta")


# ---- Distributed checkpoints: this rank saves and loads its part alone
#
# In a job, one rank makes the global plan from the plans of all ranks. In a dry run the others do not exist, so a
# checkpoint and its metadata cover only the part of this rank. On the command line, PyTorch's code writes it, with
# tensors as `torch.save()` describes them, and reads it again. In `world()` nothing is written, and the save returns
# the metadata. Loading reads existing files without the other ranks. Where rank 0 sends a whole state dict, every other
# rank receives a description of the state dict that it already has.


CHECKPOINT = "torch.distributed.checkpoint"
ALONE = "receives the global plan from rank 0"


# ---- Saving of distributed checkpoints


@while_values_are_assumed.replaces(
    f"{CHECKPOINT}._state_dict_stager:StateDictStager", "stage", reason="copies the memory of tensors"
)
def _stage(original: Function, /, self: Any, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
    return state_dict if holds_fakes(state_dict) else original(self, state_dict, *args, **kwargs)


@while_values_are_assumed.replaces(f"{CHECKPOINT}.state_dict_saver", "_save_state_dict", reason=ALONE)
def _save_state_dict(original: Function, /, *args: Any, **kwargs: Any) -> Any:
    given = inspect.signature(original).bind(*args, **kwargs)
    given.apply_defaults()
    state_dict = given.arguments["state_dict"]
    if files_apart() is not None or (current() is None and not holds_fakes(state_dict)):
        return _without_dist(original, *args, **kwargs)
    from torch.distributed.checkpoint import default_planner

    planner = given.arguments["planner"] or default_planner.DefaultSavePlanner()
    is_coordinator = dist.get_rank(given.arguments["process_group"]) == given.arguments["coordinator_rank"]
    planner.set_up_planner(state_dict, is_coordinator=is_coordinator)
    plan = planner.create_local_plan()
    note_reading("checkpoint.save", NOT_WRITTEN, sys._getframe(1))
    _, metadata = default_planner.create_default_global_save_plan([plan])
    return metadata


@while_world_is_open.replaces(
    f"{CHECKPOINT}.state_dict_saver",
    "_ProcessBasedAsyncCheckpointExecutor",
    reason="starts a process that waits for other ranks",
)
def _make_executor(original: Function, /, *args: Any, **kwargs: Any) -> Any:
    saver: Any = sys.modules["torch.distributed.checkpoint.state_dict_saver"]
    return (original if current() is None else saver._ThreadBasedAsyncCheckpointExecutor)(*args, **kwargs)


@while_world_is_open.replaces(
    f"{CHECKPOINT}.filesystem:_FileSystemWriter",
    "prepare_global_plan",
    reason="numbers files by the plans of all ranks",
)
def _prepare_global_plan(original: Function, self: Any, plans: list[Any]) -> list[Any]:
    prepared: list[Any] = original(self, plans)
    if current() is None or not dist.is_initialized():
        return prepared
    prefix = sys.modules["torch.distributed.checkpoint.filesystem"]._StoragePrefix(f"__{dist.get_rank()}_")
    return [replace(plan, storage_data=prefix) for plan in prepared]


@while_world_is_open.replaces(
    f"{CHECKPOINT}.default_planner", "_validate_global_plan", reason="needs the plans of all ranks"
)
def _validate_global_plan(original: Function, /, *args: Any, **kwargs: Any) -> Any:
    found = original(*args, **kwargs)
    if (job := current()) is None or job.size == 1:
        return found
    return True if isinstance(found, bool) else []  # since 2.12 a list of errors


# ---- Loading of distributed checkpoints


@while_world_is_open.replaces(f"{CHECKPOINT}.state_dict_loader", "_load_state_dict", reason=ALONE)
def _without_dist(original: Function, /, *args: Any, **kwargs: Any) -> Any:
    given = inspect.signature(original).bind(*args, **kwargs)
    if current() is not None:
        given.arguments["no_dist"] = True
    return original(*given.args, **given.kwargs)


@while_world_is_open.replaces(
    f"{CHECKPOINT}.default_planner", "create_default_local_load_plan", reason="needs the files of all ranks"
)
def _create_default_local_load_plan(
    original: Function, /, state_dict: Mapping[str, Any], metadata: Any, *args: Any, **kwargs: Any
) -> Any:
    if current() is not None and _is_derived_from_files(metadata):
        known = {key: _of_whole(saved, state_dict.get(key)) for key, saved in metadata.state_dict_metadata.items()}
        metadata = replace(metadata, state_dict_metadata=known)
    return original(state_dict, metadata, *args, **kwargs)


def _is_derived_from_files(metadata: Any) -> bool:
    """Whether the sizes are the largest ones in files of safetensors, instead of those that were saved with them."""
    return any(type(place).__name__ == "_HFStorageInfo" for place in (metadata.storage_data or {}).values())


def _of_whole(saved: Any, tensor: Any) -> Any:
    """Give a sharded tensor its whole size if only this rank's part was saved, from which a reader derived the size."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if not isinstance(tensor, DTensor) or getattr(saved, "size", tensor.size()) == tensor.size():
        return saved
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    is_part = saved.size == torch.Size([first + count for first, count in zip(offset, shape, strict=True)])
    return replace(saved, size=tensor.size()) if is_part else saved


@while_world_is_open.replaces(
    f"{CHECKPOINT}.state_dict", "_broadcast_state_dict", reason="receives the keys from rank 0"
)
def _broadcast_state_dict(
    original: Function, /, full_state_dict: dict[str, Any], local_state_dict: dict[str, Any], *args: Any, **kwargs: Any
) -> None:
    if dist.get_rank() == 0:
        original(full_state_dict, local_state_dict, *args, **kwargs)
        return
    with root_sending([_described_state(local_state_dict)]):
        original(full_state_dict, local_state_dict, *args, **kwargs)


def _described_state(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Describe tensors as rank 0 does: scalars unchanged, other tensors by their size and dtype."""
    utils: Any = sys.modules["torch.distributed._state_dict_utils"]
    return {
        key: utils._TensorInfo(value.size(), value.dtype)
        if isinstance(value, torch.Tensor) and value.dim() > 0
        else value
        for key, value in state_dict.items()
    }
