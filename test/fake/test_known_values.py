"""Constants of one element keep their values while what they are made of is known."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from torchext.fake import DataDependentError, fake_like, fake_mode, is_fake

UNKNOWN = "needs the values of its arguments"


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.tensor(3.0),
        lambda: torch.tensor([3]),
        lambda: torch.tensor(True),
        lambda: torch.tensor(1 + 2j),
        lambda: torch.zeros(()),
        lambda: torch.ones(1, 1, dtype=torch.bfloat16),
        lambda: torch.full((1,), 2.5, dtype=torch.float64),
        lambda: torch.arange(7, 8),
        lambda: torch.scalar_tensor(4),
        lambda: torch.zeros_like(torch.tensor(3.0)),
        lambda: torch.tensor(3.0, requires_grad=True),
        lambda: torch.tensor(2.0).to(torch.int32),
        lambda: torch.tensor([2.0]).view(()).t(),
        lambda: torch.tensor(1 + 2j).conj().imag,
        lambda: torch.tensor(3.0) * torch.tensor(2) + 1,
        lambda: torch.stack([torch.tensor(1.0), torch.tensor(2.0)]).sum(),
        lambda: torch.tensor(4.0).sqrt().clone().detach(),
        lambda: torch.tensor(3.0) * torch.ones(1).numel(),
        lambda: torch.tensor(3.0).expand(1).contiguous(),
        lambda: copy.deepcopy(torch.tensor(5.0)),
        lambda: torch.tensor(2.0).max(torch.tensor(7.0)),
        lambda: torch.where(torch.tensor(True), torch.tensor(1.0), torch.tensor(2.0)),
        lambda: nn.Parameter(torch.tensor(0.5)),
        lambda: torch.empty(1).new_ones(()),
    ],
)
def test_value_is_that_of_the_real_run(make: Callable[[], torch.Tensor]) -> None:
    with fake_mode():
        tensor = make()
        assert is_fake(tensor)
        assert tensor.item() == make().item()
    assert tensor.item() == make().item()


@pytest.mark.parametrize(
    "write",
    [
        lambda t: t.add_(1),
        lambda t: t.mul_(torch.tensor(2.0)),
        lambda t: t.view(1).fill_(7),
        lambda t: t.detach().sub_(3),
        lambda t: torch.add(t, t, out=t),
        lambda t: torch._foreach_add_([t, torch.tensor(0.0)], 1),
        lambda t: t.copy_(torch.tensor(9)),
    ],
)
def test_writes_change_the_value(write: Callable[[torch.Tensor], object]) -> None:
    real = torch.tensor(5.0)
    write(real)
    with fake_mode():
        fake = torch.tensor(5.0)
        alias = fake.view(1)
        write(fake)
        assert fake.item() == alias.item() == real.item()


@pytest.mark.parametrize(
    "write",
    [
        lambda t, unknown: t.add_(unknown),
        lambda t, unknown: t.view(1).copy_(unknown.view(1)),
        lambda t, unknown: torch._foreach_mul_([t], [unknown]),
        lambda t, unknown: t.uniform_(),
        lambda t, unknown: t.data.mul_(unknown),
    ],
)
def test_value_is_forgotten_when_a_fake_is_written_into_it(
    write: Callable[[torch.Tensor, torch.Tensor], object],
) -> None:
    unknown = fake_like(torch.tensor(1.0))
    with fake_mode():
        tensor = torch.tensor(5.0)
        alias = tensor.detach()
        write(tensor, unknown)
        for t in (tensor, alias):
            with pytest.raises(DataDependentError, match=UNKNOWN):
                t.item()


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.empty(1),
        lambda: torch.rand(1),
        lambda: torch.randint(3, (1,)),
        lambda: torch.ones(2, 2).sum(),
        lambda: torch.tensor([1.0, 2.0])[0],
        lambda: torch.tensor(1.0) + torch.ones(3).sum(),
        lambda: torch.empty_like(torch.tensor(3.0)),
    ],
)
def test_what_is_made_of_anything_else_is_unknown(make: Callable[[], torch.Tensor]) -> None:
    with fake_mode(), pytest.raises(DataDependentError, match=UNKNOWN):
        make().item()


def test_value_is_forgotten_when_a_custom_operator_writes_it() -> None:
    library = torch.library.Library("torchext_test_known_values", "FRAGMENT")
    library.define("scale_(Tensor(a!) x, float factor) -> ()")
    library.impl("scale_", lambda x, factor: x.mul_(factor), "CPU")
    library.impl("scale_", lambda x, factor: None, "Meta")
    with fake_mode():
        tensor = torch.tensor(5.0)
        torch.ops.torchext_test_known_values.scale_(tensor, 2.0)
        with pytest.raises(DataDependentError, match=UNKNOWN):
            tensor.item()
    library._destroy()


def test_random_constants_draw_nothing() -> None:
    state = torch.get_rng_state()
    with fake_mode():
        torch.tensor(1.0).normal_()
        torch.bernoulli(torch.tensor(0.5))
    assert torch.equal(torch.get_rng_state(), state)


def test_operators_that_need_values_run_on_known_ones() -> None:
    with fake_mode():
        a, b = torch.tensor(2), torch.tensor(2)
        assert torch.equal(a, b)
        assert bool(a == b)
        assert a.view(1).nonzero().shape == (1, 1)
        assert torch.zeros(1).nonzero().shape == (0, 1)
        assert list(range(int(a))) == [0, 1]


def test_errors_of_values_are_raised_as_by_the_real_run() -> None:
    with fake_mode(), pytest.raises(RuntimeError, match="ZeroDivisionError"):
        torch.tensor(1) // torch.tensor(0)


def test_resized_constant_is_unknown() -> None:
    with fake_mode():
        tensor = torch.tensor([1.0])
        tensor.resize_(2)
        with pytest.raises(DataDependentError, match=UNKNOWN):
            tensor[1].item()


def test_constants_on_fake_devices_have_values() -> None:
    with fake_mode(fake_cuda=2):
        if torch.cuda.get_device_name() != "torchext fake CUDA device":
            pytest.skip("this machine has CUDA")
        assert torch.tensor(3.0, device="cuda").item() == 3.0
        step = torch.zeros((), device="cuda:1")
        step += 1
        assert step.item() == 1.0
        assert step.to("cuda:0").cpu().item() == 1.0


def test_devices_can_what_the_cpu_cannot() -> None:
    with fake_mode(fake_cuda=True):
        result = torch.ones(1, dtype=torch.bool, device="cuda").abs()
        assert result.dtype == torch.bool


def test_constants_are_followed_in_the_handler_of_a_dispatch_mode() -> None:
    with fake_mode(), FlopCounterMode(display=False):
        counter = torch.zeros(1)
        counter += 2
        assert counter.item() == 2.0
        assert torch.tensor(3.0).mul(counter).item() == 6.0


def test_constants_of_deferred_init_are_its_own() -> None:
    from torchext.deferred_init import deferred_init, materialize_tensor

    def make() -> list[torch.Tensor]:
        counter = torch.zeros(1)
        counter += 2
        return [counter, torch.full((int(counter),), 1.5)]

    counter, tensor = deferred_init(make)
    assert materialize_tensor(counter).tolist() == [2.0]
    assert materialize_tensor(tensor).tolist() == [1.5, 1.5]


def test_writes_inside_deferred_init_are_followed() -> None:
    from torchext.deferred_init import deferred_init

    with fake_mode():
        counter = torch.zeros(1)
    deferred_init(lambda: counter.add_(1))
    assert counter.item() == 1.0


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize(
    "optimizer", [torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam, torch.optim.ASGD, torch.optim.Adamax]
)
def test_optimizers_count_their_steps(optimizer: type[torch.optim.Optimizer], foreach: bool) -> None:
    def steps() -> list[float]:
        model = nn.Linear(3, 2)
        opt = optimizer(model.parameters(), foreach=foreach)  # type: ignore[call-arg]
        for _ in range(3):
            model(torch.ones(4, 3)).sum().backward()
            opt.step()
        return [float(state["step"]) for state in opt.state.values()]

    with fake_mode():
        assert steps() == [3.0, 3.0]


def test_threads_do_not_meet() -> None:
    results: list[float] = []

    def count() -> None:
        with fake_mode():
            tensor = torch.tensor(0.0)
            for _ in range(300):
                tensor += 1
            results.append(tensor.item())

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [300.0] * 4
