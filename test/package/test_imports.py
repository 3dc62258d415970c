"""Actions on imports."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import forked
import pytest

from torchext.internals.imports import once_imported, patching, when_imported

NAME = "torchext_imported_in_a_test"


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Create a file that can be imported as NAME."""
    path = tmp_path / f"{NAME}.py"
    path.write_text("loader = __loader__\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield path
    sys.modules.pop(NAME, None)


def test_is_acted_on_when_the_module_has_run(module: Path) -> None:
    seen = []
    finders = list(sys.meta_path)
    with once_imported(NAME, lambda: seen.append(hasattr(sys.modules[NAME], "loader"))):
        found = importlib.import_module(NAME)
        importlib.import_module(NAME)
    assert seen == [True]
    assert sys.meta_path == finders
    assert "torchext" not in type(found.loader).__module__
    assert found.__spec__ is not None
    assert found.__spec__.loader is found.loader


def test_is_not_acted_on_before_the_block_and_after_it(module: Path) -> None:
    seen: list[int] = []
    with once_imported(NAME, lambda: seen.append(1)):
        pass
    importlib.import_module(NAME)
    with once_imported(NAME, lambda: seen.append(2)):
        importlib.import_module(NAME)
    assert seen == []


def test_is_acted_on_whenever_the_module_is_imported(module: Path) -> None:
    seen: list[int] = []
    finders = list(sys.meta_path)
    when_imported(NAME, lambda: seen.append(1))
    assert seen == []
    importlib.import_module(NAME)
    assert seen == [1]
    assert sys.meta_path == finders
    when_imported(NAME, lambda: seen.append(2))
    assert seen == [1, 2]


def test_module_is_patched_once_by_each_feature(module: Path) -> None:
    seen: list[str] = []

    def first(module: ModuleType) -> None:
        seen.append("first")

    def second(module: ModuleType) -> None:
        seen.append("second")

    with patching(NAME, ("loader",), first), patching(NAME, ("loader",), second):
        importlib.import_module(NAME)
    for patch in (first, second):
        with patching(NAME, ("loader",), patch):
            pass
    assert sorted(seen) == ["first", "second"]


def test_errors_of_the_module_are_its_own(module: Path) -> None:
    module.write_text("raise KeyError('of the module')\n")
    seen: list[int] = []
    with once_imported(NAME, lambda: seen.append(1)), pytest.raises(KeyError, match="of the module"):
        importlib.import_module(NAME)
    with once_imported(NAME, lambda: seen.append(1)), pytest.raises(ModuleNotFoundError, match="not_there"):
        importlib.import_module("torchext_not_there")
    assert seen == []


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
