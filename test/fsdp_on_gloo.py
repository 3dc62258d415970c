"""Programs for `test_against_gloo.py`: the memory of FSDP2 in real processes, and in a world of fakes."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from processes import program
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import Module, functional
from training_steps import BATCH, SEQUENCE, Block, Llama, shard

from torchext.dry_run import world
from torchext.memory import Category, track_memory

COMPARED = (Category.PARAMETER, Category.GRADIENT, Category.OPTIMIZER_STATE, Category.COMMUNICATION)
# Further bytes in a real process: scalars.
SMALL = 64
# Frees on gloo's threads are not reported: gathered layers, and the rest of the model, possibly in half precision.
LAYER = sum(parameter.nbytes for parameter in Block().parameters())
ROOT = sum(parameter.nbytes for parameter in Llama(layers=0).parameters())
FREED_BY_GLOO = [(layers * LAYER + roots * ROOT) // 2 for layers in range(5) for roots in range(3)]

FORGETTING = 0.02  # seconds

Work: Any = dist.distributed_c10d.Work
Held = list[tuple[str, int, dict[str, int]]]


def held_bytes(size: int, **options: Any) -> Held:
    """Train for two steps, and record the live bytes after each phase by category."""
    held: Held = []
    torch.manual_seed(0)
    with track_memory() as memory:

        def note(what: str) -> None:
            now = memory.now("cpu")
            held.append((what, now.allocated, {category.label: now.by_category[category] for category in COMPARED}))

        def note_inside(module: Module, *_: object) -> None:
            note(f"inside {type(module).__name__}")

        model = shard(Llama(), init_device_mesh("cpu", (size,)), **options)
        gc.collect()  # sharded tensors are in cycles
        note("sharded")
        for layer in model.layers.values():  # type: ignore[union-attr, operator]
            layer.attention.register_forward_hook(note_inside)
            layer.attention.register_full_backward_hook(note_inside)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            batch = torch.zeros(BATCH, SEQUENCE, dtype=torch.int64)
            loss = functional.cross_entropy(model(batch).flatten(0, 1).float(), batch.flatten())
            note("forward")
            loss.backward()
            note("backward")
            optimizer.step()
            note("optimizer")
            optimizer.zero_grad()
            note("cleared")
    return held


@contextmanager
def letting_gloo_forget() -> Iterator[None]:
    """Give gloo's threads time to drop sent tensors, so that this thread frees them."""
    original = Work.wait

    def wait(self: Any, *args: Any) -> Any:
        result = original(self, *args)
        time.sleep(FORGETTING)
        return result

    Work.wait = wait
    try:
        yield
    finally:
        Work.wait = original


@contextmanager
def without_group() -> Iterator[None]:
    """Replace the program's group by another."""
    dist.destroy_process_group()
    yield
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def assert_fakes_hold_as_much(**options: Any) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    with letting_gloo_forget():
        real = held_bytes(size, **options)
    with without_group(), world(size, rank, gpu=None):
        fake = held_bytes(size, **options)
    for of_fakes, of_real in zip(fake, real, strict=True):
        besides = [of_real[1] - of_fakes[1] - freed for freed in FREED_BY_GLOO]
        assert any(0 <= nbytes <= SMALL for nbytes in besides), f"{of_fakes} of fakes, {of_real} of real tensors"
        # The category of gathered parameters is unknown for real tensors: their storages were freed in between.
        assert of_fakes[2] == of_real[2] or "inside" in of_real[0] or "forward" in of_real[0], (of_fakes, of_real)
    assert all(by_category[Category.PARAMETER.label] > 0 for _, _, by_category in fake[1:])
    assert any(by_category[Category.GRADIENT.label] > 0 for _, _, by_category in fake)


@program(2)
def shards_of_two() -> None:
    assert_fakes_hold_as_much()


@program(4)
def shards_of_four() -> None:
    assert_fakes_hold_as_much()


@program(2)
def mixed_precision() -> None:
    assert_fakes_hold_as_much(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))


@program(4)
def kept_after_forward() -> None:
    assert_fakes_hold_as_much(reshard_after_forward=False)


@program(4)
def resharded_to_two() -> None:
    assert_fakes_hold_as_much(reshard_after_forward=2)
