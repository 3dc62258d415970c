"""On a GPU, the guards compute the same bits as PyTorch's: autocast in its four ways, inference mode."""

from __future__ import annotations

import pytest
import torch
from common import COMPUTES_ON_CUDA, has_same_bits
from guard_programs import PROGRAMS, WAYS, inference, peer_of, training

from torchext.inference import inference_mode

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_autocast_trains_as_pytorchs_does(name: str, way: str, dtype: torch.dtype) -> None:
    expected, expected_steps = training(PROGRAMS[name], peer_of(way), dtype)
    model, steps = training(PROGRAMS[name], way, dtype)
    untrained = {key: tensor.clone() for key, tensor in expected.state_dict().items()}
    for wanted, found in zip(expected_steps(), steps(), strict=True):
        assert found.dtype is (torch.float32 if way == "decorator" else wanted.dtype)
        assert has_same_bits(found.float(), wanted.float())  # decorators return the dtype of their module
    for (key, wanted), found in zip(expected.state_dict().items(), model.state_dict().values(), strict=True):
        assert has_same_bits(found, wanted), key
        assert not torch.equal(wanted, untrained[key]) or not COMPUTES_ON_CUDA, f"{key} is not trained"


@pytest.mark.parametrize("name", PROGRAMS)
def test_inference_mode_computes_like_pytorchs(name: str) -> None:
    with torch.no_grad():
        expected = inference(PROGRAMS[name], torch.inference_mode)().clone()
        assert has_same_bits(inference(PROGRAMS[name], inference_mode)(), expected)
