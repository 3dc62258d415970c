"""Programs of users, with the types that a type checker infers in them.

`make typecheck` checks them with mypy, and `make user-types` with pyright in strict mode, which also rejects types that
are partially unknown. The tests in package/test_types.py run them. They call few functions of PyTorch, because many of
these are not annotated.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor, nn
from typing_extensions import assert_type

import torchext
from torchext import amp, checkpoint, compat, deferred_init, dry_run, errors, fake, inference, inspect, memory

__all__ = ["PROGRAMS"]


def make_model(width: int = 4) -> nn.Linear:
    """Return a small model."""
    return nn.Linear(width, width)


def use_package(folder: Path) -> None:
    """Read the version and the paths of the installation, and the names of exceptions."""
    assert_type(torchext.__version__, str)
    assert_type(torchext.cmake_prefix_path(), str)
    assert_type(torchext.include_path(), str)
    assert_type(torchext.library_path(), str)
    assert_type(compat.install_as_torchdistx, Callable[[], None])
    raised: list[type[torchext.TorchextError]] = [
        errors.CheckpointError,
        errors.DataDependentError,
        errors.MaterializationError,
        errors.PatchError,
        errors.RankFailedError,
        errors.RanksDifferError,
        errors.TorchextError,
        errors.UnsupportedOperatorError,
    ]
    warned: list[type[torchext.TorchextWarning]] = [
        errors.TorchextDeprecationWarning,
        errors.TorchextFutureWarning,
        errors.TorchextWarning,
    ]
    assert raised
    assert warned
    # Type checkers report misspelled names, although modules import their names at the first use.
    with suppress(AttributeError):
        torchext.fakes  # type: ignore[attr-defined]  # noqa: B018
    with suppress(AttributeError):
        memory.track  # type: ignore[attr-defined]  # noqa: B018


def use_fakes(folder: Path) -> None:
    """Make fakes in blocks and in decorated functions."""
    gpu = fake.FakeGPU("H100-80GB", count=2, rates=fake.PeakRates(bfloat16=1e15))
    with fake.fake_mode(gpu=gpu):
        model = make_model().to("cuda")
        assert_type(fake.is_fake(model.weight), bool)
    copy = fake.fake_like(make_model())
    assert_type(copy, nn.Linear)
    assert_type(fake.fake_like((copy, {"step": 3})), tuple[nn.Linear, dict[str, int]])
    assert_type(fake.meta_like(copy.weight), Tensor)
    assert_type(fake.inherit_blocks(make_model)(8), nn.Linear)
    with fake.threads_inherit_blocks():
        pass
    assert_type(fake.fake_mode()(make_model)(width=2), nn.Linear)

    @fake.fake_mode()
    def width_of(model: nn.Linear, *, scale: int = 1) -> int:
        return model.in_features * scale

    assert_type(width_of(copy, scale=2), int)
    fake.cache_clear()
    info = fake.cache_info()
    assert_type(info, fake.CacheInfo)
    assert_type(info.hits, int)
    assert_type(fake.DataDependentError, type[errors.DataDependentError])
    assert_type(fake.UnsupportedOperatorError, type[errors.UnsupportedOperatorError])


def use_deferred_init(folder: Path) -> None:
    """Defer a model, look at its recording, and materialize it."""
    with deferred_init.tracing():
        model = deferred_init.deferred_init(make_model, width=3)
    assert_type(model, nn.Linear)
    assert_type(deferred_init.is_deferred(model), bool)
    explanation = deferred_init.explain(model.weight)
    assert_type(explanation, deferred_init.Explanation)
    assert_type(explanation[0], deferred_init.RecordedOperation)
    assert_type(explanation[0].writes, tuple[deferred_init.RecordedValue, ...])
    plan = deferred_init.plan(model)
    assert_type(plan, deferred_init.ReplayPlan)
    assert_type([operation for operation in plan], list[deferred_init.PlannedOperation])  # noqa: C416
    assert_type(plan.peak, int)
    summary = deferred_init.summary(model, time="predicted")
    assert_type(summary, deferred_init.Summary)
    assert_type(summary[-1], deferred_init.ModuleSummary)
    assert_type(summary.operators, tuple[deferred_init.OperatorSummary, ...] | None)
    deferred_init.export_graph(model, folder / "model.dot")
    assert_type(deferred_init.materialize_module(model, retain_graph=True), nn.Linear)
    deferred_init.defer_again(model)
    assert_type(deferred_init.materialize_tensor(model.weight), Tensor)
    with deferred_init.deferred_init():
        other = make_model()
    assert_type(other, nn.Linear)

    @deferred_init.deferred_init(trace=True)
    def make(width: int) -> nn.Linear:
        return nn.Linear(width, width)

    assert_type(make(2), nn.Linear)


def check_initial_weights(folder: Path) -> None:
    """Compare the initial weights of ranks with those of one process."""
    result = deferred_init.check_init(make_model, "fsdp=2", ranks=[1])
    assert_type(result, deferred_init.InitCheck)
    for mesh in result:
        assert_type(mesh, deferred_init.MeshCheck)
        assert_type([check for check in mesh.checks], list[deferred_init.TensorCheck])  # noqa: C416


def use_checkpoints(folder: Path) -> None:
    """Write the weights of a deferred model, and read them."""
    model = deferred_init.deferred_init(make_model)
    plan = checkpoint.plan_checkpoint(model, folder, max_shard_size="1MB")
    assert_type(plan, checkpoint.CheckpointPlan)
    assert_type(plan.files, tuple[checkpoint.CheckpointFile, ...])
    checkpoint.save_safetensors(model, folder, metadata={"format": "pt"})
    keys = checkpoint.load_checkpoint(deferred_init.deferred_init(make_model), folder)
    assert_type(keys, checkpoint.LoadedKeys)
    assert_type(keys.missing_keys, list[str])


def use_inference(folder: Path) -> None:
    """Run a model in inference mode."""
    with inference.inference_mode(trace=True):
        x = torch.ones(2)
        with inference.normal_tensors():
            y = torch.ones(2)
    assert_type(inference.is_inference_tensor(x), bool)
    assert_type(inference.is_inference_mode_enabled(), bool)
    assert_type(inference.check_dispatch_state(), list[str])
    origin = inference.origin(x)
    assert_type(origin, inference.Origin | None)
    assert_type(inference.to_normal({"x": x, "y": y}), dict[str, Tensor])
    inference.trace_origins(False)

    @inference.inference_mode()
    def twice(x: Tensor) -> Tensor:
        return x + x

    @inference.inference_mode
    def thrice(x: Tensor) -> Tensor:
        return x + x + x

    assert_type(twice(y), Tensor)
    assert_type(thrice(y), Tensor)


def use_autocast(folder: Path) -> None:
    """Autocast in regions, by decorators and by the tensors."""
    model = make_model()
    x = torch.ones(2, 4)
    with amp.autocast("cpu", dtype=torch.bfloat16, self_cleaning=True):
        model(x)
    assert_type(amp.to_amp(x), Tensor)
    assert_type(amp.is_amp(x), bool)
    assert isinstance(x, amp.AmpTensor)
    assert_type(amp.to_normal(model), nn.Linear)
    assert_type(amp.policy("aten::mm", "cpu"), str)
    assert_type(amp.policy(torch.ops.aten.mm.default, "cpu"), str)

    @amp.full_precision
    def total(x: Tensor, scale: int) -> Tensor:
        return x.sum() * scale

    @amp.lower_precision
    def lower(x: Tensor) -> Tensor:
        return x

    @amp.autocast("cpu")
    def product(x: Tensor) -> Tensor:
        return x @ x

    for result in (total(x, scale=2), lower(x), product(torch.ones(2, 2))):
        assert_type(result, Tensor)


def use_inspection(folder: Path) -> None:
    """Look at a call, at a tensor, and at the patches."""
    x = torch.ones(2, 2)
    route = inspect.route("aten::mm", x, x)
    assert_type(route, inspect.Route)
    assert_type(route[0], inspect.RouteStep)
    assert_type(inspect.tensor_state(x), inspect.TensorState)
    assert_type(inspect.patches(), tuple[inspect.PatchState, ...])


def use_memory(folder: Path) -> None:
    """Measure the memory of a step, and find out what fits."""

    def step() -> None:
        make_model().to("cuda")(torch.ones(2, 4, device="cuda"))

    def make_step(batch: int) -> Callable[[], None]:
        return step

    fit = memory.fits(step, fake.FakeGPU("H100-80GB"), values=memory.ValuePolicy("zero"))
    assert_type(fit, memory.Fit)
    assert_type(fit.memory, memory.TrackedMemory)
    assert_type(fit.assumed, list[memory.AssumedValue])
    batch = memory.max_batch(make_step, "H100-80GB", limit=2)
    assert_type(batch, memory.MaxBatch)
    assert_type(batch.size, int)
    with memory.track_memory() as tracked:
        make_model()
    assert_type(tracked, memory.TrackedMemory)
    peak = tracked.peak_allocated("cpu")
    assert_type(peak, memory.MemoryState)
    assert_type(dict(peak.by_category), dict[memory.Category, int])
    for allocation in tracked.allocations("cpu"):
        assert_type(allocation, memory.Allocation)
        assert_type(allocation.phase, memory.Phase)
    assert memory.PINNED not in tracked.places


def use_advice(folder: Path) -> None:
    """Look for changes that lower the memory of a step."""

    def make_step() -> Callable[[], None]:
        return lambda: None

    advice = memory.advise(make_step, "H100-80GB", runs=1)
    assert_type(advice, memory.Advice)
    assert_type(advice.solution, memory.Outcome | None)
    for outcome in advice.outcomes:
        assert_type(outcome.remedies, tuple[memory.Remedy, ...])
        assert_type([remedy.numerics for remedy in outcome.remedies], list[memory.Numerics])


def use_dry_run(folder: Path) -> None:
    """Run one rank of a job, and bound the time of its step."""
    values = dry_run.ValuePolicy(lines=(dry_run.LinePolicy("train.py", 3, dry_run.ValuePolicy("zero")),))
    with dry_run.world(2, gpu=fake.FakeGPU("H100-80GB"), values=values) as world:
        bound = dry_run.bound_time(lambda: torch.ones(2, device="cuda") @ torch.ones(2, device="cuda"))
    assert_type(world, dry_run.World)
    assert_type(bound, dry_run.TimeBound)
    assert_type(bound.operators, tuple[dry_run.BoundingOperator, ...])
    assert_type(world.collectives, list[dry_run.Collective])
    summary = world.summary()
    assert_type(summary, dry_run.CollectiveSummary)
    for row in summary:
        assert_type(row, dry_run.GroupSummary)

    @dry_run.world(2)
    def train(steps: int) -> int:
        return steps

    assert_type(train(3), int)


def compare_reports(base: Path, head: Path) -> bool:
    """Compare the reports of two runs."""
    report = dry_run.load_report(base)
    assert_type(report, dry_run.Report)
    comparison = dry_run.compare(report, dry_run.load_report(head))
    assert_type(comparison, dry_run.Comparison)
    for rank in comparison.ranks:
        assert_type(rank, dry_run.RankComparison)
        assert_type(rank.devices, tuple[dry_run.DeviceComparison, ...])
        assert_type(rank.flops, tuple[dry_run.Difference, ...])
    return comparison.exceeds(dry_run.Limit.parse("5%"))


def read_results(collective: dry_run.Collective, block: memory.Block, policy: memory.LinePolicy) -> str:
    """Read the attributes of results."""
    assert_type(collective.issued_in, dry_run.Place)
    return f"{collective.operator} {block.kind} {policy.line}"


def register(operator: str) -> None:
    """Register an operator for autocast."""
    amp.register_policy(operator, "float32", ["cpu"])


PROGRAMS: list[Callable[[Path], None]] = [
    use_package,
    use_fakes,
    use_deferred_init,
    check_initial_weights,
    use_checkpoints,
    use_inference,
    use_autocast,
    use_inspection,
    use_memory,
    use_advice,
    use_dry_run,
]
