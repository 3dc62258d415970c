"""The kinds of `freeze.py` about the Python packages: help texts, imports, patches and reports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

from torchext import amp, inference, inspect
from torchext.deferred_init import deferred_init
from torchext.dry_run import world
from torchext.fake import fake_mode
from torchext.memory import track_memory

COMMANDS = ("dry-run", "report", "checkpoint", "check-init", "env", "route", "completion")
STATES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "nothing is open": nullcontext,
    "fake_mode": fake_mode,
    "fake_mode with a GPU": lambda: fake_mode(gpu="H100"),
    "deferred_init": deferred_init,
    "inference_mode": lambda: inference.inference_mode(trace=True),
    "autocast": lambda: amp.autocast("cpu", self_cleaning=True),
    "track_memory": track_memory,
    "world": lambda: world(4, rank=1, gpu="H100"),
    "everything is closed": nullcontext,
}


def help_texts() -> Iterator[str]:
    """Run each command with `--help`, in a terminal of 80 columns."""
    for command in ((), *((name,) for name in COMMANDS)):
        done = subprocess.run(
            [sys.executable, "-m", "torchext", *command, "--help"],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "COLUMNS": "80"},
        )
        yield from (f"{' '.join(command)}: {line}" for line in done.stdout.splitlines())


def imports() -> Iterator[str]:
    """List the modules of torchext that each command and each package imports, and which large packages they need."""
    packages = sorted(path.parent.name for path in Path(__file__).parents[1].glob("torchext/*/__init__.py"))
    entries = {
        "torchext": "import torchext",
        **{f"torchext.{name}": f"import torchext.{name}" for name in packages},
        **{f"{name} --help": f"from torchext.__main__ import main; main(['{name}', '--help'])" for name in COMMANDS},
    }
    code = """
import json, sys, contextlib, io
with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    exec(sys.argv[1])
print(json.dumps(sorted(sys.modules)))
"""
    for name, statement in entries.items():
        done = subprocess.run([sys.executable, "-c", code, statement], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            yield f"{name}: {done.stderr.splitlines()[-1]}"
            continue
        modules = json.loads(done.stdout)
        others = {module.partition(".")[0] for module in modules} & {"torch", "numpy", "rich", "tqdm", "safetensors"}
        yield f"{name}: needs {sorted(others)}"
        yield from (f"{name}: {module}" for module in modules if module.startswith("torchext"))


def patches() -> Iterator[str]:
    """List the patches that are installed in each state."""
    for state, enter in STATES.items():
        with enter():
            torch.ones(2)
            for patch in inspect.patches():
                if patch.is_installed:
                    yield f"{state}: {patch.target}: {patch.reason}; while {patch.needed_while}; {patch.releases}"


def reports() -> Iterator[str]:
    """Run the tests of dry runs, and list the reports that they make."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["pytest", "-q", "-n", "2", "--tier", "all", "-p", "frozen_reports", "--frozen-reports", folder]
        subprocess.run([sys.executable, "-m", *command, "dry_run", "memory"], check=False, stdout=sys.stderr)
        for path in sorted(Path(folder).iterdir()):
            yield from (f"{path.stem}: {line}" for line in path.read_text().splitlines())
