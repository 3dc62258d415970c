"""Generators of fake CUDA devices advance like those of real ones: NOTE [Moves of CUDA generators]."""

from __future__ import annotations

import pytest
import torch
from philox_calls import facts_of, offset_of

from torchext.fake import FakeGPU, fake_mode


@pytest.mark.filterwarnings("ignore:to - 1 is out of bounds:UserWarning")
@pytest.mark.parametrize("gpu", ["H100-80GB", "A100-80GB", "L4-24GB"])
def test_generators_move_as_pytorchs_host_code_moves_them(gpu: str) -> None:
    facts = facts_of(gpu)
    assert len(facts) > 2000
    with fake_mode(gpu=FakeGPU(gpu, memory=200 * 2**30)):
        generator = torch.cuda.default_generators[0]
        found = [offset_of(case, generator) for case, _ in facts]
    wrong = [(case, offset, fact) for (case, fact), offset in zip(facts, found, strict=True) if offset != fact]
    assert not wrong
