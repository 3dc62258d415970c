"""Ranks that read messages of other ranks: those ranks also run, and their messages arrive, as on gloo."""

from __future__ import annotations

import json
import re
import signal
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import Pipe
from pathlib import Path
from textwrap import dedent
from typing import Any, NamedTuple

import pipeline_programs
import pytest
import torch
import torch.distributed as dist
from pipeline_programs import PROGRAMS, Log, run_on_gloo
from processes import forkserver
from torch.multiprocessing.spawn import start_processes

from torchext import _C, commands
from torchext.dry_run import World, world
from torchext.dry_run.adapters.deepspeed import _assert_own_length, _get_own_list
from torchext.dry_run.messages import Messages
from torchext.dry_run.protocol import OTHER, Awaited, Message, Missing
from torchext.dry_run.simulated_world import job_of

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="this build of PyTorch has no gloo"
)


class Ended(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, forked_ranks: None
) -> Callable[..., Ended]:
    """Run `program` dry as the requested ranks, to its end unless other options are given."""
    monkeypatch.chdir(tmp_path)

    def run_dry(program: str, size: int, ranks: str = "all", *options: str) -> Ended:
        (tmp_path / "train.py").write_text(dedent(program))
        capfd.readouterr()
        given = ["--no-lines", "--world-size", str(size), "--rank", ranks, *(options or ["--to-end"])]
        code = commands.main(["dry-run", *given, "--", "train.py"])
        return Ended(code, *capfd.readouterr())

    return run_dry


START = """
    import torch, torch.distributed as dist
    dist.init_process_group("cpu:gloo,cuda:nccl")
    rank, size = dist.get_rank(), dist.get_world_size()
"""


def real_logs(name: str, folder: Path) -> list[Log]:
    size = PROGRAMS[name][1]
    start_processes(run_on_gloo, (name, str(folder)), nprocs=size, start_method=forkserver())
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]


@pytest.mark.ci
@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("name", PROGRAMS)
def test_pipeline_exchanges_messages_as_on_gloo(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    capfd.readouterr()
    size = PROGRAMS[name][1]
    options = ["--no-lines", "--world-size", str(size), "--rank", "all", "--values", "raise", "--to-end"]
    code = commands.main(["dry-run", *options, "--", pipeline_programs.__file__, name])
    out, err = capfd.readouterr()
    assert code == 0, err
    dry = {int(rank): json.loads(log) for rank, log in re.findall(r"^LOG (\d) (.*)$", out, re.MULTILINE)}
    real = real_logs(name, tmp_path)
    assert all(real), "there is something to compare"
    assert [dry[rank] for rank in range(size)] == real


@pytest.mark.ci
def test_requested_rank_has_only_its_report(run: Callable[..., Ended]) -> None:
    program = (
        START
        + """
    x = torch.zeros(2, dtype=torch.int64, device="cuda")
    if rank > 0:
        dist.recv(x, rank - 1)
    print("RANK", rank, (x + rank).tolist())
    if rank < size - 1:
        dist.send(x + rank, rank + 1)
    """
    )
    ended = run(program, 4, "2")
    assert ended.code == 0, ended.err
    assert re.findall(r"^rank (\d) of 4: (.*) in", ended.out, re.MULTILINE) == [("2", "fits, 0 steps to its end")]
    assert re.findall("RANK.*", ended.out) == ["RANK 2 [3, 3]"], "what the ranks before it print is not of its run"
    assert ended.err.count("started, because") == 2
    assert "received from dry runs of other ranks: 1 from rank 1" in ended.out


@pytest.mark.ci
def test_single_rank_reports_the_assumptions(run: Callable[..., Ended]) -> None:
    program = (
        START
        + """
    x = torch.ones(2, dtype=torch.int64, device="cuda")
    dist.recv(x, 0) if rank else dist.send(x + 4, 1)
    print("READ", x[0].item())
    """
    )
    alone = run(program, 2, "1", "--alone", "--to-end")
    assert "READ 1\n" in alone.out
    assert "assuming 1 integer" in alone.out
    together = run(program, 2, "1")
    assert "READ 5\n" in together.out
    assert "assuming" not in together.out


@pytest.mark.ci
def test_value_that_the_sender_assumes_is_assumed_by_the_receiver(run: Callable[..., Ended]) -> None:
    program = (
        START
        + """
    x = torch.randn(8, device="cuda").argmax() if rank == 0 else torch.zeros((), dtype=torch.int64, device="cuda")
    dist.recv(x, 0) if rank else dist.send(x, 1)
    print("READ", x.item())
    """
    )
    ended = run(program, 2, "1")
    assert "READ 4\n" in ended.out
    assert "assuming 1 integer" in ended.out


@pytest.mark.ci
@pytest.mark.parametrize("policy", ["assume", "raise"])
def test_message_in_a_part_leaves_the_rest(run: Callable[..., Ended], policy: str) -> None:
    ended = run(
        START
        + """
    if rank == 0:
        for first in (1, 5, 1):
            dist.send(torch.arange(first, first + 4, device="cuda"), 1)
        dist.send(torch.tensor([0.5, 0.25], device="cuda"), 1)
        partly = torch.empty(4, dtype=torch.long, device="cuda")
        partly[::2] = 8
        dist.send(partly, 1)
    else:
        unknown, own = torch.empty(8, dtype=torch.long, device="cuda"), torch.zeros(8, dtype=torch.long, device="cuda")
        own[4:] = 7
        dist.recv(unknown[:4], 0)
        dist.recv(unknown[4:], 0)
        dist.recv(own[:4], 0)
        numbers = torch.zeros(4, device="cuda")
        dist.recv(numbers[1:3], 0)
        print("GOT", unknown.tolist(), own.tolist(), numbers.tolist())
        filled = torch.zeros(8, dtype=torch.long, device="cuda")
        dist.recv(filled[2:6], 0)
        print("AND", filled[:3].tolist(), filled[4].item())
    """,
        2, "all", "--to-end", "--values", policy,
    )  # fmt: skip
    assert "GOT [1, 2, 3, 4, 5, 6, 7, 8] [1, 2, 3, 4, 7, 7, 7, 7] [0.0, 0.5, 0.25, 0.0]" in ended.out
    assert "AND [0, 0, 8] 8" in ended.out
    assert "assuming" not in ended.out


def test_receiver_names_the_policy_of_the_sender() -> None:
    with rank_0(message(5, kind=_C.BY_MASKS)) as (job, arrived):
        dist.send((torch.randn(8, device="cuda") > 0).sum(), 1)
        assert arrived.told[0].message.kind == _C.BY_MASKS
        x = torch.zeros(1, dtype=torch.int64, device="cuda")
        dist.recv(x, 1)
        assert torch.empty(x.item()).shape == (5,)
        assert [value.policy for value in job.values] == ["masks=all"]


def test_messages_are_received_in_order_by_group_and_device(run: Callable[..., Ended]) -> None:
    program = (
        START
        + """
    other = dist.new_group([0, 1])
    def number(value, device="cuda"):
        return torch.tensor([value], device=device)
    if rank == 0:
        for group, first in ((None, 10), (other, 20)):
            for i in range(3):
                dist.send(number(first + i), 1, group=group)
        dist.send(number(30, "cpu"), 1, tag=5)
        dist.send(number(40, "cpu"), 1, tag=6)
        dist.send_object_list([{"a": number(50), "b": torch.ones(3, 2, device="cuda")}, 7], 1)
    else:
        received = [number(0) for _ in range(6)] + [number(0, "cpu") for _ in range(2)]
        works = [dist.irecv(x, 0, group=other) for x in received[:3]] + [dist.irecv(x, 0) for x in received[3:6]]
        works += [dist.irecv(received[7], 0, tag=6), dist.irecv(received[6], 0, tag=5)]
        for work in reversed(works):
            work.wait()
        print("READ", [x.item() for x in received])
        objects = [None, None]
        print("FROM", dist.recv_object_list(objects, 0))
        print("OBJECTS", objects[0]["a"].item(), tuple(objects[0]["b"].shape), objects[1])
    """
    )
    ended = run(program, 2, "1")
    assert ended.code == 0, ended.err
    assert "READ [20, 21, 22, 10, 11, 12, 30, 40]\n" in ended.out
    assert "FROM 0\nOBJECTS 50 (3, 2) 7\n" in ended.out


class Arrived(Messages):
    """Messages that were sent before the receiver waits for them."""

    def __init__(self, *messages: Message) -> None:
        super().__init__(Pipe()[0], 0)
        self.messages = list(messages)
        self.told: list[Any] = []

    def _await(self, awaited: Awaited) -> Message:
        self.told.append(awaited)
        return self.messages.pop(0)

    def _report(self, notice: object) -> None:
        self.told.append(notice)


def message(*numbers: int, **others: Any) -> Message:
    return Message((len(numbers),), torch.int64, 8 * len(numbers), struct.pack(f"{len(numbers)}q", *numbers), **others)


@contextmanager
def rank_0(*messages: Message) -> Iterator[tuple[World, Arrived]]:
    """Rank 0 of two, with messages of rank 1."""
    job = world(2, 0, values="assume")
    job_of(job).messages = arrived = Arrived(*messages)
    with job:
        yield job, arrived


def poll(is_done: Callable[[], bool]) -> None:
    assert any(is_done() for _ in range(3))


def read_by_callback(future: torch.futures.Future[Any]) -> None:
    assert future.then(lambda done: done.value()[0].tolist()).wait() == [5, 6]


@pytest.mark.parametrize(
    "wait",
    [
        lambda work: work.get_future().wait(),
        lambda work: work.get_future().value(),
        lambda work: read_by_callback(work.get_future()),
        lambda work: work.get_future().add_done_callback(lambda future: None),
        lambda work: torch.futures.wait_all([work.get_future()]),
        lambda work: torch.futures.collect_all([work.get_future()]).wait(),
        lambda work: poll(work.is_completed),
        lambda work: poll(work.get_future().done),
    ],
    ids=["wait", "value", "then", "add_done_callback", "wait_all", "collect_all", "is_completed", "done"],
)
def test_message_has_arrived_when_its_work_or_future_is_done(wait: Callable[[Any], object]) -> None:
    with rank_0(message(5, 6)):
        x = torch.zeros(2, dtype=torch.int64, device="cuda")
        work = dist.irecv(x, 1)
        assert x.tolist() == [0, 0]
        wait(work)
        assert x.tolist() == [5, 6]


@pytest.mark.ci
def test_future_is_not_waited_for_before_the_program_does(run: Callable[..., Ended]) -> None:
    program = (
        START
        + """
    x, y = torch.tensor([rank], device="cuda"), torch.tensor([9], device="cuda")
    future = dist.irecv(y, 1 - rank).get_future()
    dist.send(x, 1 - rank)
    future.wait()
    print("READ", y.tolist())
    """
    )
    ended = run(program, 2)
    assert ended.code == 0, ended.err
    assert re.findall("READ.*", ended.out) == ["READ [1]", "READ [0]"]


def test_signal_handler_may_send_while_the_program_sends() -> None:
    """The signal interrupts code that writes to the connection."""
    job = world(2, 0, values="assume")
    mine, theirs = Pipe()
    job_of(job).messages = messages = Messages(mine, 0)
    write = mine.send_bytes
    errors = []

    def send_from_handler(number: int, frame: object) -> None:
        dist.send(torch.tensor([2], device="cuda"), 1)
        try:
            messages.receive_objects(dist.group.WORLD, 1)
        except RuntimeError as error:
            errors.append(str(error))

    def interrupted_write(data: Any) -> None:
        mine.send_bytes = write  # type: ignore[method-assign]
        signal.raise_signal(signal.SIGUSR1)
        write(data)

    before = signal.signal(signal.SIGUSR1, send_from_handler)
    try:
        with job:
            mine.send_bytes = interrupted_write  # type: ignore[method-assign]
            dist.send(torch.tensor([1], device="cuda"), 1)
            dist.send(torch.tensor([3], device="cuda"), 1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    received = [theirs.recv() for _ in range(3)]
    assert [(one.number, struct.unpack("q", one.message.values)) for one in received] == [
        (0, (1,)),
        (1, (2,)),
        (2, (3,)),
    ]
    assert len(errors) == 1
    assert "A signal handler of the program receives from another rank" in errors[0]


def test_objects_that_are_refused_are_not_reported_as_assumed() -> None:
    job = world(2, 0, values="assume")
    mine, theirs = Pipe()
    job_of(job).messages = Messages(mine, 0)
    theirs.send(Missing(OTHER, "Rank 1 has ended."))
    theirs.send(Missing(OTHER, "Rank 1 has ended."))
    with job:
        with pytest.raises(RuntimeError, match=r"recv_object_list\(\) returns objects of rank 1 of the group"):
            dist.recv_object_list([None], 1)
        assert not job.remarks
        dist.recv(torch.zeros(1, dtype=torch.int64, device="cuda"), 1)
        assert len(job.remarks) == 1
        assert "Rank 1 has ended. Its values are assumed (" in job.remarks[0]


@pytest.mark.parametrize("numbers", [[], [0]], ids=["no_numbers", "zero"])
def test_ranks_that_check_values_of_rank_0_do_not_wait(numbers: list[int]) -> None:
    job = world(2, 1)
    job_of(job).messages = arrived = Arrived()
    with job:
        _assert_own_length(len, numbers)
        assert _get_own_list(list, numbers) == numbers
    assert arrived.told == []


@pytest.mark.ci
def test_program_that_waits_for_itself_is_refused(run: Callable[..., Ended]) -> None:
    program = (
        START
        + """
    x = torch.zeros(1, dtype=torch.int64, device="cuda")
    dist.recv(x, (rank + 1) % size)
    dist.send(x, (rank - 1) % size)
    """
    )
    ended = run(program, 3, "0")
    assert ended.code == 1
    assert re.search(
        r"Ranks wait for each other, as they would in a job: rank \d waits at .*train.py:7 in <module> for a message "
        r"from rank \d, and rank .*Change one of them to send before it receives, or use --alone",
        ended.err,
    )


def test_message_of_another_size_is_refused(run: Callable[..., Ended]) -> None:
    program = (
        START
        + """
    x = torch.zeros(2 + rank, dtype=torch.int64, device="cuda")
    dist.recv(x, 0) if rank else dist.send(x, 1)
    """
    )
    ended = run(program, 2, "1")
    assert ended.code == 1
    assert "Rank 0 sends [2] torch.int64, 16 bytes, but the receiver expects [3] torch.int64, 24 bytes" in ended.err


@pytest.mark.ci
def test_activations_of_another_size_are_reported_when_both_ranks_have_run(
    run: Callable[..., Ended], tmp_path: Path
) -> None:
    program = (
        START
        + """
    x = torch.zeros(200 + rank, device="cuda")
    dist.recv(x, 0) if rank else dist.send(x, 1)
    """
    )
    assert run(program, 2, "1").code == 0, "nothing waits for the sender"
    ended = run(program, 2, "all", "--to-end", "--report", "report.html")
    assert ended.code == 1
    mismatch = "Rank 0 sends [200] torch.float32, 800 bytes, but the receiver expects [201] torch.float32"
    assert ended.out.count(mismatch) == 1
    assert re.findall(r"^rank (\d) of 2: (.*), 0 steps", ended.out, re.MULTILINE) == [
        ("0", "fits"),
        ("1", "the program failed"),
    ]
    page = (tmp_path / "report.html").read_text()
    assert page.count(mismatch) == page.count("the program failed") == 2, "when the page is made both have run"


@pytest.mark.ci
@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        (
            "torch.randn(1, device='cuda').item(); raise ValueError('no data')",
            "failed in its dry run: ValueError: no data.",
        ),
        ("sys.exit()", "ended without sending"),
    ],
)
def test_sender_that_sends_nothing_is_named(run: Callable[..., Ended], failure: str, reason: str) -> None:
    program = (
        START
        + f"""
    import sys
    if rank == 0:
        {failure}
    x = torch.ones(1, dtype=torch.int64, device="cuda")
    dist.recv(x, 0)
    print("READ", x.item())
    dist.recv_object_list([None], 0)
    """
    )
    ended = run(program, 2, "1")
    assert ended.code == 1
    assert "READ 1\n" in ended.out
    assert f"Rank 0, the sender, {reason}" in ended.out
    assert "recv_object_list() returns objects of rank 0 of the group." in ended.err


@pytest.mark.ci
def test_broadcast_into_placeholders_gets_the_objects_of_the_root(run: Callable[..., Ended]) -> None:
    program = (
        START
        + """
    objects = [{"lr": 1}, None] if rank == 0 else [None, None]
    dist.broadcast_object_list(objects, 0)
    sizes = torch.tensor([3, 4] if rank == 0 else [0, 0], device="cuda")
    dist.broadcast(sizes, 0)
    out = [None]
    dist.scatter_object_list(out, [10, 11, 12] if rank == 0 else None, 0)
    print("READ", objects, sizes.tolist(), out)
    """
    )
    ended = run(program, 3, "2")
    assert ended.code == 0, ended.err
    assert "READ [{'lr': 1}, None] [3, 4] [12]\n" in ended.out


def test_broadcast_of_equal_values_runs_no_other_rank(run: Callable[..., Ended]) -> None:
    program = (
        START
        + """
    objects = ["name"]
    dist.broadcast_object_list(objects, 0)
    seed = torch.tensor([3], device="cuda")
    dist.broadcast(seed, 0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)).cuda()
    model = torch.nn.parallel.DistributedDataParallel(model)
    for _ in range(3):
        model(torch.ones(4, 2, device="cuda")).sum().backward()
    print("READ", objects, seed.item())
    """
    )
    ended = run(program, 3, "2")
    assert ended.code == 0, ended.err
    assert "READ ['name'] 3\n" in ended.out
    assert "started" not in ended.err


@pytest.mark.ci
def test_stage_ends_where_it_would_wait_for_one_that_has_made_its_steps(run: Callable[..., Ended]) -> None:
    program = (
        START
        + """
    model = torch.nn.Linear(4, 4).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(100):
        shape = torch.tensor([2 + step, 4], device="cuda")
        if rank == 0:
            x = torch.ones(2 + step, 4, device="cuda")
        else:
            dist.recv(shape, rank - 1)
            x = torch.empty(shape.tolist(), device="cuda")
            dist.recv(x, rank - 1)
        out = model(x)
        if rank < size - 1:
            dist.send(shape, rank + 1)
            dist.send(out.detach(), rank + 1)
        out.sum().backward()
        optimizer.step()
    """
    )
    ended = run(program, 3, "stages", "--steps", "3")
    assert ended.code == 0, ended.err
    assert re.findall(r"^rank (\d) of 3: fits, 3 of 3 steps", ended.out, re.MULTILINE) == ["0", "1", "2"]
    assert "assuming" not in ended.out
    assert re.search(r"step 3 +world +3 +send +2 +[\d.]+ B", ended.out)
    assert "FLOP in a step" in ended.out


@pytest.mark.ci
def test_sender_that_does_not_fit_continues_for_the_others(run: Callable[..., Ended]) -> None:
    program = (
        START
        + """
    x = torch.tensor([1], device="cuda")
    if rank == 0:
        torch.empty(1 << 40, device="cuda")
        dist.send(x + 1, 1)
    else:
        dist.recv(x, 0)
        print("READ", x.item())
    """
    )
    ended = run(program, 2, "1")
    assert ended.code == 0, ended.err
    assert "READ 2\n" in ended.out
    assert run(program, 2).code == 3


@pytest.mark.ci
def test_forked_processes_of_a_rank_leave_its_messages_alone(run: Callable[..., Ended]) -> None:
    program = (
        START
        + """
    from torch.utils.data import DataLoader
    x = torch.tensor([1], device="cuda")
    for _ in DataLoader(list(range(8)), num_workers=2):
        pass
    dist.recv(x, 0) if rank else dist.send(x + 1, 1)
    print("READ", x.item())
    """
    )
    ended = run(program, 2, "1")
    assert ended.code == 0, ended.err
    assert "READ 2\n" in ended.out
