"""Examples in pages and docstrings run: `snippets.py` describes the markers that pages use."""

from __future__ import annotations

import sys
from pathlib import Path

import forked
import pytest
from documents import PAGES, ROOT
from snippets import blocks_of, reason_to_skip

SNIPPETS = ROOT / "test" / "snippets.py"
# Blocks that need a process group, or a package or files that the tests do not have.
MOST_NOT_RUN = 6

MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted((ROOT / "torchext").rglob("*.py"))
    if ">>> " in path.read_text()
]


def has_code(page: Path) -> bool:
    return any(block.language in ("python", "pycon") for block in blocks_of(page.read_text()))


def examples_in(name: str, folder: Path) -> int:
    done = forked.run([sys.executable, str(SNIPPETS), name], cwd=folder)
    assert done.returncode == 0, done.stderr
    return int(done.stdout.splitlines()[-1])


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "page", [pytest.param(page, id=page.relative_to(ROOT).as_posix()) for page in PAGES if has_code(page)]
)
def test_blocks_of_pages_run(page: Path, tmp_path: Path) -> None:
    reason = reason_to_skip(page.read_text())
    if reason:
        pytest.skip(reason)
    examples_in(str(page), tmp_path)


@pytest.mark.cases(1)
@pytest.mark.parametrize("module", MODULES)
def test_examples_in_docstrings_run(module: str, tmp_path: Path) -> None:
    assert examples_in(module, tmp_path) > 0, f"doctest finds no example in {module}"


def test_few_blocks_are_not_run() -> None:
    skipped = []
    for page in PAGES:
        text = page.read_text()
        blocks = [block for block in blocks_of(text) if block.marker != "output"]
        reasons = [reason_to_skip(text) or block.reason_not_run for block in blocks]
        assert "" not in reasons, f"{page.name} does not say why a block is not run"
        skipped += [f"{page.name}: {reason}" for reason in reasons if reason]
    assert len(skipped) <= MOST_NOT_RUN, skipped


class TestBlocks:
    def test_have_the_lines_of_the_page(self) -> None:
        block, output = blocks_of("# A\n\n```python\nx = 1\n```\n\n<!-- output -->\n```text\n2\n```\n")
        assert block == (4, "python", "x = 1\n", "")
        assert output == (9, "output", "2\n", "output")

    def test_that_are_not_run_have_a_reason(self) -> None:
        (block,) = blocks_of("<!-- not run: needs a GPU -->\n```python\nx\n```\n")
        assert block.reason_not_run == "needs a GPU"

    def test_of_other_languages_do_not_count(self) -> None:
        assert blocks_of("```bash\nls\n```\n\n```\ntext\n```\n") == []

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            pytest.param("```python\n1 / 0\n```\n", "p.md:2: raises ZeroDivisionError", id="error"),
            pytest.param(
                "<!-- raises: ZeroDivisionError: division -->\n```python\n1 / 1\n```\n", "does not raise", id="no error"
            ),
            pytest.param(
                "<!-- raises: ValueError -->\n```python\n1 / 0\n```\n", "expected ValueError", id="another error"
            ),
            pytest.param(
                "```python\nprint(1)\n```\n<!-- output -->\n```text\n2\n```\n", "but the code prints\n1", id="output"
            ),
            pytest.param("```pycon\n>>> 1 + 1\n3\n```\n", "Expected:\n    3\nGot:\n    2", id="session"),
            pytest.param("```python\nimport warnings\nwarnings.warn('x')\n```\n", "raises UserWarning", id="warning"),
        ],
    )
    def test_that_fail_are_reported(self, text: str, words: str, tmp_path: Path) -> None:
        page = tmp_path / "p.md"
        page.write_text(text)
        done = forked.run([sys.executable, str(SNIPPETS), str(page)], cwd=tmp_path)
        assert done.returncode == 1
        assert words in done.stderr

    def test_share_the_names_of_the_page(self, tmp_path: Path) -> None:
        page = tmp_path / "p.md"
        page.write_text(
            "<!-- setup\nx = 1\n-->\n```python\ny = x + 1\nprint(y, 'and more')\n```\n<!-- output -->\n```text\n2 ...\n"
            "```\n```pycon\n>>> y\n2\n>>> z = 3\n```\n```python\nassert z == 3\n```\n"
        )
        assert examples_in(str(page), tmp_path) == 4
