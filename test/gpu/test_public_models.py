"""Models of torchvision, timm and transformers that are constructed on a GPU have the same bits deferred and eager."""

from __future__ import annotations

import gc
import importlib
import inspect
from collections.abc import Callable, Iterator
from importlib.util import find_spec

import pytest
import torch
from architectures import small_config
from common import COMPUTES_ON_CUDA
from cuda_values import assert_same_values
from torch import nn

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not COMPUTES_ON_CUDA, reason="values are not computed"),
    pytest.mark.filterwarnings("ignore"),  # warnings of libraries about themselves
]


LARGEST = 10**9  # parameters: two copies of a model are on the device


def of_torchvision(name: str) -> nn.Module:
    models = importlib.import_module("torchvision").models
    has_backbone = "weights_backbone" in inspect.signature(models.get_model_builder(name)).parameters
    return models.get_model(name, weights=None, **{"weights_backbone": None} if has_backbone else {})  # type: ignore[no-any-return]


def of_timm(name: str) -> nn.Module:
    return importlib.import_module("timm").create_model(name)  # type: ignore[no-any-return]


def of_transformers(name: str) -> nn.Module:
    return importlib.import_module("transformers").AutoModel.from_config(small_config(name))  # type: ignore[no-any-return]


def public_models() -> Iterator[tuple[Callable[[str], nn.Module], str]]:
    """Yield the models of the installed libraries, for timm one from each file."""
    if find_spec("torchvision"):
        every = importlib.import_module("torchvision").models.list_models()
        yield from ((of_torchvision, name) for name in every if "quantized" not in name)
    if find_spec("timm"):
        timm = importlib.import_module("timm")
        yield from ((of_timm, timm.list_models(module=module)[0]) for module in timm.list_modules())
    if find_spec("transformers"):
        every = importlib.import_module("transformers.models.auto.modeling_auto").MODEL_MAPPING_NAMES
        yield from ((of_transformers, name) for name in every)


@pytest.fixture(autouse=True)
def emptied_device() -> Iterator[None]:
    """Free this process's memory, because other processes test at the same time."""
    yield
    gc.collect()
    torch.cuda.empty_cache()


@pytest.mark.parametrize(
    ("library", "name"),
    [
        pytest.param(library, name, id=f"{library.__name__[3:]}-{name}")
        for library, name in (public_models() if torch.cuda.is_available() and COMPUTES_ON_CUDA else ())
    ],
)
def test_public_model(library: Callable[[str], nn.Module], name: str) -> None:
    def build() -> nn.Module:
        with torch.device("cuda"):
            return library(name)

    try:
        state = build().state_dict()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        pytest.skip(f"cannot be constructed eagerly: {error}"[:150])
    if sum(tensor.numel() for tensor in state.values()) > LARGEST:
        pytest.skip("is too large")
    del state
    assert_same_values(build)
