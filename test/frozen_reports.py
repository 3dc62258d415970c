"""A pytest plugin that keeps the JSON reports of all dry runs that tests make, for `freeze.py`.

It is used as in `python -m pytest -p frozen_reports --frozen-reports FOLDER test/dry_run`.
"""

from __future__ import annotations

import json
import re
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from torchext.internals import terminal

# The keys of times of this machine, and of texts that depend on the folder of a test.
OF_ONE_RUN = re.compile(r"seconds|^versions$|^folder$|^code$")
TIME = re.compile(r"\b[\d.]+ (m?s|min)\b")
ADDRESS = re.compile(r"0x[0-9a-f]+")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--frozen-reports", type=Path, required=True, help="the folder of the reports")


def cleaned(value: Any, folder: str) -> Any:
    """Return a part of a report without what differs between two runs."""
    if isinstance(value, dict):
        return {key: cleaned(item, folder) for key, item in value.items() if not OF_ONE_RUN.search(key)}
    if isinstance(value, list):
        return [cleaned(item, folder) for item in value]
    if isinstance(value, str):
        return ADDRESS.sub("ADDRESS", TIME.sub("TIME", value.replace(folder, "FOLDER")))
    return value


@pytest.fixture(autouse=True)
def _keep_reports(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers, write = count(), terminal.write_json
    name = re.sub(r"[^\w.-]+", "_", request.node.nodeid)[-180:]

    def write_and_keep(target: Path | None, command: str, content: dict[str, Any]) -> None:
        write(target, command, content)
        path = request.config.getoption("--frozen-reports") / f"{name}.{next(numbers)}.json"
        path.write_text(json.dumps(cleaned(content, str(tmp_path)), indent=1, sort_keys=True, default=str) + "\n")

    monkeypatch.setattr(terminal, "write_json", write_and_keep)
