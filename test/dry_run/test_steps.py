"""The definition of a step for programs of many kinds, and the work that belongs to it."""

from __future__ import annotations

import gc
import re
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import indent

import pytest

from torchext.descriptions import FakeGPU
from torchext.dry_run import world
from torchext.dry_run.ranks.running import run_rank
from torchext.dry_run.steps import PATIENCE
from torchext.memory import track_memory
from torchext.reports.model import FORWARD, STEP, Goal, RankReport, json_report
from torchext.reports.text import html_report, text_report

from .step_programs import PREAMBLE, PROGRAMS, Program

pytestmark = pytest.mark.usefixtures("frozen_past")

GPU = FakeGPU("H100-80GB")
JOB = {"program": ["train.py"], "world_size": 1, "other_mismatches": []}

Run = Callable[..., RankReport]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a program in this process, like the process of a rank."""
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))

    def run(source: str, goal: Goal, *, size: int = 1, counts_flops: bool = False) -> RankReport:
        gc.collect()  # garbage of earlier programs
        path = tmp_path / "train.py"
        path.write_text(source)
        return run_rank(
            [str(path)],
            is_module=False,
            size=size,
            rank=0,
            gpu=GPU,
            per_node=8,
            is_launched=size > 1,
            goal=goal,
            values="assume",
            traces_lines=False,
            counts_flops=counts_flops,
        )

    return run


def source_of(program: Program, count: int) -> str:
    loop = indent(program.loop, " " * 8)
    end = "finally:\n    for hook in hooks: hook.remove()\n"  # they are in cycles that are not collected
    return f"{PREAMBLE}\n{program.setup}\ntry:\n    for i in range({count}):\n{loop}\n{end}"


def peak_of(source: str) -> int:
    """Return the peak memory of the program without counting steps."""
    gc.collect()
    with world(1, gpu=GPU, backend=None, values="assume", is_launched=False), track_memory() as memory:
        exec(source, {})
    return memory.peak_allocated().allocated


@pytest.mark.cases(5)
@pytest.mark.parametrize("name", PROGRAMS)
def test_two_steps_are_as_often_around_the_loop_as_the_program_needs(run: Run, name: str) -> None:
    program = PROGRAMS[name]
    endless = run(source_of(program, 1000), Goal(STEP, 2))
    assert not endless.error, endless.error
    assert endless.completed == 2
    assert endless.remarks == []
    exact = run(source_of(program, program.of_steps), Goal(STEP, 2))
    assert exact.completed == 2
    assert exact.remarks == []
    fewer = run(source_of(program, program.of_steps - 1), Goal(STEP, 2))
    assert fewer.completed == 1
    assert (
        endless.devices[0]["peak_allocated"]
        == exact.devices[0]["peak_allocated"]
        == peak_of(source_of(program, program.of_steps))
    )


@pytest.mark.parametrize(
    ("name", "passes"),  # of 2 * 8 * 256 * n operations: forward, and backward without the gradient of the input
    [
        ("plain", 2 * 512),
        ("accumulation", 4 * 2 * 512),
        ("gan, discriminator first", 2 * 2048 + 5 * 2 * 512),
        ("gan, discriminators before", 2 * 2048 + 5 * 2 * 512),
        ("two optimizers in turns", 2 * 2048 + 2 * 512),
        ("gradient penalty", 3 * 512),
    ],
)
def test_floating_point_operations_are_those_of_one_whole_step(run: Run, name: str, passes: int) -> None:
    report = run(source_of(PROGRAMS[name], 1000), Goal(STEP, 2), counts_flops=True)
    assert (report.completed, report.flops, report.flops_error) == (2, 2 * 8 * 256 * passes, "")


@pytest.mark.parametrize(
    ("ending", "why"),
    [
        ("raise ValueError('after the steps')", "ValueError: after the steps"),
        ("raise SystemExit(7)", "SystemExit: 7"),
        ("break", "the program ended within the additional step"),
    ],
)
def test_report_gives_the_reason_for_uncounted_operations(run: Run, ending: str, why: str) -> None:
    program = PROGRAMS["plain"]
    report = run(
        source_of(program._replace(loop=f"if i == 2: model(batch()); {ending}\n{program.loop}"), 1000),
        Goal(STEP, 2),
        counts_flops=True,
    )
    assert (report.completed, report.program_exit_code, report.error) == (2, 0, "")
    assert (report.flops, report.flops_error) == (None, why)
    assert f"The floating-point operations were not counted: {why}." in text_report(report.to_dict(), 1)


@pytest.mark.parametrize(
    ("goal", "steps", "why"),
    [
        (Goal(STEP, None), 2, "with --to-end the program makes no additional step to count"),
        (Goal(STEP, 5), 2, "counting needs one more step than requested, and the program made fewer"),
        (Goal(STEP, 2), 2, "the program ended within the additional step"),
    ],
    ids=["to its end", "too few", "no further step"],
)
def test_report_names_the_program_without_a_countable_step(run: Run, goal: Goal, steps: int, why: str) -> None:
    report = run(source_of(PROGRAMS["plain"], steps), goal, counts_flops=True)
    assert (report.flops, report.flops_error) == (None, why)
    assert f"The floating-point operations were not counted: {why}." in text_report(report.to_dict(), 1)


def test_generator_that_steps_first_has_all_networks_in_a_step(run: Run) -> None:
    program = PROGRAMS["gan, discriminators before"]
    loop = """
one(batch()).sum().backward(); optimizer_1.step()
for _ in range(5): two(batch()).sum().backward(); optimizer_2.step()
"""
    report = run(source_of(program._replace(loop=loop), 1000), Goal(STEP, 2), counts_flops=True)
    assert report.flops == 2 * 8 * 256 * (2 * 2048 + 5 * 2 * 512)
    assert report.completed == 2
    assert run(source_of(program._replace(loop=loop), 2), Goal(STEP, 2)).completed == 2


def test_last_step_includes_what_follows_the_optimizer(run: Run) -> None:
    program = PROGRAMS["plain"]
    after = "metric, large = nn.Identity(), torch.empty(i << 28, device='cuda'); metric(large); del large\n"
    report = run(source_of(program._replace(loop=program.loop + after), 1000), Goal(STEP, 2))
    assert 2**30 <= report.devices[0]["peak_allocated"] < 2 * 2**30


@pytest.mark.parametrize("ends", [False, True])
def test_optimizer_that_is_not_called_is_skipped_with_a_remark(run: Run, ends: bool) -> None:
    program = PROGRAMS["two optimizers in each iteration"]
    loop = "two(batch()).sum().backward(); optimizer_2.step()"
    report = run(source_of(program._replace(loop=loop), 3 if ends else 1000), Goal(STEP, 2))
    assert report.completed == (3 if ends else PATIENCE)
    (remark,) = report.remarks
    count = 3 if ends else PATIENCE
    assert re.search(
        rf"^Steps are counted without Adam \(\S*train.py:\d+ in adam\): not called while .* called in {count} rounds\.",
        remark,
    )


def test_program_without_steps_is_distinguished_from_one_that_fits(run: Run) -> None:
    by_hand = "for p in model.parameters(): p.data.sub_(p.grad); p.grad = None"
    program = Program("model = net(256, 512)", f"model(batch()).sum().backward()\n{by_hand}", 0, 0)
    report = run(source_of(program, 3), Goal(STEP, 2))
    first, second = text_report(report.to_dict(), 1).splitlines()[:2]
    assert re.search(r"^rank 0 of 1: ended after 0 of 2 steps in [\d.]+ s$", first)
    assert "The program ended after 3 forward passes and 3 backward passes" in second
    assert "torch.optim.Optimizer. Use --forwards N" in second
    assert "fits" not in first + second
    assert "class=fails>rank 0 of 1: ended after 0 of 2 steps" in html_report(json_report(JOB, GPU, [report]))


def test_endless_loop_in_which_no_optimizer_is_called_is_ended(
    run: Run, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torchext.dry_run.ranks.running.MOST_IDLE", 50)
    program = PROGRAMS["plain"]
    skipping = "model(batch()).sum().backward(); optimizer.zero_grad()\nif i == 0: optimizer.step()"
    report = run(source_of(program._replace(loop=skipping), 1000), Goal(STEP, 2))
    assert (report.completed, report.backward_passes) == (1, 52)
    assert "5 backward passes without an optimizer call; the run ends after 50" in capfd.readouterr().err


SERVER = """
model, loss = net(256, 512, 256), nn.MSELoss()
cache = []
class Serving(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = model
    def forward(self, x):
        return self.model(x)
serving = Serving()
while True:
    with torch.inference_mode():
        cache.append(serving(batch()))
        loss(cache[-1], cache[-1])
        cache.append(torch.empty(1 << 20, dtype=torch.uint8, device="cuda"))
"""


def test_server_is_ended_after_its_forward_passes(run: Run) -> None:
    report = run(PREAMBLE + SERVER, Goal(FORWARD, 16), counts_flops=True)
    assert (report.completed, report.error) == (16, "")
    assert report.flops == 2 * 2 * 8 * 256 * 512
    cache = 16 * (8 * 256 * 4 + 2**20)
    assert (
        cache
        <= sum(report.devices[0]["categories"].values()) - report.devices[0]["categories"]["workspaces"]
        < cache + 2**22
    )
    assert re.search(r"^rank 0 of 1: fits, 16 of 16 forward passes in", text_report(report.to_dict(), 1))


def test_forward_passes_of_a_program_that_ends_by_itself_are_counted(run: Run) -> None:
    report = run(PREAMBLE + SERVER.replace("while True", "for _ in range(3)"), Goal(FORWARD, 16))
    text = text_report(report.to_dict(), 1)
    assert re.search(r"^rank 0 of 1: ended after 3 of 16 forward passes in", text)
    assert "Use --forwards 3, or --to-end" in text


def test_program_runs_to_its_end(run: Run) -> None:
    report = run(source_of(PROGRAMS["plain"], 5) + "torch.empty(1 << 30, device='cuda')", Goal(STEP, None))
    assert re.search(r"^rank 0 of 1: fits, 5 steps to its end in", text_report(report.to_dict(), 1))
    assert report.devices[0]["peak_allocated"] > 2**30


COMMUNICATING = """
dist.init_process_group("nccl")
weight = torch.ones(256, device="cuda")
dist.broadcast(weight, 0)
"""


def test_collectives_are_listed_by_phase(run: Run) -> None:
    plain = PROGRAMS["plain"]
    loop = (
        "dist.all_reduce(weight) if i == 0 else None\n"
        + plain.loop
        + "dist.all_reduce(weight); dist.all_reduce(weight)\n"
    )
    report = run(
        source_of(Program(plain.setup + COMMUNICATING, loop, 2, 2), 4)
        + "dist.broadcast(weight, 0)\nmodel(batch())\n" * 2,
        Goal(STEP, None),
        size=8,
    )
    assert [(row["phase"], row["operator"], row["calls"], row["bytes_sent"]) for row in report.collectives] == [
        # Everything before the first pass is construction.
        ("construction", "allreduce", 1, 1024),
        ("construction", "broadcast", 1, 1024),
        ("step 1 to 3, each", "allreduce", 2, 2048),
        ("step 4", "allreduce", 2, 2048),
        ("step 4", "broadcast", 1, 1024),
        ("after step 4", "broadcast", 1, 1024),
    ]
    assert re.search(
        r"^step 1 to 3, each +world +8 +allreduce +2 +2.00 KiB", text_report(report.to_dict(), 8), re.MULTILINE
    )


GRAPHS = """
import torch
model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.Adam(model.parameters(), capturable=True)
x = torch.randn(4, 8, device="cuda")
def step():
    optimizer.zero_grad(set_to_none=True)
    model(x).square().mean().backward()
    optimizer.step()
side = torch.cuda.Stream()
with torch.cuda.stream(side):
    step()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    step()
for replays in range(1, 100):
    graph.replay()
"""


def test_replay_of_a_captured_optimizer_is_a_step(run: Run) -> None:
    """One call warms up; capturing computes nothing on a GPU."""
    report = run(GRAPHS + "    assert replays < 5, 'is ended'\n", Goal(STEP, 4))
    assert (report.error, report.completed, report.forward_passes, report.backward_passes) == ("", 4, 4, 4)
    assert any("counts its passes, optimizer calls and collectives again" in remark for remark in report.remarks)
    counted = run(GRAPHS, Goal(STEP, 4), counts_flops=True)
    assert (counted.flops, counted.completed) == (None, 4)
    assert counted.flops_error == "the step replays a CUDA graph, and a fake graph runs no kernels"


def test_forward_pass_by_a_graphed_callable_is_one(run: Run) -> None:
    source = """
import torch
model = torch.nn.Linear(8, 8).cuda()
x = torch.randn(4, 8, device="cuda", requires_grad=True)
graphed = torch.cuda.make_graphed_callables(model, (x,))
for i in range(100):
    assert i < 5
    graphed(x).sum().backward()
"""
    report = run(source, Goal(FORWARD, 7))
    assert (report.error, report.completed) == ("", 7), "three warm up"
