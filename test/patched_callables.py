"""Compares the callables of PyTorch before and after using every feature of torchext once, and prints the differences.

`test_patches.py` runs it as a program, because it has to start in a process without torchext.
"""

from __future__ import annotations

import copy
import ctypes
import gc
import importlib
import inspect
import io
import json
import pickle
import re
import sys
from collections.abc import Callable, Iterator
from types import (
    BuiltinFunctionType,
    ClassMethodDescriptorType,
    FunctionType,
    GetSetDescriptorType,
    MethodDescriptorType,
    ModuleType,
)
from typing import Any

import torch
import torch._functorch.eager_transforms
import torch.fx.experimental.proxy_tensor
import torch.optim.adagrad
import torch.optim.sparse_adam
import torch.overrides
import torch.utils.checkpoint

import torchext
from torchext import amp, deferred_init, fake, inference


def use_everything() -> list[Any]:
    """Use each feature once. All patches outside of blocks stay installed while the result lives."""
    fakes = fake.fake_like(torch.nn.Linear(2, 2))
    with fake.fake_mode(gpu=True):
        torch.nn.Linear(2, 2, device="cuda")(torch.ones(1, 2, device="cuda")).sum().backward()
    deferred_init.materialize_module(deferred_init.deferred_init(torch.nn.Linear, 2, 2))
    with amp.autocast("cpu", self_cleaning=True):
        loss = torch.nn.Linear(2, 2)(torch.ones(1, 2)).sum()
    loss.backward()
    wrapped = amp.to_amp(torch.nn.Linear(2, 2))
    wrapped(torch.ones(1, 2)).sum().backward()
    with inference.inference_mode(trace=True):
        traced = torch.ones(2)
        inference.origin(traced)
    inference.trace_origins()
    inference.trace_origins(False)
    torchext.inspect.tensor_state(fakes.weight)
    return [fakes, wrapped, traced]


def owners() -> Iterator[tuple[str, Any]]:
    """The modules of PyTorch that are imported, and their classes."""
    seen: set[int] = set()
    for name, module in sorted(sys.modules.items()):
        if name.split(".")[0] != "torch" or not isinstance(module, ModuleType):
            continue
        yield name, module
        for cls in list(vars(module).values()):
            is_of_pytorch = isinstance(cls, type) and cls.__module__.split(".")[0] == "torch"
            if is_of_pytorch and id(cls) not in seen and not isinstance(cls, type(torch.FloatTensor)):
                seen.add(id(cls))
                yield f"{cls.__module__}.{cls.__qualname__}", cls


Found = dict[tuple[str, str], tuple[Any, Any]]

# Positions of pointers to the called code in CPython's objects for C functions, in machine words.
DEFINITIONS: dict[type, tuple[int, ...]] = {
    BuiltinFunctionType: (2, 6),  # `m_ml`, `vectorcall` of PyCFunctionObject
    MethodDescriptorType: (5,),  # `d_method` of PyMethodDescrObject
    ClassMethodDescriptorType: (5,),
    GetSetDescriptorType: (5,),  # `d_getset` of PyGetSetDescrObject
}


def is_cache(value: object) -> bool:
    """Whether PyTorch keeps the value in an attribute of a function: `torch._compile` disables Dynamo for it."""
    return hasattr(value, "_torchdynamo_disable")


def definition(function: Any) -> object:
    """Return the code or definition that `function` calls, and its attributes. They can change in the same object."""
    if isinstance(function, FunctionType):
        return function.__code__, {name: id(value) for name, value in vars(function).items() if not is_cache(value)}
    if type(function) not in DEFINITIONS:
        return None
    words = ctypes.cast(id(function), ctypes.POINTER(ctypes.c_void_p))
    return tuple(words[i] for i in DEFINITIONS[type(function)])


def namespace() -> Found:
    """Return the object of each name, and the code that functions call, including functions that no module names."""
    found: Found = {
        ("a function", f"{function.__module__}.{function.__qualname__} at {id(function)}"): (
            function,
            definition(function),
        )
        for function in gc.get_objects()
        if type(function) is FunctionType and str(function.__module__).split(".")[0] == "torch"
    }
    for owner_name, owner in owners():
        for name, value in list(vars(owner).items()):
            found[owner_name, name] = value, definition(_function(value))
    return found


def _function(value: Any) -> Any:
    """Return the function in a static or class method. Reading attributes of other objects is not always safe."""
    is_method = isinstance(value, (staticmethod, classmethod)) or type(value).__name__ == "instancemethod"
    return value.__func__ if is_method else value


def exchanged(before: Found, after: Found) -> tuple[list[str], list[Any]]:
    """Return the names that now refer to another object, and the functions that now call other code."""
    names, functions = [], []
    for (owner, name), (value, code) in before.items():
        now, code_now = after.get((owner, name), (None, None))
        if now is not value and (callable(_function(value)) or inspect.isdatadescriptor(value)):
            names.append(f"{owner}.{name}")
        elif code_now is not code and code_now != code:
            functions.append(_function(value))
    classes = {f"{cls.__module__}.{cls.__qualname__}" for _, cls in owners() if isinstance(cls, type)}
    known = {owner for owner, _ in before}
    names += [
        f"{owner}.{name}"
        for owner, name in after.keys() - before.keys()
        if owner in known & classes and name not in CACHES
    ]
    return names, functions


CACHES = ("__slotnames__", "__abstractmethods__")  # Python stores these in classes


def outcome(call: Callable[[], Any]) -> str:
    """Return the result or error of a call, as text that is equal for equal results."""
    torch.manual_seed(0)
    try:
        result = call()
    except BaseException as error:
        return f"{type(error).__name__}: {error}".split("\nException raised from")[0]
    return re.sub("0x[0-9a-f]+", "0x...", described(result))


def described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{type(value).__name__}{value!r}{value.dtype}{tuple(value.shape)}"
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__}({', '.join(map(described, value))})"
    if type(value).__repr__ is object.__repr__ or "object at 0x" in repr(value) or callable(value):
        return type(value).__name__
    return repr(value)[:500]


class Duck:
    """Has a `__torch_function__`, but is not a tensor."""

    dtype = torch.float32

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> str:
        return f"duck {torch.overrides.resolve_name(func)} {len(args)} {sorted(kwargs or {})}"


class Sub(torch.Tensor):
    """An empty subclass."""


class Noting(torch.Tensor):
    """A subclass whose `__torch_function__` looks functions up in a table, as many do."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in TABLE:
            return f"table has {TABLE[func]}"
        return super().__torch_function__(func, types, args, kwargs)


TENSOR_METHODS = ("tolist", "numpy", "__array__", "__deepcopy__", "__repr__", "new_tensor", "new", "is_set_to", "map_")
TABLE = {getattr(torch.Tensor, name): name for name in TENSOR_METHODS if name not in ("__repr__",)}
TABLE[torch.sparse_coo_tensor] = "sparse_coo_tensor"


def valid_calls() -> dict[str, Callable[[], Any]]:
    """Call in all forms that the originals accept, by position and by keyword."""

    def x() -> torch.Tensor:
        return torch.arange(6.0).reshape(2, 3)

    def s() -> torch.UntypedStorage:
        return torch.UntypedStorage([1, 2, 3, 4, 5, 6, 7, 8])

    sparse = {"indices": [[0, 1], [1, 0]], "values": [1.0, 2.0], "size": (2, 2)}
    csr = {"crow_indices": [0, 1, 2], "col_indices": [0, 1], "values": [1.0, 2.0], "size": (2, 2)}
    bsr = {**csr, "values": [[[1.0]], [[2.0]]]}
    csc = {"ccol_indices": [0, 1, 2], "row_indices": [0, 1], "values": [1.0, 2.0], "size": (2, 2)}
    bsc = {**csc, "values": [[[1.0]], [[2.0]]]}
    compressed = {"compressed_indices": [0, 1, 2], "plain_indices": [0, 1], "values": [1.0, 2.0], "size": (2, 2)}
    calls: dict[str, Callable[[], Any]] = {
        "new(size=)": lambda: x().new(size=(3, 4)).shape,
        "new(2, 3)": lambda: x().new(2, 3).shape,
        "new(torch.Size)": lambda: x().new(torch.Size([2])).shape,
        "new(data=)": lambda: x().new(data=[1.0, 2.0]),
        "new([...])": lambda: x().new([1.0, 2.0]),
        "new(other=)": lambda: x().new(other=torch.ones(2)),
        "new(tensor)": lambda: x().new(torch.ones(2)),
        "new(device=)": lambda: x().new(2, device="cpu").shape,
        "new(storage)": lambda: x().new(torch.FloatStorage([1.0, 2.0])),
        "new(storage=)": lambda: x().new(storage=torch.FloatStorage([1.0, 2.0])),
        "new(device=None)": lambda: x().new([1.0], device=None),
        "new of subclass": lambda: x().as_subclass(Sub).new(size=(2,)).shape,
        "new of sparse": lambda: torch.eye(2).to_sparse().new(indices=torch.tensor([[0], [1]]), values=torch.ones(1)),
        "new_tensor(data=)": lambda: x().new_tensor(data=[1, 2], dtype=torch.int64, requires_grad=False),
        "new_tensor(list)": lambda: x().new_tensor([1, 2], device=None),
        "new_tensor of subclass": lambda: x().as_subclass(Sub).new_tensor([1.0]),
        "map_(other=, callable=)": lambda: x().map_(other=x(), callable=lambda a, b: a + b),
        "map_(...)": lambda: x().map_(x(), lambda a, b: a * b),
        "map2_(x=, y=, callable=)": lambda: x().map2_(x=x(), y=x(), callable=lambda a, b, c: a + b + c),
        "apply_(...)": lambda: x().apply_(lambda a: a + 1),
        "apply_(callable=)": lambda: x().apply_(callable=lambda a: a + 1),
        "numpy(force=)": lambda: x().requires_grad_().numpy(force=True).tolist(),
        "numpy()": lambda: x().numpy().tolist(),
        "bound numpy": lambda: x().numpy.__call__().tolist(),
        "__array__(dtype=)": lambda: x().__array__(dtype="float64").tolist(),
        "__array__(dtype)": lambda: x().__array__("float64").tolist(),
        "__dlpack__(stream=)": lambda: type(x().__dlpack__(stream=None, copy=False)),
        "from_dlpack": lambda: torch.from_dlpack(x()),
        "tolist": lambda: x().tolist(),
        "is_set_to(tensor=)": lambda: x().is_set_to(tensor=x()),
        "is_set_to itself": lambda: (lambda y: y.is_set_to(y))(x()),
        "repr": lambda: repr(x()),
        "__repr__(tensor_contents=)": lambda: x().__repr__(tensor_contents="..."),
        "deepcopy": lambda: copy.deepcopy([x(), torch.nn.Parameter(x())]),
        "deepcopy of subclass": lambda: copy.deepcopy(x().as_subclass(Sub)),
        "__deepcopy__(memo=)": lambda: x().__deepcopy__(memo={}),
        "version": lambda: x().add_(1)._version,
        "data_ptr": lambda: torch.empty(0).data_ptr(),
        "save(obj=, f=)": lambda: torch.save(obj=x(), f=io.BytesIO(), pickle_protocol=4),
        "load": lambda: torch.load(_saved(x())),
        "pickled tensor": lambda: pickle.loads(pickle.dumps(x())),
        "copied tensor": lambda: copy.copy(x()),
        "sparse_coo_tensor": lambda: torch.sparse_coo_tensor(**sparse),
        "sparse_coo_tensor(...)": lambda: torch.sparse_coo_tensor([[0], [1]], [1.0], dtype=torch.float64),
        "sparse_csr_tensor": lambda: torch.sparse_csr_tensor(**csr),
        "sparse_bsr_tensor": lambda: torch.sparse_bsr_tensor(**bsr),
        "sparse_csc_tensor": lambda: torch.sparse_csc_tensor(**csc),
        "sparse_bsc_tensor": lambda: torch.sparse_bsc_tensor(**bsc),
        "sparse_compressed_tensor": lambda: torch.sparse_compressed_tensor(**compressed, layout=torch.sparse_csr),
        "storage[i]": lambda: (s()[2], s()[-1]),
        "storage[i:j]": lambda: s()[2:4].tolist(),
        "storage[i] = x": lambda: (lambda y: (y.__setitem__(1, 7), y.tolist()))(s()),
        "storage[i:j] = x": lambda: (lambda y: (y.__setitem__(slice(0, 2), 9), y.tolist()))(s()),
        "storage.fill_": lambda: s().fill_(3).tolist(),
        "storage.copy_": lambda: s().copy_(s()).tolist(),
        "storage.copy_(source=)": lambda: s().copy_(source=s(), non_blocking=False).tolist(),
        "storage.resize_": lambda: s().resize_(2).tolist(),
        "storage.clone": lambda: s().clone().tolist(),
        "storage deepcopy": lambda: copy.deepcopy(s()).tolist(),
        "storage repr": lambda: repr(s()),
        "storage.is_shared": lambda: (s().is_shared(), s().share_memory_().is_shared()),
        "storage.is_pinned": lambda: s().is_pinned(),
        "storage._get_filename": lambda: s()._get_filename(),
        "UntypedStorage(n)": lambda: torch.UntypedStorage(3).nbytes(),
        "UntypedStorage(device=)": lambda: torch.UntypedStorage(3, device="meta").device,
        "UntypedStorage()": lambda: torch.UntypedStorage().tolist(),
        "duck tolist": lambda: torch.Tensor.tolist(Duck()),
        "duck numpy": lambda: torch.Tensor.numpy(Duck(), force=True),
        "duck new": lambda: torch.Tensor.new(Duck(), size=(1,)),
        "duck new_tensor": lambda: torch.Tensor.new_tensor(Duck(), [1]),
        "duck repr": lambda: torch.Tensor.__repr__(Duck()),
        "duck deepcopy": lambda: torch.Tensor.__deepcopy__(Duck(), {}),
        "duck __array__": lambda: torch.Tensor.__array__(Duck()),
        "duck map_": lambda: torch.Tensor.map_(x(), Duck(), None),
        "duck is_set_to": lambda: x().is_set_to(Duck()),
        "duck RNN": lambda: outcome(lambda: torch.nn.RNN(3, 2)(Duck())),
        "duck LSTM": lambda: outcome(lambda: torch.nn.LSTM(3, 2)(Duck())),
        "duck GRU": lambda: outcome(lambda: torch.nn.GRU(3, 2)(Duck())),
        "duck check_input": lambda: torch.nn.RNN(3, 2).check_input(Duck(), None),
        "duck sparse": lambda: torch.sparse_coo_tensor(Duck(), Duck()),
        "RNN of the wrong dtype": lambda: torch.nn.RNN(3, 2)(x().double()),
        **{f"table {n}": lambda n=n: getattr(x().as_subclass(Noting), n)(*_arguments(n)) for n in TENSOR_METHODS},
        "vmap": lambda: torch.vmap(torch.sin, in_dims=1, out_dims=1)(x()),
        "grad": lambda: torch.func.grad(lambda y: (y * y).sum())(x()),
        "checkpoint": lambda: _checkpointed(x(), use_reentrant=False),
        "reentrant checkpoint": lambda: _checkpointed(x(), use_reentrant=True),
        "backward(retain_graph=)": lambda: _backward(x()),
        "autograd.grad": lambda: torch.autograd.grad([(x().requires_grad_() * 2).sum()], [], allow_unused=True),
        "trunc_normal_": lambda: torch.nn.init.trunc_normal_(x(), a=-1, b=1, generator=torch.Generator()),
        "sparse adam": lambda: _step(torch.optim.SparseAdam),
        "adagrad": lambda: _step(torch.optim.Adagrad),
        "load_state_dict": lambda: _load_state(),
        "lazy linear": lambda: torch.nn.LazyLinear(2)(x()).shape,
        "DisableAutocast": lambda: _without_autocast(),
        "inference mode": lambda: _in_inference_mode(),
        "FakeTensorMode": lambda: _in_fake_tensor_mode(),
    }  # fmt: skip
    return calls


def _arguments(name: str) -> tuple[Any, ...]:
    given = {"__deepcopy__": ({},), "new_tensor": ([1],), "new": (2,), "is_set_to": (torch.ones(1),)}
    return (torch.ones(2, 3), max) if name == "map_" else given.get(name, ())


def _saved(obj: object) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(obj, file)
    file.seek(0)
    return file


def _checkpointed(x: torch.Tensor, use_reentrant: bool) -> Any:
    x.requires_grad_()
    torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=use_reentrant).sum().backward()
    return x.grad


def _backward(x: torch.Tensor) -> Any:
    x.requires_grad_()
    y = (x * x).sum()
    y.backward(retain_graph=True)
    torch.autograd.backward(tensors=[y], grad_tensors=[torch.ones(())], inputs=[x])
    return x.grad


def _step(optimizer: Any) -> Any:
    module = torch.nn.Embedding(3, 2, sparse=True)
    module(torch.tensor([0, 0, 2])).sum().backward()
    optimizer(module.parameters()).step()
    return module.weight.detach()


def _load_state() -> Any:
    module = torch.nn.Linear(2, 2)
    module(torch.ones(1, 2)).sum().backward()
    first, second = (torch.optim.Adam(module.parameters()) for _ in range(2))
    first.step()
    second.load_state_dict(first.state_dict())
    return [value for state in second.state.values() for value in state.values()]


def _without_autocast() -> bool:
    with torch.autocast("cpu"), torch._C._DisableAutocast():
        return torch.is_autocast_enabled("cpu")


def _in_inference_mode() -> str:
    with torch.inference_mode():
        x = torch.ones(2)
    return outcome(lambda: x._version) + outcome(lambda: torch.nn.Linear(2, 2)(x))


def _in_fake_tensor_mode() -> str:
    with torch._subclasses.FakeTensorMode() as mode:
        return f"{mode.from_tensor(torch.ones(2))} {torch.ones(3)}"


def wrong_calls(function: Any) -> dict[str, str]:
    """Return the outcomes of calls with mostly wrong arguments, in type or in number."""
    if isinstance(function, type):
        return {}
    x, s = torch.arange(6.0).reshape(2, 3), torch.UntypedStorage([1, 2])
    tried: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        *(((), {}), ((x,), {"nonsense": 1}), ((s,), {"nonsense": 1}), ((), {"self": x})),
        *(((value,) * n, {}) for value in ("wrong", 1.5, [1], x) for n in range(1, 7)),
        *(((s, *([1] * n)), {}) for n in (2, 3, 7)),
        *(((x, *([object] * n)), {}) for n in (2, 3, 7)),
    ]
    return {
        f"{position}: {args} {kwargs}": outcome(lambda args=args, kwargs=kwargs: function(*args, **kwargs))
        for position, (args, kwargs) in enumerate(tried)
    }


# Functions that are not deterministic with such arguments, or that must not be called with them.
NOT_CALLED_WRONGLY = {"save", "_write_file", "_share_filename_cpu_", "_share_fd_cpu_", "const_data_ptr", "data_ptr"}


def properties(function: Any) -> dict[str, str]:
    """Return the properties of a callable that are visible without calling it."""
    facts: dict[str, Callable[[], Any]] = {
        "type": lambda: type(function),
        "repr": lambda: repr(function),
        "hash": lambda: hash(function),
        **{name: lambda name=name: getattr(function, name) for name in ("__name__", "__qualname__", "__module__")},
        **{name: lambda name=name: getattr(function, name) for name in ("__doc__", "__text_signature__", "__self__")},
        **{name: lambda name=name: getattr(function, name) for name in ("__defaults__", "__kwdefaults__")},
        **{name: lambda name=name: getattr(function, name) for name in ("__annotations__", "__objclass__")},
        "signature": lambda: inspect.signature(function),
        "kinds": lambda: [kind(function) for kind in KINDS],
        "source": lambda: inspect.getsource(function),
        "help": lambda: inspect.getdoc(function),
        **{f"pickle {protocol}": lambda p=protocol: _pickled(function, p) for protocol in range(6)},
        "copy": lambda: (copy.copy(function) is function, copy.deepcopy(function) is function),
        "resolved name": lambda: torch.overrides.resolve_name(function),
        "is a method": lambda: torch.overrides.is_tensor_method_or_property(function),
        "is overridable": lambda: function in torch.overrides.get_testing_overrides(),
        "is ignored": lambda: function in torch.overrides.get_ignored_functions(),
        "builtin of TorchScript": lambda: torch.jit._builtins._find_builtin(function),
        "dynamo": lambda: torch._dynamo.trace_rules.lookup(function),
    }
    return {name: _fact(fact) for name, fact in facts.items()}


KINDS = (
    *(inspect.isfunction, inspect.isbuiltin, inspect.isroutine, inspect.ismethoddescriptor, inspect.isdatadescriptor),
    *(inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isclass, callable),
)


def _pickled(function: Any, protocol: int) -> str:
    data = pickle.dumps(function, protocol)
    return f"{data!r} {pickle.loads(data) is function}"


def _fact(fact: Callable[[], Any]) -> str:
    try:
        return str(fact())
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def overridable() -> set[int]:
    return {
        id(function) for functions in torch.overrides.get_overridable_functions().values() for function in functions
    }


def scripted() -> dict[str, str]:
    """Code that calls patched functions, compiled by TorchScript."""

    def factories(x: torch.Tensor) -> torch.Tensor:
        return torch.sparse_coo_tensor(x.long(), x[0], [5, 5]).to_dense()

    def initialized(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.init._no_grad_trunc_normal_(x, 0.0, 1.0, -1.0, 1.0)

    made: dict[str, Callable[[], Any]] = {
        "factories": lambda: torch.jit.script(factories),
        "initialized": lambda: torch.jit.script(initialized),
        "tolist": lambda: torch.jit.script(_listed)(torch.ones(2)),
        **{
            name: lambda name=name: str(torch.jit.script(Recurrent(getattr(torch.nn, name)))(torch.ones(1, 3)).shape)
            for name in ("RNN", "LSTM", "GRU")
        },
    }
    return {name: outcome(make) for name, make in made.items()}


class Recurrent(torch.nn.Module):
    """A recurrent network as a submodule: TorchScript compiles only submodules."""

    def __init__(self, kind: type[torch.nn.RNNBase]) -> None:
        super().__init__()
        self.net = kind(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)[0]


def _listed(x: torch.Tensor) -> list[float]:
    values: list[float] = x.tolist()
    return values


def traced() -> dict[str, str]:
    """Code that calls patched functions, traced by Dynamo into one graph."""

    def of(function: Callable[..., Any], *args: Any) -> Callable[[], str]:
        def run() -> str:
            torch._dynamo.reset()
            return outcome(lambda: torch.compile(function, backend="eager", fullgraph=True)(*args)).split("\n")[0]

        return run

    x = torch.arange(6.0).reshape(2, 3)
    weight = torch.nn.Parameter(torch.ones(3))

    def adagrad() -> torch.Tensor:
        weight.grad = torch.ones(3)
        torch.optim.Adagrad([weight]).step()
        return weight.detach()

    made = {
        "new": of(lambda y: y.new(2, 3).zero_(), x),
        "new_tensor": of(lambda y: y.new_tensor([1.0]) + y, x),
        "tolist": of(lambda y: torch.ones(2) * y.tolist()[0][1], x),
        "numpy": of(lambda y: torch.from_numpy(y.numpy() + 1), x),
        "is_set_to": of(lambda y: y + 1 if y.is_set_to(y) else y, x),
        "data_ptr": of(lambda y: y + (y.data_ptr() == y.data_ptr()), x),
        "sparse": of(lambda y: torch.sparse_coo_tensor(y.long(), y[0], (5, 5)).to_dense(), x),
        "trunc_normal_": of(lambda y: torch.nn.init.trunc_normal_(y), x.clone()),
        "deepcopy": of(lambda y: copy.deepcopy(y) + 1, x),
        "adagrad": of(adagrad),
        "vmap": of(lambda y: torch.vmap(torch.sin)(y), x),
        "grad": of(lambda y: torch.func.grad(lambda z: z.sin().sum())(y), x),
        "checkpoint": of(lambda y: torch.utils.checkpoint.checkpoint(torch.sin, y, use_reentrant=False), x),
        "check_input": of(lambda y: torch.nn.RNNBase.check_input(RNN, y, None), x),
        "inference mode": of(lambda y: _doubled_in_inference_mode(y), x),
        "version": of(lambda y: y + y._version, x),
        "function": of(lambda y: Doubled.apply(y), x),
    }
    return {name: run() for name, run in made.items()}


def compiled_with_breaks() -> dict[str, tuple[int, int]]:
    """Return the number of graphs that Dynamo makes of code with graph breaks, and their numbers of operators."""

    def count(function: Callable[..., Any], *args: Any) -> tuple[int, int]:
        torch._dynamo.reset()
        counter = torch._dynamo.testing.CompileCounter()  # type: ignore[no-untyped-call]
        # Functions after a graph break are compiled separately.
        with torch._dynamo.config.patch(nested_graph_breaks=True):
            torch.compile(function, backend=counter)(*args)
        return counter.frame_count, counter.op_count

    x = torch.arange(6.0).reshape(2, 3)
    layer = torch.nn.Linear(3, 3)

    def saved() -> torch.Tensor:
        torch.save(x, io.BytesIO())
        return x + 1

    def step() -> torch.Tensor:
        copied = copy.deepcopy(layer)
        optimizer = torch.optim.AdamW(copied.parameters())
        copied(x).sum().backward()
        optimizer.step()
        return copied.weight + 1

    return {
        "deepcopy of a module": count(lambda module, y: copy.deepcopy(module)(y), torch.nn.Sequential(layer), x),
        "deepcopy of a tensor": count(lambda: copy.deepcopy(x) + 1),
        "repr": count(lambda: x + len(repr(x))),
        "save": count(saved),
        "storage": count(lambda: x.untyped_storage().data_ptr() * 0 + x),
        "numpy": count(lambda: (torch._dynamo.graph_break(), x.numpy(), x.tolist(), x + 1)),
        "training": count(step),
    }


RNN = torch.nn.RNN(3, 2)


def _doubled_in_inference_mode(x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return x * 2


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2


def candidates(found: Found) -> dict[int, tuple[str, Any]]:
    """Return all callables of PyTorch, by identity, with a name each."""
    return {
        id(value): (f"{owner}.{name}", value)
        for (owner, name), (static, _) in found.items()
        for value in [_function(static)]
        if callable(value) or inspect.isdatadescriptor(value)
    }


def main() -> None:
    if "--without-dynamo" not in sys.argv:
        importlib.import_module("torch._dynamo.testing")
        torch._dynamo.reset()
    if "--compiled" in sys.argv:  # only once in a process: Dynamo remembers failures
        if "--used" in sys.argv:
            use_everything()
        print(json.dumps(compiled_with_breaks()))
        return
    if "--warm" in sys.argv:  # lets `torch.overrides` fill its caches before anything is patched
        torch.overrides.get_overridable_functions()
        torch.overrides.get_testing_overrides()
    found = namespace()
    names = [arg for arg in sys.argv[1:] if not arg.startswith("--")]
    callables = candidates(found)
    chosen = {key: value for key, value in callables.items() if value[0] in names}

    def look() -> dict[str, Any]:
        return {
            "properties": {name: properties(function) for name, function in chosen.values()},
            "wrong calls": {
                name: wrong_calls(function)
                for name, function in chosen.values()
                if name.split(".")[-1] not in NOT_CALLED_WRONGLY and not inspect.isdatadescriptor(function)
            },
            "calls": {name: outcome(call) for name, call in valid_calls().items()},
            "scripted": scripted(),
            "traced": traced(),
        }

    before = look() if names else {}
    overridable_before = overridable() if "--warm" in sys.argv else set()
    holders = use_everything()
    after = look() if names else {}
    other_names, functions = exchanged(found, namespace())
    ids = {id(function) for function in functions}
    listed = [patch.function for patch in torchext.inspect.patches() if patch.is_installed]
    holders.clear()
    gc.collect()
    left_names, left_functions = exchanged(found, namespace())
    print(
        json.dumps(
            {
                "before": before,
                "after": after,
                "exchanged names": other_names,
                "left behind": [*left_names, *(callables[id(function)][0] for function in left_functions)],
                "still listed": [repr(patch) for patch in torchext.inspect.patches() if patch.is_installed],
                "patched": [callables[id(function)][0] for function in listed if id(function) in callables],
                "unlisted": [callables[key][0] for key in ids - set(map(id, listed))],
                "overridable": overridable_before == (overridable() if "--warm" in sys.argv else set()),
            }
        )
    )


if __name__ == "__main__":
    main()
