"""Our fakes support all that `FakeTensorMode` does: operators and modules, forward, backward, in place, `out=`.

Eager errors do not count: `FakeTensorMode` accepts in-place calls whose result has another shape.
"""

from __future__ import annotations

import itertools
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.lazy import LazyModuleMixin
from torch.testing._internal.common_device_type import instantiate_device_type_tests, ops
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import ModuleInfo, module_db, modules
from torch.testing._internal.common_utils import TestCase
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils._pytree import tree_leaves, tree_map

from torchext.fake import fake_like, fake_mode

pytestmark = pytest.mark.long

SAMPLES = 6

REFUSED = {
    "to_sparse": "how many elements the result has depends on values",
    "linspace": "its samples name the CPU",
    "logspace": "its samples name the CPU",
}

Call = Callable[[Any], Any]
Place = Callable[[Tensor], Tensor]


def differentiated(call: Call) -> Call:
    """Return the call with a backward pass of all its results that have gradients."""

    def run(arguments: Any) -> None:
        results = [t for t in tree_leaves(call(arguments)) if isinstance(t, Tensor) and t.requires_grad]
        if results:
            torch.stack([torch.view_as_real(t).sum() if t.is_complex() else t.sum() for t in results]).sum().backward()

    return run


def calls_of(op: OpInfo) -> Iterator[tuple[str, Call]]:
    """Yield the variants of an operator. They take the arguments of a sample."""
    yield "forward and backward", differentiated(lambda a: op.op(a[0], *a[1], **a[2]))
    in_place = op.inplace_variant
    if in_place is not None:
        yield "in place", differentiated(lambda a: in_place(a[0].clone(), *a[1], **a[2]))
    if op.supports_out:
        yield "out", lambda a: with_out(op, a)


@torch.no_grad()
def with_out(op: OpInfo, arguments: Any) -> None:
    first, rest, named = arguments
    results = op.op(first, *rest, **named)
    out = tree_map(lambda t: torch.empty_like(t) if isinstance(t, Tensor) else t, results)
    op.op(first, *rest, out=out, **named)


def placed(arguments: Any, place: Place) -> Any:
    """Return the arguments with leaves made of their tensors by `place`."""
    return tree_map(
        lambda t: place(t.detach()).requires_grad_(t.requires_grad) if isinstance(t, Tensor) else t, arguments
    )


def error_of(call: Call, arguments: Any, mode: AbstractContextManager[Any]) -> Exception | None:
    try:
        with mode:
            call(arguments)
    except Exception as error:
        return error
    return None


def foreign_error(call: Call, arguments: Any) -> Exception | None:
    mode = FakeTensorMode(allow_non_fake_inputs=False)
    return error_of(call, placed(arguments, mode.from_tensor), mode)


def own_error(call: Call, arguments: Any, device: str) -> Exception | None:
    with fake_mode(gpu=device == "cuda"):
        fakes = placed(arguments, lambda t: fake_like(t).to(device).detach())
        return error_of(call, fakes, nullcontext())


def eager_error(call: Call, arguments: Any) -> Exception | None:
    return error_of(call, placed(arguments, Tensor.clone), nullcontext())


def assert_can(name: str, call: Call, arguments: Any) -> None:
    """In CPU builds `FakeTensorMode` has no backward passes on CUDA, so its results on the CPU count."""
    if foreign_error(call, arguments) is not None:
        return
    for device in ("cpu", "cuda"):
        error = own_error(call, arguments, device)
        assert error is None or eager_error(call, arguments) is not None, f"{name} on {device}: {error}"


def arguments_of(sample: SampleInput) -> Any:
    return sample.input, sample.args, sample.kwargs


def are_strided(arguments: Any) -> bool:
    return all(t.layout == torch.strided for t in tree_leaves(arguments) if isinstance(t, Tensor))


class TestFakeTensorMode(TestCase):
    def setUp(self) -> None:
        super().setUp()
        log = logging.getLogger("torch._subclasses.fake_tensor")
        log.disabled = True  # it logs each error with its traceback
        self.addCleanup(setattr, log, "disabled", False)
        caught = warnings.catch_warnings()
        caught.__enter__()
        self.addCleanup(caught.__exit__, None, None, None)
        warnings.simplefilter("ignore")  # of samples that provoke them

    @ops(op_db, allowed_dtypes=(torch.float32,))
    def test_operators(self, device: str, dtype: torch.dtype, op: OpInfo) -> None:
        if op.name in REFUSED:
            self.skipTest(REFUSED[op.name])
        samples = op.sample_inputs("cpu", dtype, requires_grad=op.supports_autograd)
        for sample in itertools.islice(samples, SAMPLES):
            arguments = arguments_of(sample)
            if not isinstance(sample.input, Tensor) or not are_strided(arguments):
                continue
            for name, call in calls_of(op):
                assert_can(name, call, arguments)

    @modules(module_db, allowed_dtypes=(torch.float32,))
    def test_modules(self, device: str, dtype: torch.dtype, module_info: ModuleInfo, training: bool) -> None:
        samples = module_info.module_inputs_func(
            module_info, device="cpu", dtype=dtype, requires_grad=True, training=training
        )
        for sample in itertools.islice(samples, SAMPLES):
            constructor, forward = sample.constructor_input, sample.forward_input
            module = module_info.module_cls(*constructor.args, **constructor.kwargs).train(training)
            if forward is None or isinstance(module, LazyModuleMixin):
                continue
            arguments = (forward.args, forward.kwargs, dict(module.named_parameters()), dict(module.named_buffers()))
            call = differentiated(
                lambda a, module=module: torch.func.functional_call(module, (a[2], a[3]), a[0], a[1])  # type: ignore[misc]
            )
            assert_can("module", call, arguments)


instantiate_device_type_tests(TestFakeTensorMode, globals(), only_for="cpu")


def test_calls_are_compared() -> None:
    call = differentiated(lambda a: a.to_sparse() if a.dim() == 2 else a.sin())
    vector, matrix = (torch.rand(shape, requires_grad=True) for shape in ((3,), (3, 4)))
    assert_can("sine", call, vector)
    assert foreign_error(call, vector) is None
    with pytest.raises(AssertionError, match="sparse on cpu"):
        assert_can("sparse", call, matrix)
