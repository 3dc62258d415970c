"""AmpTensors and self-cleaning regions inside and around compiled code: dtypes are always those of eager code."""

from __future__ import annotations

import gc
import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import bindings
import pytest
import torch
from compiled import BACKENDS, check_same, compiled, graph_breaks, graphs
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torchext import _C, amp
from torchext.errors import TorchextWarning
from torchext.internals.patching import TORCH_RELEASE

BF16, FP32 = torch.bfloat16, torch.float32


@pytest.fixture(autouse=True)
def _reset(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from torchext.dynamo import results  # imports Dynamo

    monkeypatch.setattr(results, "_has_warned", True)
    yield
    torch._dynamo.reset()
    gc.collect()
    # pytest keeps Dynamo's logs and exceptions, and with them graphs with marked fakes, which hold a lease.
    for thing in gc.get_objects():
        if issubclass(type(thing), Tensor) and _C.is_amp(thing):
            _C.unwrap_amp(thing)


def kinds(results: Any) -> list[int]:
    return [_C.amp_kind(result) for result in pytree.tree_leaves(results) if isinstance(result, Tensor)]


def check(function: Callable[..., Any], *args: Any, backend: str, around: Callable[[], Any] | None = None) -> None:
    around = around or torch.enable_grad
    run = compiled(function, backend)
    for _ in range(2):
        with around():
            wanted, found = function(*args), run(*args)
        check_same(found, wanted, counts_writes=backend != "inductor")
        assert kinds(found) == kinds(wanted)
    assert graph_breaks() == 0
    assert graphs() == 1


W = torch.eye(2) + 0.5


def computes(x: Tensor) -> Any:
    y = x @ W
    return y, y.dtype, amp.is_amp(y), y + W, x.view(-1), x


def cleans(x: Tensor) -> Any:
    with amp.autocast("cpu", self_cleaning=True):
        y = x @ W
        z = y + 1
        inside = y.dtype, amp.is_amp(y)
    return y, z, inside, torch.mm(y, W), torch.mm(z, W).dtype


def disables_inside(x: Tensor) -> Any:
    y = x @ W
    with amp.autocast("cpu", enabled=False):
        return y, torch.mm(y, W), torch.mm(y, W).dtype


@pytest.mark.parametrize("backend", BACKENDS)
class TestWrapped:
    def test_inputs_autocast(self, backend: str) -> None:
        check(computes, amp.to_amp(torch.eye(2)), backend=backend)

    @pytest.mark.parametrize("is_enabled", [True, False])
    def test_regions_around_decide(self, backend: str, is_enabled: bool) -> None:
        x = amp.to_amp(torch.eye(2))
        check(computes, x, backend=backend, around=lambda: amp.autocast("cpu", enabled=is_enabled))

    def test_regions_inside_decide(self, backend: str) -> None:
        def function(x: Tensor) -> Any:
            with amp.autocast("cpu", enabled=False):
                y = x @ W
            return y, x @ W

        check(function, amp.to_amp(torch.eye(2)), backend=backend)

    def test_parameters_autocast_and_gradients_are_eager_ones(self, backend: str) -> None:
        layer = amp.to_amp(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.Linear(2, 2)))

        def gradients(run: Callable[..., Any]) -> Any:
            results = run(torch.eye(2))
            return results, torch.autograd.grad(results.float().sum(), tuple(layer.parameters()))

        found, wanted = gradients(compiled(layer, backend)), gradients(layer)
        check_same(found, wanted)
        assert kinds(found) == kinds(wanted)
        assert found[0].dtype is BF16
        assert graph_breaks() == 0

    def test_wrapping_and_unwrapping_recompiles(self, backend: str) -> None:
        layer = nn.Linear(2, 2)
        run = compiled(lambda x: (lambda y: y + (y.dtype is FP32))(layer(x)), backend)
        dtypes = [run(torch.eye(2)).dtype]
        for change in (amp.to_amp, amp.to_normal, amp.to_amp):
            change(layer)
            dtypes.append(run(torch.eye(2)).dtype)
        assert dtypes == [FP32, BF16, FP32, BF16]
        assert graphs() == (4 if TORCH_RELEASE < (2, 12) else 2)

    def test_kinds_and_disabled_regions_are_distinguished(self, backend: str) -> None:
        def function(x: Tensor) -> Any:
            y = torch.mm(x, x)
            return y, y.dtype

        run = compiled(function, backend)
        with amp.autocast("cpu", self_cleaning=True):
            unclean = torch.eye(2) @ torch.eye(2)
        for x in (unclean, amp.to_amp(unclean.detach().clone()), unclean):
            check_same(run(x), function(x))
            assert kinds(run(x)) == kinds(function(x))
        wrapped = amp.to_amp(torch.eye(2))
        for is_disabled in (False, True, False):
            with amp.autocast("cpu", enabled=False) if is_disabled else torch.enable_grad():
                assert run(wrapped)[1] is run(wrapped)[0].dtype is (FP32 if is_disabled else BF16)


@pytest.mark.parametrize("backend", BACKENDS)
class TestSelfCleaning:
    def test_inside(self, backend: str) -> None:
        check(cleans, torch.eye(2), backend=backend)

    @pytest.mark.parametrize("function", [computes, disables_inside, cleans])
    def test_around(self, backend: str, function: Callable[[Tensor], Any]) -> None:
        check(function, torch.eye(2), backend=backend, around=lambda: amp.autocast("cpu", self_cleaning=True))

    def test_results_are_cleaned_in_compiled_code(self, backend: str) -> None:
        with amp.autocast("cpu", self_cleaning=True):
            unclean = torch.eye(2) @ torch.eye(2)
        check(lambda u: (torch.mm(u, W), u.view(-1), u), unclean, backend=backend)


@pytest.mark.parametrize("function", [computes, cleans])
def test_no_mark_outlives_compiled_code(function: Callable[[Tensor], Any]) -> None:
    gc.collect()
    before = bindings.live_marks()
    logging.disable()  # pytest keeps Dynamo's logs, and with them graphs
    try:
        compiled(function)(amp.to_amp(torch.eye(2)))
    finally:
        logging.disable(logging.NOTSET)
    torch._dynamo.reset()
    gc.collect()
    assert bindings.live_marks() == before


@pytest.mark.ci
def test_results_allocated_by_inductor_are_cleaned() -> None:
    layer = nn.Linear(2, 2)
    check(layer, torch.eye(2), backend="inductor", around=lambda: amp.autocast("cpu", self_cleaning=True))
    with amp.autocast("cpu", self_cleaning=True):
        result = torch.compile(layer)(torch.eye(2))
    assert torch.mm(result, W).dtype is FP32


class TestRefusals:
    def test_one_warning_that_no_backend_compiles(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("torchext.dynamo.results._has_warned", False)
        with pytest.warns(TorchextWarning, match="`computes` receives AmpTensors, which backends do not support"):
            compiled(computes, "aot_eager")(amp.to_amp(torch.eye(2)))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            compiled(cleans, "aot_eager")(torch.eye(2))
            monkeypatch.setattr("torchext.dynamo.results._has_warned", False)
            compiled(cleans, "eager")(torch.eye(2))

    def test_isinstance_breaks_the_graph(self) -> None:
        def function(x: Tensor) -> bool:
            return isinstance(x @ W, amp.AmpTensor)

        assert compiled(function, fullgraph=False)(amp.to_amp(torch.eye(2)))
        with pytest.raises(torch._dynamo.exc.Unsupported, match="torchext: isinstance.. of AmpTensor"):
            compiled(function)(amp.to_amp(torch.eye(2)))

    def test_wrap_is_not_traced(self) -> None:
        def function(x: Tensor) -> Tensor:
            return amp.to_amp(x * 1) @ W

        assert compiled(function, fullgraph=False)(torch.eye(2)).dtype is BF16
        with pytest.raises(torch._dynamo.exc.Unsupported, match=r"torchext: to_amp\(\)"):
            compiled(function)(torch.eye(2))
