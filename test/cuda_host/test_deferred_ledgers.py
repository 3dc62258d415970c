"""Deferred constructors launch the same CUDA kernels as eager ones: the same draws for each tensor, in any order."""

from __future__ import annotations

import gc
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, small_config
from cuda_constructors import BUILDERS, constructors_of, moved_by_dead_operators, tensors_of
from ledger import draws_of, eager, generator_states
from torch import nn
from torch.testing._internal.common_modules import ModuleInfo, module_db

from torchext.deferred_init import deferred_init, is_deferred, materialize_module, materialize_tensor

pytestmark = [
    pytest.mark.cuda_host,
    pytest.mark.skipif("NULLCUDA_TRACE" not in os.environ, reason="needs the null driver: make cuda-host"),
]


@pytest.fixture(autouse=True)
def without_cudnn() -> Iterator[None]:
    """Disable cuDNN: its stubs do not return the sizes of weights."""
    with torch.backends.cudnn.flags(enabled=False):
        yield


@pytest.fixture(autouse=True)
def zeros_in_memory() -> None:
    """Let uncomputed values read as zeros, like new memory: `trunc_normal_()` redraws depending on values."""
    gc.collect()
    torch.cuda.empty_cache()


def assert_same_ledger(build: Callable[[], Any]) -> None:
    """Assert that deferred tensors draw what eager ones draw, in three orders and together."""
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


@pytest.mark.filterwarnings("ignore")  # deprecations
def test_dead_operators_move_the_generator_as_eager_ones() -> None:
    """Replay checks how far an operator advances the generator, but skips operators with unused results."""
    moved, wrong = moved_by_dead_operators()
    assert not wrong
    assert moved > 60


@pytest.mark.filterwarnings("ignore::UserWarning")  # advice about the arguments
@pytest.mark.parametrize("module", module_db, ids=lambda module: module.name)
def test_modules_of_pytorch(module: ModuleInfo) -> None:
    for build in constructors_of(module):
        assert_same_ledger(build)


NEED_VALUES = {
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
