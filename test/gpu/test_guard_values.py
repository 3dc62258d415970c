"""The guards compute on a GPU what PyTorch's own compute, bit for bit: autocast in its four ways, inference mode."""

from __future__ import annotations

import pytest
import torch
from common import has_same_bits
from guard_programs import PROGRAMS, WAYS, inference, peer_of, training

from torchext.inference import inference_mode

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_autocast_trains_as_pytorchs_does(name: str, way: str, dtype: torch.dtype) -> None:
    expected, expected_steps = training(PROGRAMS[name], peer_of(way), dtype)
    model, steps = training(PROGRAMS[name], way, dtype)
    for wanted, found in zip(expected_steps(), steps(), strict=True):
        assert has_same_bits(found.float(), wanted.float())  # decorators return the dtype of their module
    for (key, wanted), found in zip(expected.state_dict().items(), model.state_dict().values(), strict=True):
        assert has_same_bits(found, wanted), key


@pytest.mark.parametrize("name", PROGRAMS)
def test_inference_mode_computes_what_pytorchs_computes(name: str) -> None:
    with torch.no_grad():
        expected = inference(PROGRAMS[name], torch.inference_mode)().clone()
        assert has_same_bits(inference(PROGRAMS[name], inference_mode)(), expected)
