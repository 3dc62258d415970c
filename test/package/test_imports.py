"""Actions on imports."""

from __future__ import annotations

import importlib.util
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import forked
import pytest
from paused_imports import paused_import

from torchext.internals import imports
from torchext.internals.imports import is_imported, when_imported

NAME = "torchext_module_that_is_imported"


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Create a file that can be imported as NAME, while no other module has actions."""
    path = tmp_path / f"{NAME}.py"
    path.write_text("loader = __loader__\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(imports, "_actions", {})
    monkeypatch.setattr(sys, "meta_path", [finder for finder in sys.meta_path if finder is not imports._finder])
    yield path
    sys.modules.pop(NAME, None)


def test_actions_run_once_in_order_after_the_code_of_the_module(module: Path) -> None:
    seen: list[object] = []
    finders = list(sys.meta_path)
    when_imported(NAME, lambda: seen.append(hasattr(sys.modules[NAME], "loader")))
    when_imported(NAME, lambda: seen.append("second"))
    assert seen == []
    found = importlib.import_module(NAME)
    assert seen == [True, "second"]
    assert [finder for finder in sys.meta_path if finder is not imports._finder] == finders
    assert "torchext" not in type(found.loader).__module__
    assert found.__spec__ is not None
    assert found.__spec__.loader is found.loader
    importlib.reload(found)
    assert seen == [True, "second"]


def test_action_runs_immediately_if_the_module_has_been_imported(module: Path) -> None:
    importlib.import_module(NAME)
    seen: list[int] = []
    finders = list(sys.meta_path)
    when_imported(NAME, lambda: seen.append(1))
    assert seen == [1]
    assert [finder for finder in sys.meta_path if finder is not imports._finder] == finders


def test_actions_wait_for_an_import_that_succeeds(module: Path) -> None:
    module.write_text("raise KeyError('of the module')\n")
    seen: list[int] = []
    when_imported(NAME, lambda: seen.append(1))
    with pytest.raises(KeyError, match="of the module"):
        importlib.import_module(NAME)
    with pytest.raises(ModuleNotFoundError, match="not_there"):
        importlib.import_module("torchext_not_there")
    assert seen == []
    module.write_text("")
    importlib.import_module(NAME)
    assert seen == [1]


def test_actions_wait_for_an_import_on_another_thread(module: Path) -> None:
    assert not is_imported(NAME)
    with paused_import(module) as running:
        assert not is_imported(NAME)
        seen: list[bool] = []
        when_imported(NAME, lambda: seen.append(hasattr(sys.modules[NAME], "loader")))
        assert seen == []
        running.finish()
        assert seen == [True]
    assert is_imported(NAME)
    assert is_imported("__main__")  # may have no spec


def test_actions_wait_for_the_next_import_if_one_on_another_thread_fails(module: Path) -> None:
    module.write_text("raise ImportError('the first time')\n")
    seen: list[int] = []
    with paused_import(module) as running:
        when_imported(NAME, lambda: seen.append(1))
        running.finish()
        assert (running.runs, seen) == (1, [])
    module.write_text("")
    importlib.import_module(NAME)
    assert seen == [1]


def test_modules_with_actions_can_be_run_and_inspected_before_their_import(module: Path) -> None:
    seen: list[int] = []
    when_imported(NAME, lambda: seen.append(1))
    spec = importlib.util.find_spec(NAME)
    assert spec is not None
    assert spec.loader is not None
    assert not spec.loader.is_package(NAME)  # type: ignore[attr-defined]
    assert "loader" in runpy.run_module(NAME)
    assert seen == []
    importlib.import_module(NAME)
    assert seen == [1]


@pytest.mark.ci
def test_modules_of_pytorch_that_patches_wait_for_exist() -> None:
    """A release that renames a module must not leave its patches waiting."""
    program = """
import importlib
from torchext import amp
from torchext.deferred_init import deferred_init
from torchext.dry_run import world
from torchext.fake import fake_mode
from torchext.internals.imports import _actions
with world(4), amp.autocast("cuda", self_cleaning=True), deferred_init():
    names = [name for name in _actions if name.startswith("torch.")]
    for name in names:
        importlib.import_module(name)
print(len(names), [name for name in names if _actions[name]])
"""
    done = forked.run([sys.executable, "-c", program])
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    count, left = done.stdout.split(" ", 1)
    assert int(count) > 10
    assert left == "[]\n"


@pytest.mark.ci
@pytest.mark.parametrize("when", ["before", "inside"])
def test_transformers_may_be_imported_in_a_block(when: str) -> None:
    pytest.importorskip("transformers", reason="is about it")
    program = f"""
import torch
from torchext.fake import fake_mode
if {when!r} == "before":
    import transformers
with fake_mode(gpu=True):
    from transformers import BertConfig, BertModel
    model = BertModel(BertConfig(num_hidden_layers=1, hidden_size=64, num_attention_heads=2, vocab_size=100)).cuda()
    ids = torch.zeros(2, 16, dtype=torch.int64, device="cuda")
    model(ids, attention_mask=torch.ones_like(ids)).last_hidden_state.sum().backward()
    print(torch.cuda.max_memory_allocated())
"""
    done = forked.run([sys.executable, "-c", program])
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 2**20
