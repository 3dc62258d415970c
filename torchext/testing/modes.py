"""The modes of the plugin: each replaces functions of PyTorch in the tests of a suite by those of torchext.

The control run of a mode replaces the same functions by wrappers that pass calls through. A test that fails in it fails
because of the replacing, not because of torchext.
"""

from __future__ import annotations

import copy
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import wraps
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch._subclasses import fake_tensor
from torch.utils._device import _device_constructors
from torch.utils.weak import WeakIdKeyDictionary

from .. import amp, inspect
from ..deferred_init import (
    defer_again,
    deferred_init,
    explain,
    export_graph,
    is_deferred,
    materialize_module,
    materialize_tensor,
    summary,
    tracing,
)
from ..fake import cache_clear, cache_info, fake_like, fake_mode, is_fake, meta_like
from ..inference import inference_mode, normal_tensors, origin, to_normal, trace_origins

__all__ = ["enter_mode", "replace_everywhere"]


def enter_mode(mode: str, is_control: bool = False) -> None:
    """Enter `mode` for the rest of the process. The state of random generators does not change.

    Args:
        mode: One of MODES.
        is_control: Replace the mode's functions by pass-through wrappers.
    """
    with torch.random.fork_rng(devices=[]):
        _MODES[mode](is_control)


# ---- Mode `installed`


def _enter_installed(is_control: bool) -> None:
    """Use every feature of torchext once, so that all patches are declared. Nothing else is changed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for use in (_use_fakes, _use_deferred, _use_inference_mode, _use_autocast, _use_inspection):
            use()


def _use_fakes() -> None:
    for fake_cuda in (0, 2):
        with fake_mode(gpu=fake_cuda):
            model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.LSTM(2, 2))
            optimizer = torch.optim.AdamW(model.parameters())
            model(torch.randn(3, 2))[0].sum().backward()
            optimizer.step()
            repr(model[0].weight)
            if fake_cuda and not torch.cuda.is_initialized():
                torch.ones(2, device="cuda").sum()
    copy.deepcopy(fake_like(model))
    meta_like(fake_like(torch.ones(2)))
    torch.ones(2).to_sparse(), fake_like(torch.ones(2).to_sparse())
    cache_info()
    cache_clear()


def _use_deferred() -> None:
    with deferred_init(trace=True):
        model = nn.Transformer(8, 2, 1, 1, 8)
    with tracing():
        nn.init.trunc_normal_(model.encoder.layers[0].linear1.weight)
    parameter = next(model.parameters())
    explain(parameter), summary(model)
    export_graph(model, os.devnull)
    copy.deepcopy(deferred_init(nn.Linear, 2, 2)).weight.tolist()
    materialize_module(model, retain_graph=True)
    defer_again(model)
    materialize_module(model, device="cpu", dtype=torch.float64)
    materialize_tensor(deferred_init(torch.nn.UninitializedParameter))


def _use_inference_mode() -> None:
    trace_origins(True)
    trace_origins(False)
    with inference_mode(trace=True):
        tensor = torch.ones(2)
        with normal_tensors():
            torch.ones(2)
    origin(tensor), to_normal(tensor)
    inference_mode(lambda: None)()


def _use_autocast() -> None:
    tensor = torch.ones(2, 2)
    with amp.autocast("cpu"):
        tensor @ tensor
    with amp.autocast("cpu", self_cleaning=True):
        (tensor @ tensor).sum()
    amp.autocast("cpu")(lambda: tensor @ tensor)()
    amp.full_precision(amp.lower_precision(torch.mm))(tensor, tensor)
    model = amp.to_amp(nn.Linear(2, 2))
    model(amp.to_amp(torch.ones(2, 2, requires_grad=True))).sum().backward()
    amp.to_normal(model)
    amp.policy("aten::mm", "cpu")


def _use_inspection() -> None:
    inspect.route("aten::mm", torch.ones(2, 2), torch.ones(2, 2))
    inspect.tensor_state(torch.ones(2))


# ---- Mode `fake`


PyTorchFakeTensor: Any = fake_tensor.FakeTensor
PyTorchFakeTensorMode: Any = fake_tensor.FakeTensorMode


class _FakeTensors(type):
    """A class whose instances are determined by the tensor, not by its Python class."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, PyTorchFakeTensor) or (isinstance(instance, torch.Tensor) and is_fake(instance))

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, PyTorchFakeTensor)

    def __getattr__(cls, name: str) -> Any:
        return getattr(PyTorchFakeTensor, name)


class FakeTensor(metaclass=_FakeTensors):
    """torchext's fake tensors, and PyTorch's."""


class FakeTensorMode:
    """The part of FakeTensorMode that tests use, implemented by `fake_mode` and `fake_like`."""

    def __init__(self, **kwargs: Any) -> None:
        self._open: list[ExitStack] = []
        self._fakes = WeakIdKeyDictionary()

    def __enter__(self) -> FakeTensorMode:
        block = ExitStack()
        block.enter_context(fake_mode())
        self._open.append(block)
        return self

    def __exit__(self, *error: Any) -> Any:
        return self._open.pop().__exit__(*error)

    def from_tensor(self, tensor: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Return the fake of a tensor, the same object for each call."""
        if tensor not in self._fakes:
            self._fakes[tensor] = fake_like(tensor)
        fake: torch.Tensor = self._fakes[tensor]
        return fake


class _Module(ModuleType):
    """A module with other values for some names in tests. Properties take precedence over the module's own names."""

    @property
    def FakeTensor(self) -> type:  # noqa: N802 - PyTorch's name
        return FakeTensor if _is_called_by_tests() else PyTorchFakeTensor

    @property
    def FakeTensorMode(self) -> type:  # noqa: N802 - PyTorch's name
        return FakeTensorMode if _is_called_by_tests() else PyTorchFakeTensorMode


def _enter_fake(is_control: bool) -> None:
    """Make FakeTensorMode in tests torchext's `fake_mode`.

    PyTorch itself, for example `torch.compile`, keeps its own FakeTensorMode, because it relies on internals of that
    class and has tables keyed by it. So modules with this name return PyTorch's class to PyTorch, and ours to others.
    """
    for module in (torch._subclasses, fake_tensor):
        module.__class__ = _Module


# ---- Mode `deferred`


class _Thread(threading.local):
    is_constructing = False
    """Whether a deferred constructor of a module is running."""


_thread = _Thread()


def _enter_deferred(is_control: bool) -> None:
    """Defer modules that tests construct, and materialize them immediately.

    A constructor call is `type.__call__`, which cannot be replaced. It calls the `__init__` of the class, so each
    module class gets an `__init__` that defers the original. Nested calls by `super().__init__()` pass through.
    """
    defer = _call_init if is_control else _defer_init
    for cls in list(_subclasses(nn.Module)):
        _replace_init(cls, defer)

    def __init_subclass__(cls: type[nn.Module], /, **kwargs: Any) -> None:
        super(nn.Module, cls).__init_subclass__(**kwargs)
        _replace_init(cls, defer)

    nn.Module.__init_subclass__ = classmethod(__init_subclass__)  # type: ignore[assignment]


def _subclasses(cls: type[nn.Module]) -> Iterator[type[nn.Module]]:
    for subclass in cls.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


def _replace_init(cls: type[nn.Module], defer: Callable[..., None]) -> None:
    original: Any = vars(cls).get("__init__")
    if original is None or hasattr(original, "_is_deferred") or issubclass(cls, torch.jit.ScriptModule):
        return

    @wraps(original)
    def __init__(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        if _thread.is_constructing or torch.compiler.is_compiling() or not _is_called_by_tests():
            original(self, *args, **kwargs)
            return
        _thread.is_constructing = True
        try:
            defer(original, self, *args, **kwargs)
        finally:
            _thread.is_constructing = False

    __init__._is_deferred = True  # type: ignore[attr-defined]
    cls.__init__ = __init__  # type: ignore[method-assign]


def _call_init(original: Callable[..., None], module: nn.Module, *args: Any, **kwargs: Any) -> None:
    original(module, *args, **kwargs)


def _defer_init(original: Callable[..., None], module: nn.Module, *args: Any, **kwargs: Any) -> None:
    def construct() -> None:
        original(module, *args, **kwargs)

    deferred_init(construct)
    materialize_module(module)


# ---- Mode `deferred-factories`


def _enter_deferred_factories(is_control: bool) -> None:
    """Defer tensors of factory functions and modules, and materialize them immediately."""
    _enter_deferred(is_control)
    for factory in _factories():
        replace_everywhere(factory, _deferring(factory, _call_factory if is_control else _defer_factory))


def _factories() -> Iterator[Callable[..., Any]]:
    """Return PyTorch's factory functions, including those that make a tensor like another."""
    yield from _device_constructors()
    for name in dir(torch):
        if name.endswith("_like"):
            yield getattr(torch, name)


def _deferring(factory: Callable[..., Any], defer: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(factory)
    def make(*args: Any, **kwargs: Any) -> Any:
        if _thread.is_constructing or torch.compiler.is_compiling() or not _is_called_by_tests():
            return factory(*args, **kwargs)
        return defer(factory, *args, **kwargs)

    operator = torch.jit._builtins._find_builtin(factory)
    if operator is not None:  # prevents TorchScript from compiling `make`
        torch.jit._builtins._register_builtin(make, operator)
    return make


def _call_factory(factory: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return factory(*args, **kwargs)


def _defer_factory(factory: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    result = deferred_init(lambda: factory(*args, **kwargs))
    if isinstance(result, torch.Tensor) and is_deferred(result):
        materialize_tensor(result)
    return result


# ---- Mode `inference`


def _enter_inference(is_control: bool) -> None:
    """Make `torch.inference_mode` torchext's."""
    replace_everywhere(torch.inference_mode, inference_mode)
    torch._C._InferenceMode = inference_mode  # type: ignore[assignment, misc]


# ---- Mode `autocast`


def _enter_autocast(is_control: bool) -> None:
    """Make `torch.autocast` enter and leave torchext's regions.

    The class keeps its arguments, warnings and attributes, which differ from torchext's; only its effect on the thread
    is replaced. Functions that it decorates run in such a region. Unlike torchext's decorator, it does not cast their
    results.
    """
    autocast: Any = torch.amp.autocast_mode.autocast
    original_enter = autocast.__enter__

    @wraps(original_enter)
    def __enter__(self: Any) -> Any:
        if torch.compiler.is_compiling() or torch._C._is_torch_function_mode_enabled():
            return original_enter(self)
        region = amp.autocast(
            self.device, dtype=self.fast_dtype, enabled=self._enabled, cache_enabled=self._cache_enabled
        )
        region.__enter__()
        # An object may be entered again while it is open.
        self.__dict__.setdefault("_torchext_regions", []).append(region)
        return self

    original_exit = autocast.__exit__

    @wraps(original_exit)
    def __exit__(self: Any, *error: Any) -> Any:
        regions = self.__dict__.get("_torchext_regions")
        if not regions:
            return original_exit(self, *error)
        return regions.pop().__exit__(*error)

    autocast.__enter__, autocast.__exit__ = __enter__, __exit__


# ---- Replacing


def replace_everywhere(original: object, replacement: object) -> None:
    """Replace the object in all imported modules and in the attributes of `torch._C`."""
    for module in list(sys.modules.values()):
        names: dict[str, Any] = getattr(module, "__dict__", {})
        if str(names.get("__name__")).partition(".")[0] != "torchext":
            for name in [name for name, value in list(names.items()) if value is original]:
                setattr(module, name, replacement)


def _is_called_by_tests() -> bool:
    """Return true if the calling function was called from outside PyTorch, or by PyTorch's test helpers."""
    name = str(sys._getframe(2).f_globals.get("__name__"))
    return not f"{name}.".startswith("torch.") or name.startswith("torch.testing.")


_MODES = {
    "installed": _enter_installed,
    "fake": _enter_fake,
    "deferred": _enter_deferred,
    "deferred-factories": _enter_deferred_factories,
    "inference": _enter_inference,
    "autocast": _enter_autocast,
}
