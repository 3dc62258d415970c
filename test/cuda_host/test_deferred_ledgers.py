"""Deferred constructors launch on CUDA what eager ones launch: the same draws for each tensor, in any order."""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, small_config
from torch import Tensor, nn
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import ModuleInfo, module_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils import _pytree as pytree

from torchext.deferred_init import deferred_init, is_deferred, materialize_module, materialize_tensor

pytestmark = [
    pytest.mark.cuda_host,
    pytest.mark.skipif("NULLCUDA_TRACE" not in os.environ, reason="needs the null driver: make cuda-host"),
]
if "NULLCUDA_TRACE" in os.environ:
    from ledger import draws_of, eager, generator_states


def written_twice() -> nn.Module:
    layer = nn.Linear(30, 30, device="cuda")
    nn.init.normal_(layer.weight)
    nn.init.xavier_uniform_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


def halves() -> nn.Module:
    layer = nn.Linear(64, 64, device="cuda")
    with torch.no_grad():
        layer.weight[:32].normal_()
        layer.weight[32:].uniform_()
    return layer


def scaled() -> Tensor:
    weight = torch.randn(600, 600, device="cuda")
    return weight.div_(weight.std())


def parts() -> list[Tensor]:
    weight = torch.randn(1024, 32, device="cuda")
    return [weight[:512].clone(), weight[512:].clone(), weight.t().contiguous()]


def mixed_devices() -> nn.Module:
    return nn.Sequential(
        nn.Linear(9, 9), nn.Linear(9, 9, device="cuda"), nn.Linear(9, 9), nn.Linear(9, 9, device="cuda")
    )


def own_generator() -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(5)
    first = torch.randn(700, device="cuda", generator=generator)
    second = torch.randn(700, device="cuda")
    third = torch.empty(300, device="cuda").uniform_(generator=generator)
    return [first, second, third]


def seeding_inside() -> list[Tensor]:
    first = torch.randn(5, device="cuda")
    torch.manual_seed(11)
    second = torch.randn(5, device="cuda")
    torch.cuda.manual_seed_all(12)
    return [first, second, torch.randn(5, device="cuda")]


def forked() -> list[Tensor]:
    first = torch.randn(5, device="cuda")
    with torch.random.fork_rng(devices=[0]):
        torch.cuda.manual_seed(3)
        second = torch.randn(5, device="cuda")
    return [first, second, torch.randn(5, device="cuda")]


def state_restored() -> list[Tensor]:
    state = torch.cuda.get_rng_state()
    first = torch.randn(2000, device="cuda")
    torch.cuda.set_rng_state(state)
    return [first, torch.randn(2000, device="cuda")]


def offset_decides() -> list[Tensor]:
    tensors = [torch.randn(5, device="cuda") for _ in range(3)]
    if torch.cuda.default_generators[0].get_offset() == 12:
        tensors.append(torch.rand(7, device="cuda"))
    return tensors


def many_operators() -> list[Tensor]:
    weight = torch.empty(3000, device="cuda")
    return [
        *(fill(weight.clone()) for fill in (Tensor.exponential_, Tensor.cauchy_, Tensor.log_normal_, Tensor.normal_)),
        weight.clone().bernoulli_(0.3),
        torch.bernoulli(torch.full((3000,), 0.3, device="cuda")),
        torch.bernoulli(weight, 0.3),
        torch.randperm(3000, device="cuda", generator=torch.Generator("cuda")),
        torch.empty(3000, dtype=torch.int64, device="cuda").random_(0, 2**40),
        torch.randint(10, (3000,), device="cuda"),
        torch.randperm(3000, device="cuda"),
        torch.poisson(torch.full((3000,), 0.3, device="cuda")),
        torch.normal(torch.zeros(3000, device="cuda"), 2.0),
        nn.functional.dropout(torch.ones(3000, device="cuda"), 0.5),
        nn.functional.rrelu(torch.ones(3000, device="cuda"), training=True),
        torch.multinomial(torch.ones(30, 40, device="cuda"), 5),
        torch.randn(3000, dtype=torch.complex64, device="cuda"),
        torch.randn(3000, dtype=torch.float64, device="cuda"),
        torch.randn(2_000_000, device="cuda"),
        torch.rand(7, device="cuda"),
    ]


def truncated() -> list[Tensor]:
    first = nn.init.trunc_normal_(torch.empty(50, 50, device="cuda"))
    second = nn.init.trunc_normal_(torch.empty(50, 50, device="cuda"), std=0.02)
    return [first, second, torch.rand(7, device="cuda")]


def two_devices() -> list[Tensor]:
    first = torch.randn(700, device="cuda:0")
    second = torch.randn(700, device="cuda:1")
    generator = torch.Generator("cuda").manual_seed(4)
    third = torch.randn(700, device="cuda:1", generator=generator)
    return [first, second, third, torch.rand(7, device="cuda:0"), torch.rand(7, device="cuda:1")]


def copied() -> list[Tensor]:
    weight = torch.randn(700, device="cuda")
    return [copy.deepcopy(weight), weight, weight.clone(), weight + torch.rand(700, device="cuda")]


def read_inside() -> list[Tensor]:
    weight = torch.randn(700, device="cuda")
    scale = weight.abs().max().item()
    assert not weight.isnan().any()
    return [weight / (scale + 1), torch.rand(7, device="cuda")]


def default_device() -> nn.Module:
    with torch.device("cuda"):
        return nn.TransformerEncoderLayer(16, 2, 32)


BUILDERS: dict[str, Callable[[], Any]] = {
    "linear": lambda: nn.Linear(600, 600, device="cuda"),
    "two layers": lambda: nn.Sequential(nn.Linear(30, 30, device="cuda"), nn.Linear(30, 5, device="cuda")),
    "convolution": lambda: nn.Conv2d(3, 64, 7, device="cuda"),
    "embedding": lambda: nn.Embedding(5000, 300, padding_idx=3, device="cuda"),
    "attention": lambda: nn.MultiheadAttention(32, 4, device="cuda"),
    "half precision": lambda: nn.Linear(600, 600, device="cuda", dtype=torch.bfloat16),
    "converted": lambda: nn.Linear(600, 600, device="cuda").half(),
    **{
        builder.__name__.replace("_", " "): builder
        for builder in (
            *(written_twice, halves, scaled, parts, mixed_devices, own_generator, seeding_inside, forked),
            *(copied, read_inside, default_device),
            *(state_restored, offset_decides, many_operators, truncated, two_devices),
        )
    },
    **{
        f"init.{name}": (lambda fill: lambda: fill(torch.empty(40, 40, device="cuda")))(getattr(nn.init, name))
        for name in (
            *("uniform_", "normal_", "trunc_normal_", "xavier_uniform_", "xavier_normal_", "kaiming_uniform_"),
            *("kaiming_normal_", "zeros_", "ones_", "eye_"),
        )
    },
    "init.sparse_": lambda: nn.init.sparse_(torch.empty(40, 40, device="cuda"), 0.1),
}


@pytest.fixture(autouse=True)
def without_cudnn() -> Iterator[None]:
    """CuDNN's stubs do not tell the sizes of weights."""
    with torch.backends.cudnn.flags(enabled=False):
        yield


def tensors_of(result: Any) -> dict[str, Tensor]:
    if isinstance(result, nn.Module):
        state = result.state_dict(keep_vars=True)
        return {name: tensor for name, tensor in state.items() if not nn.parameter.is_lazy(tensor)}
    tensors = [result] if isinstance(result, Tensor) else result
    return {str(i): tensor for i, tensor in enumerate(tensors)}


def assert_same_ledger(build: Callable[[], Any]) -> None:
    """Asserts that deferred tensors draw what was drawn for them eagerly, in three orders and together."""
    torch.manual_seed(0)
    constructed = eager(build)
    after_eager = generator_states()
    eager_tensors = tensors_of(constructed.result)
    names = list(eager_tensors)
    alone: dict[str, list[Any]] = {}
    for order in (names, names[::-1], random.Random(0).sample(names, len(names))):
        torch.manual_seed(0)
        tensors = tensors_of(deferred_init(build))
        assert generator_states() == after_eager
        torch.manual_seed(99)
        torch.randn(1000, device="cuda")
        before = generator_states()
        for key in order:
            if is_deferred(tensors[key]):
                drawn = draws_of(partial(materialize_tensor, tensors[key]))
                assert not Counter(drawn) - Counter(constructed.draws), f"{key} draws what eager construction does not"
                assert not Counter(constructed.of(eager_tensors[key])) - Counter(drawn), f"{key} lacks draws"
                assert alone.setdefault(key, drawn) == drawn, f"{key} depends on the order"
        assert generator_states() == before

    torch.manual_seed(0)
    deferred = deferred_init(build)
    if isinstance(deferred, nn.Module):
        together = draws_of(lambda: materialize_module(deferred))
        assert set(together) == {draw for draws in alone.values() for draw in draws}
        assert generator_states() == after_eager


@pytest.mark.parametrize("name", BUILDERS)
def test_constructors(name: str) -> None:
    assert_same_ledger(BUILDERS[name])


def constructors_of(module: ModuleInfo) -> list[Callable[[], nn.Module]]:
    inputs = module.module_inputs_func(module, device="cpu", dtype=torch.float32, requires_grad=False, training=True)
    arguments = [one.constructor_input for one in inputs]

    def build(args: tuple[Any, ...], kwargs: dict[str, Any]) -> nn.Module:
        with torch.device("cuda"):
            return module.module_cls(*args, **kwargs)  # type: ignore[no-any-return]

    return [partial(build, one.args, one.kwargs) for one in arguments]


def calls_of_operators() -> Iterator[tuple[str, Callable[[], Any]]]:
    for op in op_db:
        try:
            samples = list(itertools.islice(op.sample_inputs("cpu", torch.float32), 6))
        except (RuntimeError, TypeError, ValueError):  # not for this dtype
            continue
        for i, sample in enumerate(samples):

            def call(op: OpInfo = op, sample: SampleInput = sample) -> Any:
                return op.op(*pytree.tree_map_only(Tensor, to_cuda, (sample.input, *sample.args)), **sample.kwargs)

            yield f"{op.full_name} {i}", call


def to_cuda(tensor: Tensor) -> Tensor:
    return torch.ones(tensor.shape, dtype=tensor.dtype, device="cuda")


@pytest.mark.filterwarnings("ignore")  # of what is deprecated
def test_dead_operators_move_the_generator_as_eager_ones() -> None:
    """What is not replayed cannot be checked when it is."""
    moved, wrong = 0, []
    for name, call in calls_of_operators():
        with contextlib.suppress(Exception):  # what CUDA refuses, or the null driver does not have
            torch.manual_seed(0)
            call()
            expected = generator_states()
            if expected[1:] != [(0, 0), (0, 0)]:
                torch.manual_seed(0)
                deferred_init(call)
                moved += 1
                if generator_states() != expected:
                    wrong.append(name)
    assert not wrong
    assert moved > 100


@pytest.mark.filterwarnings("ignore::UserWarning")  # advice about the arguments
@pytest.mark.parametrize("module", module_db, ids=lambda module: module.name)
def test_modules_of_pytorch(module: ModuleInfo) -> None:
    for build in constructors_of(module):
        assert_same_ledger(build)


NEED_VALUES = {
    "rwkv": "orthogonal_() needs cuSOLVER",
    "siglip": "draws again by values, which nothing computes here",
}


@pytest.mark.parametrize("model_type", [name for pair in ARCHITECTURES.values() for names in pair for name in names])
def test_architectures_of_transformers(model_type: str) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    if model_type in NEED_VALUES:
        pytest.skip(NEED_VALUES[model_type])
    config = small_config(model_type)

    def build() -> nn.Module:
        with torch.device("cuda"):
            return transformers.AutoModel.from_config(config)  # type: ignore[no-any-return]

    assert_same_ledger(build)
