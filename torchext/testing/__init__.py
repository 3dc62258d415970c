"""Running other people's test suites with torchext: `pytest -p torchext.testing.plugin --torchext=MODE`.

docs/how_to/foreign_suites.md is about its use.
"""

from __future__ import annotations

__all__: list[str] = []
