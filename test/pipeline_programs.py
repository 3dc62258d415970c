"""Pipelines whose stages exchange shapes: for `test_messages.py`, which runs them dry and on gloo.

Each rank prints its sent and received messages, or writes them to a file: `python pipeline_programs.py NAME`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import PipelineScheduleMulti
from torch.nn.functional import mse_loss

WIDTHS = (4, 6, 10, 8, 5)  # of the activations between four layers
MICROBATCHES = 4
ROWS = 2  # of a microbatch

Log = list[list[Any]]


@contextmanager
def logging() -> Iterator[Log]:
    """Record messages in the block: operation, peer, shape, dtype; or the objects."""
    log: Log = []
    replaced = {name: getattr(dist, name) for name in ("P2POp", "send", "recv", "send_object_list", "recv_object_list")}
    is_open = [True]

    def note(name: str, tensor: Tensor, peer: int | None) -> None:
        if is_open[0]:
            log.append([name, peer, list(tensor.shape), str(tensor.dtype)])

    original: Any = dist.P2POp

    class Logged(original):  # type: ignore[misc]
        def __init__(self, op: Any, tensor: Tensor, peer: int | None = None, *args: Any, **kwargs: Any) -> None:
            super().__init__(op, tensor, peer, *args, **kwargs)
            note(op.__name__, tensor, peer)

    def logged(name: str, tensor: Tensor, peer: int | None = None, *args: Any, **kwargs: Any) -> Any:
        note(name, tensor, kwargs.get("dst", kwargs.get("src", peer)))
        given = args if peer is None else (peer, *args)
        return replaced[name](tensor, *given, **kwargs)

    def logged_objects(name: str, objects: list[Any], *args: Any, **kwargs: Any) -> Any:
        is_open[0] = False
        result = replaced[name](objects, *args, **kwargs)
        is_open[0] = True
        log.append([name, kwargs.get("dst", kwargs.get("src")), repr(objects)])
        return result

    dist.P2POp = Logged  # type: ignore[misc]
    for name in ("send", "recv"):
        setattr(dist, name, partial(logged, name))
    for name in ("send_object_list", "recv_object_list"):
        setattr(dist, name, partial(logged_objects, name))
    try:
        yield log
    finally:
        for name, value in replaced.items():
            setattr(dist, name, value)


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def layers_of(stage: int, stages: int) -> nn.Module:
    """Return four layers, or two in each of two stages."""
    count = (len(WIDTHS) - 1) // stages
    first = stage * count
    layers = [nn.Linear(WIDTHS[i], WIDTHS[i + 1]) for i in range(first, first + count)]
    return nn.Sequential(*layers).to(device())


def scheduled(schedule: Any, per_rank: int = 1, is_static: bool = False) -> None:
    """Run a PyTorch schedule for two steps and an evaluation."""
    rank, size = dist.get_rank(), dist.get_world_size()
    count = per_rank * size
    stages = []
    for i in range(rank, count, size):
        module = layers_of(i, count)
        width = (len(WIDTHS) - 1) // count
        examples: dict[str, Any] = {}
        if is_static:
            examples = {
                "input_args": torch.empty(ROWS, WIDTHS[i * width], device="meta", requires_grad=i > 0),
                "output_args": torch.empty(ROWS, WIDTHS[(i + 1) * width], device="meta", requires_grad=True),
            }
        stages.append(PipelineStage(module, i, count, device(), **examples))
    given = stages if issubclass(schedule, PipelineScheduleMulti) else stages[0]
    running = schedule(given, n_microbatches=MICROBATCHES, loss_fn=mse_loss)
    optimizer = torch.optim.SGD([p for stage in stages for p in stage.submod.parameters()], lr=0.01)
    batch = torch.ones(ROWS * MICROBATCHES, WIDTHS[0], device=device())
    target = torch.ones(ROWS * MICROBATCHES, WIDTHS[-1], device=device())
    for _ in range(2):
        arguments = (batch,) if rank == 0 else ()
        losses: list[Tensor] = []
        running.step(*arguments, target=target, losses=losses)
        optimizer.step()
        optimizer.zero_grad()


def send_both(first: Tensor | None, second: Tensor | None, receives: tuple[int, int], shape: list[int]) -> Any:
    """Exchange with the next and the previous rank in a batch, like Megatron's `_communicate()`."""
    rank = dist.get_rank()
    operations = []
    received: list[Tensor | None] = [None, None]
    for tensor, peer in ((first, rank + 1), (second, rank - 1)):
        if tensor is not None:
            operations.append(dist.P2POp(dist.isend, tensor.detach().contiguous(), peer))
    for i, peer in enumerate((rank - 1, rank + 1)):
        if receives[i]:
            dtype = torch.int64 if len(shape) == 1 else torch.float32
            received[i] = empty = torch.empty(receives[i] if len(shape) == 1 else shape, dtype=dtype, device=device())
            operations.append(dist.P2POp(dist.irecv, empty, peer))
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()
    return received


def exchange(first: Tensor | None, second: Tensor | None, *, from_previous: bool, from_next: bool) -> Any:
    """Send the shapes before the tensors."""
    own = [None if t is None else torch.tensor(t.shape, device=device()) for t in (first, second)]
    found = send_both(own[0], own[1], (3 * from_previous, 3 * from_next), [3])
    sizes = [None if shape is None else shape.tolist() for shape in found]
    if sizes[0] and sizes[1]:
        assert sizes[0] == sizes[1], sizes
    return send_both(first, second, (bool(sizes[0]), bool(sizes[1])), sizes[0] or sizes[1] or [0, 0, 0])


def shapes_first() -> None:
    """Like Megatron with `variable_seq_lengths`: 1F1B with varying sequence lengths."""
    rank, size = dist.get_rank(), dist.get_world_size()
    module = nn.Linear(8, 8).to(device())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    is_first, is_last = rank == 0, rank == size - 1
    for step in range(2):
        waiting: list[tuple[Tensor | None, Tensor]] = []

        def forward(microbatch: int, given: Tensor | None, step: int = step, waiting: Any = waiting) -> Tensor:
            length = 3 + microbatch + step
            x = torch.ones(length, ROWS, 8, device=device()) if given is None else given.requires_grad_()
            out: Tensor = module(x)
            waiting.append((given, out))
            return out

        def backward(grad: Tensor | None, waiting: Any = waiting) -> Tensor | None:
            given, out = waiting.pop(0)
            (out.square().mean() if grad is None else (out * grad).sum()).backward()
            return None if given is None else given.grad

        warm_up = min(size - rank - 1, MICROBATCHES)
        for i in range(warm_up):
            given, _ = exchange(None, None, from_previous=not is_first, from_next=False)
            exchange(forward(i, given), None, from_previous=False, from_next=False)
        given, _ = exchange(None, None, from_previous=not is_first, from_next=False)
        for i in range(warm_up, MICROBATCHES):
            out = forward(i, given)
            _, grad = exchange(None if is_last else out, None, from_previous=False, from_next=not is_last)
            has_more = i < MICROBATCHES - 1
            given, _ = exchange(None, backward(grad), from_previous=has_more and not is_first, from_next=False)
        for _ in range(warm_up):
            _, grad = exchange(None, None, from_previous=False, from_next=True)
            exchange(None, backward(grad), from_previous=False, from_next=False)
        optimizer.step()
        optimizer.zero_grad()


DTYPES = (torch.float32, torch.bool, torch.int64)
META_SIZE = 64


def meta_buffer() -> None:
    """Like DeepSpeed: one buffer of integers, the first of them describing tensors of several dtypes."""
    rank, size = dist.get_rank(), dist.get_world_size()
    module = nn.Linear(8, 8).to(device())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    buffers: list[Tensor] | None = None
    for step in range(2):
        if rank == 0:
            x, mask = torch.ones(5, 8, device=device()), torch.ones(5, 1, dtype=torch.bool, device=device())
        else:
            if buffers is None:
                buffer = torch.empty(META_SIZE, dtype=torch.int32, device=device())
                dist.recv(buffer, rank - 1)
                offset, buffers = 2, []
                assert buffer[0].item() == 2
                for _ in range(int(buffer[1].item())):
                    dtype, dims = DTYPES[int(buffer[offset].item())], int(buffer[offset + 1].item())
                    shape = buffer[offset + 2 : offset + 2 + dims].tolist()
                    buffers.append(torch.zeros(shape, dtype=dtype, device=device()))
                    offset += 2 + dims
            for one in buffers:
                dist.recv(one, rank - 1)
            x, mask = buffers[0].clone().requires_grad_(), buffers[1]
        out = module(x) * mask
        if rank < size - 1:
            if step == 0:
                meta = [2, 2]
                for tensor in (out, mask):
                    meta += [DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape]
                buffer = torch.empty(META_SIZE, dtype=torch.int32, device=device())
                buffer[: len(meta)].copy_(torch.tensor(meta, dtype=torch.int32))
                dist.send(buffer, rank + 1)
            dist.send(out.detach(), rank + 1)
            dist.send(mask, rank + 1)
            grad = torch.empty_like(out)
            dist.recv(grad, rank + 1)
            out.backward(grad)
        else:
            out.square().mean().backward()
        if rank > 0:
            assert x.grad is not None
            dist.send(x.grad, rank - 1)
        optimizer.step()
        optimizer.zero_grad()


PROGRAMS: dict[str, tuple[Callable[[], None], int]] = {
    "gpipe": (partial(scheduled, ScheduleGPipe), 4),
    "gpipe_static": (partial(scheduled, ScheduleGPipe, is_static=True), 2),
    "1f1b": (partial(scheduled, Schedule1F1B), 2),
    "1f1b_static": (partial(scheduled, Schedule1F1B, is_static=True), 4),
    "interleaved": (partial(scheduled, ScheduleInterleaved1F1B, per_rank=2), 2),
    "interleaved_static": (partial(scheduled, ScheduleInterleaved1F1B, per_rank=2, is_static=True), 2),
    "shapes_first": (shapes_first, 3),
    "meta_buffer": (meta_buffer, 3),
}


def run_on_gloo(rank: int, name: str, folder: str) -> None:
    """Run one process of a program, for `torch.multiprocessing`."""
    function, size = PROGRAMS[name]
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting_point", rank=rank, world_size=size)
    with logging() as log:
        function()
    (Path(folder) / f"{rank}.json").write_text(json.dumps(log))
    dist.destroy_process_group()


if __name__ == "__main__":
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    with logging() as log_of_rank:
        PROGRAMS[sys.argv[1]][0]()
    print(f"LOG {dist.get_rank()} {json.dumps(log_of_rank)}")
