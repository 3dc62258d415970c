"""Pages, docstrings, comments and messages follow the mechanical writing rules of CONTRIBUTING.md."""

from __future__ import annotations

from pathlib import Path

import pytest
from prose import ALLOWED, ROOT, files, findings, sentences, texts, without_code

FOLDERS = ("csrc", "torchext", "docs", "test", "benchmarks", "examples", "build_tools")
TOP = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "setup.py")


def found_in(folder: Path, name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr("prose.ROOT", folder)
    path = folder / name
    path.write_text(text)
    return [finding.found.strip(" .") for finding in findings(path)]


@pytest.mark.parametrize("name", [*FOLDERS, *TOP])
def test_texts_follow_the_rules(name: str) -> None:
    rules = ROOT / "test" / "prose.py"  # contains what it bans
    here = Path(__file__).resolve()
    found = [str(one) for path in files([ROOT / name]) if path not in (rules, here) for one in findings(path)]
    assert not found, "\n".join(found)


def test_exceptions_are_needed() -> None:
    unused = [
        (name, words)
        for name, words in ALLOWED
        if not any(words in without_code(text.words) for text in texts(ROOT / name))
    ]
    assert not unused


class TestRules:
    def test_find_banned_words_in_a_comment(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        source = "// Nobody reads it, because the schema says so.\nint x;\n"
        assert found_in(tmp_path, "a.cpp", source, monkeypatch) == ["Nobody", "says"]

    def test_find_banned_words_in_docstrings_and_messages(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        source = '"""It runs faster, and sooner."""\nf("the tensor is not there, be it fake")  # what is wrong\n'
        assert found_in(tmp_path, "a.py", source, monkeypatch) == ["sooner", "be it", "not there", "what is"]

    def test_find_british_spelling(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        assert found_in(tmp_path, "a.md", "The behaviour is normal.\n", monkeypatch) == ["behaviour"]

    def test_find_long_sentences_in_pages_only(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        sentence = "It " + "is very " * 20 + "long."
        assert found_in(tmp_path, "a.md", sentence, monkeypatch) == ["It is very is very is"]
        assert found_in(tmp_path, "a.py", f"# {sentence}\n", monkeypatch) == []

    def test_ignore_code(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        page = "Run `nobody says`:\n\n```\nnobody\n```\n\n    nobody asks\n\n[text](sooner.md)\n"
        assert found_in(tmp_path, "a.md", page, monkeypatch) == []

    def test_split_sentences(self) -> None:
        assert sentences("It runs. X returns: It ends.") == ["It runs.", "X returns:", "It ends."]
