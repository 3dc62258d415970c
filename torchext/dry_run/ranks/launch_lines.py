"""Read command lines of torchrun, accelerate, deepspeed and Python, which start the processes of a job.

`commands/dry_run.py` runs `python -m torchext.dry_run.ranks.launch_lines ARGUMENTS ANSWER`. In that process the
launcher reads its own arguments and files, and is stopped where it would start the processes of the job.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

__all__ = ["Launch", "launcher_of", "read_launch", "without_python"]

# The modules that `python -m` runs, by the commands of the launchers.
MODULES = {
    "torchrun": "torch.distributed.run",
    "accelerate launch": "accelerate.commands.launch",
    "accelerate-launch": "accelerate.commands.launch",
    "deepspeed": "deepspeed.launcher.runner",
    "ds": "deepspeed.launcher.runner",
}
LAUNCHERS = {*MODULES.values(), "torch.distributed.launch"}

# Options of Python before the script: flags, and options with a value.
FLAGS_OF_PYTHON = frozenset("bBdEiIOPqsSuvx")
VALUES_OF_PYTHON = ("-W", "-X")

# Variables of launchers that a dry run sets itself.
OWN_VARIABLES = {"CUDA_VISIBLE_DEVICES", "MASTER_ADDR", "MASTER_PORT"}


@dataclass
class Launch:
    """The processes that a launcher would start.

    Attributes:
        program: A script, or `-m` and a module, and its arguments.
        size: The number of ranks; None for a program that runs alone, without variables of a launcher.
        per_node: The number of ranks on a machine; None without a launcher.
        environment: The variables that the launcher sets for all ranks.
    """

    program: list[str]
    size: int | None = None
    per_node: int | None = None
    environment: dict[str, str] = field(default_factory=dict)


def without_python(line: Sequence[str]) -> list[str]:
    """Remove Python, with its own options, from the front of a command line.

    Raises:
        ValueError: Python would run neither a script nor a module.
    """
    rest = list(line)
    if not rest or not _is_python(rest[0]):
        return rest
    del rest[0]
    while rest and rest[0].startswith("-") and rest[0] != "-m":
        option = rest.pop(0)
        if option in VALUES_OF_PYTHON and rest:
            del rest[0]
        elif not option.startswith(VALUES_OF_PYTHON) and not set(option[1:]) <= FLAGS_OF_PYTHON:
            raise ValueError(f"{option}: expected a script, or -m and a module, after {line[0]}")
    return rest


def _is_python(command: str) -> bool:
    name = Path(command).name
    return command == sys.executable or name.rstrip("0123456789.") in ("python", "pypy")


def launcher_of(line: Sequence[str]) -> list[str] | None:
    """Return the module of the launcher that `line` calls, and its arguments; None if `line` calls no launcher."""
    if line[:1] == ["-m"] and line[1:2] and line[1] in LAUNCHERS:
        return list(line[1:])
    if not line or (Path(line[0]).is_file() and os.sep not in line[0]):  # a script of that name
        return None
    for length in (1, 2):
        module = MODULES.get(" ".join([Path(line[0]).name, *line[1:length]]))
        if module is not None:
            return [module, *line[length:]]
    return None


class _Started(BaseException):
    """Raised to stop the launcher where it would start processes."""

    def __init__(self, launch: Launch) -> None:
        super().__init__()
        self.launch = launch


def read_launch(module: str, arguments: Sequence[str], gpus: int) -> Launch:
    """Return the processes that a launcher would start on machines with `gpus` GPUs.

    Raises:
        ValueError: The launcher fails, or starts processes in a way that is not supported.
    """
    from ...descriptions import FakeGPU
    from ...fake import fake_mode

    try:
        with fake_mode(gpu=FakeGPU("H100-80GB", count=gpus)), _stopping_before_processes():
            sys.argv = [module, *arguments]
            if module.startswith("deepspeed."):
                return _by_deepspeed(arguments)
            import_module(module).main()
    except _Started as started:
        return started.launch
    except ImportError as error:
        raise ValueError(f"{module} cannot be imported: {error}") from error
    raise ValueError("it ended without starting processes")


@contextmanager
def _stopping_before_processes() -> Iterator[None]:
    before = dict(os.environ)

    def run(options: Any) -> None:
        raise _Started(_by_torchrun(options, before))

    def popen(command: Any, *args: Any, env: Mapping[str, str] | None = None, **kwargs: Any) -> None:
        line = [command] if isinstance(command, str) else list(command)
        if not _is_python(line[0]):
            raise ValueError(f"it would start {line[0]}, whose arguments a dry run cannot read")
        raise _Started(Launch(without_python(line), environment=_added(env or os.environ, before)))

    starting = [import_module(f"torch.distributed.{name}") for name in ("run", "launch")]
    replaced = [*((module, "run", run) for module in starting), (subprocess, "Popen", popen), (sys, "argv", sys.argv)]
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in replaced]
    for owner, name, value in replaced:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in originals:
            setattr(owner, name, value)


def _by_torchrun(options: Any, before: Mapping[str, str]) -> Launch:
    import torch
    from torch.distributed.run import parse_min_max_nnodes

    per_node = str(options.nproc_per_node)
    count = int(per_node) if per_node.isdigit() else torch.cuda.device_count()
    nodes = parse_min_max_nnodes(str(options.nnodes))[1]
    if getattr(options, "no_python", False):
        raise ValueError("--no-python: a dry run runs Python programs only")
    rank = [] if getattr(options, "use_env", True) else ["--local-rank={local_rank}"]
    start = ["-m"] if options.module else []
    program = [*start, options.training_script, *rank, *options.training_script_args]
    return Launch(program, nodes * count, count, _added(os.environ, before))


def _by_deepspeed(arguments: Sequence[str]) -> Launch:
    """Do what `main()` of its runner does, without the calls of ssh."""
    import torch

    runner: Any = import_module("deepspeed.launcher.runner")
    options = runner.parse_args(list(arguments))
    pool = runner.fetch_hostfile(options.hostfile) or {"localhost": torch.cuda.device_count()}
    hosts = runner.parse_inclusion_exclusion(pool, options.include, options.exclude)
    slots = [len(ids) for ids in hosts.values()]
    if options.num_nodes > 0:
        slots = slots[: options.num_nodes]
    if options.num_gpus > 0:
        slots = [options.num_gpus] * len(slots)
    if not slots or len(set(slots)) > 1:
        raise ValueError(f"expected machines with the same number of GPUs, got {slots}")
    if options.no_python:
        raise ValueError("--no_python: a dry run runs Python programs only")
    start = ["-m"] if options.module else []
    rank = [] if options.no_local_rank else ["--local_rank={local_rank}"]
    return Launch([*start, options.user_script, *rank, *options.user_args], sum(slots), slots[0])


def _added(environment: Mapping[str, str], before: Mapping[str, str]) -> dict[str, str]:
    return {k: v for k, v in environment.items() if before.get(k) != v and k not in OWN_VARIABLES}


def _main(arguments: str, answer: str) -> None:
    given = json.loads(Path(arguments).read_text())
    try:
        launch = asdict(read_launch(given["module"], given["arguments"], given["gpus"]))
        Path(answer).write_text(json.dumps(launch))
    except ValueError as error:
        Path(answer).write_text(json.dumps({"error": str(error)}))


if __name__ == "__main__":
    _main(*sys.argv[1:])
