"""Run the examples in pages and docstrings.

    python test/snippets.py PAGE
    python test/snippets.py torchext.MODULE

A page's blocks run from top to bottom in one namespace:

- ```` ```python ```` blocks are executed, and ```` ```pycon ```` blocks are sessions as in docstrings;
- `<!-- not run: reason -->` before a block skips it, `<!-- page not run: reason -->` anywhere skips all of them;
- `<!-- raises: ValueError: words -->` before a block expects this exception, with these words in its message;
- `<!-- output -->` before a block without code compares it with the output of the last block that ran. `...` stands
  for any text;
- a comment that begins with `<!-- setup` runs and is not displayed.

Docstrings have sessions that begin with `>>>`. Each has the names of its module, `torch`, `torchext` and torchext's
public names. Warnings are errors in both.
"""

from __future__ import annotations

import builtins
import contextlib
import doctest
import importlib
import io
import pkgutil
import re
import sys
import traceback
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Block", "blocks_of", "reason_to_skip", "run_docstrings", "run_page"]

OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
FENCE = re.compile(r"^( *)(`{3,})(\w*)[^\n`]*\n(.*?)^\1\2 *$", re.M | re.S)
COMMENT = re.compile(r"<!--\s*(.*?)\s*-->", re.S)
SETUP = re.compile(r"^<!-- setup\n(.*?)-->", re.M | re.S)


class Block(NamedTuple):
    """A block of code, or of output, in a page."""

    line: int  # of its first line of code, from 1
    language: str
    code: str
    marker: str  # the comment before it

    @property
    def reason_not_run(self) -> str | None:
        """The reason in the comment before it, if it is not run."""
        return self.marker.removeprefix("not run:").strip() if self.marker.startswith("not run:") else None


def blocks_of(text: str) -> list[Block]:
    """Return the blocks that matter here: Python, sessions, expected output and setups, in their order."""
    found = []
    for match in FENCE.finditer(text):
        indent, _, language, code = match.groups()
        before = text[: match.start()].rstrip("\n ")
        comments = list(COMMENT.finditer(before[before.rfind("<!--") :])) if before.endswith("-->") else []
        marker = comments[-1][1] if comments else ""
        if language in ("python", "pycon") or marker == "output":
            kind = "output" if marker == "output" else language
            code = re.sub(f"^{indent}", "", code, flags=re.M)
            found.append((match.start(4), Block(_line(text, match.start(4)), kind, code, marker)))
    for match in SETUP.finditer(text):
        found.append((match.start(1), Block(_line(text, match.start(1)), "python", match[1], "setup")))
    return [block for _, block in sorted(found)]


def _line(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1


def reason_to_skip(text: str) -> str | None:
    """Return why no block of a page is run, if the page states a reason."""
    match = re.search(r"<!-- page not run: (.*?) *-->", text)
    return match[1] if match else None


class ExampleError(Exception):
    """An example does not do what the page shows."""


def run_page(path: Path) -> int:
    """Run the blocks of a page, and return how many there were.

    Raises:
        ExampleError: A block has failed.
    """
    page = types.ModuleType("__main__")
    sys.modules["__main__"] = page
    count, printed = 0, ""
    for block in blocks_of(path.read_text()):
        if block.reason_not_run is not None:
            continue
        if block.language == "output":
            _compare(path, block, printed)
            continue
        count += 1
        run = _run_session if block.language == "pycon" else _run_python
        with contextlib.redirect_stdout(io.StringIO()) as stream:
            run(path, block, page)
        printed = stream.getvalue()
    return count


def _run_python(path: Path, block: Block, page: types.ModuleType) -> None:
    # The lines of the code are those of the page, in tracebacks and for `inspect`.
    code = compile("\n" * (block.line - 1) + block.code, str(path), "exec")
    expected = block.marker.removeprefix("raises:").strip() if block.marker.startswith("raises:") else None
    try:
        exec(code, vars(page))
    except Exception as error:
        if expected is None:
            traceback.print_exc()
            raise ExampleError(f"{path}:{block.line}: raises {type(error).__name__}") from error
        name, _, words = expected.partition(":")
        names = [cls.__name__ for cls in type(error).__mro__]
        if name not in names or words.strip() not in str(error):
            raise ExampleError(
                f"{path}:{block.line}: expected {expected}, got {type(error).__name__}: {error}"
            ) from error
    else:
        if expected is not None:
            raise ExampleError(f"{path}:{block.line}: does not raise {expected}")


def _run_session(path: Path, block: Block, page: types.ModuleType) -> None:
    test = doctest.DocTestParser().get_doctest(block.code, vars(page), path.name, str(path), block.line - 1)
    report = io.StringIO()
    result = doctest.DocTestRunner(optionflags=OPTIONS).run(test, out=report.write, clear_globs=False)
    vars(page).update(test.globs)
    if result.failed:
        raise ExampleError(report.getvalue())


def _compare(path: Path, block: Block, printed: str) -> None:
    if not doctest.OutputChecker().check_output(block.code, printed, OPTIONS):
        raise ExampleError(f"{path}:{block.line}: the page shows\n{block.code}\nbut the code prints\n{printed}")


def docstrings_of(module: str) -> Iterator[doctest.DocTest]:
    """Return the docstrings of a module that have examples."""
    found = importlib.import_module(module)
    names = vars(found) | dict(_public_names())
    for test in doctest.DocTestFinder().find(found, module, globs=names):
        if test.examples:
            yield test


def _public_names() -> Iterator[tuple[str, Any]]:
    import torch

    import torchext

    yield from (("torch", torch), ("torchext", torchext))
    for found in pkgutil.iter_modules(torchext.__path__):
        if not found.name.startswith("_"):
            module = importlib.import_module(f"torchext.{found.name}")
            public = [name for name in getattr(module, "__all__", ()) if name not in dir(builtins)]
            yield from ((name, getattr(module, name)) for name in public)


def run_docstrings(module: str) -> int:
    """Run the examples in the docstrings of a module, and return how many docstrings have some.

    Raises:
        ExampleError: An example has failed.
    """
    import torch

    count = 0
    report = io.StringIO()
    for test in docstrings_of(module):
        count += 1
        torch.manual_seed(0)
        doctest.DocTestRunner(optionflags=OPTIONS).run(test, out=report.write)
    if report.getvalue():
        raise ExampleError(report.getvalue())
    return count


def main() -> None:
    """Run what the argument names, and print how many examples it has."""
    import torch

    warnings.simplefilter("error")
    for category in (DeprecationWarning, FutureWarning):
        warnings.filterwarnings("ignore", category=category, module=r"torch\..*")
    torch.manual_seed(0)
    (name,) = sys.argv[1:]
    try:
        count = run_page(Path(name).resolve()) if name.endswith(".md") else run_docstrings(name)
    except ExampleError as failed:
        sys.exit(str(failed))
    print(count)


if __name__ == "__main__":
    main()
