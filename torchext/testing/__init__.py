"""Runs the test suites of other projects with torchext: `pytest -p torchext.testing.plugin --torchext=MODE`.

See docs/how_to/foreign_suites.md.
"""

from __future__ import annotations

__all__: list[str] = []
