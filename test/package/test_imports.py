"""Actions on imports."""

from __future__ import annotations

import importlib.util
import runpy
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import forked
import pytest

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
    assert sys.meta_path == finders
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
    assert sys.meta_path == finders


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


def test_actions_wait_for_an_import_on_another_thread(module: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    has_begun, may_end = threading.Event(), threading.Event()

    def pause() -> None:
        has_begun.set()
        may_end.wait(60)

    monkeypatch.setattr(sys, "pause_of_torchext", pause, raising=False)
    module.write_text("import sys\nsys.pause_of_torchext()\nloader = __loader__\n")
    assert not is_imported(NAME)
    thread = threading.Thread(target=importlib.import_module, args=(NAME,))
    thread.start()
    assert has_begun.wait(60)
    assert not is_imported(NAME)
    acted = threading.Event()
    when_imported(NAME, lambda: acted.set() if hasattr(sys.modules[NAME], "loader") else None)
    assert not acted.is_set()
    may_end.set()
    thread.join()
    assert acted.wait(60)
    assert is_imported(NAME)
    assert is_imported("__main__")  # may have no spec


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
