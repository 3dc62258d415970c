"""The types of the public API: `typed_programs.py` uses all of it, and its programs run."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import typed_programs

import torchext
from torchext.internals.document import Document


def test_programs_use_each_public_name() -> None:
    used = {
        f"{node.value.id}.{node.attr}"
        for node in ast.walk(ast.parse(Path(typed_programs.__file__).read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }
    rooms = {name: getattr(torchext, name) for name in torchext.__all__}
    names = [f"torchext.{name}" for name in rooms if name not in {*torchext.errors.__all__, *_modules(rooms)}]
    names += [f"{room}.{name}" for room, module in _modules(rooms).items() for name in module.__all__]
    assert [name for name in names if name not in used] == []


def _modules(members: dict[str, object]) -> dict[str, ModuleType]:
    return {name: member for name, member in members.items() if isinstance(member, ModuleType)}


def test_results_are_frozen_dataclasses_that_print() -> None:
    modules = _modules({name: getattr(torchext, name) for name in torchext.__all__}).values()
    classes = {name: getattr(module, name) for module in modules for name in module.__all__}
    returned = {
        name
        for function in filter(inspect.isfunction, classes.values())
        for name in re.findall(r"\w+", str(inspect.signature(function).return_annotation))
        if isinstance(classes.get(name), type)
    }
    # Contexts, whose records grow, and rows in a tuple.
    results = returned - {"Block", "PatchState", "TrackedMemory", "World"}
    assert {"Explanation", "LoadedKeys", "MaxBatch", "Report", "Summary"} < results
    for result in (classes[name] for name in results):
        assert issubclass(result, Document)
        assert dataclasses.is_dataclass(result)
        assert all(callable(getattr(result, name)) for name in ("to_dict", "_repr_html_", "__str__"))


@pytest.mark.parametrize("program", typed_programs.PROGRAMS, ids=lambda program: program.__name__)
def test_program_runs(program: Callable[[Path], None], tmp_path: Path) -> None:
    program(tmp_path)
