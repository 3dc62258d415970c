"""Constructors of tensors and modules on CUDA devices, and calls of operators there."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
from ledger import generator_states
from torch import Tensor, nn
from torch.testing._internal import common_methods_invocations
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import ModuleInfo
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils import _pytree as pytree

from torchext.deferred_init import deferred_init

__all__ = ["BUILDERS", "NEED_SECOND_DEVICE", "constructors_of", "moved_by_dead_operators", "tensors_of"]


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
            *("kaiming_normal_", "zeros_", "ones_", "eye_", "orthogonal_"),
        )
    },
    "init.sparse_": lambda: nn.init.sparse_(torch.empty(40, 40, device="cuda"), 0.1),
}

NEED_SECOND_DEVICE = {"two devices"}


def tensors_of(result: Any) -> dict[str, Tensor]:
    """Return the tensors of a constructor's result by name, including buffers that are not in the state."""
    if isinstance(result, nn.Module):
        named = itertools.chain(
            result.named_parameters(remove_duplicate=False), result.named_buffers(remove_duplicate=False)
        )
        return {name: tensor for name, tensor in named if not nn.parameter.is_lazy(tensor)}
    tensors = [result] if isinstance(result, Tensor) else result
    return {str(i): tensor for i, tensor in enumerate(tensors)}


def constructors_of(module: ModuleInfo) -> list[Callable[[], nn.Module]]:
    inputs = module.module_inputs_func(module, device="cpu", dtype=torch.float32, requires_grad=False, training=True)
    arguments = [one.constructor_input for one in inputs]

    def build(args: tuple[Any, ...], kwargs: dict[str, Any]) -> nn.Module:
        with torch.device("cuda"):
            return module.module_cls(*args, **kwargs)  # type: ignore[no-any-return]

    return [partial(build, one.args, one.kwargs) for one in arguments]


def call_as_it_is(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return op(*args, **kwargs)


def calls_of_operators() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield calls of `op_db`, on copies of its samples on CUDA."""
    for op in op_db:
        try:
            samples = list(itertools.islice(op.sample_inputs("cpu", torch.float32), 6))
        except (RuntimeError, TypeError, ValueError):  # not for this dtype
            continue
        for i, sample in enumerate(samples):

            def call(op: OpInfo = op, sample: SampleInput = sample) -> Any:
                args, kwargs = pytree.tree_map_only(
                    Tensor, to_cuda, ((sample.input, *sample.args), dict(sample.kwargs))
                )
                return op.op(*args, **kwargs)

            yield f"{op.full_name} {i}", call


def to_cuda(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cuda")


def moved_by_dead_operators() -> tuple[int, list[str]]:
    """Call operators eagerly, and record them without reading a result.

    Returns:
        The number of calls that have advanced a CUDA generator, and the names of those that advance it differently when
        recorded.
    """
    # PyTorch's own random samples set a seed first, and restore the generators.
    with mock.patch.object(common_methods_invocations, "wrapper_set_seed", call_as_it_is):
        moved = []
        for name, call in calls_of_operators():
            torch.manual_seed(0)
            with contextlib.suppress(Exception):  # rejected on CUDA, or missing in the null driver
                call()
                expected = generator_states()
                if any(offset for _, offset in expected[1:]):
                    moved.append((name, call, expected))
        differ = []
        for name, call, expected in moved:
            torch.manual_seed(0)
            deferred_init(call)
            if generator_states() != expected:
                differ.append(name)
        return len(moved), differ
