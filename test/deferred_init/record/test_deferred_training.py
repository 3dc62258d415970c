"""Training deferred modules, before or after materialization, equals training eager ones, bit for bit."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.optim import SGD, Adagrad, AdamW, Optimizer
from torch.utils.checkpoint import checkpoint

from torchext.deferred_init import deferred_init, is_deferred, materialize_module, materialize_tensor

OPTIONS = ("foreach", "fused", "capturable", "differentiable", "amsgrad", "centered", "maximize", "nesterov")


def optimizers() -> Iterator[Any]:
    """Yield every PyTorch optimizer with each of its options."""
    for name, cls in vars(torch.optim).items():
        if not (isinstance(cls, type) and issubclass(cls, Optimizer)) or cls is Optimizer:
            continue
        known = inspect.signature(cls).parameters
        # SGD keeps state only with momentum. LBFGS reads values, and each read replays the recording from its
        # beginning, so its iterations are limited.
        always = {"SGD": {"momentum": 0.9}, "LBFGS": {"max_iter": 2}}.get(name, {})
        settings = [{}, *({option: True} for option in OPTIONS if option in known)]
        settings += [{"foreach": False}] if "foreach" in known else []
        for setting in settings:
            yield pytest.param(cls, always | setting, id="-".join([name, *(f"{k}={v}" for k, v in setting.items())]))


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))


def parameters_for(cls: type[Optimizer], model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if cls.__name__ != "Muon" or parameter.dim() == 2]


def train(model: nn.Module, optimizer: Optimizer, steps: int) -> None:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.full((3, 4), 0.5)).square().sum()
        loss.backward()
        if type(optimizer).__name__ == "SparseAdam":
            for parameter in model.parameters():
                parameter.grad = parameter.grad.to_sparse()
        return loss

    for _ in range(steps):
        if type(optimizer).__name__ == "LBFGS":
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()


def values(model: nn.Module, optimizer: Optimizer) -> list[torch.Tensor]:
    state = torch.utils._pytree.tree_leaves(optimizer.state_dict())
    return [*model.parameters(), *(value for value in state if isinstance(value, torch.Tensor))]


def assert_same(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    assert not any(map(is_deferred, found))
    assert len(found) == len(wanted)
    assert all(map(torch.equal, found, wanted))


@pytest.mark.cases(21)
@pytest.mark.parametrize(("cls", "options"), list(optimizers()))
@pytest.mark.parametrize("is_trained", [False, True], ids=["made before", "trained before"])
def test_every_optimizer_trains_as_eagerly(cls: type[Optimizer], options: dict[str, Any], is_trained: bool) -> None:
    def run(build: Callable[[], nn.Module]) -> list[torch.Tensor]:
        model = build()
        optimizer = cls(parameters_for(cls, model), lr=0.01, **options)
        train(model, optimizer, 3 if is_trained else 0)
        materialize_module(model)
        assert not any(map(is_deferred, values(model, optimizer)))
        train(model, optimizer, 2)
        return values(model, optimizer)

    try:
        wanted = run(make_model)
    except (AssertionError, RuntimeError) as error:
        pytest.skip(f"the CPU refuses these options: {error}")
    assert_same(run(lambda: deferred_init(make_model)), wanted)


def trained(adopt: Callable[[nn.Module, Optimizer], None], make: Callable[..., Optimizer] = Adagrad) -> None:
    """Compare a training that follows `adopt`, which must materialize everything."""
    wanted = make_model()
    expected = make(wanted.parameters(), lr=0.1)
    train(wanted, expected, 3)
    model = deferred_init(make_model)
    optimizer = make(model.parameters(), lr=0.1)
    adopt(model, optimizer)
    train(model, optimizer, 3)
    assert_same(values(model, optimizer), values(wanted, expected))


class TestState:
    """State that was made before materialization is materialized with its parameter."""

    def test_with_the_module(self) -> None:
        trained(lambda model, optimizer: materialize_module(model))

    def test_with_single_tensors(self) -> None:
        def adopt(model: nn.Module, optimizer: Optimizer) -> None:
            for parameter in model.parameters():
                materialize_tensor(parameter)
                assert not is_deferred(optimizer.state[parameter]["sum"])

        trained(adopt)

    def test_with_modules_one_after_another(self) -> None:
        def adopt(model: nn.Module, optimizer: Optimizer) -> None:
            materialize_module(model[0])
            assert not is_deferred(optimizer.state[model[0].weight]["sum"])
            assert is_deferred(optimizer.state[model[2].weight]["sum"])
            materialize_module(model)

        trained(adopt)

    def test_that_checkpoints_have_made(self) -> None:
        def adopt(model: nn.Module, optimizer: Optimizer) -> None:
            get_optimizer_state_dict(model, optimizer)
            materialize_module(model)
            for state in optimizer.state.values():
                state["step"].zero_()  # making the checkpoint took the first step
            assert not any(map(is_deferred, values(model, optimizer)))

        trained(adopt, AdamW)

    def test_of_a_module_that_is_real_already(self) -> None:
        def adopt(model: nn.Module, optimizer: Optimizer) -> None:
            saved = {parameter: state.pop("sum") for parameter, state in optimizer.state.items()}
            materialize_module(model)
            for parameter, state in optimizer.state.items():
                state["sum"] = saved[parameter]
            materialize_module(model)

        trained(adopt)

    @pytest.mark.parametrize(
        "hand_over",
        [
            lambda model, optimizer: materialize_module(model, optimizer=optimizer),
            lambda model, optimizer: materialize_module(model, False, None, optimizer=[optimizer]),
        ],
        ids=["optimizer", "list"],
    )
    def test_of_an_optimizer_that_is_handed_over(self, hand_over: Callable[..., None]) -> None:
        def adopt(model: nn.Module, optimizer: Optimizer) -> None:
            hand_over(model, optimizer)
            assert not is_deferred(optimizer.param_groups[0]["lr"])

        def make(parameters: Any, lr: float) -> Optimizer:
            return deferred_init(lambda: AdamW(parameters, lr=torch.tensor(lr), foreach=False))

        trained(adopt, make)

    def test_of_copied_and_loaded_optimizers(self) -> None:
        model = deferred_init(make_model)
        both = nn.ModuleDict({"model": model})
        both.optimizer = Adagrad(model.parameters())
        copied = copy.deepcopy(both)
        materialize_module(copied.model)  # type: ignore[type-var]
        assert not any(map(is_deferred, values(copied.model, copied.optimizer)))
        assert is_deferred(model)

    def test_for_parameters_that_stay_deferred(self) -> None:
        model = deferred_init(make_model)
        optimizer = Adagrad(model.parameters())
        materialize_module(model, buffers_only=True)
        materialize_module(model[0], optimizer=optimizer)
        assert [is_deferred(optimizer.state[parameter]["sum"]) for parameter in model.parameters()] == [
            *(False, False),
            *(True, True),
        ]

    def test_goes_where_its_parameter_goes(self) -> None:
        model = deferred_init(make_model)
        optimizer = Adagrad(model.parameters())
        materialize_module(model, dtype=torch.float64)
        assert {state["sum"].dtype for state in optimizer.state.values()} == {torch.float64}
        assert {state["step"].dtype for state in optimizer.state.values()} == {torch.float32}

    def test_is_not_kept_alive_by_observers(self) -> None:
        optimizer = Adagrad(deferred_init(make_model).parameters())
        gone = weakref.ref(optimizer)
        del optimizer
        gc.collect()
        assert gone() is None

    def test_is_saved_after_materialization(self) -> None:
        model = deferred_init(make_model)
        optimizer = Adagrad(model.parameters())
        materialize_module(model)
        torch.save(optimizer.state_dict(), io.BytesIO())

    def test_groups_are_added_by_name(self) -> None:
        optimizer = SGD([nn.Parameter(torch.ones(1))], lr=1.0)
        optimizer.add_param_group(param_group={"params": [deferred_init(nn.Parameter, torch.ones(1))]})
        assert len(optimizer.param_groups) == 2
        with pytest.raises(TypeError, match=r"^Optimizer.add_param_group\(\) missing 1 required positional argument"):
            optimizer.add_param_group()

    def test_takes_optimizers_only(self) -> None:
        with pytest.raises(TypeError, match="takes optimizers, but was given a Linear"):
            materialize_module(nn.Linear(1, 1), optimizer=[nn.Linear(1, 1)])  # type: ignore[list-item]


def test_gradients_become_real_with_their_parameters() -> None:
    def run(model: nn.Module) -> list[torch.Tensor]:
        model(torch.ones(2, 4)).sum().backward()
        materialize_module(model)
        return [parameter.grad for parameter in model.parameters()]

    assert_same(run(deferred_init(make_model)), run(make_model()))


class TestGrowingRecordings:
    """A recording that grows with each step warns once; other recordings do not warn."""

    def test_is_warned_of(self) -> None:
        average = deferred_init(torch.zeros, 3)

        def step(count: int) -> None:
            for _ in range(count):
                average.lerp_(torch.ones(3), 0.1)

        with pytest.warns(UserWarning, match=r"`aten::lerp_.Scalar` .* 300 times .* materialize_module") as warned:
            step(400)
        assert len(warned) == 1

    @pytest.mark.parametrize(
        "write",
        [
            lambda rows: deferred_init(lambda: [rows.add_(1) for _ in range(1000)]),
            lambda rows: [row.normal_().mul_(0.5) for row in rows],
            lambda rows: [row.copy_(torch.ones(2)) for row in rows],
            lambda rows: [rows[0, 0].item() for _ in range(400) if rows.add_(1) is rows],
        ],
        ids=["constructor", "rows", "loading", "reading"],
    )
    def test_others_are_not(self, write: Callable[[torch.Tensor], object]) -> None:
        rows = deferred_init(torch.zeros, 400, 2)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            write(rows)

    def test_training_with_real_state_records_nothing(self) -> None:
        model = deferred_init(make_model)
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
        train(model, optimizer, 1)
        materialize_module(model)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            train(model, optimizer, 301)


def test_optimizers_are_keywords() -> None:
    model = deferred_init(nn.Linear, 2, 2)
    with pytest.raises(TypeError, match="second positional argument, got SGD. Pass `optimizer=`"):
        materialize_module(model, torch.optim.SGD(model.parameters()))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="takes optimizers, but was given a str"):
        materialize_module(model, optimizer="SGD")  # type: ignore[arg-type]
    assert is_deferred(model)
    materialize_module(model, optimizer=None)


# ---- Computations of autograd ----


@torch.library.custom_op("torchext_test_training::sine", mutates_args=())
def sine(x: torch.Tensor) -> torch.Tensor:
    return x.sin()


def keep_cosine(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(inputs[0].cos() * torch.ones(3))


sine.register_autograd(lambda ctx, grad: grad * ctx.saved_tensors[0], setup_context=keep_cosine)


class FrozenNorm(nn.Module):
    """A normalization whose statistics and weights are real, between deferred layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 3), nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)))  # type: ignore[no-any-return]


def with_real_norm(model: nn.Module) -> nn.Module:
    model.norm = nn.BatchNorm1d(3)
    return model


INPUT = torch.linspace(-1, 1, 12).view(3, 4)


def loss_of(model: nn.Module, *inputs: torch.Tensor) -> torch.Tensor:
    result = model(*(inputs or (INPUT,)))
    return (result[0] if isinstance(result, tuple) else result).square().sum()  # type: ignore[no-any-return]


def with_pack_hooks(model: nn.Module) -> None:
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.mul(2), lambda x: x / 2):
        loss_of(model).backward()  # type: ignore[no-untyped-call]


def in_autocast(model: nn.Module) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        weight = model[0].weight
        hidden = torch.mm(torch.mm(INPUT, weight.t()), weight.t()[:3])
    hidden.float().square().sum().backward()


def by_forward_mode(model: nn.Module) -> None:
    weight = model[0].weight
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(weight.detach(), torch.full((3, 4), 0.5))
        weight.grad = forward_ad.unpack_dual((dual * dual).sin().mul_(dual)).tangent


def into_a_real_tensor(model: nn.Module) -> None:
    total = torch.zeros(3, 2)
    total.add_(model(INPUT))
    total[0] = model(INPUT)[1]
    total.square().sum().backward()


def through_quantization(model: nn.Module) -> None:
    weight = torch.fake_quantize_per_tensor_affine(model[0].weight, 0.1, 0, -128, 127)
    scale, zero = torch.full((3,), 0.1), torch.zeros(3, dtype=torch.int32)
    weight = torch.fake_quantize_per_channel_affine(weight, scale, zero, 0, -128, 127)
    nn.functional.linear(INPUT, weight).square().sum().backward()


def sequence() -> torch.Tensor:
    return torch.linspace(-1, 1, 40).view(5, 2, 4)


def twice(model: nn.Module) -> None:
    for _ in range(2):
        loss_of(model, sequence()).backward()  # type: ignore[no-untyped-call]


PROGRAMS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Any]]] = {
    "overwritten by an activation": (
        lambda: nn.Sequential(nn.Linear(4, 3), nn.ReLU6(inplace=True), nn.Linear(3, 2)),
        lambda model: loss_of(model).backward(),  # type: ignore[no-untyped-call]
    ),
    "LSTM": (lambda: nn.LSTM(4, 3, num_layers=2, bidirectional=True), twice),
    "GRU": (lambda: nn.GRU(4, 3), twice),
    "RNN": (lambda: nn.RNN(4, 3), twice),
    "pack hooks": (make_model, with_pack_hooks),
    "hinge_embedding_loss": (
        make_model,
        lambda model: nn.functional.hinge_embedding_loss(model(INPUT), torch.ones(3, 2)).backward(),
    ),
    "autocast, with a weight that is used twice": (make_model, in_autocast),
    "forward mode": (make_model, by_forward_mode),
    "setup_context of a custom operator": (
        lambda: nn.Linear(4, 3),
        lambda model: sine(model(INPUT)).square().sum().backward(),
    ),
    "fake quantization": (make_model, through_quantization),
    "results in a real tensor": (make_model, into_a_real_tensor),
    "checkpointing": (
        lambda: nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.3), nn.Linear(3, 2)),
        lambda model: checkpoint(model, INPUT, use_reentrant=False).square().sum().backward(),  # type: ignore[no-untyped-call]
    ),
    "a module that is real already": (
        FrozenNorm,
        lambda model: loss_of(with_real_norm(model)).backward(),  # type: ignore[no-untyped-call]
    ),
}


@pytest.mark.cases(11)
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("in_reverse", [False, True], ids=["the module", "gradients first"])
def test_gradients_are_those_of_eager_training(name: str, in_reverse: bool) -> None:
    make, run = PROGRAMS[name]

    def trained(build: Callable[[], nn.Module]) -> nn.Module:
        torch.manual_seed(0)
        model = build()
        run(model)
        return model

    wanted, model = trained(make), trained(lambda: deferred_init(make))
    gradients = [parameter.grad for parameter in model.parameters()]
    assert [grad is None for grad in gradients] == [parameter.grad is None for parameter in wanted.parameters()]
    for grad in reversed(gradients) if in_reverse else []:
        if grad is not None and is_deferred(grad):
            materialize_tensor(grad)
    materialize_module(model)
    for found, expected in zip(model.parameters(), wanted.parameters(), strict=True):
        for one, other in ((found, expected), (found.grad, expected.grad)):
            if other is not None:
                assert not is_deferred(one)
                assert torch.equal(one, other)


def test_real_tensor_that_is_set_to_a_deferred_one_shares_its_storage() -> None:
    real, deferred = torch.zeros(3), deferred_init(torch.ones, 3)
    assert real.set_(deferred) is real
    assert is_deferred(real)
    deferred.add_(1)
    real[0] = 5
    materialize_tensor(deferred)
    assert real.tolist() == deferred.tolist() == [5, 2, 2]
    with pytest.raises(RuntimeError, match="Could not set tensor of type float to a tensor of type double"):
        torch.zeros(3, dtype=torch.double).set_(deferred_init(torch.ones, 3))


@pytest.mark.parametrize("geometry", [(1, (2,)), (1, (2, 2), (2, 1)), (0, (3,), (2,))])
def test_real_tensor_that_is_set_to_a_part_of_a_deferred_one_shares_its_storage(geometry: tuple[Any, ...]) -> None:
    def build() -> torch.Tensor:
        return torch.arange(6.0)

    wanted = torch.zeros(1).set_(build().add_(1), *geometry)
    real, deferred = torch.zeros(1), deferred_init(build)
    real.set_(deferred, *geometry)
    deferred.add_(1)
    materialize_tensor(deferred)
    assert torch.equal(real, wanted)
    assert real.stride() == wanted.stride()


def test_real_tensor_that_is_set_to_a_deferred_one_is_not_conjugated() -> None:
    real = torch.zeros(2, dtype=torch.complex64)
    real.set_(deferred_init(lambda: (torch.ones(2) * 1j).conj()))
    assert not real.is_conj()
    assert materialize_tensor(real).tolist() == [1j, 1j]


def test_cast_in_autocasts_cache_is_forgotten_when_its_leaf_becomes_real() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        layer = deferred_init(nn.Linear, 4, 3)
        assert is_deferred(layer(INPUT))
        materialize_module(layer)
        assert not is_deferred(layer(INPUT))


@pytest.mark.parametrize("lengths", [[6, 5], torch.tensor([6, 5])], ids=["numbers", "tensor"])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_ctc_loss_of_deferred_tensors_has_gradients(reduction: str, lengths: Any) -> None:
    def build() -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(0)
        x = torch.randn(6, 2, 4, requires_grad=True)
        of_targets = torch.tensor([3, 2]) if isinstance(lengths, torch.Tensor) else [3, 2]
        targets = torch.tensor([[1, 2, 3], [3, 1, 0]])
        loss = nn.functional.ctc_loss(x.log_softmax(2), targets, lengths, of_targets, reduction=reduction)
        (gradient,) = torch.autograd.grad(loss.sum(), x)
        return loss.detach(), gradient

    for found, wanted in zip(deferred_init(build), build(), strict=True):
        assert torch.equal(materialize_tensor(found), wanted)
