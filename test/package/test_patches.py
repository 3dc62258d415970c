"""Patched PyTorch functions behave like the originals when they are called, pickled or inspected."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from torchext import _C
from torchext.errors import PatchError
from torchext.internals import patching

PROGRAM = Path(__file__).parents[1] / "patched_callables.py"

# Functions that can be replaced only by another object.
OTHER_OBJECTS = {
    "torch.storage.UntypedStorage.__setitem__": "the slot wrapper of a type, which is inherited",
}


@functools.cache
def run(*args: str) -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-W", "ignore", PROGRAM, *args], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@functools.cache
def patched() -> tuple[str, ...]:
    """Return the names of all patches, by comparing PyTorch before and after using every feature."""
    return tuple(dict.fromkeys(run("--warm")["patched"]))


@functools.cache
def compared(*options: str) -> dict[str, Any]:
    return run(*options, *patched())


def differences(before: Any, after: Any, where: str = "") -> list[str]:
    if isinstance(before, dict) and isinstance(after, dict):
        keys = dict.fromkeys([*before, *after])
        return [line for key in keys for line in differences(before.get(key), after.get(key), f"{where} | {key}")]
    return [] if before == after else [f"{where}: {before!r} became {after!r}"]


@pytest.mark.ci
def test_objects_are_kept_where_possible() -> None:
    assert set(run("--warm")["exchanged names"]) == set(OTHER_OBJECTS)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(["--warm"], id="dynamo"),
        pytest.param(["--without-dynamo"], id="without-dynamo", marks=pytest.mark.ci),
    ],
)
def test_pytorch_is_unchanged_when_no_tensor_of_ours_is_alive(options: list[str]) -> None:
    found = run(*options)
    assert found["left behind"] == []
    assert found["still listed"] == []


@pytest.mark.ci
def test_all_patches_are_in_one_list() -> None:
    found = run("--warm")
    assert found["unlisted"] == []
    assert len(set(found["patched"])) > 50


@pytest.mark.ci
@pytest.mark.parametrize("what", ["properties", "calls", "wrong calls", "scripted", "traced"])
@pytest.mark.parametrize("tables", ["made-before", "made-after"])
def test_patched_callables_are_as_they_were(what: str, tables: str) -> None:
    found = compared(*(["--warm"] if tables == "made-before" else []))
    assert differences(found["before"][what], found["after"][what]) == []


@pytest.mark.ci
def test_overridable_functions_are_the_same_objects() -> None:
    assert compared("--warm")["overridable"]


@pytest.mark.ci
def test_dynamo_compiles_the_same_functions_after_graph_breaks() -> None:
    """Dynamo does not compile functions of torchext that are called there."""
    assert run("--compiled", "--used") == run("--compiled")


def test_interpreter_that_calls_past_a_replacement_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    patching._check_interpreter.__wrapped__()
    monkeypatch.setattr(patching, "_C", SimpleNamespace(exchange=lambda _steps: None, identity=_C.identity))
    with pytest.raises(PatchError, match=r"cannot replace C functions in Python 3\.\d+"):
        patching._check_interpreter.__wrapped__()
