"""Random programs of allocations and frees, which PyTorch's allocator and the simulated one run alike."""

from __future__ import annotations

import random
from collections.abc import Sequence

__all__ = ["Event", "random_program", "run_on_cuda"]

Event = tuple[str, int, int, int]  # kind, number of the allocation, bytes, stream

MIB = 2**20


def random_program(seed: int, count: int, largest: int) -> list[Event]:
    """Make `count` events on two streams, with requests of all classes of sizes up to `largest` bytes."""
    draws = random.Random(seed)
    classes = [(1, MIB), (MIB, 10 * MIB), (10 * MIB, 300 * MIB), (300 * MIB, largest)]
    live: list[int] = []
    events: list[Event] = []
    for number in range(count):
        what = draws.choices(["alloc", "free", "record", "empty"], [50, 45, 4, 1])[0]
        if what == "alloc":
            low, high = draws.choices(classes, [40, 30, 27, 3])[0]
            events.append(("alloc", number, draws.randint(low, high), draws.randint(0, 1)))
            live.append(number)
        elif what == "empty":
            events.append(("empty", 0, 0, 0))
        elif live and what == "free":
            events.append(("free", live.pop(draws.randrange(len(live))), 0, 0))
        elif live:
            events.append(("record", draws.choice(live), 0, draws.randint(0, 1)))
    return events


def run_on_cuda(events: Sequence[Event]) -> list[tuple[int, int]]:
    """Run `events` on the CUDA device. Return the same as `bindings.simulate_allocations()`."""
    import torch

    streams = [torch.cuda.default_stream(), torch.cuda.Stream()]
    tensors: dict[int, torch.Tensor] = {}
    result = []
    for what, number, nbytes, stream in events:
        failed = False
        if what == "alloc":
            try:
                with torch.cuda.stream(streams[stream]):
                    tensors[number] = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
            except torch.OutOfMemoryError:
                failed = True
        elif what == "free":
            tensors.pop(number, None)
        elif what == "record":
            if number in tensors:
                tensors[number].record_stream(streams[stream])
        else:
            torch.cuda.empty_cache()
        result.append((-1 if failed else torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
    return result
