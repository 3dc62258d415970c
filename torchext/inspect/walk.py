"""The walk of a call over the dispatch keys.

NOTE [Following a call]

The dispatcher begins with the keys of the tensor arguments and those that the thread includes, without those that it
excludes, and picks the highest. Each kernel decides where the call goes next. A kernel may do anything, but PyTorch's
kernels follow a few patterns:

- A kernel above the backends redispatches to the keys below its own. It does not read the arguments again, but removes
  keys from the key set that it received. Autograd kernels remove all autograd keys.
- An autocast kernel casts the arguments and repeats the call with its own key excluded, so keys above it are visited
  twice.
- A BackendSelect kernel adds the backend for `dtype`, `layout` and `device` to the key set.
- A composite kernel calls other operators.
- The next step of kernels that wrap tensors (functionalization, torch.func) or are written in Python cannot be
  predicted here, so a route ends there.
- torchext's fallbacks report the decision that they would make (`predictFake()`, `predictRecorder()`, `predictAmp()`).

A kernel of another library, at a key above the backends, is assumed to pass the call on.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TypeAlias

import torch
from torch._C import DispatchKey, DispatchKeySet

from .. import _C

__all__ = ["Walk"]

_Step: TypeAlias = tuple[str, str, str, bool, str, str]
_Turn: TypeAlias = tuple[str, str]  # the turn and the comment of a `RouteStep`

_ENDS = ("decomposes", "computes", "calls Python", "raises")

_MARKS = "TESTING_ONLY_GenericMode"
_COMPOSITES = "TESTING_ONLY_GenericWrapper"
# The keys of views that are conjugated, negated or filled with zeros on reads.
_LAZY = ("Conjugate", "Negative", "ZeroTensor")
_NO_KEYS = DispatchKeySet(DispatchKey.Undefined)
# Dense backends, sparse, quantized, nested. `PythonDispatcher` is in all sets of keys below another.
_BACKENDS = torch._C._dispatch_keyset_full_after("BackendSelect").remove("PythonDispatcher")

# The origins of kernels, by the texts with which `computeDispatchTableEntryWithDebug()` explains its choice.
_ORIGINS = {
    "math kernel": "CompositeImplicitAutograd",
    "nested kernel": "CompositeImplicitAutogradNestedTensor",
    "autograd kernel": "Autograd",
    "batched kernel": "FuncTorchBatchedDecomposition",
    "backend fallback": "fallback",
}
# Alias keys whose kernels only call other operators, and inherit differentiability, batching and so on from them.
# `CompositeExplicitAutograd` is not among them: its kernels replace those of a backend.
_COMPOSITE_ORIGINS = (
    "CompositeImplicitAutograd",
    "CompositeImplicitAutogradNestedTensor",
    "FuncTorchBatchedDecomposition",
)

_TRANSFORMED = ("decomposes", "the innermost transform of torch.func handles the call from here")
_LAST_TURNS = {
    "FuncTorchDynamicLayerFrontMode": _TRANSFORMED,
    "FuncTorchDynamicLayerBackMode": _TRANSFORMED,
    "FuncTorchBatched": _TRANSFORMED,
    "FuncTorchVmapMode": _TRANSFORMED,
    "BatchedNestedTensor": _TRANSFORMED,
    "Functionalize": ("decomposes", "makes the call without mutations on the wrapped tensors"),
    "Python": ("calls Python", "a __torch_dispatch__ handles the call from here"),
    "PythonDispatcher": ("calls Python", "the dispatcher that is written in Python handles the call from here"),
}

# The turns of torchext's fallbacks, by the decisions that they report. Without a comment here, the decision has one.
_FAKE_TURNS = {
    "passes on": ("passes on", ""),
    "runs for real": ("passes on", "the call does not involve fake tensors"),
    "lifts": ("computes", "makes a fake of the constant"),
    "pins": ("computes", "copies the metadata"),
    "decomposes": ("decomposes", "runs the composite kernel"),
    "handler computes": ("computes", ""),
    "handler decomposes": ("decomposes", ""),
    "handler passes on": ("passes on", ""),
    "Meta kernel": ("passes on", "calls the Meta kernel for the metadata, unless they are cached"),
    "composite kernel": (
        "decomposes",
        "calls the composite kernel for the metadata, on the meta device, unless they are cached",
    ),
    "fake implementation": (
        "decomposes",
        "calls the function of `torch.library.register_fake` on fakes for the metadata",
    ),
    "own kernel": ("computes", "makes fakes by a rule of torchext"),
    "kernel on zeros": ("decomposes", "calls the CPU kernel for the metadata, on zeros"),
    "no kernel": ("raises", "the operator has no Meta kernel"),
    "not implemented": ("raises", ""),
    "refuses": ("raises", ""),
}
_RECORDER_TURNS = {
    "decomposes": ("passes on", "calls by the kernels below come here again"),
    "passes on": ("passes on", "the handler of Fake records the call; calls by the kernels in between come here again"),
    "passes on below": ("passes on", "the call does not involve deferred tensors"),
    "lifts": ("computes", "keeps the bytes of the constant"),
    "communicates": ("decomposes", "makes the deferred arguments real, and is called again"),
    "synchronizes": ("decomposes", "makes the call now, on a real tensor"),
}
_RECORDER_TURNS_BELOW_AUTOGRAD = {
    "communicates": _RECORDER_TURNS["communicates"],
    "synchronizes": _RECORDER_TURNS["synchronizes"],
    "shows": ("passes on", "the tensor becomes deferred"),
    "runs for real": ("passes on", "deferred_init makes the call now, on the values of the deferred arguments"),
}
_AMP_TURNS = {
    "passes on": ("passes on", "marks the results"),
    "passes on in backward": ("passes on", "marks the results"),
    "autocasts": ("passes on", "autocasts, because an argument is an AmpTensor"),
    "cleans": ("passes on", "casts results of a self-cleaning region to float32"),
}


class Walk:
    """The walk of a call of `operator`, which is never made: NOTE [Following a call]."""

    def __init__(self, operator: str, call: _C.PredictedCall) -> None:
        self._operator = operator
        self._call = call
        # The keys of the tensor arguments and of the thread.
        self._all_keys = call.keys()
        # The keys that kernels on the route have included in, and excluded from, those of the thread.
        self._included = self._excluded = _NO_KEYS
        # The key set that the next kernel will get.
        self._keys = self._all_keys
        # The recorder of deferred_init made the call. It runs operators that cannot be faked on real tensors.
        self._is_recorded = False

    def steps(self) -> Iterator[_Step]:
        """Yield the fields of each `RouteStep`, on this thread now. Calls no operator."""
        skipped: set[str] = set()  # keys may be visited twice
        turn = ""
        while turn not in _ENDS:
            key = self._keys.highestPriorityTypeId()  # an object: `_dispatch_key_parse()` rejects some names
            name = torch._C._dispatch_key_name(key)
            is_valid, is_fallthrough, is_python, source, reason = self._call.table_entry(key)
            origin = name if reason == "kernel" else self._origin(key, reason)
            if not is_valid or origin == "none":
                turn, comment = "raises", _first_sentence(self._call.missing_kernel_message(key))
            elif is_fallthrough and name == "Undefined":
                turn, comment = "raises", "the kernel falls through, but there is no key below"
            elif is_fallthrough:
                turn, comment = "skipped", ""
            else:
                turn, comment = self._follow(key, name, origin)
            if name not in skipped or turn != "skipped":
                yield name, origin, turn, is_python, source.removeprefix("registered at "), comment
            if turn == "skipped":
                skipped.add(name)
                self._keys &= torch._C._dispatch_keyset_full_after(key)
            elif turn == "passes on":
                # The kernels of all autograd keys mask with `after_autograd_keyset`.
                last = "AutogradOther" if name.startswith("Autograd") else key
                self._keys &= torch._C._dispatch_keyset_full_after(last)

    def _origin(self, key: DispatchKey, reason: str) -> str:
        if reason == "default backend kernel":
            strictest = "CompositeExplicitAutogradNonFunctional"
            is_strictest = torch._C._dispatch_has_kernel_for_dispatch_key(self._operator, strictest) and (
                key == DispatchKey.Undefined or torch._C._dispatch_is_included_in_alias(key, strictest)
            )
            return strictest if is_strictest else "CompositeExplicitAutograd"
        return _ORIGINS.get(reason, "none")

    def _follow(self, key: DispatchKey, name: str, origin: str) -> _Turn:
        """Return the turn of a kernel, and repeat its changes of the key sets. Keys above its own are removed later."""
        # The few kernels for lazy views that are not the fallback compute the result by other operators, as
        # `mul_zerotensor()` does.
        if origin in _COMPOSITE_ORIGINS or (name in _LAZY and origin != "fallback"):
            return "decomposes", ""
        if name == "Undefined" or _BACKENDS.has(key):
            return "computes", ""
        if name.startswith("Autocast"):
            self._excluded = self._excluded.add(key)
            self._keys = self._keys_at_start()
            return "starts over", "casts the arguments"
        followed = {
            "Fake": self._follow_fake,
            "DeferredInit": self._follow_recorder,
            _MARKS: self._follow_marks,
            _COMPOSITES: self._follow_composites,
            "BackendSelect": self._follow_backend_select,
        }
        return followed[name]() if name in followed else _LAST_TURNS.get(name, ("passes on", ""))

    def _keys_at_start(self) -> DispatchKeySet:
        """Return the initial key set of the dispatcher, including keys that fall through."""
        return (self._all_keys | self._included) - self._excluded

    def _follow_fake(self) -> _Turn:
        decision, details = self._call.predict_fake(self._keys, self._included, self._excluded, self._is_recorded)
        if decision == "records":
            return self._follow_recorder_below_autograd()
        if self._is_recorded and decision in ("not implemented", "no kernel"):
            return "decomposes", "cannot be faked, so deferred_init runs it for real"
        if decision == "runs for real":
            self._excluded = self._excluded.add("Fake")
        elif decision == "handler passes on":
            self._included = self._included.add("Fake")
        elif decision == "Meta kernel":
            self._keys = _NO_KEYS.add("Meta")
        turn, comment = _FAKE_TURNS[decision]
        return turn, comment or _first_sentence(details)

    def _follow_recorder(self) -> _Turn:
        decision = self._call.predict_recorder(self._keys, is_below_autograd=False)
        if decision == "passes on":
            self._keys = self._keys.add("Fake")
        elif decision == "passes on below":
            self._excluded = self._excluded.add("DeferredInit")
        return _RECORDER_TURNS.get(decision, _RECORDER_TURNS["decomposes"])

    def _follow_recorder_below_autograd(self) -> _Turn:
        """See NOTE [Recording below autograd]."""
        decision = self._call.predict_recorder(self._keys, is_below_autograd=True)
        if decision in _RECORDER_TURNS_BELOW_AUTOGRAD:
            self._excluded = self._excluded.add("Fake")
            return _RECORDER_TURNS_BELOW_AUTOGRAD[decision]
        self._is_recorded = True
        self._excluded = self._excluded.add("DeferredInit")
        self._included = self._included.add("Fake")
        return self._follow_fake()

    def _follow_marks(self) -> _Turn:
        """See NOTE [Marked tensors]."""
        decision, autocast_keys = self._call.predict_amp()
        self._excluded = self._excluded.add(_MARKS)
        self._keys |= autocast_keys
        return _AMP_TURNS[decision]

    def _follow_composites(self) -> _Turn:
        """See NOTE [Composites that read memory]."""
        return ("decomposes" if self._operator == "aten::max_pool1d" else "passes on"), ""

    def _follow_backend_select(self) -> _Turn:
        """Follow a generated kernel, which computes the key set again, with the backend that the arguments name.

        The key set contains the keys of tensor arguments and of the thread only if there are tensor arguments.
        """
        backend = self._call.selected_backend()
        if backend is None:
            return "decomposes", "chooses the backend by its own rule"
        self._keys = DispatchKeySet(backend)
        if self._call.has_tensors():
            self._keys |= self._keys_at_start()
        return "passes on", "chooses the backend by dtype, layout and device"


def _first_sentence(message: str) -> str:
    return re.split(r"\. |\n", message, maxsplit=1)[0]
