"""`torchext dry-run`: programs run unmodified; exit codes, text, HTML and JSON reports, and errors in arguments."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from textwrap import dedent
from typing import Any, NamedTuple

import pytest
import torch

from torchext import commands
from torchext.commands.dry_run import exit_code_of
from torchext.reports.model import RankReport

ROOT = Path(__file__).parents[2]

# A thousand steps, which the dry run must end.
TRAIN = """
    import torch, sys
    width = int(sys.argv[1]) if len(sys.argv) > 1 else 256
    model = torch.nn.Sequential(torch.nn.Linear(64, width), torch.nn.ReLU(), torch.nn.Linear(width, 8)).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(1000):
        loss = model(torch.randn(32, 64, device="cuda")).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""


USES_GPU = "import torch; torch.ones(1, device='cuda')"  # a rank that does not is not reported as one that fits


class Ended(NamedTuple):
    code: int
    out: str
    err: str


Command = Callable[..., Ended]


@pytest.fixture
def fresh_command(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """Write `program` to train.py and run it. Each rank has a new interpreter; the report comes from this one."""
    monkeypatch.chdir(tmp_path)

    def run(program: str, *options: str, arguments: Sequence[str] = ("train.py",)) -> Ended:
        (tmp_path / "train.py").write_text(dedent(program))
        capfd.readouterr()
        code = commands.main(["dry-run", *options, "--", *arguments])
        return Ended(code, *capfd.readouterr())

    return run


@pytest.fixture
def command(forked_ranks: None, fresh_command: Command) -> Command:
    """Do the same for tests that do not depend on how interpreters start."""
    return fresh_command


@pytest.mark.ci
def test_program_that_fits_is_ended_after_its_steps(fresh_command: Command) -> None:
    ended = fresh_command(TRAIN, "--steps", "3")
    assert ended.code == 0
    assert re.search(r"^rank 0 of 1: fits, 3 of 3 steps in [\d.]+ s$", ended.out, re.MULTILINE)
    assert re.search(
        r"^cuda:0 +[\d.]+ MiB +[\d.]+ MiB +79.20 GiB  79.\d\d GiB \((99.9|100.0) %\)$", ended.out, re.MULTILINE
    )
    assert re.search(r"^parameters +73.\d\d KiB", ended.out, re.MULTILINE)
    assert "train.py:4 in <module>" in ended.out, "the line that made the parameters"
    assert re.findall(r"step (\d) of 3", ended.err) == ["1", "2", "3"]


@pytest.mark.parametrize(("how", "said"), [("--to-end", "to its end"), ("--steps=1", "1 of 1 step")])
def test_program_ends_as_in_python(how: str, said: str, command: Command) -> None:
    program = """
        import atexit, concurrent.futures, threading, time, weakref
        import torch
        class Held: pass
        held = Held()
        weakref.finalize(held, print, "finalized")
        atexit.register(lambda: print("at exit on", torch.ones(2, device="cuda").device))
        model = torch.nn.Linear(2, 2).cuda()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        pool = concurrent.futures.ThreadPoolExecutor(1)
        late = threading.Thread(target=lambda: (time.sleep(2), print("thread ended")))
        late.start()
        for _ in range(3):
            model(torch.ones(1, 2, device="cuda")).sum().backward()
            optimizer.step()
        pool.submit(lambda: print("task done"))
        raise RuntimeError("after the last step")
    """
    ended = command(program, how)
    ends, handlers = ["task done", "thread ended"], ["at exit on cuda:0", "finalized"]
    found = [line for line in ended.out.splitlines() if line in (*ends, *handlers)]
    if how == "--to-end":
        assert sorted(found[:2]) == ends
    assert found[-2:] == handlers
    assert said in ended.out
    assert ended.code == (1 if how == "--to-end" else 0), ended.out


@pytest.mark.ci
def test_program_that_fails_does_not_wait_for_its_threads(command: Command) -> None:
    program = """
        import queue, threading
        import torch
        threading.Thread(target=queue.Queue().get).start()
        torch.nn.Linear(2, 2).cuda().undefined
    """
    ended = command(program)
    assert "'Linear' object has no attribute 'undefined'" in ended.out + ended.err
    assert "ended the program's threads and `atexit` handlers after 5 s" in ended.err
    assert ended.code == 1


@pytest.mark.parametrize("kind", ["manager", "workers"])
def test_handlers_of_a_stopped_program_find_its_processes(kind: str, fresh_command: Command) -> None:
    program = f"""
        import atexit, multiprocessing
        import torch
        if {kind == "manager"}:
            shared = multiprocessing.Manager().dict(step=0)
            atexit.register(lambda: print("shared:", dict(shared), flush=True))
        else:
            loader = iter(torch.utils.data.DataLoader(range(60), 2, num_workers=3, persistent_workers=True))
            atexit.register(lambda: print("shared: loader", flush=True))
        model = torch.nn.Linear(2, 2).cuda()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            model(torch.ones(1, 2, device="cuda")).sum().backward()
            optimizer.step()
    """
    ended = fresh_command(program, "--steps=1")
    assert ("shared: {'step': 0}" if kind == "manager" else "shared: loader") in ended.out
    assert "Traceback" not in ended.out + ended.err
    assert ended.code == 0


STARTS_PYTHON = '''
import multiprocessing, subprocess, sys
import torch
CHILD = """
import torch
loaded = torch.load("weight.pt")
model = torch.nn.Linear(500, 500).cuda()
model(loaded).sum().backward()
torch.save(model.state_dict(), "trained.pt")
print(torch.cuda.get_device_name(), torch.cuda.device_count(), loaded.device)
"""
def work(queue):
    queue.put(torch.ones(3, device="cuda").device.type)
if __name__ == "__main__":
    torch.save(torch.randn(500, 500, device="cuda"), "weight.pt")
    print(subprocess.run([sys.executable, "-c", CHILD], check=True, capture_output=True, text=True).stdout)
    assert torch.load("trained.pt")["weight"].shape == (500, 500)
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=work, args=(queue,))
    process.start()
    print("spawned:", queue.get())
    process.join()
    print(list(torch.utils.data.DataLoader(range(4), num_workers=1, multiprocessing_context="spawn")))
'''


@pytest.mark.ci
def test_python_processes_of_the_program_have_the_same_gpus(fresh_command: Command) -> None:
    ended = fresh_command(STARTS_PYTHON, "--to-end", "--gpu=L4", "--world-size=2")
    assert "NVIDIA L4 2 cuda:0" in ended.out
    assert "spawned: cuda" in ended.out
    assert "[tensor([0]), tensor([1]), tensor([2]), tensor([3])]" in ended.out, "workers of loaders compute with data"
    assert re.search(
        r"A process that the program started needed \d+\.\d MiB of cuda:0, which is not counted", ended.out
    )
    assert ended.code == 0


@pytest.mark.ci
def test_work_of_a_started_process_is_work_on_a_gpu(fresh_command: Command) -> None:
    child = "import torch; torch.ones(2**20, device='cuda')"
    ended = fresh_command(
        f"import subprocess, sys, torch\nsubprocess.run([sys.executable, '-c', {child!r}], check=True)", "--to-end"
    )
    assert "rank 0 of 1: fits" in ended.out
    assert ended.code == 0


# Modules that take long to import, and that PyTorch imports only for programs that need them.
HEAVY = [
    *("torch._dynamo", "torch._inductor", "torch.distributed.fsdp", "torch.distributed.tensor", "torch.onnx"),
    *("matplotlib", "rich", "transformers"),
]


@pytest.mark.ci
def test_only_the_rank_imports_pytorch_and_no_module_that_its_program_does_not_need(tmp_path: Path) -> None:
    program = f"""
        import sys
        def heavy():
            return [name for name in {["sympy", *HEAVY]} if name in sys.modules]
        print("before:", heavy())
        import torch
        model = torch.nn.Linear(4, 4).cuda()
        model(torch.randn(2, 4, device="cuda")).sum().backward()
        heavy = [name for name in heavy() if name != "sympy"]  # imported by PyTorch's Meta kernels
        print("after:", heavy)
    """
    (tmp_path / "program.py").write_text(dedent(program))
    code = """
import sys, torchext_command
code = torchext_command.main()
print("torch" in sys.modules, code)
"""
    command = [sys.executable, "-c", code, "dry-run", "--to-end", "--", str(tmp_path / "program.py")]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert "before: []\n" in ended.stdout, ended.stderr
    assert "after: []\n" in ended.stdout
    assert ended.stdout.endswith("False 0\n")


MEETS = f"""
    {USES_GPU}
    import os, socket, sys, time
    address = ("127.0.0.1", int(sys.argv[1]))
    print("rank", os.environ["RANK"], "reads", sys.stdin.read())
    if os.environ["RANK"] == "1":
        socket.create_server(address).accept()
    else:
        while True:
            try:
                socket.create_connection(address).close()
                break
            except ConnectionRefusedError:
                time.sleep(0.01)
"""


@pytest.mark.ci
def test_ranks_run_at_the_same_time_and_are_reported_in_their_order(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ("--world-size", "2", "--rank", "0,1", "--to-end", "--no-flops", "--jobs", "2")
    ended = command(MEETS, *options, arguments=["train.py", str(port)])
    assert ended.code == 0, ended.err
    assert re.findall(r"^rank \d (?:of|reads).*?(?=[,:\n])", ended.out, re.MULTILINE) == [
        "rank 0 reads ",
        "rank 0 of 2",
        "rank 1 reads ",
        "rank 1 of 2",
    ]


@pytest.mark.ci
def test_one_job_runs_a_rank_when_the_one_before_has_ended(command: Command) -> None:
    program = """
        import os, sys
        print("rank", os.environ["RANK"], "is shown directly:", os.readlink("/proc/self/fd/1") == sys.argv[1])
    """
    place = str(Path("/proc/self/fd/1").readlink())
    options = ("--world-size", "2", "--rank", "all", "--to-end", "--no-flops", "--jobs", "1")
    ended = command(program, *options, arguments=["train.py", place])
    assert [f"rank {rank} is shown directly: True" in ended.out for rank in (0, 1)] == [True, True]


def test_policies_for_values_are_checked(command: Command, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        command(TRAIN, "--values", "assume,masks=most")
    assert "masks=all|half|none, routing=balanced|same|worst|histogram:FILE" in capfd.readouterr().err


OFFLOADS = """
    import torch
    model = torch.nn.Linear(512, 512, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    masters = torch.zeros(4, 512, 512)
    pinned = torch.empty(512, 512, pin_memory=True)
    for step in range(1000):
        y = model(torch.randn(8, 512, device="cuda"))
        y[y > 0].sum().backward()
        pinned.copy_(model.weight.grad, non_blocking=True)
        optimizer.step()
"""


@pytest.mark.ci
@pytest.mark.parametrize("masks", ["all", "half"])
def test_report_has_the_memory_of_the_host_and_the_policies(command: Command, masks: str) -> None:
    ended = command(OFFLOADS, "--values", f"assume,masks={masks}")
    assert ended.code == 0
    assert re.search(r"^cpu +4.00 MiB +4.00 MiB *$", ended.out, re.MULTILINE)
    assert re.search(r"^pinned +1.00 MiB +1.00 MiB *$", ended.out, re.MULTILINE)
    assert f"Sizes depend on masks={masks}: see --values for other policies." in ended.out
    assert f"{4096 if masks == 'all' else 2048} of 4096 elements" in ended.out


@pytest.mark.ci
def test_floating_point_operations_are_those_of_one_step(command: Command) -> None:
    ended = command(TRAIN, "--steps", "3")
    forward = 2 * 32 * (64 * 256 + 256 * 8)
    backward = 2 * forward - 2 * 32 * 64 * 256  # the input needs no gradient
    assert f"{(forward + backward) / 1e6:.3g} MFLOP in a step" in ended.out
    assert "FLOP" not in command(TRAIN, "--no-flops").out


@pytest.mark.ci
def test_time_of_a_step_has_a_bound_if_the_rates_are_known(command: Command, capfd: pytest.CaptureFixture[str]) -> None:
    program = TRAIN.replace("torch.randn(32, 64", "torch.randn(8192, 64")
    ended = command(program, "--json", "report.json", "--report", "report.html", "--rates", "memory=1,tf32=1,float32=1")
    (rank,) = json.loads(Path("report.json").read_text())["ranks"]
    flops, bound = rank["flops"], rank["bound"]
    assert bound["compute"] == pytest.approx(flops / 1e12 / (1980 / 1830))
    assert bound["seconds"] >= max(bound["compute"], bound["memory"])
    assert (bound["rates"]["memory"], rank["bound_error"]) == (1e9, "")
    line = f"A step takes at least {bound['seconds']:.3g} s (compute {bound['compute']:.3g}, memory "
    assert line in ended.out
    assert line in Path("report.html").read_text()
    assert re.search(r"Least time of operators in a step\n.*\n-.*\n.* s +\d+ +compute +mm +backward of \*", ended.out)

    ended = command(TRAIN, "--gpu", "my GPU", "--gpu-memory", "80")
    assert "The time has no bound: the rates of 'my GPU' are unknown, so give them with FakeGPU(rates=...)" in ended.out
    with pytest.raises(SystemExit, match="2"):
        command(TRAIN, "--rates", "float=3")
    assert "--rates: expected rates such as memory=3350,network=50 (GB/s)" in capfd.readouterr().err


def test_products_that_are_given_the_dtype_of_their_result_are_counted(command: Command) -> None:
    program = """
        import torch
        a, b = (torch.nn.Parameter(torch.ones(4, 8, 8, device="cuda", dtype=torch.bfloat16)) for _ in range(2))
        optimizer = torch.optim.SGD([a, b])
        for _ in range(9):
            with torch.no_grad():
                c = torch.mm(a[0], b[0], out_dtype=torch.float32)
                torch.addmm(c, a[0], b[0], out_dtype=torch.float32)
                torch.bmm(a, b, out_dtype=torch.float32)
            a.sum().backward()
            optimizer.step()
    """
    ended = command(program)
    assert f"{6 * 2 * 8**3 / 1e3:.3g} kFLOP in a step" in ended.out, ended.out


@pytest.mark.parametrize("memory", ["2", "2GiB", "2147483648B"])
def test_program_that_does_not_fit_gets_the_required_memory(command: Command, memory: str) -> None:
    ended = command(TRAIN, "--gpu-memory", memory, arguments=["train.py", "8000000"])
    assert ended.code == 3
    assert "rank 0 of 1: does not fit, 2 of 2 steps" in ended.out
    assert "CUDA out of memory. Tried to allocate" in ended.out
    assert re.search(r"^cuda:0 +1\d\.\d\d GiB +1\d\.\d\d GiB +\d.\d\d GiB  -\d+\.\d\d GiB", ended.out, re.MULTILINE)


@pytest.mark.ci
def test_limit_that_the_program_sets_does_not_hide_the_required_memory(command: Command) -> None:
    program = """
        import torch
        torch.cuda.set_per_process_memory_fraction(0.1)
        torch.empty(16 << 30, dtype=torch.int8, device="cuda")
    """
    ended = command(program, "--to-end", "--no-flops")
    assert ended.code == 3
    assert re.search(r"^cuda:0 +16\.00 GiB +16\.00 GiB", ended.out, re.MULTILINE), ended.out


@pytest.mark.ci
@pytest.mark.parametrize("handler", ["raise RuntimeError('failed') from error", "raise RuntimeError('failed')"])
def test_out_of_memory_in_an_error_of_the_program_does_not_fit(command: Command, handler: str) -> None:
    program = f"""
        import torch
        try:
            torch.empty(1 << 40, device="cuda")
        except torch.cuda.OutOfMemoryError as error:
            {handler}
    """
    assert command(program).code == 3


@pytest.mark.ci
def test_out_of_memory_that_the_program_handles_fits(command: Command) -> None:
    program = """
        import torch
        try:
            torch.empty(1 << 40, device="cuda")
        except torch.cuda.OutOfMemoryError:
            torch.empty(1 << 20, device="cuda")
    """
    ended = command(program, "--to-end")
    assert ended.code == 0
    assert "rank 0 of 1: fits, 0 steps to its end" in ended.out
    assert command(program).code == 4


@pytest.mark.ci
@pytest.mark.parametrize(
    ("failure", "code"),
    [("torch.empty(1 << 40, device='cuda')", 3), ("raise ValueError('after the steps')", 1), ("sys.exit(7)", 1)],
)
def test_code_after_the_steps_does_not_count(command: Command, failure: str, code: int) -> None:
    """Neither the step that counts operations nor code after the last optimizer call is part of the run."""
    ended = command(TRAIN.replace("loss = model", f"step == 2 and exec({failure!r}); loss = model"), "--no-flops")
    assert ended.code == code
    ended = command(TRAIN.replace("loss.backward()", f"loss.backward(); step == 2 and exec({failure!r})"))
    assert (ended.code, "fits, 2 of 2 steps" in ended.out) == (0, True)
    assert "FLOP" not in ended.out


def test_errors_of_the_program_are_shown(command: Command) -> None:
    ended = command("def train():\n    raise ValueError('no data')\ntrain()")
    assert ended.code == 1
    assert "rank 0 of 1: the program failed, 0 of 2 steps" in ended.out
    assert "operations were not counted" not in ended.out
    assert re.search(r'File ".*train.py", line 2, in train.*ValueError: no data', ended.err, re.DOTALL)


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("argument", "shown"),
    [("0", 0), ("3", 3), ("5", 5), ("-1", -1), ("'no data'", 1), ("", 0), ("256", 256), ("False", 0)],
)
def test_exit_code_of_the_program_is_printed(command: Command, argument: str, shown: int) -> None:
    ended = command(f"import sys; sys.exit({argument})")
    assert ended.code == (1 if shown else 4)
    first = ended.out.partition("\n")[0]
    assert (f"the program exited with code {shown}, 0 of 2" if shown else "ended after 0 of 2 steps") in first
    assert "fits" not in ended.out


def test_values_that_a_package_reads_are_of_the_line_that_calls_it(command: Command) -> None:
    ended = command("import numpy, torch\nlist(numpy.arange(9)[i] for i in torch.randint(9, (3,), device='cuda'))")
    assert re.search(r"3 +\d, \d, \d +\S*train.py:2 in <genexpr>", ended.out)


@pytest.mark.ci
def test_package_may_be_in_an_environment_below(
    fresh_command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example, an environment on top of another one, or the user's own packages."""
    package = tmp_path / "below" / "site-packages"
    package.mkdir(parents=True)
    (package / "logging_of_losses.py").write_text("def log(loss):\n    return loss.item()")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{package}")
    ended = fresh_command("import logging_of_losses, torch\nlogging_of_losses.log(torch.rand(2, device='cuda').sum())")
    assert re.search(r"1 +0.25 +\S*train.py:2 in <module> +\S*logging_of_losses.py:2 in log", ended.out)


SEND_STATES = """
    import torch, torch.distributed as dist
    dist.init_process_group("nccl")
    generator = torch.Generator().manual_seed(7)
    before = generator.get_state()
    for get, set_ in [
        (generator.get_state, generator.set_state),
        (torch.get_rng_state, torch.set_rng_state),
        (torch.cuda.get_rng_state, torch.cuda.set_rng_state),
        (torch.cuda.get_rng_state, lambda state: torch.cuda.set_rng_state_all([state])),
    ]:
        state = get().cuda()
        dist.broadcast(state, 0)
        set_(state.cpu())
    assert torch.equal(generator.get_state(), before)
    assert generator.set_state(before.cuda().cpu()) is generator
"""


@pytest.mark.ci
def test_states_of_generators_that_others_send_are_not_set(command: Command) -> None:
    ended = command(SEND_STATES, "--world-size", "2", "--rank", "1", "--to-end")
    assert ended.code == 0, ended.err
    assert re.findall(r"1 +not set +\S*train.py:(\d+) in", ended.out).count("14") == 3
    assert re.search(r"1 +not set +\S*train.py:10 in <lambda>", ended.out)
    assert re.search(r"1 +not set +\S*train.py:16 in <module>", ended.out)


def test_states_of_generators_that_others_send_are_values(command: Command) -> None:
    ended = command(SEND_STATES, "--world-size", "2", "--values", "raise")
    assert ended.code == 1
    assert re.search(r"train.py\", line 14, in <module>.*no data to read", ended.err, re.DOTALL)


READS = TRAIN + "        print('loss', loss.item())\n        print('sound', bool(torch.isfinite(loss)))\n"


def test_values_that_do_not_exist_are_assumed_and_listed(command: Command) -> None:
    ended = command(READS)
    assert ended.code == 0
    assert "loss 0.125\nsound True\n" in ended.out
    assert re.search(
        r"^rank 0 of 1: fits, 2 of 2 steps in [\d.]+ s, assuming 2 truth values, 2 numbers$", ended.out, re.M
    )
    values = ended.out.partition("Reads of values that do not exist")[2]
    assert re.search(r"2 +0\.125 +\S*train.py:11 in <module> +\S*train.py:11", values)
    assert re.search(r"2 +True +\S*train.py:12 in <module> +\S*train.py:12", values)
    assert "_ops.py" not in values, "the mode that counts operations is no reader"


@pytest.mark.ci
def test_values_that_do_not_exist_can_be_refused(command: Command) -> None:
    ended = command(READS, "--values", "raise")
    assert ended.code == 1
    assert re.search(r"train.py\", line 11, in <module>.*_local_scalar_dense", ended.err, re.DOTALL)


@pytest.mark.ci
def test_error_after_values_that_do_not_exist_names_the_last_of_them(command: Command) -> None:
    ended = command(
        "import torch\ntokens = torch.ones(8, 4, device='cuda')\n"
        "counts = torch.empty(2, dtype=torch.int64, device='cuda').tolist()\ntokens.split(counts)"
    )
    assert ended.code == 1
    assert re.search(
        r"sum exactly to 8.*read assumed values.* with Tensor.tolist at \S*train.py:3 in <module>: \[0, 0\]. If sizes",
        ended.err,
        re.DOTALL,
    )
    assert "assumed values" not in command("raise ValueError('no data')").err


@pytest.mark.ci
def test_program_without_launcher_trains_alone(command: Command) -> None:
    alone = "'RANK' not in os.environ and 'WORLD_SIZE' not in os.environ"
    assert command(f"{USES_GPU}\nimport os; assert {alone}", "--to-end").code == 0
    launched = "os.environ['RANK'] + os.environ['WORLD_SIZE'] == '01'"
    assert command(f"{USES_GPU}\nimport os; assert {launched}", "--to-end", "--world-size", "1").code == 0


@pytest.mark.ci
def test_modules_run_as_by_python(fresh_command: Command, tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "part.py").write_text("name = 'part of the package'")
    (package / "go.py").write_text(
        f"{USES_GPU}\nimport os, sys\nfrom .part import name\n"
        "print(name, __name__, sys.argv[1:], sys.path[0] == os.getcwd())"
    )
    ended = fresh_command("", "--to-end", arguments=["-m", "package.go", "--steps", "7"])
    assert ended.code == 0
    assert "part of the package __main__ ['--steps', '7'] True" in ended.out


@pytest.mark.ci
def test_scripts_run_as_by_python(fresh_command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python searches the folder of the script for modules, but not the current one."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # an empty entry there would add the current folder
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    (scripts / "beside.py").write_text("name = 'beside the script'")
    (tmp_path / "not_beside.py").touch()
    (scripts / "go.py").write_text(
        f"{USES_GPU}\nimport importlib.util, sys, beside\n"
        "assert importlib.util.find_spec('not_beside') is None\n"
        "assert sys.modules['__main__'].beside is beside\n"
        "print(beside.name, __name__, sys.argv)"
    )
    ended = fresh_command("", "--to-end", arguments=["scripts/go.py", "-x"])
    assert ended.code == 0, ended.err
    assert "beside the script __main__ ['scripts/go.py', '-x']" in ended.out


@pytest.mark.ci
def test_compilers_are_ignored_and_reported(command: Command) -> None:
    ended = command(TRAIN.replace("optimizer =", "model = torch.compile(model)\n    optimizer ="), "--no-compile")
    assert ended.code == 0, ended.err
    assert re.search(
        r"^torch.compile\(\) was ignored: .* not compiled \(--no-compile .*\) \(\S*train.py:5 in <module>\)\.$",
        ended.out,
        re.MULTILINE,
    )
    assert "OptimizedModule._orig_mod.0.weight" in ended.out


@pytest.mark.ci
def test_compiled_function_that_is_not_called_is_not_mentioned(command: Command) -> None:
    functions = "".join(f"    compiled{i} = torch.compile(lambda loss: 2 * loss)\n" for i in range(6))
    program = TRAIN.replace("    model =", functions + "    model =")
    assert "torch.compile" not in command(program, "--no-compile").out
    calls = " ".join(f"loss = compiled{i}(loss);" for i in range(6))
    ended = command(program.replace("loss.backward()", calls + " loss.backward()"), "--no-compile")
    assert re.search(
        r"not compiled \(--no-compile .*\) \((\S*train.py:\d+ in <module>, ){4}and 2 more\)\.$", ended.out, re.MULTILINE
    ), ended.out


FLEX = """
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    LENGTH = 4096
    bias = torch.nn.Parameter(torch.zeros(4, device="cuda"))
    query, key, value = (torch.randn(1, 4, LENGTH, 64, device="cuda", requires_grad=True) for _ in range(3))
    optimizer = torch.optim.SGD([bias, query, key, value])
    before = torch.cuda.memory_allocated()
    blocks = {create}(lambda b, h, i, j: i >= j, None, None, LENGTH, LENGTH, device="cuda")
    print("mask", (torch.cuda.max_memory_allocated() - before) >> 20, blocks.kv_indices.shape)
    torch.cuda.reset_peak_memory_stats()
    while True:
        out = {attend}(query, key, value, lambda score, b, h, i, j: score + bias[h], blocks)
        out.sum().backward()
        print("step", (torch.cuda.max_memory_allocated() - before) >> 20, tuple(bias.grad.shape))
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.ci
def test_flex_attention_of_a_program_that_compiles_is_its_kernel(command: Command) -> None:
    compiled = {"create": "torch.compile(create_block_mask)", "attend": "torch.compile(flex_attention)"}
    ended = command(FLEX.format(**compiled), "--no-compile")
    assert ended.code == 0, ended.err
    assert re.search(r"^mask 0 torch.Size\(\[1, 1, 32, 32\]\)$", ended.out, re.MULTILINE)
    # The result, its gradient, and those of the query, the key and the value are 4 MiB each.
    used = re.findall(r"^step (\d+) \(4,\)$", ended.out, re.MULTILINE)
    assert max(map(int, used)) <= 6 * 4
    if torch.__version__ >= (2, 15):  # whose FlopCounterMode supports the operator; it makes a third step
        assert len(used) == 3
        forward = 4 * 2 * 2 * 4096 * 4096 * 64
        assert f"{forward * 3.5 / 1e9:.3g} GFLOP in a step" in ended.out, "the backward pass has five products of two"
    else:
        assert len(used) == 2
        assert "FLOP in a step" not in ended.out
        assert "The floating-point operations were not counted: " in ended.out
    assert re.search(
        r"^flex_attention\(\) was counted as the kernel .* \(\S*train.py:13 in <module>\)\.$", ended.out, re.MULTILINE
    )


@pytest.mark.ci
@pytest.mark.parametrize("call", ["torch.compile(Masking())()", "torch.compile(Masking().forward)()"])
def test_mask_of_blocks_that_a_compiled_module_makes_has_no_elements(command: Command, call: str) -> None:
    ended = command(
        f"""
        import torch
        from torch.nn.attention.flex_attention import create_block_mask

        class Masking(torch.nn.Module):
            def forward(self):
                return create_block_mask(lambda b, h, i, j: i >= j, None, None, 4096, 4096, device="cuda")

        {call}
        print("mask", torch.cuda.max_memory_allocated() >> 20)
        """,
        *("--to-end", "--no-compile"),
    )
    assert ended.code == 0, ended.err
    assert re.search(r"^mask 0$", ended.out, re.MULTILINE)


@pytest.mark.ci
def test_flex_attention_that_is_not_compiled_computes_all_scores(command: Command) -> None:
    ended = command(
        """
        import torch
        from torch.nn.attention.flex_attention import flex_attention
        query = torch.randn(1, 4, 4096, 64, device="cuda")
        with torch.no_grad():
            flex_attention(query, query, query)
        print("used", torch.cuda.max_memory_allocated() >> 20)
        """,
        "--to-end",
    )
    assert ended.code == 0, ended.err
    assert int(re.findall(r"^used (\d+)", ended.out, re.MULTILINE)[0]) >= 4 * 4 * 4096 * 4096 >> 20


@pytest.mark.ci
def test_mask_of_blocks_that_is_not_compiled_has_an_element_for_each_pair(command: Command) -> None:
    program = FLEX.format(create="create_block_mask", attend="torch.compile(flex_attention)")
    ended = command(program, "--no-compile")
    assert ended.code == 0, ended.err
    assert int(re.findall(r"^mask (\d+)", ended.out, re.MULTILINE)[0]) >= 2 * 4096 * 4096 >> 20


DDP = """
    import os, torch
    from torch.nn.functional import cross_entropy
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    def train(local_rank, width=256):
        torch.cuda.set_device(local_rank)
        model = DistributedDataParallel(torch.nn.Linear(64, width, device="cuda"), device_ids=[local_rank])
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        data = TensorDataset(torch.randn(512, 64), torch.randint(0, 10, (512,)))
        loader = DataLoader(data, 16, sampler=DistributedSampler(data), num_workers=2, pin_memory=True)
        for epoch in range(100):
            loader.sampler.set_epoch(epoch)
            for batch, labels in loader:
                loss = cross_entropy(model(batch.cuda(non_blocking=True)), labels.cuda(non_blocking=True))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
"""


@pytest.mark.ci
def test_several_ranks_of_a_job_that_torchrun_starts(fresh_command: Command) -> None:
    program = """
        torch.distributed.init_process_group("nccl")
        assert torch.distributed.get_rank() == int(os.environ["RANK"])
        train(int(os.environ["LOCAL_RANK"]))
    """
    ended = fresh_command(dedent(DDP) + dedent(program), "--world-size", "16", "--rank", "0,13", "--gpu", "A100-40GB")
    assert ended.code == 0, ended.err
    assert "rank 0 of 16: fits, 2 of 2 steps" in ended.out
    assert "rank 13 of 16: fits, 2 of 2 steps" in ended.out
    assert re.findall(r"^(cuda:\d)  .* (39\.\d+ GiB)", ended.out, re.MULTILINE) == [
        ("cuda:0", "39.47 GiB"),
        ("cuda:5", "39.47 GiB"),
    ]
    assert len(re.findall(r"step [12] +world +16 +allreduce +1 +65.00 KiB", ended.out)) == 4


SPAWN = """
    def main(local_rank, world_size, width):
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", "12355"
        torch.distributed.init_process_group("nccl", rank=local_rank, world_size=world_size)
        train(local_rank, width)

    if __name__ == "__main__":
        count = torch.cuda.device_count()
        torch.multiprocessing.spawn(main, args=(count, 128), nprocs=count)
"""


def test_processes_that_the_program_starts_are_the_one_that_is_there(command: Command) -> None:
    ended = command(dedent(DDP) + dedent(SPAWN), "--world-size", "4", "--rank", "3")
    assert ended.code == 0, ended.err
    assert "rank 3 of 4: fits, 2 of 2 steps" in ended.out
    assert re.search(r"^cuda:3  ", ended.out, re.MULTILINE)


@pytest.mark.ci
def test_processes_that_the_program_starts_have_to_be_as_many_as_the_job_has(command: Command) -> None:
    ended = command(dedent(DDP) + dedent(SPAWN).replace("nprocs=count", "nprocs=3"), "--world-size", "4")
    assert ended.code == 1
    assert "spawn() was called for 3 processes, but this is a dry run of a job of 4" in ended.err


def test_fully_sharded_job_reports_shards_and_collectives(command: Command) -> None:
    program = """
        import os, torch
        from torch import nn
        from torch.distributed.fsdp import fully_shard
        torch.distributed.init_process_group("nccl")
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        with torch.device("meta"):
            model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4)))
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
        model.to_empty(device="cuda")
        for parameter in model.parameters():
            nn.init.normal_(parameter)
        optimizer = torch.optim.AdamW(model.parameters())
        while True:
            model(torch.randn(8, 1024, device="cuda")).sum().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    """
    ended = command(program, "--world-size", "512", "--rank", "511")
    assert ended.code == 0, ended.err
    assert re.search(r"^optimizer state +68.00 KiB", ended.out, re.MULTILINE), "of 32 MiB"
    assert re.search(r"step 1 to 2, each +world +512 +allgather_base +8 +64.06 KiB +32.03 MiB", ended.out)
    assert re.search(r"step 1 to 2, each +world +512 +reduce_scatter_base +4 +16.02 MiB +32.03 KiB", ended.out)


def test_report_is_one_page_that_needs_nothing_else(command: Command, tmp_path: Path) -> None:
    program = dedent(TRAIN).replace("in range(1000)", "in '<&>' * 1000")
    ended = command(program, "--report", "out.html", arguments=["train.py", "64"])
    assert ended.code == 0
    assert "The report is in out.html." in ended.out
    page = (tmp_path / "out.html").read_text()
    assert "rank 0 of 1: fits, 2 of 2 steps" in page
    assert "Largest tensors of cuda:0" in page
    assert "<pre>train.py 64</pre>" in page
    assert not re.search(r"""(src|href)=["']?(https?:|//|\w+\.(js|css))|@import|url\(""", page)


@pytest.mark.ci
def test_json_has_all_of_the_report(command: Command, tmp_path: Path) -> None:
    ended = command(READS, "--steps", "3", "--world-size", "2", "--rank", "all", "--json", "report.json", "--quiet")
    assert ended.code == 0, ended.err
    assert "[dry run]" not in ended.err
    found = json.loads((tmp_path / "report.json").read_text())
    assert {name: found[name] for name in ("schema", "command", "world_size", "exit_code", "interrupted")} == {
        "schema": 1,
        "command": "dry-run",
        "world_size": 2,
        "exit_code": 0,
        "interrupted": False,
    }
    assert found["program"] == ["train.py"]
    assert found["versions"]["torch"] == torch.__version__
    assert (found["gpu"]["name"], found["gpu"]["count"]) == ("NVIDIA H100 80GB HBM3", 2)
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1]
    rank = found["ranks"][0]
    assert (rank["outcome"], rank["unit"], rank["requested"], rank["completed"]) == ("fits", "step", 3, 3)
    assert rank["flops"] > 0
    assert [value["answer"] for value in rank["values"]] == ["0.125", "True"]
    device = rank["devices"][0]
    assert device["device"] == "cuda:0"
    assert device["total"] - device["peak_reserved"] == device["headroom"]
    assert sum(device["categories"].values()) == device["peak_allocated"]
    assert sum(device["modules"].values()) == device["peak_allocated"]
    assert any("train.py:4 in <module>" in line for line in device["lines"])


@pytest.mark.ci
def test_json_on_stdout_is_alone_there(fresh_command: Command) -> None:
    ended = fresh_command("print('of the program'); import sys; sys.exit(3)", "--json", "-", "--to-end")
    assert ended.code == 1
    found = json.loads(ended.out)["ranks"][0]
    assert (found["outcome"], found["program_exit_code"]) == ("failed", 3)
    assert "of the program\n" in ended.err
    assert "rank 0 of 1: the program exited with code 3, 0 steps" in ended.err


@pytest.mark.ci
def test_collectives_in_json_have_phases_and_bytes(command: Command, tmp_path: Path) -> None:
    program = """
        import torch, torch.distributed as dist
        dist.init_process_group("nccl")
        dist.all_reduce(torch.ones(4, device="cuda"))
    """
    assert command(program, "--to-end", "--world-size", "8", "--json", "report.json").code == 0
    [row] = json.loads((tmp_path / "report.json").read_text())["ranks"][0]["collectives"]
    assert (row["operator"], row["group_size"], row["bytes_sent"], row["bytes_received"]) == ("allreduce", 8, 16, 16)
    assert row["phase"] == "construction"


@pytest.mark.ci
def test_tables_of_equal_ranks_are_printed_once(command: Command) -> None:
    of_rank_2 = "import os; import torch; kept = [torch.ones(9, 9)] * (os.environ['RANK'] == '2')\n"
    ended = command(of_rank_2 + dedent(TRAIN), "--world-size", "4", "--rank", "all")
    assert ended.out.count("At the peak of cuda:0") == 2
    alike = re.findall(
        r"^rank (\d) of 4: fits.*\nThe rest is equal to the report of rank (\d)\.$", ended.out, re.MULTILINE
    )
    assert alike == [("1", "0"), ("3", "0")]


@pytest.mark.ci
def test_each_rank_reports_when_it_is_done(command: Command) -> None:
    ended = command(TRAIN, "--world-size", "2", "--rank", "all", "--no-flops")
    done = re.findall(r"^\[dry run\] rank (\d): done, fits, 2 of 2 steps in [\d.]+ s$", ended.err, re.M)
    assert sorted(done) == ["0", "1"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--world-size", "4", "--rank", "4", "--", "train.py"], r"a job of 4 has the ranks 0 to 3"),
        (["--world-size", "4", "--rank", "0,2-5", "--", "train.py"], r"a job of 4 has the ranks 0 to 3; got '0,2-5'"),
        (
            ["--world-size", "4", "--rank", "3-1", "--", "train.py"],
            r"--rank: the range '3-1' is reversed. Did you mean 1-3\?",
        ),
        (["--forwards", "0", "--", "train.py"], r"--forwards: expected at least 1, got 0"),
        (["--steps", "1", "--forwards", "1", "--", "train.py"], r"not allowed with argument --steps"),
        (["--per-node", "0", "--", "train.py"], r"--per-node: expected at least 1, got 0"),
        (["--", "python", "-c", "pass"], r"-c: expected a script, or -m and a module, after python"),
        (["--rank", "1", "--", "train.py"], r"without --world-size has rank 0 only, got '1'; give --world-size"),
        (["--jobs", "0", "--", "train.py"], r"--jobs: expected at least 1, got 0"),
        (["--world-size", "0", "--", "train.py"], r"--world-size: expected at least 1, got 0"),
        (["--steps", "0", "--", "train.py"], r"--steps: expected at least 1, got 0"),
        (
            ["--gpu", "H100-81GB", "--", "train.py"],
            r"--gpu: Unknown GPU 'H100-81GB'. Did you mean H100-80GB.* pass its memory with --gpu-memory GIB",
        ),
        (["--rank", "0;1", "--", "train.py"], r"expected ranks such as 0,8-15, or all, or stages; got '0;1'"),
        (["--rank", "a", "--", "train.py"], r"--rank: expected ranks such as 0,8-15, or all, or stages; got 'a'$"),
        (["--rank", "stage", "--", "train.py"], r"got 'stage'. Did you mean stages\?"),
        (["--report", "missing/r.html", "--", "train.py"], r"argument --report: the folder 'missing' does not exist"),
        (["--report", "r.txt", "--", "train.py"], r"expected a file that ends in .html or .htm, got 'r.txt'"),
        (["--report", "-", "--", "train.py"], r"expected a file that ends in .html or .htm, got '-'"),
        (
            ["--values", "asume", "--", "train.py"],
            r"--values: expected value policies of the form .* Did you mean assume\?",
        ),
        (["--values", "assume,masks=al", "--", "train.py"], r"--values: expected .* Did you mean masks=all"),
        (["--", "."], r"error: the folder '\.' has no __main__.py: give a script, or -m and a module$"),
        (["--json", "missing/r.json", "--", "train.py"], r"argument --json: the folder 'missing' does not exist"),
        (["--", "no_such_script.py"], r"error: the script 'no_such_script.py' does not exist$"),
        (["--", "-m", "no_such_module.train"], r"error: the module 'no_such_module.train' does not exist$"),
        *(
            (
                ["--gpu-memory", size, "--", "train.py"],
                f"--gpu-memory: expected a positive number of GiB, or .* '{size}'",
            )
            for size in ("inf", "0", "24XB", "-3")
        ),
        (["--gpu", "H99", "--", "train.py"], r"Known models: T4-16GB.*pass its memory with --gpu-memory GIB"),
        (["--steps", "2"], r"the program is missing: give it after --"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    with pytest.raises(SystemExit, match="2"):
        commands.main(["dry-run", *arguments])
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.ci
def test_exit_code_is_that_of_the_process(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import torch; torch.empty(1 << 40, device='cuda')")
    ended = subprocess.run(
        [sys.executable, "-m", "torchext", "dry-run", "--", str(tmp_path / "train.py")],
        check=False,
        capture_output=True,
    )
    assert ended.returncode == 3, ended.stderr


SAVE = """
    import os, shutil, torch
    from safetensors.torch import load_file, save_file
    model = torch.nn.Linear(4, 4).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    def step():
        model(torch.randn(2, 4, device="cuda")).sum().backward()
        optimizer.step()
    step()
    torch.save({"epoch": 7, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, "checkpoint.pt")
    loaded = torch.load("checkpoint.pt", map_location="cpu")
    print(loaded["epoch"], loaded["model"]["weight"].shape, loaded["model"]["weight"].device)
    model.load_state_dict(loaded["model"])
    optimizer.load_state_dict(torch.load("checkpoint.pt")["optimizer"])
    step()
    save_file(model.state_dict(), "new.safetensors")
    print(sorted((name, tensor.shape) for name, tensor in load_file("new.safetensors").items()))
    torch.save({"names": ["weight"]}, "progress.pt")
    print(torch.load("progress.pt"))
    shutil.rmtree("checkpoint-1")
    os.rename("model.safetensors", "old.safetensors")
    step()
"""


@pytest.mark.ci
def test_checkpoints_are_read_again_and_those_that_exist_stay(fresh_command: Command, tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    (tmp_path / "checkpoint-1").mkdir()
    old = [tmp_path / name for name in ("checkpoint.pt", "model.safetensors", "checkpoint-1/model.safetensors")]
    for path in old:
        path.write_text("of the real run")
    ended = fresh_command(SAVE, "--keep-files", str(tmp_path / "kept"))
    assert ended.code == 0, ended.err
    assert ended.out.splitlines()[:3] == [
        "7 torch.Size([4, 4]) cpu",
        "[('bias', torch.Size([4])), ('weight', torch.Size([4, 4]))]",
        "{'names': ['weight']}",
    ]
    assert [path.read_text() for path in old] == ["of the real run"] * 3
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "checkpoint-1",
        "checkpoint.pt",
        "kept",
        "model.safetensors",
        "train.py",
    ]
    told = re.search(r"^Files that the program would have changed\n(.*?)\n\n", ended.out, re.MULTILINE | re.DOTALL)
    assert told is not None
    assert re.findall(rf"{tmp_path}/(\S+) +(\w+)", told[1]) == [
        ("checkpoint-1", "removed"),
        ("checkpoint-1/model.safetensors", "removed"),
        ("checkpoint.pt", "overwritten"),
        ("model.safetensors", "removed"),
        ("new.safetensors", "written"),
        ("old.safetensors", "written"),
        ("progress.pt", "written"),
    ]
    kept = tmp_path / f"kept/rank-0{tmp_path}"
    assert sorted(path.name for path in kept.iterdir()) == ["old.safetensors", "progress.pt"], "without values"


DESCRIBED = """
    import argparse, io, os, shutil, torch
    from torch import nn
    from torchext import _C
    class Sub(torch.Tensor): pass
    model = nn.Linear(1000, 1000).cuda()
    torch.save(model.state_dict(), "model.pt")
    assert 4_004_000 < os.path.getsize("model.pt") < 4_020_000
    shutil.copy("model.pt", "copy.pt")
    os.rename("model.pt", "renamed.pt")
    for name in ("copy.pt", "renamed.pt"):
        assert torch.load(name)["weight"].is_cuda
        assert os.stat(name).st_blocks * 512 < 100_000, "holes take no room"
    with open("two.pt", "wb") as file:
        torch.save(model.state_dict(), file)
        torch.save({"step": model.weight[0]}, file)
    with open("two.pt", "rb") as file:
        assert [sorted(torch.load(file)) for _ in range(2)] == [["bias", "weight"], ["step"]]
    content = io.BytesIO()
    torch.save(model.state_dict(), content)
    content.seek(0)
    assert _C.is_fake(torch.load(content)["weight"])

    torch.save({"weight": model.weight, "namespace": argparse.Namespace(x=1)}, "namespace.pt")
    try:
        torch.load("namespace.pt")
    except Exception as error:
        assert "argparse.Namespace is not an allowed global" in str(error)
    else:
        raise AssertionError("weights_only is not respected")
    assert torch.load("namespace.pt", weights_only=False)["namespace"].x == 1
    with torch.serialization.safe_globals([argparse.Namespace]):
        assert type(torch.load("namespace.pt")["weight"]) is nn.Parameter

    parameter = nn.Parameter(torch.empty(3, device="cuda"), requires_grad=False)
    parameter.tag = "tag"
    subclass = torch.empty(3, device="cuda").as_subclass(Sub)
    subclass.note = [1]
    conjugate = torch.empty(2, dtype=torch.complex64, device="cuda").conj()
    buffer = nn.Buffer(torch.empty(2, device="cuda"))
    torch.save([parameter, subclass, conjugate, buffer, model], "several.pt")
    parameter, subclass, conjugate, buffer, loaded = torch.load("several.pt", weights_only=False)
    assert type(parameter) is nn.Parameter and not parameter.requires_grad and parameter.tag == "tag"
    assert type(subclass) is Sub and subclass.note == [1]
    assert conjugate.is_conj()
    assert isinstance(buffer, nn.Buffer)
    assert loaded.weight.requires_grad and _C.is_fake(loaded.weight)
"""


def test_described_tensors_keep_their_properties(command: Command) -> None:
    ended = command(DESCRIBED, "--to-end")
    assert ended.code == 0, ended.err


SAFETENSORS = """
    import os, shutil, torch
    from safetensors import safe_open
    from safetensors.torch import load, load_file, load_model, save, save_file, save_model
    from torchext import _C
    model = torch.nn.Linear(1000, 1000).cuda()
    state = {name: tensor for name, tensor in model.state_dict().items()}
    save_file(state, "model.safetensors", metadata={"format": "pt"})
    assert 4_004_000 < os.path.getsize("model.safetensors") < 4_005_000
    shutil.copy("model.safetensors", "copy.safetensors")
    for device, kind in ((None, "cpu"), ("cpu", "cpu"), ("cuda:0", "cuda"), (0, "cuda")):
        options = {} if device is None else {"device": device}
        loaded = load_file("copy.safetensors", **options)
        assert all(_C.is_fake(tensor) and tensor.device.type == kind for tensor in loaded.values())
        with safe_open("model.safetensors", framework="pt", **options) as file:
            assert file.metadata() == {"format": "pt"}
            assert sorted(file.keys()) == ["bias", "weight"]
            assert file.get_slice("weight").get_shape() == [1000, 1000]
            assert file.get_slice("weight")[:10].shape == (10, 1000)
            assert file.get_tensor("bias").device.type == kind
    content = save(state)
    assert _C.is_fake(load(content)["weight"])
    open("written.safetensors", "wb").write(content)
    assert _C.is_fake(load_file("written.safetensors")["weight"])
    save_model(model, "saved.safetensors")
    load_model(model, "saved.safetensors", device="cuda:0")
    try:
        safe_open("model.safetensors", framework="np")
    except ValueError as error:
        print(error)
    assert load_file("real.safetensors", device="cuda:0")["a"].is_cuda
    with safe_open("real.safetensors", framework="pt", device="cuda:0") as file:
        assert file.get_tensor("a").is_cuda
"""


def test_safetensors_are_read_as_described(command: Command, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_file({"a": torch.ones(3)}, tmp_path / "real.safetensors")
    ended = command(SAFETENSORS, "--to-end", "--keep-files", str(tmp_path / "kept"))
    assert ended.code == 0, ended.err
    assert "was written by a dry run and has no values, which framework='np' requires" in ended.out
    assert not list((tmp_path / "kept").rglob("*.safetensors"))


CHECKPOINTS = """
    import json, os, torch
    from safetensors import safe_open
    from torch import nn
    from torchext import _C
    from torchext.checkpoint import load_checkpoint, save_safetensors
    from torchext.deferred_init import deferred_init, is_deferred
    make = lambda: deferred_init(lambda: nn.Sequential(*[nn.Linear(1000, 1000) for _ in range(3)]))
    model = make()
    save_safetensors(model, "deferred", max_shard_size="5MB", dtype=torch.bfloat16, metadata={"a": "b"})
    assert is_deferred(model[0].weight)
    names = sorted(name for name in os.listdir("deferred") if not name.startswith("."))
    assert names == [*(f"model-0000{i}-of-00002.safetensors" for i in (1, 2)), "model.safetensors.index.json"], names
    assert len(json.load(open("deferred/model.safetensors.index.json"))["weight_map"]) == 6
    try:
        save_safetensors(model, "deferred", max_shard_size="5MB", dtype=torch.bfloat16)
    except FileExistsError:
        print("exists")
    load_checkpoint(make(), "deferred", device="cuda")
    trained = nn.Linear(4, 4, device="cuda")
    trained.register_buffer("steps", torch.tensor([3, 4], device="cuda"))
    save_safetensors(trained, "trained.safetensors", metadata={"a": "b"})
    with safe_open("trained.safetensors", "pt") as file:
        print(file.metadata(), file.get_tensor("steps").tolist(), file.get_tensor("weight").shape)
    loaded = deferred_init(nn.Linear, 4, 4)
    load_checkpoint(loaded, {"weight": trained.weight, "bias": trained.bias}, device="cuda")
    assert _C.is_fake(loaded.weight) and not is_deferred(loaded.weight) and loaded.weight.is_cuda
"""


def test_own_checkpoints_are_described_and_read(command: Command, tmp_path: Path) -> None:
    pytest.importorskip("safetensors.torch")
    pytest.importorskip("huggingface_hub")
    ended = command(CHECKPOINTS, "--to-end")
    assert ended.code == 0, ended.err
    assert "exists\n{'a': 'b'} [3, 4] torch.Size([4, 4])" in ended.out
    assert not (tmp_path / "deferred").exists()


@pytest.mark.ci
def test_reading_a_value_to_write_it_may_be_refused(command: Command) -> None:
    program = "import torch\nopen('loss', 'w').write(str(torch.rand(2, device='cuda').sum().item()))"
    assert command(program, "--values", "raise").code == 1


@pytest.mark.parametrize("can", [True, False])
def test_command_does_not_start_where_files_cannot_be_guarded(
    command: Command, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], can: bool
) -> None:
    monkeypatch.setattr("torchext.commands.dry_run.can_guard", lambda: False)
    if can:
        program = "import torch\nx = torch.ones(2, device='cuda')\nopen('file', 'w').write('x')"
        assert command(program, "--unguarded", "--to-end").code == 0
        assert not Path("file").exists()
    else:
        with pytest.raises(SystemExit, match="2"):
            command("pass")
        assert "this system has no Landlock" in capfd.readouterr().err


@pytest.mark.ci
def test_rejected_writes_name_the_remedy(fresh_command: Command, tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    (tmp_path / "vocabulary").mkdir()
    ended = fresh_command("""
        from tokenizers import models
        type(models.BPE()).save.__wrapped__(models.BPE(), "vocabulary")
    """)
    assert ended.code == 1
    assert "write below `tempfile.gettempdir()`, or give the library a file that Python has opened" in ended.err
    assert not list((tmp_path / "vocabulary").iterdir())


def test_folder_for_files_must_not_exist(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        commands.main(["dry-run", "--keep-files", str(tmp_path), "--", "train.py"])
    assert f"--keep-files: {tmp_path} exists" in capsys.readouterr().err


@pytest.mark.ci
def test_gpus_of_a_program_without_a_launcher(command: Command) -> None:
    program = "import torch; [torch.empty(1 << 20, device=i) for i in range(torch.cuda.device_count())]"
    for options, count in ([], 1), (["--per-node", "3"], 3):
        ended = command(program, "--to-end", "--no-lines", *options)
        assert re.findall(r"^cuda:(\d) ", ended.out, re.MULTILINE) == [str(i) for i in range(count)]


SHOW = f"""
    {USES_GPU}
    import os, sys
    print("started", os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["LOCAL_RANK"], *sys.argv[1:])
"""


@pytest.mark.ci
def test_command_line_of_torchrun_is_understood(command: Command) -> None:
    line = ["torchrun", "--nnodes=2", "--nproc-per-node", "4", "train.py", "--local_rank", "{local_rank}", "--x={rank}"]
    ended = command(SHOW, "--to-end", "--no-lines", "--rank", "0,5-6", arguments=line)
    assert ended.code == 0, ended.err
    assert re.findall(r"started (.*)", ended.out) == [
        "0 8 0 --local_rank 0 --x=0",
        "5 8 1 --local_rank 1 --x=5",
        "6 8 2 --local_rank 2 --x=6",
    ]


def test_options_of_a_launcher_that_do_not_exist_are_refused(command: Command) -> None:
    with pytest.raises(SystemExit, match="2"):
        command(SHOW, arguments=["torchrun", "--processes", "4", "train.py"])


@pytest.mark.ci
def test_stages_are_the_ranks_that_exchange_messages(command: Command) -> None:
    program = """
        import os, torch, torch.distributed as dist
        dist.init_process_group("nccl")
        rank = dist.get_rank()
        x = torch.ones(4, device="cuda")
        if rank < 4:
            dist.send(x, rank + 2)
        else:
            dist.recv(x, rank - 2)
        dist.all_reduce(x)
    """
    ended = command(program, "--to-end", "--no-lines", "--world-size", "6", "--rank", "stages")
    assert ended.code == 0, ended.err
    assert re.findall(r"^rank (\d) of 6: fits", ended.out, re.MULTILINE) == ["0", "2", "4"]


@pytest.mark.parametrize(
    ("reports", "code"),
    [
        ([{"completed": 2}, {"completed": 3}], 0),
        ([{"completed": 2}, {"completed": 1}], 4),
        ([{"completed": 1}, {"completed": 2, "out_of_memory": "x"}], 3),
        ([{"completed": 2, "out_of_memory": "x"}, {"program_exit_code": 7}], 1),
        ([{"completed": 2, "out_of_memory": "x"}, {"program_exit_code": 512}], 1),
        ([{"program_exit_code": 7}, {"error": "x"}], 1),
        ([{"completed": 2}, {"completed": 2, "devices": []}], 3),
        ([{"completed": 2}, {"completed": 2, "devices": [{"device": "cpu"}]}], 3),
        ([{"completed": 1, "devices": []}], 4),
    ],
)
def test_exit_code_is_that_of_the_worst_rank(reports: list[dict[str, Any]], code: int) -> None:
    gpu = {"devices": [{"device": "cuda:0"}]}
    assert exit_code_of([RankReport(i, **gpu | report) for i, report in enumerate(reports)]) == code


def test_program_without_a_gpu_does_not_fit_on_it(command: Command) -> None:
    ended = command("import torch\nx = torch.ones(2)", "--to-end")
    assert ended.code == 3
    assert "rank 0 of 1: uses no GPU, 0 steps to its end" in ended.out
    assert "The program has allocated no memory on a GPU, so it is unknown whether it fits on one." in ended.out


@pytest.mark.ci
def test_program_that_handles_everything_is_ended(command: Command) -> None:
    body = TRAIN[TRAIN.index("        loss = model") :].replace("        ", "            ")
    program = (
        TRAIN[: TRAIN.index("    for step")]
        + f"    while True:\n        try:\n{body}        except:\n            pass\n"
    )
    ended = command(program, "--no-lines")
    assert ended.code == 0, ended.err
    assert "rank 0 of 1: fits, 2 of 2 steps" in ended.out


@pytest.mark.ci
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: str(number.name))
def test_signals_leave_no_files_and_no_processes(tmp_path: Path, number: signal.Signals) -> None:
    script, temporary = tmp_path / "train.py", tmp_path / "temporary"
    temporary.mkdir()
    script.write_text("""
import os, subprocess, time
children = [subprocess.Popen(["sleep", "600"]) for _ in range(2)]
open("written", "w").close()
open("/dev/stderr", "w").write(f"{os.getpid()} {children[0].pid} {children[1].pid} started\\n")
time.sleep(600)
""")
    command = subprocess.Popen(
        [sys.executable, "-m", "torchext", "dry-run", "--", str(script)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(temporary)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        # Shells start background programs with SIGINT ignored, which is inherited.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert command.stderr is not None
    words: list[str] = []
    while words[-1:] != ["started"]:
        line = command.stderr.readline()
        assert line, "the program has not started"
        words = line.split()
    command.send_signal(number)
    command.communicate(timeout=60)
    assert command.returncode == (143 if number == signal.SIGTERM else 130)
    assert not list(temporary.iterdir())
    assert not (tmp_path / "written").exists()
    assert not [process for process in words[:-1] if Path("/proc", process, "exe").exists()]


@pytest.mark.ci
def test_interrupt_reports_the_ranks_that_are_finished(tmp_path: Path) -> None:
    script, target = tmp_path / "train.py", tmp_path / "report.json"
    script.write_text(f"""
{USES_GPU}
import os, time
if os.environ["RANK"] == "1":
    open("/dev/stderr", "w").write("started\\n")
    time.sleep(600)
""")
    options = ["--world-size", "2", "--rank", "all", "--to-end", "--no-flops", "--json", str(target)]
    command = subprocess.Popen(
        [sys.executable, "-m", "torchext", "dry-run", *options, "--", str(script)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert command.stderr is not None
    while "started" not in (line := command.stderr.readline()):
        assert line, "rank 1 has not started"
    command.send_signal(signal.SIGINT)
    out, err = command.communicate(timeout=60)
    assert command.returncode == 130
    assert "rank 0 of 2: fits, 0 steps to its end" in out
    assert "interrupted; finished ranks: 0\n" in err
    found = json.loads(target.read_text())
    assert (found["interrupted"], [rank["rank"] for rank in found["ranks"]]) == (True, [0])


def test_c_library_that_reads_a_fake_ends_the_process_with_a_reason(command: Command) -> None:
    ended = command(
        """
        import ctypes, torch
        ctypes.memmove(ctypes.create_string_buffer(4), torch.ones(1, device="cuda").data_ptr(), 4)
        """
    )
    assert ended.code == 1
    assert "The address of a fake tensor has no memory" in ended.err


def test_scalars_on_the_gpu_become_elements_of_tensors(command: Command) -> None:
    ended = command(
        """
        import torch
        loss, correct = torch.randn(4, device="cuda").mean(), torch.randint(9, (4,), device="cuda").sum()
        made = [torch.tensor([loss, correct]), torch.as_tensor([loss, 1.0], device="cuda"), loss.new_tensor([loss])]
        print([(tuple(x.shape), str(x.device)) for x in made + [torch.ones(2).new_tensor([[loss, loss]])]])
        """,
        "--no-flops",
    )
    assert "[((2,), 'cpu'), ((2,), 'cuda:0'), ((1,), 'cuda:0'), ((1, 2), 'cpu')]" in ended.out


@pytest.mark.ci
def test_model_of_a_folder_without_weights_is_made_of_its_configuration(command: Command) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    program = """
        import torch
        from transformers import AutoModelForCausalLM, LlamaConfig
        sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
        LlamaConfig(**sizes, num_key_value_heads=4, vocab_size=100).save_pretrained("folder")
        model = AutoModelForCausalLM.from_pretrained("folder", dtype=torch.bfloat16).cuda()
        print("MADE", sum(p.numel() for p in model.parameters()), {p.dtype for p in model.parameters()})
        LlamaConfig(**sizes, vocab_size=50).save_pretrained("folder/with/another")
        open("folder/with/weights.bin", "w").close()
        model = AutoModelForCausalLM.from_pretrained("folder/with", subfolder="another", variant="fp16")
        print("FROM SUBFOLDER", model.config.vocab_size)
        open("folder/another.bin", "w").close()
        AutoModelForCausalLM.from_pretrained("folder")
    """
    ended = command(program, "--to-end")
    assert "MADE 95040 {torch.bfloat16}\n" in ended.out
    assert "FROM SUBFOLDER 50\n" in ended.out
    assert "folder has no weights: the model was made from its configuration (" in ended.out
    assert ended.code == 1, "weights that it does not find are missed"
    assert "OSError: Error no file named model.safetensors" in ended.err
