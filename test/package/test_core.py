"""The core of the C++ library builds and works without extensions: `make core`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cpp_library import ROOT, compile_program

# The programs, and the number of tests in each.
PROGRAMS = {"core/fakes": 9, "core/recordings": 7, "guards": 5, "inference_mode": 7, "operator_table": 5}

# Calls the tests of a program, and prints their messages. torchext is not imported: it would load the whole library.
RUN = """
import ctypes, itertools, json, sys
import torch
program = ctypes.CDLL(sys.argv[1])
for function in (program.test_name, program.run_test):
    function.restype, function.argtypes = ctypes.c_char_p, [ctypes.c_size_t]
names = itertools.takewhile(bool, map(program.test_name, itertools.count()))
print(json.dumps({name.decode(): program.run_test(index).decode() for index, name in enumerate(names)}))
"""


def build_core(folder: Path) -> Path:
    """Link the core alone, whose objects `make build` has compiled, and return its folder."""
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--build-lib", str(folder)]
    environment = {**os.environ, "TORCHEXT_CORE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "torchext" / "lib"


def run_tests(name: str, library: Path, folder: Path) -> dict[str, str]:
    """Compile a program against the core, and return the messages of its tests."""
    program = compile_program(name, folder, library)
    command = [sys.executable, "-c", RUN, str(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(json.loads(done.stdout))


@pytest.mark.ci  # compiles
def test_programs_pass_their_tests_with_the_core_alone(tmp_path: Path) -> None:
    library = build_core(tmp_path / "core")
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        results = dict(
            zip(PROGRAMS, threads.map(lambda name: run_tests(name, library, tmp_path), PROGRAMS), strict=True)
        )
    assert {name: len(messages) for name, messages in results.items()} == PROGRAMS
    failed = [f"{name}, {test}: {text}" for name, one in results.items() for test, text in one.items() if text]
    assert not failed, "\n\n".join(failed)
