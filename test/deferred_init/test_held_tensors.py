"""`materialize_module` finds the tensors of a module in every container and iterator."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import enum
import functools
import gc
import itertools
import operator
import queue
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary, WeakTensorKeyDictionary

from torchext import _C
from torchext.deferred_init import deferred_init, is_deferred, materialize_module
from torchext.fake import fake_like, fake_mode, is_fake


class Pair(NamedTuple):
    first: object
    second: object


@dataclasses.dataclass(slots=True)
class Slotted:
    tensor: object


@dataclasses.dataclass(frozen=True)
class Frozen:
    tensor: object


class Slots:
    __slots__ = ("missing", "tensor")

    def __init__(self, tensor: object) -> None:
        self.tensor = tensor


class OrderedSubclass(collections.OrderedDict[str, object]):
    pass


class ListSubclass(list[object]):
    pass


class Property:
    def __init__(self, tensor: object) -> None:
        self._tensor = tensor

    @property
    def tensor(self) -> object:
        raise AssertionError("unexpected read")


class Cached:
    def __init__(self, tensor: object) -> None:
        self.source = [tensor]

    @functools.cached_property
    def tensor(self) -> object:
        return self.source.pop()


def cached(tensor: object) -> Cached:
    result = Cached(tensor)
    assert result.tensor is tensor
    return result


def generator(tensor: object) -> Iterator[object]:
    yield 1
    yield tensor


def started(tensor: object) -> Iterator[object]:
    result = generator(tensor)
    next(result)
    return result


def remembered(tensor: object) -> Callable[..., object]:
    @functools.lru_cache
    def remember(key: int) -> object:
        return kept.pop()

    kept = [tensor]
    remember(1)
    return remember


def put(made: Any, tensor: object) -> object:
    made.put(tensor)
    return made


def in_local(tensor: object) -> object:
    local = threading.local()
    local.tensor = tensor
    return local


def in_context(tensor: object) -> object:
    return contextlib.nullcontext(tensor)


def attribute_of_a_tensor(tensor: object) -> object:
    other = torch.ones(1)
    other.kept = tensor
    return other


def exception(tensor: object) -> object:
    return ValueError("of", tensor)


CONTAINERS: dict[str, Callable[[Tensor], object]] = {
    "list": lambda t: [t],
    "tuple": lambda t: (t,),
    "set": lambda t: {t},
    "frozenset": lambda t: frozenset([t]),
    "dict": lambda t: {"a": t},
    "key": lambda t: {t: "a"},
    "nested": lambda t: [{"a": ({1: [t]},)}],
    "defaultdict": lambda t: collections.defaultdict(list, a=[t]),
    "default of a defaultdict": lambda t: collections.defaultdict(lambda: t),
    "OrderedDict": lambda t: collections.OrderedDict(a=t),
    "OrderedDict subclass": lambda t: OrderedSubclass(a=t),
    "list subclass": lambda t: ListSubclass([t]),
    "Counter": lambda t: collections.Counter([t]),
    "deque": lambda t: collections.deque([t]),
    "ChainMap": lambda t: collections.ChainMap({}, {"a": t}),
    "UserDict": lambda t: collections.UserDict(a=t),
    "UserList": lambda t: collections.UserList([t]),
    "namedtuple": lambda t: Pair(1, t),
    "mappingproxy": lambda t: types.MappingProxyType({"a": t}),
    "SimpleNamespace": lambda t: types.SimpleNamespace(a=t),
    "slots": Slots,
    "slotted dataclass": Slotted,
    "frozen dataclass": Frozen,
    "property": Property,
    "cached property": cached,
    "weakref": weakref.ref,
    "WeakSet": lambda t: weakref.WeakSet([t]),
    "WeakValueDictionary": lambda t: weakref.WeakValueDictionary({"a": t}),
    "WeakTensorKeyDictionary": lambda t: WeakTensorKeyDictionary({t: 1}),
    "WeakIdKeyDictionary": lambda t: WeakIdKeyDictionary({t: 1}),
    "closure": lambda t: lambda: t,
    "default": lambda t: lambda x=t: x,
    "keyword default": lambda t: lambda *, x=t: x,
    "method": lambda t: Frozen(t).__eq__,
    "bound builtin method": lambda t: [t].index,
    "partial": lambda t: functools.partial(max, t, key=len),
    "partialmethod": lambda t: functools.partialmethod(max, t),
    "lru_cache": remembered,
    "itemgetter": lambda t: operator.itemgetter(t),
    "iterator": lambda t: iter([t]),
    "tuple iterator": lambda t: iter((t,)),
    "dict iterator": lambda t: iter({"a": t}.values()),
    "dict view": lambda t: {"a": t}.items(),
    "reversed": lambda t: reversed([t]),
    "enumerate": lambda t: enumerate([t]),
    "zip": lambda t: zip([t], [1], strict=True),
    "map": lambda t: map(len, [t]),
    "filter": lambda t: filter(None, [t]),
    "chain": lambda t: itertools.chain([1], [t]),
    "cycle": lambda t: itertools.cycle([t]),
    "repeat": lambda t: itertools.repeat(t),
    "product": lambda t: itertools.product([t], [1]),
    "tee": lambda t: itertools.tee([t])[0],
    "islice": lambda t: itertools.islice([t], 1),
    "generator": generator,
    "started generator": started,
    "generator expression": lambda t: (x for x in [t]),
    "slice": lambda t: slice(t),
    "exception": exception,
    "context manager": in_context,
    "queue": lambda t: put(queue.Queue(), t),
    "SimpleQueue": lambda t: put(queue.SimpleQueue(), t),
    "thread-local": in_local,
    "module in a list": lambda t: [nn.ParameterList([t])],
    "enum": lambda t: enum.Enum("Values", {"A": (t,)}).A,
    "attribute of a tensor": attribute_of_a_tensor,
}  # fmt: skip
OPAQUE = {
    "SimpleQueue": "does not expose its contents",
    "thread-local": "belongs to its threads",
}
"""Objects that cannot be searched."""


class Holder(nn.Module):
    def __init__(self, contain: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.tensor_of_the_test = [torch.ones(2)]
        self.container = contain(self.tensor_of_the_test[0])


@pytest.mark.parametrize(
    "contain",
    [
        pytest.param(
            contain, id=name, marks=[pytest.mark.xfail(reason=OPAQUE[name], strict=True)] if name in OPAQUE else []
        )
        for name, contain in CONTAINERS.items()
    ],
)
def test_tensors_are_found_in(contain: Callable[[Tensor], object]) -> None:
    module = deferred_init(Holder, contain)
    tensor = module.tensor_of_the_test.pop()
    assert is_deferred(module)
    materialize_module(module)
    assert not is_deferred(tensor)
    assert torch.equal(tensor, torch.ones(2))


@pytest.mark.parametrize("is_alone", [True, False], ids=["alone", "beside-other-fakes"])
def test_tensors_are_found_beside_other_fakes(is_alone: bool) -> None:
    others = [] if is_alone else [fake_like(torch.ones(1)), deferred_init(nn.Linear, 2, 2)]
    module = deferred_init(lambda: nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    with deferred_init():
        module.more = [{"a": torch.ones(2)}, (torch.ones(3), [torch.ones(4)])]  # type: ignore[assignment]
        module.more.append(module.more)  # type: ignore[operator, union-attr]
        module.of_object = Slots(torch.ones(5))  # type: ignore[assignment]
        module.register_buffer("view", module.of_object.tensor[1:])
    module.weight_of_other = module[0].weight
    tensors = [torch.ones(1), *module.parameters(), module.of_object.tensor, module.view, *module.more[1]]  # type: ignore[misc]
    materialize_module(module)
    assert not any(is_deferred(tensor) for tensor in tensors if isinstance(tensor, torch.Tensor))
    assert all(map(is_fake, others[:1]))
    assert all(map(is_deferred, others[1:]))


def test_all_fakes_are_recognized_only_if_none_is_elsewhere() -> None:
    gc.collect()
    first, second = deferred_init(nn.Linear, 2, 2), deferred_init(nn.Linear, 2, 2)
    looped: list[object] = [vars(first), (torch.ones(1), {"second": vars(second)})]
    looped.append(looped)
    all_fakes = [first.weight, first.bias, second.weight, second.bias]
    found = _C.all_fakes_if_in([{"all": looped}, vars(first)])
    assert set(map(id, found or [])) == set(map(id, all_fakes))
    assert _C.all_fakes_if_in([vars(first)]) is None
    with fake_mode():
        assert _C.all_fakes_if_in([{"all": looped}]) is None
    materialize_module(second)
    assert _C.all_fakes_if_in([vars(first)]) == [first.weight, first.bias]


def test_iterators_are_not_consumed() -> None:
    module = deferred_init(Holder, lambda t: started(t))
    materialize_module(module)
    assert [x is module.tensor_of_the_test[0] for x in module.container] == [True]
