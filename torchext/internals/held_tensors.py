"""Finds the tensors that a module holds, the inner tensors of a tensor, and its storage."""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from functools import partial
from types import (
    BuiltinFunctionType,
    CodeType,
    FrameType,
    FunctionType,
    GeneratorType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    TracebackType,
)
from typing import Any, NamedTuple, TypeGuard, TypeVar

import torch
from torch.nn import Module, Parameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .. import _C

__all__ = [
    "Held",
    "held_tensors",
    "inner_tensors",
    "is_wrapper",
    "parts_of",
    "reachable_tensors",
    "shows_all",
    "storage_of",
    "tensors_in",
]


# Types of objects that hold no tensors. Most objects in modules are of these types.
LEAVES = (
    *(int, float, complex, str, bytes, type(None), type, ModuleType),
    *(CodeType, FrameType, TracebackType),
    *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format, torch.Generator),
)
LEAF_TYPES = frozenset(map(id, (*LEAVES, bool)))  # compared by id, because a class may be unhashable

CONTAINERS: tuple[type[Any], ...] = (dict, list, tuple, set, frozenset, deque)

LRU_CACHE = type(functools.lru_cache(len))

# Modules whose types are implemented in C: read-only views, iterators, generators, caches. These expose their
# references to the garbage collector, but before Python 3.11 generators do not expose their variables.
MODULES_IN_C = frozenset({"builtins", "types", "itertools", "functools", "collections", "operator", "_operator"})


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Return True for a tensor that wraps others, such as a `DTensor`. Fast for other tensors and parameters."""
    return type(tensor) is not Parameter and is_traceable_wrapper_subclass(tensor)


class Held(NamedTuple):
    """A tensor that a module holds."""

    tensor: torch.Tensor
    """The tensor itself, or an inner tensor of a wrapper such as a `DTensor`, which itself has no data."""
    name: str
    """The name in `named_parameters()`; for a tensor in a container, the name of the attribute."""
    is_registered: bool
    """Whether it is a parameter or a buffer, which `Module.to()` moves, not a plain attribute."""
    is_parameter: bool
    is_part: bool
    """Whether it is an inner tensor of a wrapper."""
    whole: torch.Tensor
    """The object that the module holds: the tensor itself, or the wrapper."""


def held_tensors(
    module: Module, buffers_only: bool = False, check_fn: Callable[[Module], bool] | None = None
) -> Iterator[Held]:
    """Yield the tensors of `module` and its descendants. A tensor that is held twice may be yielded twice.

    Args:
        module: The module.
        buffers_only: Skip the parameters.
        check_fn: Returns, for each module, whether to yield the tensors that it holds directly.
    """
    reach = _Reach(module, _is_deferred, into_caches=True)
    for prefix, module_part in module.named_modules():
        if check_fn is None or check_fn(module_part):
            for tensor, name, is_registered in _held_by(module_part, reach):
                full_name = f"{prefix}.{name}" if prefix else name
                yield from _parts_held(tensor, full_name, is_registered, buffers_only)
    # Hidden modules are found during the search, and may lead to others.
    for hidden, name in reach.hidden_modules:
        if check_fn is None or check_fn(hidden):
            for tensor, _, _ in _held_by(hidden, reach):
                yield from _parts_held(tensor, name, is_registered=False, buffers_only=buffers_only)


def _parts_held(tensor: torch.Tensor, name: str, is_registered: bool, buffers_only: bool) -> Iterator[Held]:
    is_parameter = isinstance(tensor, Parameter)
    if not (buffers_only and is_parameter):
        for part in parts_of(tensor) if is_wrapper(tensor) else (tensor,):
            yield Held(part, name, is_registered, is_parameter, part is not tensor, tensor)


def parts_of(tensor: torch.Tensor, around: tuple[torch.Tensor, ...] = ()) -> Iterator[torch.Tensor]:
    """Yield the tensors with data that make up `tensor`: itself, or the inner tensors if it is a wrapper.

    Args:
        tensor: Any tensor.
        around: The wrappers that contain it. A wrapper that `torch.utils.swap_tensors()` has swapped with its inner
            tensor contains itself, and has no data.
    """
    if not is_wrapper(tensor):
        yield tensor
    elif not any(tensor is wrapper for wrapper in around):
        for part in inner_tensors(tensor):
            yield from parts_of(part, (*around, tensor))


def inner_tensors(wrapper: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors that a wrapper lists as its inner tensors."""
    parts = [getattr(wrapper, name) for name in wrapper.__tensor_flatten__()[0]]  # type: ignore[attr-defined]
    return [part for part in parts if isinstance(part, torch.Tensor)]  # `DTensor` lists other objects as well


def reachable_tensors(obj: object, is_wanted: Callable[[torch.Tensor], bool]) -> Iterator[torch.Tensor]:
    """Yield the tensors in the containers that make up `obj` and in modules, and the selected ones in other objects.

    Args:
        obj: Any object. None of its code is called: see `_Reach`.
        is_wanted: Selects tensors among those in attributes of objects.
    """
    reach = _Reach(obj, is_wanted)
    if isinstance(obj, Module):
        for module in obj.modules():
            yield from (tensor for tensor, _, _ in _held_by(module, reach))
    else:
        yield from reach.tensors_in(obj, "")
    for hidden, _ in reach.hidden_modules:  # found during the search; may lead to others
        yield from (tensor for tensor, _, _ in _held_by(hidden, reach))


def _held_by(module: Module, reach: _Reach) -> Iterator[tuple[torch.Tensor, str, bool]]:
    for attribute, value in vars(module).items():
        if attribute in ("_parameters", "_buffers"):
            for name, tensor in value.items():
                if tensor is not None:
                    yield tensor, name, True
                    if attributes := reach.attributes_once(tensor):
                        yield from ((other, name, False) for other in reach.tensors_among(attributes, name))
        elif not (id(type(value)) in LEAF_TYPES or reach.leads_nowhere(attribute, value)):
            yield from ((tensor, attribute, False) for tensor in reach.tensors_in(value, attribute))


class _Reach:
    """A search from a module or an object through containers and objects. It visits each of them once.

    Models hold tensors in distributions, schedules, samplers and other custom objects. The search calls none of their
    code, which may compute, raise or have side effects. It avoids even `isinstance()`, which reads `__class__`, a
    property of lazy objects and proxies.
    """

    def __init__(self, root: object, is_wanted: Callable[[torch.Tensor], bool], into_caches: bool = False) -> None:
        self._root = root
        self._is_wanted = is_wanted
        self._into_caches = into_caches
        self._modules = set(map(id, root.modules())) if isinstance(root, Module) else set()
        self._seen: dict[int, object] = {}  # kept alive, so that addresses are not reused
        self._descriptors = dict(_OF_TORCH)  # by the address of the class, which may be unhashable
        self.hidden_modules: list[tuple[Module, str]] = []
        """Modules that are not descendants, for example in a list, with the names of the attributes to them."""

    def leads_nowhere(self, attribute: str, value: Any) -> bool:
        """Return True for the attributes that every module has, if they hold nothing but known modules."""
        if type(value) in (set, OrderedDict):  # hooks, names of buffers
            return not value
        return attribute == "_modules" and type(value) is dict and self._modules.issuperset(map(id, value.values()))

    def tensors_among(self, attributes: list[object], name: str) -> Iterator[torch.Tensor]:
        """Yield the selected tensors in attributes of a tensor."""
        yield from self._search([(value, True) for value in attributes], name)

    def tensors_in(self, value: object, name: str) -> Iterator[torch.Tensor]:
        """Yield the tensors in the containers that make up `value`, and the selected ones in other objects there."""
        yield from self._search([(value, False)], name)

    def _search(self, values: list[tuple[object, bool]], name: str) -> Iterator[torch.Tensor]:
        """Yield the tensors in `values`, with whether an object holds them. Iterative, because lists may be linked."""
        stack = values[::-1]
        while stack:
            value, is_in_object = stack.pop()
            if id(type(value)) in LEAF_TYPES:
                continue
            if _is(value, torch.Tensor):
                if not is_in_object or self._is_wanted(value):
                    yield value
                if attributes := self.attributes_once(value):
                    stack.extend((part, True) for part in reversed(attributes))
            elif _is_one_of(value, LEAVES):
                continue
            elif _is(value, Module):
                self._register_module(value, name)
            elif id(value) not in self._seen:
                self._seen[id(value)] = value
                is_in_object = is_in_object or not _is_one_of(value, CONTAINERS)
                content = [*_content(value, self._into_caches), *self._attributes(value)]
                stack.extend((part, is_in_object) for part in reversed(content))

    def attributes_once(self, tensor: torch.Tensor) -> list[object]:
        """Return the attributes of a tensor the first time, and nothing afterwards."""
        attributes = self._attributes(tensor)
        if not attributes or id(tensor) in self._seen:
            return []
        self._seen[id(tensor)] = tensor
        return attributes

    def _register_module(self, module: Module, name: str) -> None:
        """Register a module, unless it contains the root: submodules may refer to parents without holding them."""
        if id(module) not in self._modules:
            self._modules.add(id(module))
            if all(part is not self._root for part in module.modules()):
                self.hidden_modules += [(part, name) for part in module.modules()]
                self._modules.update(map(id, module.modules()))

    def _attributes(self, value: object) -> list[object]:
        cls = type(value)
        if id(cls) not in self._descriptors:
            self._descriptors[id(cls)] = _Descriptors.of(cls)
        return self._descriptors[id(cls)].values_of(value)


def _is_deferred(tensor: torch.Tensor) -> bool:
    return any(map(_C.is_deferred, parts_of(tensor)))


T = TypeVar("T")


def _is(value: object, cls: type[T]) -> TypeGuard[T]:
    return issubclass(type(value), cls)


def _is_one_of(value: object, classes: tuple[type, ...]) -> bool:
    return issubclass(type(value), classes)


def _content(value: Any, into_caches: bool) -> Iterator[object]:
    """Return the objects that `value`, neither a module nor a tensor, holds besides its attributes."""
    if _is(value, dict):
        yield from [key for key in dict.keys(value) if type(key) is not str]
        yield from list(dict.values(value))
        if _is(value, defaultdict):
            yield vars(defaultdict)["default_factory"].__get__(value)
    elif _is_one_of(value, CONTAINERS):
        [cls] = [container for container in CONTAINERS if _is(value, container)]
        yield from list(cls.__iter__(value))
    elif _is(value, partial):
        yield from (value.func, value.args, value.keywords)
    elif _is(value, MethodType) or _is(value, BuiltinFunctionType):
        yield value.__self__
    elif _is(value, FunctionType):
        yield from (value.__defaults__, value.__kwdefaults__)
        for cell in value.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:  # empty cell
                continue
    elif _is(value, weakref.ref):
        yield from filter(_is_tensor, (weakref.ref.__call__(value),))
    elif _is(value, LRU_CACHE):
        # A cache's entries do not belong to the object that holds the cached function.
        yield from gc.get_referents(value) if into_caches else (value.__wrapped__,)
    elif sys.version_info < (3, 11) and _is(value, GeneratorType):
        yield from () if value.gi_frame is None else value.gi_frame.f_locals.values()
    elif type.__getattribute__(type(value), "__module__") in MODULES_IN_C:
        yield from gc.get_referents(value)


def _is_tensor(value: object) -> bool:
    return _is(value, torch.Tensor)


class _Descriptors(NamedTuple):
    """The descriptors by which instances of a class store attributes."""

    cls: type
    of_dict: GetSetDescriptorType | MemberDescriptorType | None
    of_slots: tuple[MemberDescriptorType, ...]

    @classmethod
    def of(cls, owner: type) -> _Descriptors:
        """Return the descriptors of `owner`, except class attributes that reuse their names."""
        bases = [type.__getattribute__(base, "__dict__") for base in type.__getattribute__(owner, "__mro__")]
        kinds = (GetSetDescriptorType, MemberDescriptorType)
        dicts = (base["__dict__"] for base in bases if _is_one_of(base.get("__dict__"), kinds))
        slots = (
            member
            for base in bases
            if "__slots__" in base
            for member in base.values()
            if type(member) is MemberDescriptorType
        )
        return cls(owner, next(dicts, None), tuple(slots))

    def values_of(self, value: object) -> list[object]:
        """Return the values of the attributes that are set."""
        attributes: dict[str, object] = {} if self.of_dict is None else self.of_dict.__get__(value)
        found = list(attributes.values())
        for slot in self.of_slots:
            try:
                found.append(slot.__get__(value))
            except AttributeError:  # not set
                continue
        return found


_OF_TORCH = {id(cls): _Descriptors.of(cls) for cls in (torch.Tensor, Parameter)}


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """Yield a tensor, or those in nested lists, tuples and dicts. Other containers are not searched."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple | dict):
        for part in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(part)


def storage_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return a number for the storage of a tensor, valid while the tensor lives, and its size in bytes.

    For sparse tensors and wrappers, which have several storages or none, it is a number for the tensor.
    """
    with torch._C.DisableTorchFunctionSubclass():  # lazy parameters raise for their storage
        if not torch._C._has_storage(tensor):
            return id(tensor), tensor.numel() * tensor.element_size()
        storage = tensor.untyped_storage()
        return storage._cdata, storage.nbytes()


def shows_all(tensor: torch.Tensor) -> bool:
    """Return True if a tensor shows each byte of its storage once. An expanded tensor may only have the same size."""
    return tensor.numel() * tensor.itemsize == storage_of(tensor)[1] and _is_dense(tensor)


def _is_dense(tensor: torch.Tensor) -> bool:
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
