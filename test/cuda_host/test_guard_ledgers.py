"""The guards launch the same CUDA kernels as PyTorch's: autocast in its four ways, and inference mode."""

from __future__ import annotations

import os

import pytest
import torch
from guard_programs import PROGRAMS, WAYS, inference, peer_of, training
from ledger import launches_of

from torchext.inference import inference_mode

pytestmark = [
    pytest.mark.cuda_host,
    pytest.mark.skipif("NULLCUDA_TRACE" not in os.environ, reason="needs the null driver: make cuda-host"),
]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_autocast_launches_the_same_kernels_as_pytorchs(name: str, way: str, dtype: torch.dtype) -> None:
    _, expected = training(PROGRAMS[name], peer_of(way), dtype)
    launches = launches_of(expected)
    assert len(launches) > 10
    _, steps = training(PROGRAMS[name], way, dtype)
    assert launches_of(steps) == launches


@pytest.mark.parametrize("name", PROGRAMS)
def test_inference_mode_launches_the_same_kernels_as_pytorchs(name: str) -> None:
    expected = launches_of(inference(PROGRAMS[name], torch.inference_mode))
    assert launches_of(inference(PROGRAMS[name], inference_mode)) == expected
