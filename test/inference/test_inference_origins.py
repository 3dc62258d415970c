"""Where inference tensors come from: `inference_mode(trace=True)`, `trace_origins()`, `origin()`, notes on errors."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from common import memory_in_use
from torch import Tensor, nn

from torchext import amp
from torchext.deferred_init import deferred_init, materialize_module, materialize_tensor
from torchext.fake import fake_mode
from torchext.inference import Origin, inference_mode, normal_tensors, origin, to_normal, trace_origins

needs_notes = pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have notes since Python 3.11")
THIS = "test_inference_origins.py"


@pytest.fixture
def everywhere() -> Iterator[None]:
    trace_origins()
    yield
    trace_origins(False)


def line() -> int:
    """Return the line of the caller."""
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return frame.f_back.f_lineno


def notes(function: Callable[[], object]) -> list[str]:
    """Return the notes on the RuntimeError that `function` raises."""
    with pytest.raises(RuntimeError, match="nference tensor") as raised:
        function()
    return getattr(raised.value, "__notes__", [])


class TestOrigin:
    def test_is_the_line_that_made_the_tensor(self) -> None:
        with inference_mode(trace=True):
            first, wanted = torch.ones(2), line()
            second = first * 2
        found = origin(first)
        assert found is not None
        assert Path(found.file).name == THIS
        assert found == Origin(found.file, wanted, "test_is_the_line_that_made_the_tensor")
        assert str(found) == f"{found.file}:{wanted} in test_is_the_line_that_made_the_tensor"
        assert origin(second).line == wanted + 1

    @pytest.mark.parametrize(
        "make",
        [
            lambda: torch.tensor([1.0]),
            lambda: torch.empty(1),
            lambda: nn.Parameter(torch.ones(1)),
            lambda: nn.Linear(2, 2).weight,
            lambda: torch.ones(3).split(1)[1],
            lambda: torch.ones(2, 2).view(-1).detach(),
            lambda: torch.eye(2).to_sparse(),
            lambda: torch.add(torch.ones(1), 1, out=torch.ones(1)),
            lambda: torch.compile(torch.sin, backend="eager")(torch.ones(2)),
            lambda: torch.ones(1).data,
        ],
    )
    def test_is_known_for_any_construction(self, make: Callable[[], Tensor]) -> None:
        with inference_mode(trace=True):
            tensor = make()
        assert tensor.is_inference()
        assert Path(origin(tensor).file).name == THIS

    @pytest.mark.parametrize("kind", ["fake", "deferred"])
    def test_of_fake_and_deferred_tensors(self, kind: str) -> None:
        with inference_mode(trace=True):
            if kind == "fake":
                with fake_mode():
                    model, wanted = nn.Linear(2, 2), line()
            else:
                model, wanted = deferred_init(nn.Linear, 2, 2), line()
        assert origin(model.weight).line == wanted
        if kind == "deferred":
            materialize_module(model)
            assert origin(model.weight).line == wanted

    def test_of_a_view_made_later_is_that_of_its_base(self) -> None:
        with inference_mode(trace=True):
            base, wanted = torch.ones(2, 2), line()
        view = base.t()
        with inference_mode():
            rows = base.unbind()
        for alias in (view, base.detach(), *rows, view.view(2, 2)):
            assert origin(alias).line == wanted

    def test_of_tensors_changed_in_place_stays(self) -> None:
        with inference_mode(trace=True):
            tensor, wanted = torch.ones(2), line()
            tensor += 1
            torch.neg(tensor, out=tensor)
        assert origin(tensor).line == wanted

    def test_is_none_for_untraced_tensors(self) -> None:
        with inference_mode():
            untraced = torch.ones(2)
        with inference_mode(trace=True):
            untraced.add_(1)
            untraced.view(2)
            with normal_tensors():
                normal = torch.ones(2)
            traced = torch.ones(2)
        with inference_mode():
            later = traced + 1
        for tensor in (untraced, normal, later, traced.clone(), torch.ones(1)):
            assert origin(tensor) is None

    def test_normal_tensors_lose_it(self) -> None:
        with inference_mode(trace=True):
            tensor = torch.ones(2)
        assert origin(to_normal(tensor)) is None
        assert "Generic" not in str(torch._C._dispatch_keys(tensor))

    def test_takes_tensors(self) -> None:
        with pytest.raises(TypeError, match=r"origin\(\) takes a tensor, but `tensor` is a list"):
            origin([])

    def test_traced_tensors_support_all_operations(self) -> None:
        with inference_mode(trace=True):
            tensor = torch.arange(4.0).view(2, 2)
        file = io.BytesIO()
        torch.save(tensor, file)
        file.seek(0)
        assert torch.equal(torch.load(file), tensor)
        with inference_mode():
            assert torch.equal(copy.deepcopy(tensor), tensor)
        assert torch.equal(torch.func.vmap(lambda row: row * 2)(tensor), tensor * 2)
        assert torch.equal(torch.compile(lambda t: t + 1, backend="eager")(tensor), tensor + 1)
        assert tensor.tolist() == [[0.0, 1.0], [2.0, 3.0]]
        with torch.autocast("cpu"):
            assert (tensor @ tensor).dtype == torch.bfloat16
        assert repr(tensor) == "tensor([[0., 1.],\n        [2., 3.]])"

    def test_factories_of_a_traced_tensor_find_its_device(self) -> None:
        with inference_mode(trace=True):
            x = torch.ones(2)
        assert x.new_tensor([1.0]).device == x.new(2).device == x.device
        assert torch.equal(torch.cond(torch.tensor(True), lambda x: x + 1, lambda x: x - 1, (x,)), x + 1)

    def test_decorated_functions_trace(self) -> None:
        @inference_mode(trace=True)
        def generate() -> Iterator[Tensor]:
            yield torch.ones(1)

        def make() -> Tensor:
            return torch.ones(1)

        assert origin(next(iter(generate()))).function == "generate"
        assert origin(inference_mode(make, trace=True)()).function == "make"


@needs_notes
class TestNotes:
    @pytest.mark.parametrize(
        "use",
        [
            lambda t, w: t * w,
            lambda t, w: nn.functional.linear(t.view(2, 2), w),
            lambda t, w: t.add_(1),
            lambda t, w: t[0].add_(1),
            lambda t, w: torch.add(w.detach(), 1, out=t),
            lambda t, w: torch._foreach_add_([w.detach(), t], 1),
            lambda t, w: t._version,
            lambda t, w: Saves.apply(t, w),
        ],
        ids=["saved", "view saved", "changed", "view changed", "out", "foreach", "version", "custom function"],
    )
    @pytest.mark.parametrize("kind", ["real", "fake", "deferred"])
    def test_errors_name_the_line(self, use: Callable[[Tensor, Tensor], object], kind: str) -> None:
        weight = nn.Parameter(torch.ones(2, 2))
        with inference_mode(trace=True), fake_mode() if kind == "fake" else nullcontext():
            tensor, wanted = deferred_init(torch.ones, 2, 2) if kind == "deferred" else torch.ones(2, 2), line()
        if kind == "fake":
            with fake_mode():
                weight = nn.Parameter(torch.ones(2, 2))
        (note,) = notes(lambda: use(tensor, weight))
        assert f"{THIS}:{wanted} in " in note

    def test_note_names_the_operator_and_each_line_once(self) -> None:
        with inference_mode(trace=True):
            tensors, first = [torch.ones(1), torch.ones(1)], line()
            tensors.append(torch.ones(1))
        (note,) = notes(lambda: torch._foreach_mul_(tensors, 2))
        assert note.startswith(
            "The inference tensors among the arguments of `aten::_foreach_mul_.Scalar` were created at\n  "
        )
        found = [int(row.split(":")[-1].split(" ")[0]) for row in note.splitlines()[1:]]
        assert found == [first, first + 1]

    def test_message_and_type_are_unchanged(self) -> None:
        with inference_mode():
            untraced = torch.ones(1)
        with inference_mode(trace=True):
            traced = torch.ones(1)
        errors = []
        for tensor in (untraced, traced):
            with pytest.raises(RuntimeError) as raised:
                tensor.add_(1)
            errors.append(raised.value)
        assert type(errors[0]) is type(errors[1])
        assert str(errors[0]) == str(errors[1])

    def test_other_errors_get_no_note(self) -> None:
        with inference_mode(trace=True):
            tensor = torch.ones(2)
        with pytest.raises(RuntimeError, match="must match the size") as raised:
            tensor + torch.ones(3)
        assert not hasattr(raised.value, "__notes__")
        with pytest.raises(IndexError, match="Dimension out of range") as raised_too:
            tensor.sum(5)
        assert not hasattr(raised_too.value, "__notes__")

    def test_errors_on_other_threads_name_the_line(self) -> None:
        with inference_mode(trace=True):
            tensor, wanted = torch.ones(2), line()
        found: list[str] = []
        thread = threading.Thread(target=lambda: found.extend(notes(lambda: tensor.add_(1))))
        thread.start()
        thread.join()
        assert f"{THIS}:{wanted}" in found[0]

    def test_untraced_tensors_get_no_note(self) -> None:
        with inference_mode():
            tensor = torch.ones(2)
        assert notes(lambda: tensor.add_(1)) == []
        assert notes(lambda: tensor._version) == []


class Saves(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a)
        return a + b

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad


@pytest.mark.usefixtures("everywhere")
class TestEverywhere:
    @pytest.mark.parametrize("mode", [inference_mode, torch.inference_mode])
    def test_every_block_is_traced(self, mode: Any) -> None:
        with mode():
            tensor, wanted = torch.ones(2), line()
        assert origin(tensor).line == wanted

    @pytest.mark.parametrize("mode", [inference_mode, torch.inference_mode])
    def test_every_thread_is_traced(self, mode: Any) -> None:
        made: list[Tensor] = []

        def work() -> None:
            with mode():
                made.append(torch.ones(2))

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert origin(made[0]).function == "work"

    def test_can_be_turned_off(self) -> None:
        trace_origins(False)
        for mode in (inference_mode, torch.inference_mode):
            with mode():
                assert origin(torch.ones(2)) is None

    def test_block_that_is_open_is_traced_from_now_on(self) -> None:
        trace_origins(False)
        with inference_mode():
            before = torch.ones(1)
            trace_origins()
            after = torch.ones(1)
        assert origin(before) is None
        assert origin(after) is not None

    def test_normal_work_is_not_touched(self) -> None:
        weight = nn.Parameter(torch.ones(2))
        (weight * 2).sum().backward()
        assert "Generic" not in str(torch._C._dispatch_tls_local_include_set())
        assert "Generic" not in str(torch._C._dispatch_keys(weight))


def test_nothing_is_left_behind_by_a_block() -> None:
    before = str(torch._C._dispatch_tls_local_include_set())
    with inference_mode(trace=True):
        with inference_mode(False):
            assert torch.ones(1, requires_grad=True).requires_grad
        assert "Generic" in str(torch._C._dispatch_tls_local_include_set())
    assert str(torch._C._dispatch_tls_local_include_set()) == before


def test_tracing_costs_nothing_before_it_is_used() -> None:
    code = """
import torch, torchext
from torchext.inference import inference_mode
version = torch.Tensor._version
apply = torch.autograd.Function.apply
with inference_mode():
    x = torch.ones(1)
assert torch.Tensor._version is version
assert torch.autograd.Function.apply == apply
assert "Generic" not in str(torch._C._dispatch_keys(x))
"""
    forked.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


@pytest.mark.ci
def test_memory_goes_with_the_tensors() -> None:
    def growth() -> int:
        before = memory_in_use()
        for _ in range(50_000):
            torch.ones(1)
        gc.collect()
        return memory_in_use() - before

    with inference_mode(trace=True):
        # A leak grows each time; other threads of the process allocate only occasionally.
        assert min(growth() for _ in range(4)) < 50_000 * 16


def test_deferred_tensors_recorded_under_tracing_replay_outside() -> None:
    with inference_mode(trace=True):
        tensor = deferred_init(lambda: torch.ones(2).mul_(3))
    assert materialize_tensor(tensor).tolist() == [3.0, 3.0]


def test_a_view_of_a_traced_tensor_is_not_cleaned_up_because_another_argument_is() -> None:
    with inference_mode(trace=True):
        traced = torch.ones(2, 2, dtype=torch.bfloat16)
    with amp.autocast("cpu", self_cleaning=True):
        to_be_cleaned = torch.ones(2, 2) @ torch.ones(2, 2)
        view = traced.view_as(to_be_cleaned)
    assert (to_be_cleaned + 1).dtype == torch.float32
    assert (view + 1).dtype == torch.bfloat16
    assert origin(view) == origin(traced)


def test_views_of_amp_tensors_in_another_dtype_keep_the_origin() -> None:
    with inference_mode(trace=True):
        traced = amp.to_amp(torch.ones(2))
    assert isinstance(traced, amp.AmpTensor)
    with inference_mode():  # outside, PyTorch makes such a view a normal tensor
        view = traced.view(torch.int32)
    assert not isinstance(view, amp.AmpTensor)
    assert origin(view) == origin(traced) is not None


def test_a_region_that_outlives_the_traced_block_leaves_no_key_behind() -> None:
    def in_region() -> Iterator[None]:
        with amp.autocast("cpu", self_cleaning=True):
            yield

    before = str(torch._C._dispatch_tls_local_include_set())
    with inference_mode(trace=True):
        region = in_region()
        next(region)
    assert list(region) == []
    assert str(torch._C._dispatch_tls_local_include_set()) == before


def test_tracing_continues_after_a_region_in_the_block() -> None:
    with inference_mode(trace=True):
        with amp.autocast("cpu", self_cleaning=True):
            pass
        after = torch.ones(1)
    assert origin(after) is not None
