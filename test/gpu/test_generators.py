"""The generator of a GPU advances as the facts list, and as in a recording: NOTE [Moves of CUDA generators]."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from common import COMPUTES_ON_CUDA
from philox_calls import CALLS, Case, facts_of, offset_of

from torchext.deferred_init import deferred_init

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.filterwarnings("ignore:to - 1 is out of bounds:UserWarning"),
    pytest.mark.skipif(not COMPUTES_ON_CUDA, reason="this is how the facts were made: make philox-facts"),
]

# The GPUs of the facts, by the relevant properties: multiprocessors, and threads of each.
GPUS = {(132, 2048): "H100-80GB", (108, 2048): "A100-80GB", (58, 1536): "L4-24GB"}


def facts_of_this_gpu(call: str) -> list[tuple[Case, int]]:
    gpu = torch.cuda.get_device_properties(0)
    key = (gpu.multi_processor_count, gpu.max_threads_per_multi_processor)
    if key not in GPUS:
        pytest.skip(f"there are no facts for {gpu.name}")
    return [(case, fact) for case, fact in facts_of(GPUS[key]) if case.call == call]


def eager(case: Case, generator: torch.Generator) -> int | None:
    try:
        return offset_of(case, generator)
    except torch.OutOfMemoryError:
        return None


def recorded(case: Case, generator: torch.Generator) -> int:
    generator.manual_seed(7)
    generator.set_offset(4096)
    deferred_init(case.run)
    return generator.get_offset() - 4096


@pytest.mark.parametrize("way", [eager, recorded])
@pytest.mark.parametrize("call", CALLS)
def test_generator_moves_as_the_facts_say(call: str, way: Callable[[Case, torch.Generator], int | None]) -> None:
    torch.zeros(1, device="cuda")
    generator = torch.cuda.default_generators[0]
    found = [(case, way(case, generator), fact) for case, fact in facts_of_this_gpu(call)]
    assert sum(moved is not None for _, moved, _ in found) > len(found) / 2
    assert [row for row in found if row[1] not in (row[2], None)] == []
