"""The core and the libraries of the C++ code build and work without extensions: `make core`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cpp_library import ROOT, compile_program

# For folders of csrc that are built alone: the programs, and the number of tests in each.
PROGRAMS = {
    "core libraries/support": {
        "core/fakes": 9,
        "core/recordings": 7,
        "guards": 5,
        "inference_mode": 7,
        "operator_table": 5,
    },
    "libraries": {"core/libraries": 5},
}


def build_alone(folders: str, output: Path) -> Path:
    """Link the objects of some folders alone, which `make build` has compiled, and return the folder of the library."""
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--build-lib", str(output)]
    environment = {**os.environ, "TORCHEXT_ONLY": folders}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return output / "torchext" / "lib"


def results_of(name: str, library: Path, folder: Path) -> dict[str, str]:
    """Compile a program against the library in a folder, and return the messages of its tests."""
    program = compile_program(name, folder, library)
    command = [sys.executable, ROOT / "test" / "cpp_tests.py", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(json.loads(done.stdout))


@pytest.mark.ci  # compiles
def test_programs_pass_their_tests_without_extensions(tmp_path: Path) -> None:
    """One test, because builds of one folder must not run at the same time."""
    libraries = {folders: build_alone(folders, tmp_path / folders.partition(" ")[0]) for folders in PROGRAMS}
    programs = {name: folders for folders, names in PROGRAMS.items() for name in names}
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        runs = threads.map(lambda name: results_of(name, libraries[programs[name]], tmp_path), programs)
        results = dict(zip(programs, runs, strict=True))
    expected = {name: count for names in PROGRAMS.values() for name, count in names.items()}
    assert {name: len(messages) for name, messages in results.items()} == expected
    failed = [f"{name}, {test}: {text}" for name, one in results.items() for test, text in one.items() if text]
    assert not failed, "\n\n".join(failed)
