"""From tensor files, mapped into memory, to a deferred module."""

from __future__ import annotations

import json
import logging
import mmap
import os
import pickle
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.nn import Module
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from .. import _C
from ..deferred_init import materialize_module, materialize_tensor
from ..errors import CheckpointError
from ..internals.dispatch_keys import without_our_keys
from ..internals.document import Document, Table
from ..internals.held_tensors import is_wrapper, parts_of, shows_all, storage_of
from .contents import (
    LENGTH_BYTES,
    SUFFIX,
    check_dtype,
    converted_dtype,
    known_dtypes,
    lacks_values,
    parse_header,
    safetensors_torch,
)
from .saving import LARGEST_PIECE, parts_of_shape

__all__ = ["LoadedKeys", "Mapped", "StateDict", "load_checkpoint", "read_file"]


# ---- Tensor files


# Private mappings then take memory only where they are written. Python has the name since 3.11.
NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


class Mapped:
    """A file in memory. Writes to the memory do not change the file."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._size = os.fstat(file.fileno()).st_size
            self._bytes = mmap.mmap(
                file.fileno(),
                self._size,
                flags=mmap.MAP_PRIVATE | NO_RESERVE,
                prot=mmap.PROT_READ | mmap.PROT_WRITE,
            )

    def tensor(self, dtype: torch.dtype, shape: list[int], begin: int, end: int) -> torch.Tensor:
        """Return a tensor on the bytes from `begin` to `end`, which it keeps mapped."""
        with without_our_keys():
            if begin == end:
                return torch.empty(shape, dtype=dtype, device="cpu")
            raw = torch.frombuffer(self._bytes, dtype=torch.uint8, count=end - begin, offset=begin)
            if begin % dtype.itemsize:  # safetensors does not write such files
                raw = raw.clone()
            return raw.view(dtype).view(shape)

    def forget(self, tensor: torch.Tensor) -> None:
        """Release the memory pages of `tensor`, which was not written. They can be read again."""
        start = torch.frombuffer(self._bytes, dtype=torch.uint8).data_ptr()
        begin = tensor.data_ptr() - start
        if 0 <= begin < self._size:
            page = mmap.PAGESIZE
            first, last = -(-begin // page) * page, (begin + tensor.nbytes) // page * page
            if first < last:
                self._bytes.madvise(mmap.MADV_DONTNEED, first, last - first)


class StateDict(NamedTuple):
    """Tensors by name, and their files."""

    tensors: dict[str, Any]
    files: list[Mapped]
    versions: Any = None
    """The versions of modules that `state_dict()` recorded, if any."""

    def forget(self, tensor: torch.Tensor) -> None:
        """Release the memory pages of `tensor`."""
        for file in self.files:
            file.forget(tensor)


def _read_state(source: str | os.PathLike[str] | Mapping[str, Any]) -> StateDict:
    """Return the tensors of a checkpoint.

    Args:
        source: A safetensors file, an index of several, a folder with one or the other, a file of `torch.save()`, or a
            state dict.

    Raises:
        FileNotFoundError: The file does not exist, or the folder has no checkpoint.
        CheckpointError: A file is damaged, or has another format. The message names the file and the tensor.
        ImportError: safetensors is required, but not installed.
    """
    if isinstance(source, Mapping):
        return StateDict(dict(source), [], getattr(source, "_metadata", None))
    path = _file_of(Path(source))
    if path.suffix == ".json":
        return _read_index(path)
    if path.suffix == SUFFIX:
        return _read_files([path])
    return _read_pickle(path)


def _file_of(path: Path) -> Path:
    if not path.is_dir():
        return path
    found = [name for name in (f"model{SUFFIX}", f"model{SUFFIX}.index.json") if (path / name).exists()]
    if len(found) > 1:
        raise CheckpointError(f"There are two checkpoints in {path}: `{found[0]}` and `{found[1]}`. Name one of them.")
    if found:
        return path / found[0]
    raise FileNotFoundError(f"There is neither `model{SUFFIX}` nor `model{SUFFIX}.index.json` in {path}.")


def _read_files(paths: list[Path]) -> StateDict:
    state = StateDict({}, [])
    for path in paths:
        mapped, tensors = read_file(path)
        if mapped is not None:
            state.files.append(mapped)
        for name, tensor in tensors:
            if name in state.tensors:
                raise CheckpointError(f"{path} has a tensor `{name}`, which is also in another file of the checkpoint.")
            state.tensors[name] = tensor
    return state


def read_file(path: Path) -> tuple[Mapped | None, Iterable[tuple[str, torch.Tensor]]]:
    """Map a file. safetensors validates it: lengths, names, dtypes, and that tensors neither overlap nor leave gaps.

    Dry runs replace this function for files without values.
    """
    library = safetensors_torch()
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {path}.")
    try:
        with library.safe_open(path, framework="pt"):
            pass
    except Exception as error:
        raise CheckpointError(f"{path} is not a safetensors file, or is damaged: {error}") from error
    mapped = Mapped(path)
    with path.open("rb") as file:
        length = file.read(LENGTH_BYTES)
        content = length + file.read(int.from_bytes(length, "little"))
    return mapped, _tensors_of(path, mapped, content)


def _tensors_of(path: Path, mapped: Mapped, content: bytes) -> Iterator[tuple[str, torch.Tensor]]:
    for name, entry in parse_header(content).items():
        if name == "__metadata__":
            continue
        known = known_dtypes().get(entry["dtype"])
        if known is None:
            raise CheckpointError(f"`{name}` in {path} has the dtype {entry['dtype']}, which PyTorch does not have.")
        begin, end = (len(content) + offset for offset in entry["data_offsets"])
        shape = entry["shape"]
        if known.packed > 1:
            shape = [*shape[:-1], shape[-1] // known.packed]
        yield name, mapped.tensor(known.dtype, shape, begin, end)


def _read_index(path: Path) -> StateDict:
    try:
        places = json.loads(path.read_text())["weight_map"]
        names = {str(name): Path(str(file)) for name, file in places.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path} is not the index of a checkpoint: it has no `weight_map` of names to files."
        ) from error
    for name, file in names.items():
        if file.name != str(file) or file.suffix != SUFFIX:
            raise CheckpointError(f"{path} maps `{name}` to {str(file)!r}, which is not a file in its folder.")
    state = _read_files([path.with_name(file) for file in sorted({str(file) for file in names.values()})])
    for name, file in names.items():
        if name not in state.tensors:
            raise CheckpointError(f"{path} maps `{name}` to {file}, which does not contain it.")
    return state


def _read_pickle(path: Path) -> StateDict:
    """Map a file of `torch.save()`, by `torch.load()`."""
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {path}.")
    try:
        with without_our_keys():
            content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError, ValueError) as error:
        raise CheckpointError(
            f"{path} is not a file of torch.save() that holds tensors, or is damaged: {error}"
        ) from error
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path} was expected to hold a state dict, but it holds a {type(content).__name__}.")
    return StateDict(dict(content), [], getattr(content, "_metadata", None))


# ---- Loading into a deferred module


Device: TypeAlias = torch.device | str | int

logger: logging.Logger = logging.getLogger(__package__)


@dataclass(frozen=True)
class LoadedKeys(Document):
    """The names that `load_checkpoint(strict=False)` did not match.

    They may be unpacked, as those of `Module.load_state_dict()`: `missing, unexpected = load_checkpoint(...)`.
    """

    missing_keys: list[str]
    """Names of the module that are not in the files. They have the values of eager construction."""
    unexpected_keys: list[str]
    """Names in the files that the module does not have."""

    def __iter__(self) -> Iterator[list[str]]:
        return iter((self.missing_keys, self.unexpected_keys))

    def _parts(self) -> list[Table]:
        rows = [(field.name, name) for field, names in zip(fields(self), self, strict=True) for name in names]
        return [Table(("not matched", "name"), rows)]


def load_checkpoint(
    module: Module,
    path: str | os.PathLike[str] | Mapping[str, Any],
    *,
    strict: bool = True,
    device: Device | None = None,
    dtype: torch.dtype | None = None,
) -> LoadedKeys:
    """Materialize a deferred module with tensors from files.

    Its tensors become real in place, so ties, optimizers and all other holders have them. Tensors with the dtype and
    the device of the file use the file itself, which is mapped into memory: pages are read at first use, and writes do
    not change the file. Other tensors are converted one by one. Tensors that the files do not contain, such as buffers
    that are not persistent, get the values of eager construction. Real tensors of the module are overwritten.

    A rank reads only its shards of distributed tensors (`DTensor`) from the files.

    Args:
        module: A module, deferred as a whole or in parts. Its `load_state_dict()`, with its hooks, decides which tensor
            is loaded where.
        path: A safetensors file, an index of several, a folder with `model.safetensors` or
            `model.safetensors.index.json`, a file of `torch.save()`, or a state dict, whose tensors the module then
            shares, as with `load_state_dict(assign=True)`.
        strict: Whether missing and unexpected names are an error. A name that is tied to a name in the files is not
            missing.
        device: The device of parameters and buffers. Default: their recorded devices.
        dtype: The dtype of deferred floating point and complex parameters and buffers. Default: their recorded dtypes.

    Returns:
        The missing and the unexpected names.

    Raises:
        TypeError: `module` is not a module, or `dtype` is neither floating point nor complex.
        FileNotFoundError: The file does not exist.
        CheckpointError: A file is damaged or has another format. The module does not change. Or names are missing or
            unexpected, or shapes differ; the message lists them all, as in `load_state_dict()`. The module does not
            change, except by its own hooks and `set_extra_state()`.
        ValueError: An argument is out of range. The module does not change.
        ImportError: safetensors is required, but not installed.
    """
    if not isinstance(module, Module):
        raise TypeError(f"load_checkpoint() takes a module, but `module` is a {type(module).__name__}.")
    check_dtype(dtype)
    place = _Place(None if device is None else torch.device(device), dtype)
    state = _read_state(path)
    tied = _tied(module, state.tensors)
    given = _with_versions({**state.tensors, **tied}, state.versions)
    preview = _Preview(place) if _has_code_that_may_look(module) else None
    try:
        with _Collecting(module, given.values(), tied.values(), preview) as collected:
            keys = _load_state_dict(module, given, strict)
        for load in collected.loads.values():
            _check(load, place)
    except BaseException:
        if preview is not None:
            preview.put_back()
        raise
    loads = [load for load in collected.loads.values() if preview is None or preview.is_shown(load)]
    loader = _Loader(state, place, _Shown(), Counter(_storage(load.target) for load in loads))
    try:
        for load in loads:
            loader.load(load)
        materialize_module(module, device=device, dtype=dtype)
    finally:
        if preview is not None:
            preview.keep_apart()
    logger.info("Loaded %d tensors, with %d missing names.", len(loads), len(keys.missing_keys))
    return LoadedKeys(list(keys.missing_keys), list(keys.unexpected_keys))


def _load_state_dict(module: Module, given: Mapping[str, Any], strict: bool) -> Any:
    try:
        return module.load_state_dict(given, strict=strict)
    except RuntimeError as error:
        if str(error).startswith("Error(s) in loading state_dict"):
            raise CheckpointError(str(error)) from error
        raise  # of the module's own code


def _with_versions(tensors: dict[str, Any], versions: Any) -> OrderedDict[str, Any]:
    state = OrderedDict(tensors)
    if versions is not None:
        state._metadata = versions  # type: ignore[attr-defined]
    return state


class _Place(NamedTuple):
    """The device and the dtype of the loaded tensors."""

    device: torch.device | None
    dtype: torch.dtype | None

    def of(self, tensor: torch.Tensor) -> tuple[torch.device, torch.dtype]:
        """Return the device and the dtype of a tensor of the module after loading."""
        return self.device or tensor.device, converted_dtype(tensor, self.dtype)


class _Load(NamedTuple):
    """A tensor of the module, and the data to load into it."""

    target: torch.Tensor
    data: torch.Tensor
    recorded: torch.dtype
    """The dtype of the target, to which values are converted first."""
    version: int
    """The version of `data` when it was copied."""


class _Collecting(TorchFunctionMode):
    """Collect the copies of `load_state_dict()`, so that nothing has changed when it raises.

    Args:
        module: The module.
        given: The tensors to load.
        tied: Tensors that need no copy, because they have the memory of another tensor.
        preview: Makes the values visible to the module's own code, if it has any.
    """

    def __init__(
        self, module: Module, given: Iterable[Any], tied: Iterable[torch.Tensor], preview: _Preview | None
    ) -> None:
        super().__init__()
        self._tied = {id(tensor) for tensor in tied}
        self._preview = preview
        self._given: Counter[int | None] = Counter()
        """For the module's own code: how many of the given tensors are on each storage."""
        if preview is not None:
            self._given.update(_storage(tensor) for tensor in given if isinstance(tensor, torch.Tensor))
        held = [*module.parameters(), *module.buffers()]
        self._held = {id(tensor): tensor for tensor in held}
        self.loads: dict[int, _Load] = {}

    def _may_change(self, data: object) -> bool:
        """Return True for a real tensor that may change unnoticed: one of the module, or a part of a given storage."""
        if not isinstance(data, torch.Tensor) or _C.is_fake(data) or (storage := _storage(data)) is None:
            return False
        return self._given[storage] != 1

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.copy_ and len(args) == 2 and not kwargs and id(args[0]) in self._held:
            target, data = args
            if self._preview is not None and _is_same_memory(target, data):
                return target  # a state dict of the module itself
            if self._preview is not None and self._may_change(data):
                data = data.detach().clone()
            if data is not target and id(data) not in self._tied:
                self.loads.pop(id(target), None)  # the last copy wins
                load = _Load(target, data, target.dtype, _version(data))
                if self._preview is None or not self._preview.show(load):
                    self.loads[id(target)] = load
            return target
        return func(*args, **(kwargs or {}))


class _Preview:
    """Make the values of files visible while `load_state_dict()` runs, as in eager modules, and restore them after.

    Hooks, `set_extra_state()` and methods that a module overrides may read the loaded tensors, compute others from
    them, and change them.
    """

    def __init__(self, place: _Place) -> None:
        self._place = place
        self._deferred: list[tuple[_C.RecordedValue, _C.RecordedValue]] = []
        """The value of each storage before, and with the loaded tensors."""
        self._latest: dict[int | None, tuple[_C.RecordedValue, bool]] = {}
        """For each storage, the last value set here, and whether the module has changed one."""
        self._real: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """Real tensors, and copies of their values before."""

    def show(self, load: _Load) -> bool:
        """Set the values of the target of `load`, unless they do not fit: then the caller raises.

        Returns:
            Whether the module has computed the values from deferred tensors, so that they are recorded.
        """
        try:
            _check(load, self._place)
        except ValueError:
            return False
        target, data = _parts_of_load(load)
        if not _C.is_deferred(target):
            self._real.setdefault(id(target), (target, target.detach().clone()))
            target.copy_(data)
            return False
        before = _C.RecordedValue(target)
        storage = _storage(target)
        latest, is_changed = self._latest.get(storage, (before, False))
        is_changed = is_changed or not latest.is_of(target)
        if not _C.show_data(target, data.detach()):
            target.copy_(data)
        shown = _C.RecordedValue(target)
        self._deferred.append((before, shown))
        self._latest[storage] = shown, is_changed
        return _C.is_deferred(data)

    def is_shown(self, load: _Load) -> bool:
        """Return True if the target of `load` is deferred and still has the values set here."""
        target, _ = _parts_of_load(load)
        if not _C.is_deferred(target):
            return False
        shown, is_changed = self._latest.get(_storage(target), (None, True))
        return not is_changed and shown is not None and shown.is_of(target)

    def put_back(self) -> None:
        """Restore the values of all targets."""
        for before, _ in reversed(self._deferred):
            before.put_back()
        with torch.no_grad():
            for target, value in self._real.values():
                target.copy_(value)

    def keep_apart(self) -> None:
        """Copy the memory that recordings outside of the module read, and that the module's tensors now use."""
        self._latest.clear()
        shown = [value for _, value in self._deferred]
        self._deferred.clear()
        for value in shown:
            value.keep_apart()


def _has_code_that_may_look(module: Module) -> bool:
    """Return True if `load_state_dict()` runs code outside of PyTorch, which may read the loaded tensors."""
    methods = "load_state_dict", "_load_from_state_dict", "set_extra_state"
    return any(
        part._load_state_dict_pre_hooks
        or part._load_state_dict_post_hooks
        or not all(map(_is_of_pytorch, (getattr(part, name) for name in methods)))
        for part in module.modules()
    )


def _is_of_pytorch(method: object) -> bool:
    return str(getattr(method, "__module__", None)).startswith("torch.nn.modules.")


def _tied(module: Module, tensors: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return tensors for names that are not in the files, but whose memory is that of a tensor in the files."""
    held = {name: tensor for name, tensor in module.state_dict(keep_vars=True).items() if _has_values(tensor)}
    given = {name: data for name, data in tensors.items() if name in held and isinstance(data, torch.Tensor)}
    same = {id(held[name]): data for name, data in given.items()}
    whole = {_storage(held[name]): data for name, data in given.items() if _show_all_in_order(held[name], data)}
    tied = {}
    for name, tensor in held.items():
        if name in tensors:
            continue
        if id(tensor) in same:
            tied[name] = same[id(tensor)].detach()
        elif (data := whole.get(_storage(tensor))) is not None and data.dtype == tensor.dtype:
            offset = data.storage_offset() + tensor.storage_offset()
            tied[name] = data.detach().as_strided(tensor.shape, tensor.stride(), offset)
    return tied


def _has_values(value: object) -> bool:
    """Whether it is a tensor, and not one of a lazy module, which `load_state_dict()` gives its shape."""
    return isinstance(value, torch.Tensor) and not is_lazy(value)


def _storage(tensor: torch.Tensor) -> int | None:
    """Return a number for the storage of a tensor, or None if it has none."""
    if is_wrapper(tensor) or tensor.layout != torch.strided or tensor.numel() == 0:
        return None
    return storage_of(tensor)[0]


def _is_same_memory(one: torch.Tensor, other: object) -> bool:
    return (
        isinstance(other, torch.Tensor)
        and not _C.is_fake(one)
        and not _C.is_fake(other)
        and _storage(one) is not None
        and bool(one.is_set_to(other))
    )


def _show_all_in_order(tensor: torch.Tensor, data: torch.Tensor) -> bool:
    """Return True if `tensor` shows all of its storage in order, so that its views are views of `data`."""
    return (
        _storage(tensor) is not None
        and tensor.is_contiguous()
        and shows_all(tensor)
        and data.shape == tensor.shape
        and data.is_contiguous()
    )


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _check(load: _Load, place: _Place) -> None:
    """Raise for a tensor that cannot be loaded, before any tensor is loaded."""
    target, data = load.target, load.data
    if _version(data) != load.version:
        raise CheckpointError(
            f"The module's own code has changed a loaded tensor of shape {tuple(data.shape)} in place after it was "
            "copied into a parameter or buffer. Change a clone of it."
        )
    if place.device is not None and place.device.type == "meta":
        raise ValueError("Tensors cannot be loaded to the device `meta`, where they have no values.")
    if data.layout != torch.strided or lacks_values(data):
        raise CheckpointError(
            f"The data for a tensor of shape {tuple(target.shape)} has no strided values: its layout is {data.layout}, "
            f"its device {data.device}."
        )
    if is_wrapper(data) and not is_wrapper(target):
        raise CheckpointError(
            f"A {type(data).__name__} cannot be loaded into a tensor of shape {tuple(target.shape)} that is not "
            "distributed. Use its full_tensor()."
        )
    for part in parts_of(target):
        if _C.is_fake(part) and lacks_values(part):
            raise ValueError(
                f"A tensor of shape {tuple(part.shape)} is fake, but was not constructed by deferred_init(), so it "
                "cannot be loaded."
            )
    device, dtype = place.of(target)
    if is_wrapper(target) and (device.type != target.device.type or dtype != target.dtype):
        raise ValueError(
            f"A {type(target).__name__} of shape {tuple(target.shape)} cannot be loaded with another device or dtype. "
            "Convert the module before it is wrapped, or after it is loaded."
        )


class _Shown:
    """The memory in use by tensors of the module, so that no two of them share memory."""

    def __init__(self) -> None:
        self._spans: dict[int, list[tuple[int, int]]] = {}

    def claim(self, data: torch.Tensor) -> bool:
        """Claim the memory of `data`. Return False if it is in use."""
        storage = data.untyped_storage()
        begin = int(data.storage_offset()) * data.itemsize
        end = begin + data.numel() * data.itemsize
        spans = self._spans.setdefault(storage.data_ptr(), [])
        if any(first < end and begin < last for first, last in spans):
            return False
        spans.append((begin, end))
        return True


class _Loader(NamedTuple):
    """Load the tensors one by one, so that at most one is in memory twice."""

    state: StateDict
    place: _Place
    shown: _Shown
    counts: Counter[int | None]
    """The number of tensors loaded into each storage."""

    def load(self, load: _Load) -> None:
        target, data = _parts_of_load(load)
        if not _C.is_deferred(target):
            with torch.no_grad():
                target.copy_(data.to(load.recorded))
            self.state.forget(data)
        elif _C.materializes_as_fakes() or not _C.adopt(target, self._ready(target, data)):  # fakes are not read
            self._copy(target, data)

    def _ready(self, target: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
        """Return the data of `target`: `data` itself if possible."""
        device, dtype = self.place.of(target)
        if _C.is_fake(data):
            return data  # from the module itself, which is not adopted
        is_there = data.device.type == device.type and device.index in (None, data.device.index)
        is_same = data.dtype == dtype and _is_exact(data.dtype, target.dtype) and data.is_contiguous()
        if is_there and is_same and self.counts[_storage(target)] <= 1 and self.shown.claim(data):
            return data.detach()
        return self._converted(data.detach(), target.dtype, dtype, device)

    def _converted(
        self, data: torch.Tensor, recorded: torch.dtype, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return `data`, converted to the recorded dtype and then to `dtype`."""
        result = torch.empty(data.shape, dtype=dtype, device=device)
        for part in parts_of_shape(data.shape, LARGEST_PIECE // data.itemsize):
            result[part] = data[part].to(recorded)
            self.state.forget(data[part])
        return result

    def _copy(self, target: torch.Tensor, data: torch.Tensor) -> None:
        """Copy into a deferred tensor, such as a part of a larger storage whose rest is computed."""
        with torch.no_grad():
            target.copy_(data)
        materialize_tensor(target, device=self.place.device, dtype=self.place.dtype)
        self.state.forget(data)


def _is_exact(dtype: torch.dtype, other: torch.dtype) -> bool:
    """Return True if `other` represents all values of `dtype`."""
    if dtype == other:
        return True
    try:
        return torch.promote_types(dtype, other) == other
    except RuntimeError:  # float8 and others have no promotion
        return False


def _parts_of_load(load: _Load) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the target and the data of `load`, or the local parts if the target is distributed."""
    return _local(load.target, load.data) if is_wrapper(load.target) else (load.target, load.data)


def _local(target: Any, data: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the local part of a distributed tensor, and of its data."""
    [local] = parts_of(target)
    if not isinstance(data, type(target)):
        return local, _shard_of(target, local, data)
    if (data.device_mesh, data.placements) != (target.device_mesh, target.placements):
        data = data.redistribute(target.device_mesh, target.placements)
    [data] = parts_of(data)
    return local, data


def _shard_of(target: Any, local: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    """Return the elements of `data` for the local part of `target`, without reading others."""
    coordinate = target.device_mesh.get_coordinate()
    if coordinate is None:  # this rank is not in the mesh
        return torch.empty(local.shape, dtype=data.dtype)
    for dim in range(data.dim()):
        indices = _indices(target, coordinate, dim, data)
        is_range = len(indices) == 0 or bool(torch.all(indices.diff() == 1))
        if is_range:
            data = data.narrow(dim, int(indices[0]) if len(indices) else 0, len(indices))
        else:
            data = data.index_select(dim, indices)
    return data


def _indices(target: Any, coordinate: list[int], dim: int, data: torch.Tensor) -> torch.Tensor:
    """Return the indices of the local part in a dimension, by dividing all indices as placements divide tensors."""
    with without_our_keys():
        indices = torch.arange(data.shape[dim], device="cpu").view([-1 if i == dim else 1 for i in range(data.dim())])
        for mesh_dim, placement in enumerate(target.placements):
            if getattr(placement, "dim", None) == dim:
                parts, _ = placement._split_tensor(
                    indices, target.device_mesh.size(mesh_dim), with_padding=False, contiguous=False
                )
                indices = parts[coordinate[mesh_dim]]
        return indices.flatten()
