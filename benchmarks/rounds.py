"""The rows of the table of `make bench`, in groups.

A group prepares its state once and returns a function that measures one round: each row once, alternately with its
peer, so that noise affects both. The operators and models are those of the other scripts in this folder, which print
more columns.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

__all__ = ["GROUPS", "Round", "Sample"]


class Sample(NamedTuple):
    """One measurement of a row: what it costs here, and what its peer costs, in seconds or bytes."""

    row: str
    ours: float
    peer: float
    limit: float | None = None
    """The physical limit: the least cost on this hardware, measured in the same round."""
    at_most: float | None = None
    """The ratio to the peer that the project aims at."""


Round = Callable[[], Iterator[Sample]]


def seconds_per_call(run: Callable[[], object], calls: int) -> float:
    """Return the mean duration of `calls` calls."""
    start = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - start) / calls


def fake_calls() -> Round:
    """Warm calls on fakes, by the real calls."""
    from benchmarks.fake_dispatch import CASES, GETTERS, Case, measure_case

    torch.set_num_threads(1)
    cases = {**CASES, **{name: Case(getter, share=10) for name, getter in GETTERS.items()}}

    def measure() -> Iterator[Sample]:
        for name, case in cases.items():
            found = measure_case(case, 500, 3, is_compared=False)
            row = f"fake call: {name}, by the real call"
            yield Sample(row, found["warm"] / 1e6, found["real"] / 1e6, at_most=1.1)

    return measure


def cold_steps() -> Round:
    """The first training step of a process on fakes, by a later one and by the first one under FakeTensorMode."""
    from benchmarks.cold_calls import PHASES, in_process

    def total(found: dict[str, Any]) -> float:
        return sum(float(found[phase]) for phase in PHASES[1:])

    def measure() -> Iterator[Sample]:
        for name in ("Llama-8B", "bert", "t5"):
            ours, theirs = in_process(name, "torchext"), in_process(name, "FakeTensorMode")
            if ours is not None:
                row = f"{name}: first step on fakes, by a later one"
                yield Sample(row, total(ours["first"]), total(ours["later"]), at_most=3.0)
            if ours is not None and theirs is not None:
                row = f"{name}: first step on fakes, by FakeTensorMode"
                yield Sample(row, total(ours["first"]), total(theirs["first"]))

    return measure


def fake_steps() -> Round:
    """A training step of the Llama-2-7B shape on fakes, by PyTorch's FakeTensorMode."""
    from benchmarks.fake_dispatch import PHASES, train_llama
    from torchext.fake import fake_mode

    def phases(mode: AbstractContextManager[Any]) -> dict[str, float]:
        gc.collect()
        with mode:
            return train_llama(8)

    phases(fake_mode())

    def measure() -> Iterator[Sample]:
        ours, peer = phases(fake_mode()), phases(FakeTensorMode(allow_non_fake_inputs=True))
        for phase in PHASES:
            yield Sample(f"Llama-2-7B shape, {phase}: warm fakes, by FakeTensorMode", ours[phase], peer[phase])

    return measure


def construction() -> Round:
    """Construction of the Llama-2-7B shape, deferred, by the meta device."""
    import transformers

    from benchmarks.deferred_init import LAYERS, construct_under, linears, llama, seconds
    from torchext.deferred_init import deferred_init

    transformers.logging.set_verbosity_error()
    builds = {"transformers": llama, "linear layers": linears}

    def measure() -> Iterator[Sample]:
        for name, build in builds.items():
            ours = seconds(partial(deferred_init, build, LAYERS))
            peer = seconds(partial(construct_under, lambda: torch.device("meta"), build))
            row = f"Llama-2-7B shape ({name}): deferred construction, by the meta device"
            yield Sample(row, ours, peer, at_most=2.0)

    return measure


def recordings() -> Round:
    """Memory of a deferred model, by the memory of the same model on the meta device."""
    from benchmarks.deferred_init import bytes_on_meta, in_subprocess, linears, llama, recorded_model

    def measure() -> Iterator[Sample]:
        for name, build in {"transformers": llama, "linear layers": linears}.items():
            ours, peer = in_subprocess(recorded_model, build), in_subprocess(bytes_on_meta, build)
            yield Sample(f"Llama-2-7B shape ({name}): bytes deferred, by the meta device", ours.bytes, peer)

    return measure


def small_models() -> Round:
    """Models of small tensors, deferred and materialized, by eager construction."""
    from benchmarks.deferred_init import SMALL, small_times

    bars = {
        "one Linear(4, 4)": (None, 2.0),
        "10,000 in Linear(16, 16)": (0.25, None),
        "100,000 of 8 in a list": (1.0, None),
    }

    def measure() -> Iterator[Sample]:
        for name, (build, calls) in SMALL.items():
            found = small_times(build, calls, 1)
            of_materializing, of_both = bars.get(name, (None, None))
            row = f"{name}: materialized, by eager construction"
            yield Sample(row, found["materializing"], found["eager"], at_most=of_materializing)
            row = f"{name}: deferred and materialized, by eager construction"
            yield Sample(row, found["both"], found["eager"], at_most=of_both)

    return measure


def models() -> Round:
    """Materialization of models of about 50 M parameters, by eager construction; the limit writes as many zeros."""
    from benchmarks.materialize import MODELS, fresh_zeros, seconds
    from torchext.deferred_init import deferred_init, materialize_module

    builds = {name: partial(build, 50) for name, build in MODELS.items() if "small" not in name}
    sizes = {name: sum(tensor.nbytes for tensor in deferred_init(build).parameters()) for name, build in builds.items()}

    def measure() -> Iterator[Sample]:
        for name, build in builds.items():
            deferred = deferred_init(build)
            ours = seconds(partial(materialize_module, deferred))
            del deferred
            peer, limit = seconds(build), seconds(partial(fresh_zeros, sizes[name]))
            yield Sample(f"{name}: materialized, by eager construction", ours, peer, limit, at_most=0.5)

    return measure


def random_fills() -> Round:
    """Random fills of existing memory on one thread, by PyTorch's; the limit is `zero_`."""
    from benchmarks.fills import DTYPES, nanoseconds, ours, pytorchs, zeros

    numel = 1 << 22
    tensors = {dtype: torch.zeros(numel, dtype=dtype) for dtype in DTYPES}

    def measure() -> Iterator[Sample]:
        for dtype, tensor in tensors.items():
            for is_normal in (True, False):
                costs = (
                    nanoseconds(fill, 1, tensor, numel, dtype) * numel / 1e9
                    for fill in (ours(is_normal), pytorchs(is_normal), zeros)
                )
                name = f"{'normal_' if is_normal else 'uniform_'} of {dtype}"
                yield Sample(f"{name}, by PyTorch's", *costs)

    return measure


def shards() -> Round:
    """CPU time of a shard: rows by the whole matrix; columns by their limit: skipping numbers and computing values."""
    from benchmarks.materialize import seconds
    from benchmarks.shards import INITIALIZERS, build, measure_prices
    from torchext.deferred_init import deferred_init, materialize_tensor

    torch.set_num_threads(1)
    size, world = 8192, 64

    def shard(name: str, ranks: int, is_row: bool) -> float:
        deferred = deferred_init(build, name, size, ranks, is_row)
        return seconds(partial(materialize_tensor, deferred), time.process_time)

    def measure() -> Iterator[Sample]:
        prices = measure_prices(1)
        for name in INITIALIZERS:
            ours, peer = shard(name, world, is_row=True), shard(name, 1, is_row=True)
            yield Sample(f"{name}: 1/{world} of the rows, by the whole matrix", ours, peer, at_most=1 / 40)
            ours, limit = shard(name, world, is_row=False), prices.floor(name, size, world)
            yield Sample(f"{name}: 1/{world} of the columns, by its limit", ours, limit, limit, at_most=1.2)

    return measure


def guards() -> Round:
    """Regions of the guards, by PyTorch's."""
    from benchmarks.inference_mode import MODES, decorated, entering, entering_again
    from torchext import amp

    torch.set_num_threads(1)
    kinds = {"a new block": entering, "the same block": entering_again, "a decorated function": decorated}
    pairs = {
        f"inference mode, {kind}": (make(MODES["ours"]), make(MODES["torch.inference_mode"]))
        for kind, make in kinds.items()
    }
    pairs["autocast region"] = entering(lambda: amp.autocast("cpu")), entering(lambda: torch.autocast("cpu"))

    def measure() -> Iterator[Sample]:
        for name, (ours, peer) in pairs.items():
            yield Sample(
                f"{name}, by PyTorch's", seconds_per_call(ours, 5000), seconds_per_call(peer, 5000), at_most=1.0
            )

    return measure


def compiled() -> Round:
    """Steps of a compiled transformer with our guards, by the same with PyTorch's."""
    from benchmarks import compile as steps

    torch.set_num_threads(1)
    pairs = {name: [make() for make in makers] for name, makers in steps.STEPS.items()}

    def measure() -> Iterator[Sample]:
        for name, (theirs, ours) in pairs.items():
            peer, own = steps.fastest([theirs, ours], 20, 3)
            yield Sample(f"compiled step, {name}, by PyTorch's", own, peer, at_most=1.1)

    return measure


def getters() -> Round:
    """Metadata of fakes, read in C++, by that of real tensors."""
    from benchmarks.metadata_getters import GETTERS, compile_loops, measure

    loops = compile_loops()

    def measure_round() -> Iterator[Sample]:
        for name, getter in GETTERS.items():
            calls = 20_000 if getter == "resize_" else 2_000_000
            real, fake, _ = measure(loops, getter, (64, 2048), calls, 1)
            yield Sample(f"{name} of a fake in C++, by a real tensor", fake / 1e9, real / 1e9, at_most=1.1)

    return measure_round


def checkpoints() -> Round:
    """The initial checkpoint of a model of 1 GiB, by eager construction and torch.save; the limit is a plain write."""
    import argparse
    import tempfile

    from benchmarks.checkpoint import measure_apart, new_folder

    options = argparse.Namespace(gib=1.0, max_memory="256MiB")

    def measure() -> Iterator[Sample]:
        with tempfile.TemporaryDirectory() as folder:
            ours, peer, limit = (
                measure_apart(way, new_folder(folder), options)[0]
                for way in ("save_ours", "torch_save", "write_plainly")
            )
        yield Sample("checkpoint of 1 GiB, by eager construction and torch.save", ours, peer, limit)

    return measure


def real_calls() -> Round:
    """Real calls in a process that has used every feature, by the same in a process that has only imported torch."""
    from benchmarks.patches import in_a_process

    def measure() -> Iterator[Sample]:
        before, after = in_a_process("before", 3000), in_a_process("after", 3000)
        for name, peer in before.items():
            yield Sample(f"real {name} after everything was used, by before", after[name] / 1e6, peer / 1e6)

    return measure


def dry_runs() -> Round:
    """A tracked fake step, by the real step and by MemTracker under FakeTensorMode."""
    from benchmarks.dry_run import in_process

    def measure() -> Iterator[Sample]:
        ours, real, tracker = (
            in_process("peer", "small", how, 3)["seconds"] for how in ("torchext", "real", "MemTracker")
        )
        yield Sample("tracked fake step of a small Llama, by the real step", ours, real)
        yield Sample("tracked fake step of a small Llama, by MemTracker", ours, tracker)

    return measure


def commands() -> Round:
    """CPU time of commands, by importing torch and running the program in one process."""
    from benchmarks.dry_run import SMALL_PROGRAM, own_time_of, times_of

    torchext = [sys.executable, "-m", "torchext"]

    def measure() -> Iterator[Sample]:
        with TemporaryDirectory() as folder:
            path = Path(folder) / "program.py"
            path.write_text(SMALL_PROGRAM)
            importing = times_of([sys.executable, "-c", "import torch"]).cpu
            yield Sample("torchext --help, by import torch", times_of([*torchext, "--help"]).cpu, importing)
            ours = times_of([*torchext, "dry-run", "--quiet", "--", str(path)]).cpu
            peer = importing + own_time_of(str(path))
            yield Sample(
                "torchext dry-run of a small program, by import torch and the program", ours, peer, at_most=1.3
            )

    return measure


GROUPS: dict[str, Callable[[], Round]] = {
    "fake-calls": fake_calls,
    "fake-steps": fake_steps,
    "cold-steps": cold_steps,
    "construction": construction,
    "recordings": recordings,
    "small-models": small_models,
    "models": models,
    "fills": random_fills,
    "shards": shards,
    "guards": guards,
    "compiled": compiled,
    "getters": getters,
    "checkpoints": checkpoints,
    "real-calls": real_calls,
    "dry-runs": dry_runs,
    "commands": commands,
}
