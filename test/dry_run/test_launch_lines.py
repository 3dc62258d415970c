"""Command lines of launchers: the program that they start, how often, and with which variables."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from torchext.dry_run.ranks.launch_lines import Launch, launcher_of, read_launch, without_python

# These do what accelerate 1.15 and DeepSpeed 0.19 do before they start processes.
ACCELERATE = """
    import argparse, os, subprocess, sys, torch

    def main():
        parser = argparse.ArgumentParser()
        parser.add_argument("--num_processes", type=int, default=torch.cuda.device_count())
        parser.add_argument("--mpirun", action="store_true")
        parser.add_argument("script")
        parser.add_argument("arguments", nargs=argparse.REMAINDER)
        options = parser.parse_args()
        env = {**os.environ, "ACCELERATE_MIXED_PRECISION": "bf16", "CUDA_VISIBLE_DEVICES": "0"}
        if options.num_processes == 1:
            start = ["mpirun", "-n", "1"] if options.mpirun else [sys.executable]
            subprocess.Popen([*start, options.script, *options.arguments], env=env).wait()
            return
        import torch.distributed.run as torchrun
        before = dict(os.environ)
        os.environ.update(env)
        try:
            line = [f"--nproc_per_node={options.num_processes}", "--nnodes=2", options.script, *options.arguments]
            torchrun.run(torchrun.parse_args(line))
        finally:
            os.environ.clear()
            os.environ.update(before)
"""
DEEPSPEED = """
    import argparse, os

    def parse_args(args=None):
        parser = argparse.ArgumentParser()
        parser.add_argument("--hostfile", default="")
        for name in ("include", "exclude"):
            parser.add_argument("--" + name, default="")
        for name in ("num_nodes", "num_gpus"):
            parser.add_argument("--" + name, type=int, default=-1)
        for name in ("module", "no_python", "no_local_rank"):
            parser.add_argument("--" + name, action="store_true")
        parser.add_argument("user_script")
        parser.add_argument("user_args", nargs=argparse.REMAINDER)
        return parser.parse_args(args)

    def fetch_hostfile(path):
        return {"w0": 8, "w1": 8, "w2": 8} if path == "hosts" else {"w0": 8, "w1": 4} if path == "mixed" else None

    def parse_inclusion_exclusion(pool, include, exclude):
        return {host: list(range(slots)) for host, slots in pool.items()}
"""


@pytest.fixture
def launchers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Return packages that replace accelerate and DeepSpeed."""
    for name, source in ("accelerate/commands/launch", ACCELERATE), ("deepspeed/launcher/runner", DEEPSPEED):
        path = tmp_path / f"{name}.py"
        path.parent.mkdir(parents=True)
        path.write_text(dedent(source))
    monkeypatch.syspath_prepend(tmp_path)
    hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name.startswith(PACKAGES)}
    yield
    for name in [name for name in sys.modules if name.startswith(PACKAGES)]:
        del sys.modules[name]
    sys.modules.update(hidden)


PACKAGES = ("accelerate", "deepspeed")
BF16 = {"ACCELERATE_MIXED_PRECISION": "bf16"}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("torchrun train.py --x 1", Launch(["train.py", "--x", "1"], 1, 1)),
        ("torchrun --standalone --nproc_per_node=gpu train.py", Launch(["train.py"], 4, 4)),
        ("torchrun --nnodes 1:3 --nproc-per-node 2 -m go --x", Launch(["-m", "go", "--x"], 6, 2)),
        (
            "python3 -u -m torch.distributed.run --nproc_per_node 2 --rdzv_backend c10d train.py",
            Launch(["train.py"], 2, 2),
        ),
        (
            "python -m torch.distributed.launch --nproc_per_node 2 train.py --x",
            Launch(["train.py", "--local-rank={local_rank}", "--x"], 2, 2),
        ),
        ("python -m torch.distributed.launch --use_env --nproc_per_node 2 train.py", Launch(["train.py"], 2, 2)),
        ("accelerate launch train.py --x", Launch(["train.py", "--x"], 8, 4, BF16)),
        ("accelerate-launch --num_processes 1 train.py --x", Launch(["train.py", "--x"], None, None, BF16)),
        ("deepspeed train.py --x", Launch(["train.py", "--local_rank={local_rank}", "--x"], 4, 4)),
        ("deepspeed --hostfile hosts --no_local_rank train.py", Launch(["train.py"], 24, 8)),
        (
            "/usr/bin/deepspeed --hostfile hosts --num_nodes 2 --num_gpus 2 --module go",
            Launch(["-m", "go", "--local_rank={local_rank}"], 4, 2),
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:The module torch.distributed.launch is deprecated")
@pytest.mark.usefixtures("launchers")
def test_launchers_are_understood(line: str, expected: Launch) -> None:
    before = dict(os.environ), list(sys.argv), subprocess.Popen
    called = launcher_of(without_python(line.split()))
    assert called is not None
    assert read_launch(called[0], called[1:], gpus=4) == expected
    assert (dict(os.environ), list(sys.argv), subprocess.Popen) == before


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("torchrun --no-python train.sh", "--no-python: a dry run runs Python programs only"),
        ("deepspeed --hostfile mixed train.py", r"the same number of GPUs, got \[8, 4\]"),
        (
            "accelerate launch --num_processes 1 --mpirun train.py",
            "it would start mpirun, whose arguments a dry run cannot read",
        ),
    ],
)
@pytest.mark.usefixtures("launchers")
def test_unknown_launcher_options_are_errors(line: str, message: str) -> None:
    called = launcher_of(line.split())
    assert called is not None
    with pytest.raises(ValueError, match=message):
        read_launch(called[0], called[1:], gpus=4)


def test_launcher_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(ValueError, match=r"accelerate.commands.launch cannot be imported"):
        read_launch("accelerate.commands.launch", ["train.py"], gpus=4)


@pytest.mark.parametrize(
    ("line", "program"),
    [
        ("train.py -u --x", "train.py -u --x"),
        ("-m go --x", "-m go --x"),
        ("python train.py", "train.py"),
        (f"{sys.executable} -uB -X dev -Wignore train.py -c", "train.py -c"),
        ("/usr/bin/python3.12 -W ignore -m go", "-m go"),
        ("accelerate config", "accelerate config"),
    ],
)
def test_programs_without_a_launcher(line: str, program: str) -> None:
    found = without_python(line.split())
    assert found == program.split()
    assert launcher_of(found) is None


def test_script_may_have_the_name_of_a_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torchrun").touch()
    monkeypatch.chdir(tmp_path)
    assert launcher_of(["torchrun", "x"]) is None
    assert launcher_of(["/usr/bin/torchrun", "x"]) is not None
