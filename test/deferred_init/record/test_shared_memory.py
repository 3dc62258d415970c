"""Every factory that accepts memory: tensors that share it eagerly also share it when deferred."""

from __future__ import annotations

import array
import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from torchext.deferred_init import deferred_init, is_deferred, materialize_tensor

Make = Callable[[Any], torch.Tensor]


class Buffer:
    """Memory of 8 float32, in the given form."""

    def __init__(self, kind: str) -> None:
        self.tensor = torch.arange(8.0)
        base = self.tensor.numpy()
        self.source: Any = {
            "untyped storage": lambda: self.tensor.untyped_storage(),
            "typed storage": lambda: self.tensor.storage(),
            "numpy": lambda: base,
            "memoryview": lambda: memoryview(base),
            "ctypes": lambda: (ctypes.c_float * 8).from_buffer(base),
            "capsule": lambda: torch.utils.dlpack.to_dlpack(self.tensor),
            "dlpack": lambda: base,
            "interface": lambda: Interface(base),
            "tensor": lambda: self.tensor,
        }[kind]()


class Interface:
    """Describes the memory of an array by `__array_interface__` alone."""

    def __init__(self, owner: np.ndarray[Any, Any]) -> None:
        self.owner = owner
        self.__array_interface__ = owner.__array_interface__


FACTORIES: dict[str, dict[str, Make]] = {
    "untyped storage": {
        "tensor of bytes": lambda s: torch.tensor(s, dtype=torch.uint8),
        "tensor": lambda s: torch.tensor(s, dtype=torch.float32),
        "as_tensor": lambda s: torch.as_tensor(s, dtype=torch.float32),
        "asarray": lambda s: torch.asarray(s, dtype=torch.float32),
        "asarray copy": lambda s: torch.asarray(s, dtype=torch.float32, copy=True),
        "Tensor": lambda s: torch.Tensor(s),
        "FloatTensor": lambda s: torch.FloatTensor(s),
        "new": lambda s: torch.empty(0).new(s),
        "new_tensor": lambda s: torch.empty(0).new_tensor(s),
        "set_": lambda s: torch.empty(0).set_(s),
        "set_ with a shape": lambda s: torch.empty(0).set_(s, 2, (2, 2), (2, 1)),
        "clone": lambda s: torch.empty(0).set_(s.clone()),
        "slice": lambda s: torch.empty(0).set_(s[4:8]),
        "list": lambda s: torch.tensor(list(s)),
        "frombuffer": lambda s: torch.frombuffer(s, dtype=torch.float32),
    },
    "typed storage": {
        "tensor": lambda s: torch.tensor(s),
        "as_tensor": lambda s: torch.as_tensor(s),
        "asarray": lambda s: torch.asarray(s),
        "tensor of another dtype": lambda s: torch.tensor(s, dtype=torch.float64),
        "Tensor": lambda s: torch.Tensor(s),
        "FloatTensor": lambda s: torch.FloatTensor(s),
        "new": lambda s: torch.empty(0).new(s),
        "set_": lambda s: torch.empty(0).set_(s),
        "clone": lambda s: torch.empty(0).set_(s.clone()),
        "to double": lambda s: torch.empty(0, dtype=torch.float64).set_(s.double()),
        "list": lambda s: torch.tensor(s.tolist()),
    },
    "numpy": {
        "tensor": lambda a: torch.tensor(a),
        "as_tensor": lambda a: torch.as_tensor(a),
        "as_tensor of another dtype": lambda a: torch.as_tensor(a, dtype=torch.float64),
        "asarray": lambda a: torch.asarray(a),
        "asarray copy": lambda a: torch.asarray(a, copy=True),
        "from_numpy": lambda a: torch.from_numpy(a),
        "from_numpy view": lambda a: torch.from_numpy(a[2:4]),
        "from_dlpack": lambda a: torch.from_dlpack(a),
        "from_dlpack copy": lambda a: torch.from_dlpack(a, copy=True),
        "frombuffer": lambda a: torch.frombuffer(a, dtype=torch.float32, offset=8),
        "Tensor": lambda a: torch.Tensor(a),
        "FloatTensor": lambda a: torch.FloatTensor(a),
        "new_tensor": lambda a: torch.empty(0).new_tensor(a),
        "list of arrays": lambda a: torch.tensor([a, a]),
        "storage": lambda a: torch.empty(0).set_(torch.from_numpy(a).untyped_storage()),
        "detached": lambda a: torch.from_numpy(a).detach(),
        "cloned": lambda a: torch.from_numpy(a).clone(),
    },
    "memoryview": {
        "tensor": lambda m: torch.tensor(m),
        "as_tensor": lambda m: torch.as_tensor(m),
        "asarray": lambda m: torch.asarray(m, dtype=torch.float32),
        "frombuffer": lambda m: torch.frombuffer(m, dtype=torch.float32),
        "from_numpy": lambda m: torch.from_numpy(np.asarray(m)),
    },
    "ctypes": {
        "tensor": lambda c: torch.tensor(c),
        "asarray": lambda c: torch.asarray(c, dtype=torch.float32),
        "frombuffer": lambda c: torch.frombuffer(c, dtype=torch.float32),
    },
    "capsule": {
        "from_dlpack": lambda c: torch.from_dlpack(c),
        "utils": lambda c: torch.utils.dlpack.from_dlpack(c),
        "asarray": lambda c: torch.asarray(c),
    },
    "interface": {
        "tensor": lambda i: torch.tensor(np.asarray(i)),
        "as_tensor": lambda i: torch.as_tensor(np.asarray(i)),
        "from_numpy": lambda i: torch.from_numpy(np.asarray(i)),
    },
    "tensor": {
        "tensor": lambda t: torch.tensor(t),
        "as_tensor": lambda t: torch.as_tensor(t),
        "asarray": lambda t: torch.asarray(t),
        "asarray copy": lambda t: torch.asarray(t, copy=True),
        "from_dlpack": lambda t: torch.from_dlpack(t),
        "capsule": lambda t: torch.from_dlpack(torch.utils.dlpack.to_dlpack(t)),
        "from_numpy": lambda t: torch.from_numpy(t.numpy()),
        "array": lambda t: torch.from_numpy(np.asarray(t)),
        "array copy": lambda t: torch.from_numpy(np.array(t)),
        "Tensor": lambda t: torch.Tensor(t),
        "new": lambda t: t.new(t),
        "new_tensor": lambda t: t.new_tensor(t),
        "set_": lambda t: torch.empty(0).set_(t),
        "data": lambda t: t.data,
        "storage tensor": lambda t: torch.tensor(t.untyped_storage(), dtype=torch.float32),
        "storage as_tensor": lambda t: torch.as_tensor(t.untyped_storage(), dtype=torch.float32),
        "storage asarray": lambda t: torch.asarray(t.untyped_storage(), dtype=torch.float32),
        "storage Tensor": lambda t: torch.Tensor(t.untyped_storage()),
        "storage FloatTensor": lambda t: torch.FloatTensor(t.untyped_storage()),
        "storage new": lambda t: t.new(t.untyped_storage()),
        "storage new_tensor": lambda t: t.new_tensor(t.untyped_storage()),
        "storage set_": lambda t: torch.empty(0).set_(t.untyped_storage()),
        "typed storage tensor": lambda t: torch.tensor(t.storage()),
        "typed storage as_tensor": lambda t: torch.as_tensor(t.storage()),
        "typed storage asarray": lambda t: torch.asarray(t.storage()),
        "typed storage FloatTensor": lambda t: torch.FloatTensor(t.storage()),
        "typed storage double": lambda t: torch.tensor(t.storage(), dtype=torch.float64),
        "typed storage set_": lambda t: torch.empty(0).set_(t.storage()),
        "storage clone": lambda t: torch.empty(0).set_(t.untyped_storage().clone()),
        "storage of storage": lambda t: torch.empty(0).set_(torch.UntypedStorage(list(t.untyped_storage()))),
        "typed of untyped": lambda t: torch.tensor(torch.TypedStorage(wrap_storage=t.untyped_storage(), dtype=t.dtype)),
        "frombuffer": lambda t: torch.frombuffer(t.numpy(), dtype=torch.float32),
    },
}  # fmt: skip
CASES = [(kind, name) for kind, factories in FACTORIES.items() for name in factories]
IDS = [f"{kind}, {name}" for kind, name in CASES]
"""A source, and a function that makes a tensor from it."""

pytestmark = [
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
    pytest.mark.filterwarnings("ignore:To copy construct from a tensor"),
    pytest.mark.filterwarnings("ignore:Creating a tensor from a list of numpy.ndarrays"),
]


def outcome(make: Callable[[], tuple[torch.Tensor, torch.Tensor]]) -> object:
    """Return the tensor after a change of its source, and the source after a change of the tensor; or the error."""
    try:
        source, made = make()
    except Exception as error:
        return type(error)
    for tensor in (source, made):
        if is_deferred(tensor):
            materialize_tensor(tensor)
    with torch.no_grad():
        before = made.tolist()
        source += 10
        made.view(-1)[0] += 1
        source += 100
    return before, made.tolist(), source.tolist(), made.dtype, made.stride(), made.storage_offset()


def real_source(kind: str, name: str, call: Callable[..., Any]) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    def make() -> tuple[torch.Tensor, torch.Tensor]:
        buffer = Buffer(kind)
        return buffer.tensor, call(FACTORIES[kind][name], buffer.source)

    return make


def immediately(make: Callable[..., Any], *args: Any) -> Any:
    return make(*args)


@pytest.mark.parametrize(("kind", "name"), CASES, ids=IDS)
def test_tensors_on_real_memory_share_it_like_eager_ones(kind: str, name: str) -> None:
    eager = outcome(real_source(kind, name, immediately))
    assert outcome(real_source(kind, name, deferred_init)) == eager


@pytest.mark.parametrize("is_materialized_first", [False, True], ids=["later", "first"])
@pytest.mark.parametrize("name", FACTORIES["tensor"])
def test_tensors_on_deferred_memory_share_it_like_eager_ones(name: str, is_materialized_first: bool) -> None:
    def construct() -> tuple[torch.Tensor, torch.Tensor]:
        source = torch.ones(8).mul_(3)
        made = FACTORIES["tensor"][name](source)
        source.add_(1)
        return source, made

    def materialized() -> tuple[torch.Tensor, torch.Tensor]:
        source, made = deferred_init(construct)
        for tensor in (made, source) if is_materialized_first else ():
            materialize_tensor(tensor)
        return source, made

    assert outcome(materialized) == outcome(construct)


def test_a_tensor_on_a_file_writes_the_file(tmp_path: Path) -> None:
    path = tmp_path / "memory"
    np.arange(4, dtype=np.float32).tofile(path)
    tensor = deferred_init(torch.from_file, str(path), shared=True, size=4)
    if is_deferred(tensor):
        materialize_tensor(tensor)
    tensor.fill_(5)
    assert np.fromfile(path, dtype=np.float32).tolist() == [5, 5, 5, 5]


def test_tensor_on_an_array_reflects_later_writes() -> None:
    memory = array.array("f", [1, 2])
    shared, copied = deferred_init(lambda: (torch.frombuffer(memory, dtype=torch.float32), torch.tensor(memory)))
    memory[0] = 7
    materialize_tensor(copied)
    assert shared.tolist() == [7, 2]
    assert copied.tolist() == [1, 2]
