"""Models that are constructed on a CUDA device have the same bits deferred and eager, in any order."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from architectures import ARCHITECTURES, small_config
from common import COMPUTES_ON_CUDA
from cuda_constructors import BUILDERS, NEED_SECOND_DEVICE, constructors_of, moved_by_dead_operators
from cuda_values import assert_same_values
from torch import nn
from torch.testing._internal.common_modules import ModuleInfo, module_db

pytestmark = pytest.mark.cuda


@pytest.fixture(autouse=True)
def without_stubs_of_cudnn() -> Iterator[None]:
    """Disable cuDNN with the null driver, whose stubs do not return the sizes of weights."""
    with torch.backends.cudnn.flags(enabled=COMPUTES_ON_CUDA and torch.backends.cudnn.enabled):
        yield


@pytest.mark.parametrize("name", BUILDERS)
def test_constructors(name: str) -> None:
    if name in NEED_SECOND_DEVICE and torch.cuda.device_count() < 2:
        pytest.skip("needs two devices")
    assert_same_values(BUILDERS[name])


@pytest.mark.filterwarnings("ignore::UserWarning")  # advice about the arguments
@pytest.mark.parametrize("module", module_db, ids=lambda module: module.name)
def test_modules_of_pytorch(module: ModuleInfo) -> None:
    for build in constructors_of(module):
        assert_same_values(build, may_only_hold_arguments=True)


@pytest.mark.parametrize("model_type", [name for pair in ARCHITECTURES.values() for names in pair for name in names])
def test_architectures_of_transformers(model_type: str) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    if model_type == "siglip" and not COMPUTES_ON_CUDA:
        pytest.skip("draws again by values")
    config = small_config(model_type)

    def build() -> nn.Module:
        with torch.device("cuda"):
            return transformers.AutoModel.from_config(config)  # type: ignore[no-any-return]

    assert_same_values(build)


@pytest.mark.filterwarnings("ignore")  # deprecations
def test_dead_operators_move_the_generator_as_eager_ones() -> None:
    """Replay checks how far an operator advances the generator, but skips operators with unused results."""
    moved, wrong = moved_by_dead_operators()
    assert not wrong
    assert moved > 60
