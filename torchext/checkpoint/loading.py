"""From files of tensors to a module that is deferred."""

from __future__ import annotations

import os
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.nn import Module
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from .. import _C
from ..deferred_init import materialize_module, materialize_tensor
from ..tools.dispatch_keys import without_our_keys
from ..tools.held_tensors import is_wrapper, parts_of
from .pieces import LARGEST_PIECE, parts_of_shape
from .reading import StateDict, read_state
from .tensors import check_dtype, converted_dtype, shows_all, storage_of

__all__ = ["LoadedKeys", "load_safetensors"]

Device: TypeAlias = torch.device | str | int


class LoadedKeys(NamedTuple):
    """What `load_safetensors(strict=False)` has not found."""

    missing_keys: list[str]
    """Names of the module that are not in the files. They have the values of eager construction."""
    unexpected_keys: list[str]
    """Names in the files that the module does not have."""


def load_safetensors(
    module: Module,
    path: str | os.PathLike[str] | Mapping[str, Any],
    *,
    strict: bool = True,
    device: Device | None = None,
    dtype: torch.dtype | None = None,
) -> LoadedKeys:
    """Makes a deferred module real, with tensors from files.

    Its tensors become real in place, so that ties, optimizers and all other holders see them. Where dtype and device
    are those of the file, they show the file itself, which is mapped into memory: nothing is read before it is used,
    and what is written to them is not written to the file. Others are converted one by one. What the files do not have,
    such as buffers that are not persistent, gets the values of eager construction. Tensors of the module that are real
    already are copied into.

    Parts of tensors that are on several processes, of `DTensor`s, are read from their places in the files.

    Args:
        module: A module, deferred as a whole or in parts. Its `load_state_dict()` decides what goes where, with its
            hooks.
        path: A file of safetensors, an index of several, a folder with `model.safetensors` or
            `model.safetensors.index.json`, a file of `torch.save()`, or a state dict, whose tensors the module then
            shares, as by `load_state_dict(assign=True)`.
        strict: Whether it is an error if names are missing, or not expected. A name that is tied to one in the files is
            not missing.
        device: Where to put parameters and buffers, if not on the devices that they were recorded on.
        dtype: What to convert floating point and complex parameters and buffers to that are deferred.

    Returns:
        The names that were missing and those that were not expected.

    Raises:
        TypeError: `module` is not a module, or `dtype` is neither floating point nor complex.
        FileNotFoundError: There is no such file.
        ValueError: A file is damaged, or is not what it should be; or an argument is out of range. The module is as it
            was.
        RuntimeError: Names are missing or not expected, or shapes differ: all of them, in the words of
            `load_state_dict()`. The module is as it was, but for what its own hooks and `set_extra_state()` have done.
        ImportError: safetensors is needed and not installed.
    """
    if not isinstance(module, Module):
        raise TypeError(f"load_safetensors() takes a module, but `module` is a {type(module).__name__}.")
    check_dtype(dtype)
    place = _Place(None if device is None else torch.device(device), dtype)
    state = read_state(path)
    tied = _tied(module, state.tensors)
    given = _with_versions({**state.tensors, **tied}, state.versions)
    preview = _Preview(place) if _has_code_that_may_look(module) else None
    try:
        with _Collecting(module, tied.values(), preview) as collected:
            keys = module.load_state_dict(given, strict=strict)
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
    return LoadedKeys(list(keys.missing_keys), list(keys.unexpected_keys))


def _with_versions(tensors: dict[str, Any], versions: Any) -> OrderedDict[str, Any]:
    state = OrderedDict(tensors)
    if versions is not None:
        state._metadata = versions  # type: ignore[attr-defined]
    return state


class _Place(NamedTuple):
    """Where tensors go, and what they become."""

    device: torch.device | None
    dtype: torch.dtype | None

    def of(self, tensor: torch.Tensor) -> tuple[torch.device, torch.dtype]:
        """The device and the dtype of a tensor of the module afterwards."""
        return self.device or tensor.device, converted_dtype(tensor, self.dtype)


class _Load(NamedTuple):
    """A tensor of the module, and what it is to become."""

    target: torch.Tensor
    data: torch.Tensor
    recorded: torch.dtype
    """The dtype of the target, which values pass through."""


class _Collecting(TorchFunctionMode):
    """Collects what `load_state_dict()` would copy, so that nothing has changed when it raises.

    Args:
        module: The module.
        tied: What need not be copied, because the memory is that of another tensor.
        preview: Shows the values at once to the module's own code, if it has any.
    """

    def __init__(self, module: Module, tied: Iterable[torch.Tensor], preview: _Preview | None) -> None:
        super().__init__()
        self._tied = {id(tensor) for tensor in tied}
        self._preview = preview
        held = [*module.parameters(), *module.buffers()]
        self._held = {id(tensor): tensor for tensor in held}
        self.loads: dict[int, _Load] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.copy_ and len(args) == 2 and not kwargs and id(args[0]) in self._held:
            target, data = args
            if data is not target and id(data) not in self._tied:
                self.loads.pop(id(target), None)  # what is copied last stays
                load = self.loads[id(target)] = _Load(target, data, target.dtype)
                if self._preview is not None:
                    self._preview.show(load)
            return target
        return func(*args, **(kwargs or {}))


class _Preview:
    """Shows the values of files while `load_state_dict()` runs, as eager modules have them then, to be put back.

    Hooks, `set_extra_state()` and methods that a module overrides may read what has been loaded, compute other tensors
    of it, and change it.
    """

    def __init__(self, place: _Place) -> None:
        self._place = place
        self._deferred: list[tuple[_C.RecordedValue, _C.RecordedValue]] = []
        """What each storage showed before, and with the values."""
        self._latest: dict[int | None, tuple[_C.RecordedValue, bool]] = {}
        """For each storage, the last value that it was given here, and whether others have changed one."""
        self._real: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """Tensors that were real, and copies of what they were."""

    def show(self, load: _Load) -> None:
        """Lets the target of `load` have its values, unless it cannot: then the caller raises."""
        try:
            _check(load, self._place)
        except ValueError:
            return
        target, data = _parts_of_load(load)
        if not _C.is_deferred(target):
            self._real.setdefault(id(target), (target, target.detach().clone()))
            target.copy_(data)
            return
        before = _C.RecordedValue(target)
        storage = _storage(target)
        latest, is_changed = self._latest.get(storage, (before, False))
        is_changed = is_changed or not latest.is_of(target)
        if not _C.show_data(target, data.detach()):
            target.copy_(data)
        shown = _C.RecordedValue(target)
        self._deferred.append((before, shown))
        self._latest[storage] = shown, is_changed

    def is_shown(self, load: _Load) -> bool:
        """Whether the target of `load` is deferred and still has the values that it was given here."""
        target, _ = _parts_of_load(load)
        if not _C.is_deferred(target):
            return False
        shown, is_changed = self._latest.get(_storage(target), (None, True))
        return not is_changed and shown is not None and shown.is_of(target)

    def put_back(self) -> None:
        """Gives all targets the values that they had before."""
        for before, _ in reversed(self._deferred):
            before.put_back()
        with torch.no_grad():
            for target, value in self._real.values():
                target.copy_(value)

    def keep_apart(self) -> None:
        """Copies what is recorded outside of the module as read from memory that its tensors show now."""
        self._latest.clear()
        shown = [value for _, value in self._deferred]
        self._deferred.clear()
        for value in shown:
            value.keep_apart()


def _has_code_that_may_look(module: Module) -> bool:
    """Whether code other than PyTorch's runs in `load_state_dict()`, which may look at what has been loaded."""
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
    """What is not in the files, because one that is shows its memory: the same tensor, or all of the memory."""
    held = {name: tensor for name, tensor in module.state_dict(keep_vars=True).items() if _has_values(tensor)}
    given = {name: data for name, data in tensors.items() if name in held and _is_tensor(data)}
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


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _storage(tensor: torch.Tensor) -> int | None:
    """Which storage a tensor shows, if it shows one."""
    if is_wrapper(tensor) or tensor.layout != torch.strided or tensor.numel() == 0:
        return None
    return storage_of(tensor)[0]


def _show_all_in_order(tensor: torch.Tensor, data: torch.Tensor) -> bool:
    """Whether `tensor` shows all of its storage in order, so that what shows a part of it shows a part of `data`."""
    return (
        _storage(tensor) is not None
        and tensor.is_contiguous()
        and shows_all(tensor)
        and data.shape == tensor.shape
        and data.is_contiguous()
    )


def _check(load: _Load, place: _Place) -> None:
    """Raises what would be raised halfway otherwise."""
    target, data = load.target, load.data
    if place.device is not None and place.device.type == "meta":
        raise ValueError("Tensors cannot be loaded to the device `meta`, where they have no values.")
    if data.layout != torch.strided or data.is_meta or (_C.is_fake(data) and not _C.is_deferred(data)):
        raise ValueError(
            f"What is to be loaded into a tensor of shape {tuple(target.shape)} has no values in order: its layout is "
            f"{data.layout}, its device {data.device}."
        )
    if is_wrapper(data) and not is_wrapper(target):
        raise ValueError(
            f"A {type(data).__name__} cannot be loaded into a tensor of shape {tuple(target.shape)} that is whole. Use "
            "its full_tensor()."
        )
    for part in parts_of(target):
        if _C.is_fake(part) and not _C.is_deferred(part):
            raise ValueError(
                f"A tensor of shape {tuple(part.shape)} is fake, and was not constructed by deferred_init(), so that "
                "it cannot become real."
            )
    device, dtype = place.of(target)
    if is_wrapper(target) and (device.type != target.device.type or dtype != target.dtype):
        raise ValueError(
            f"A {type(target).__name__} of shape {tuple(target.shape)} cannot be loaded with another device or dtype. "
            "Convert the module before it is wrapped, or after it is loaded."
        )


class _Shown:
    """The memory that tensors of the module show already, so that no two of them come to share it."""

    def __init__(self) -> None:
        self._spans: dict[int, list[tuple[int, int]]] = {}

    def take(self, data: torch.Tensor) -> bool:
        """Returns whether nobody has taken it yet, and takes it."""
        storage = data.untyped_storage()
        begin = int(data.storage_offset()) * data.itemsize
        end = begin + data.numel() * data.itemsize
        spans = self._spans.setdefault(storage.data_ptr(), [])
        if any(first < end and begin < last for first, last in spans):
            return False
        spans.append((begin, end))
        return True


class _Loader(NamedTuple):
    """Loads one tensor after the other, so that no more than one is in memory twice."""

    state: StateDict
    place: _Place
    shown: _Shown
    counts: Counter[int | None]
    """How many tensors are loaded into each storage."""

    def load(self, load: _Load) -> None:
        target, data = _parts_of_load(load)
        if not _C.is_deferred(target):
            with torch.no_grad():
                target.copy_(data.to(load.recorded))
            self.state.forget(data)
        elif not _C.adopt(target, self._ready(target, data)):
            self._copy(target, data)

    def _ready(self, target: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
        """What `target` shall show: `data` itself if it can."""
        device, dtype = self.place.of(target)
        if _C.is_fake(data):
            return data  # of the module itself, which is not adopted
        is_there = data.device.type == device.type and device.index in (None, data.device.index)
        is_same = data.dtype == dtype and _is_exact(data.dtype, target.dtype) and data.is_contiguous()
        if is_there and is_same and self.counts[_storage(target)] <= 1 and self.shown.take(data):
            return data.detach()
        return self._converted(data.detach(), target.dtype, dtype, device)

    def _converted(
        self, data: torch.Tensor, recorded: torch.dtype, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """As by copying it into what was recorded, and converting that."""
        result = torch.empty(data.shape, dtype=dtype, device=device)
        for part in parts_of_shape(data.shape, LARGEST_PIECE // data.itemsize):
            result[part] = data[part].to(recorded)
            self.state.forget(data[part])
        return result

    def _copy(self, target: torch.Tensor, data: torch.Tensor) -> None:
        """Into a part of a larger memory, say, whose rest is computed."""
        with torch.no_grad():
            target.copy_(data)
        materialize_tensor(target, device=self.place.device, dtype=self.place.dtype)
        self.state.forget(data)


def _is_exact(dtype: torch.dtype, other: torch.dtype) -> bool:
    """Whether `other` has all values of `dtype`."""
    if dtype == other:
        return True
    try:
        return torch.promote_types(dtype, other) == other
    except RuntimeError:  # of float8 and others
        return False


def _parts_of_load(load: _Load) -> tuple[torch.Tensor, torch.Tensor]:
    """The target and the data of `load`, or, if the target is distributed, the parts that this process has."""
    return _local(load.target, load.data) if is_wrapper(load.target) else (load.target, load.data)


def _local(target: Any, data: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The part of a distributed tensor that this process has, and of what it is loaded from."""
    [local] = parts_of(target)
    if not isinstance(data, type(target)):
        return local, _shard_of(target, local, data)
    if (data.device_mesh, data.placements) != (target.device_mesh, target.placements):
        data = data.redistribute(target.device_mesh, target.placements)
    [data] = parts_of(data)
    return local, data


def _shard_of(target: Any, local: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    """The elements of `data` that belong to the local part of `target`, without reading others."""
    coordinate = target.device_mesh.get_coordinate()
    if coordinate is None:  # this process is not in the mesh
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
    """Which indices of a dimension the local part has: as placements divide tensors, they divide these."""
    with without_our_keys():
        indices = torch.arange(data.shape[dim], device="cpu").view([-1 if i == dim else 1 for i in range(data.dim())])
        for mesh_dim, placement in enumerate(target.placements):
            if getattr(placement, "dim", None) == dim:
                parts, _ = placement._split_tensor(
                    indices, target.device_mesh.size(mesh_dim), with_padding=False, contiguous=False
                )
                indices = parts[coordinate[mesh_dim]]
        return indices.flatten()
