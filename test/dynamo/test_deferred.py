"""Deferred and fake modules that are compiled or exported."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from compiled import BACKENDS, check_same, compiled, graph_breaks, graphs
from torch import Tensor, nn

from torchext.deferred_init import deferred_init, is_deferred, materialize_module
from torchext.fake import fake_like, fake_mode, is_fake
from torchext.internals.patching import TORCH_RELEASE


@pytest.fixture(autouse=True)
def _reset() -> Iterator[None]:
    yield
    torch._dynamo.reset()


class CompilesItsLayer(nn.Module):
    def __init__(self, backend: str) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.second = torch.compile(nn.Linear(2, 2), backend=backend)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


@pytest.mark.parametrize("backend", BACKENDS)
class TestDeferred:
    def test_constructor_may_compile(self, backend: str) -> None:
        torch.manual_seed(0)
        eager = CompilesItsLayer(backend)
        torch.manual_seed(0)
        module = deferred_init(CompilesItsLayer, backend)
        assert is_deferred(module)
        materialize_module(module)
        check_same(list(module.parameters()), list(eager.parameters()))
        with torch.no_grad():
            check_same(module(torch.eye(2)), eager(torch.eye(2)))

    def test_compiles_once_on_the_first_real_call(self, backend: str) -> None:
        module = deferred_init(nn.Linear, 2, 2)
        run = compiled(module, backend)
        assert graphs() == 0
        materialize_module(module)
        for _ in range(3):
            check_same(run(torch.eye(2)), module(torch.eye(2)))
        assert graphs() == 1

    def test_called_while_deferred_it_compiles_once_more_when_it_is_real(self, backend: str) -> None:
        module = deferred_init(nn.Linear, 2, 2)
        run = compiled(module, backend)
        assert is_deferred(run(torch.eye(2)))
        assert graphs() == 1
        materialize_module(module)
        for _ in range(3):
            check_same(run(torch.eye(2)), module(torch.eye(2)))
        # Before 2.12 Dynamo does not check the parameters of a module again if no parameter object has changed.
        assert graphs() == (1 if TORCH_RELEASE < (2, 12) else 2)
        assert graph_breaks() == 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_fakes_train_in_compiled_code(backend: str, device: str) -> None:
    with fake_mode(gpu=device == "cuda"):
        module, x = nn.Linear(4, 3, device=device), torch.ones(2, 4, device=device)
        result = compiled(module, backend)(x)
        result.sum().backward()
        assert is_fake(result)
        assert (result.shape, result.device.type) == ((2, 3), device)
        assert module.weight.grad.shape == (3, 4)
    assert graph_breaks() == 0


@pytest.mark.parametrize("kind", ["deferred", "fake"])
def test_exported_graph_is_that_of_eager_modules(kind: str) -> None:
    x, eager = torch.ones(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    module = (
        deferred_init(lambda: nn.Sequential(nn.Linear(2, 2), nn.ReLU())) if kind == "deferred" else fake_like(eager)
    )
    given = x if kind == "deferred" else fake_like(x)
    found, wanted = torch.export.export(module, (given,), strict=False), torch.export.export(eager, (x,), strict=False)
    assert str(found.graph) == str(wanted.graph)
    assert found.graph_signature == wanted.graph_signature
    assert {name: value.shape for name, value in found.state_dict.items()} == {
        name: value.shape for name, value in wanted.state_dict.items()
    }
    assert is_deferred(module) == (kind == "deferred")
