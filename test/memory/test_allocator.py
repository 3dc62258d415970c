"""The simulated caching allocator, compared with PyTorch's."""

from __future__ import annotations

import ast
import os
import sys
from pathlib import Path

import bindings
import forked
import pytest
import torch

GIB = 2**30

# The results of PyTorch 2.15's allocator for `random_program(7, 1500, largest)` on a device of the given capacity:
# allocated and reserved bytes at the end, their peaks, the number of failed requests, and a checksum of all states.
# (`run_on_cuda()`, with the null driver of `make oracle`.)
FIGURES = [
    ("", 79, 1, ((4102345728, 6232735744), 5255776768, 7165968384, 0, 1834904389)),
    ("", 6, 8, ((1580843520, 6442450944), 6404702208, 6442450944, 215, 3062634267)),
    ("expandable_segments:True", 79, 1, ((4098992128, 4368367616), 5251776000, 6488588288, 0, 659951145)),
    ("max_split_size_mb:64", 79, 1, ((4187405312, 4318035968), 5335616000, 7778336768, 0, 2664423895)),
    ("max_split_size_mb:64", 6, 8, ((6017416704, 6109003776), 6404702208, 6429868032, 8, 287098882)),
    (
        "max_split_size_mb:30,max_non_split_rounding_mb:40",
        79,
        1,
        ((4278182912, 4347396096), 5358634496, 7723810816, 0, 3085934521),
    ),
    (
        "max_split_size_mb:30,max_non_split_rounding_mb:40",
        6,
        8,
        ((6137172480, 6211764224), 6404702208, 6434062336, 8, 2229179329),
    ),
    ("roundup_power2_divisions:4", 6, 8, ((3904708608, 4590665728), 6442450944, 6442450944, 10, 93591761)),
    (
        "roundup_power2_divisions:[1:2,16:8,256:1,>:4]",
        6,
        8,
        ((5854940672, 6375342080), 6442450944, 6442450944, 12, 3237979153),
    ),
    ("large_segment_size_mb:40", 79, 1, ((4102964736, 6287261696), 5258207744, 7514095616, 0, 4087078018)),
    ("large_segment_size_mb:40", 6, 8, ((3558074368, 4299161600), 6404702208, 6413090816, 14, 2678166790)),
]

# The settings hold for the process, and PyTorch cannot reset all of them.
CHILD = """
import sys, zlib
sys.path[:0] = {folders!r}
import bindings
from allocation_programs import random_program
result = bindings.simulate_allocations({capacity}, random_program(7, 1500, {largest}))
peaks = (max(a for a, _ in result), max(r for _, r in result))
print((result[-1], *peaks, sum(a < 0 for a, _ in result), zlib.crc32(repr(result).encode())))
"""


@pytest.mark.parametrize(
    ("settings", "capacity", "largest", "figures"), FIGURES, ids=[f"{s or 'default'}-{c}GiB" for s, c, _, _ in FIGURES]
)
def test_random_programs_allocate_like_on_a_real_allocator(
    settings: str, capacity: int, largest: int, figures: tuple[object, ...]
) -> None:
    if "large_segment_size" in settings and not _knows(settings):
        pytest.skip("this release of PyTorch has no large_segment_size_mb")
    folders = [str(folder) for folder in Path(__file__).parents[:2]]
    program = CHILD.format(folders=folders, capacity=capacity * GIB, largest=largest * GIB)
    environment = {**os.environ, "PYTORCH_ALLOC_CONF": settings}
    output = forked.run([sys.executable, "-c", program], env=environment, check=True).stdout
    assert ast.literal_eval(output.splitlines()[-1]) == figures


def _knows(settings: str) -> bool:
    program = f"import torch; torch._C._accelerator_setAllocatorSettings({settings!r})"
    return forked.run([sys.executable, "-c", program]).returncode == 0


def test_a_block_that_another_stream_uses_is_free_with_the_next_request() -> None:
    size = 64 * 2**20
    events = [("alloc", 0, size, 0), ("record", 0, 0, 1), ("free", 0, 0, 0), ("alloc", 1, size, 0)]
    assert bindings.simulate_allocations(GIB, events)[-1] == (size, size)


def test_streams_do_not_share_their_blocks() -> None:
    size = 64 * 2**20
    events = [("alloc", 0, size, 0), ("free", 0, 0, 0), ("alloc", 1, size, 1)]
    assert bindings.simulate_allocations(GIB, events)[-1] == (size, 2 * size)


def test_request_that_does_not_fit_keeps_allocations() -> None:
    events = [("alloc", 0, GIB // 2, 0), ("alloc", 1, GIB, 0), ("alloc", 2, GIB // 2, 0)]
    assert bindings.simulate_allocations(GIB, events) == [(GIB // 2, GIB // 2), (-1, GIB // 2), (GIB, GIB)]


def test_an_unknown_event_is_refused() -> None:
    with pytest.raises(ValueError, match='"alloc", "free", "record" or "empty", got "grow"'):
        bindings.simulate_allocations(GIB, [("grow", 0, 0, 0)])


def test_settings_are_those_that_pytorch_parses() -> None:
    before = torch._C._accelerator_getAllocatorSettings()
    with pytest.raises(ValueError, match="max_split_size_mb too small"):
        torch._C._accelerator_setAllocatorSettings("max_split_size_mb:1")
    torch._C._accelerator_setAllocatorSettings(before)  # PyTorch has kept the text
