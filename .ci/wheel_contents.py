"""Check that a wheel contains exactly the files of the package.

    .ci/wheel_contents.py WHEEL

The expected files come from the checkout that contains this script.
"""

from __future__ import annotations

import re
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).absolute().parents[1]
UNEXPECTED = [
    r"(?!torchext/|torchext_(command|pytest)\.py$|torchext-[^/]*\.dist-info/)",
    r".*(^|/)(tests?/|test_[^/]*$|conftest\.py$)",
    r".*\.(cpp|o|pyc)$",
]
COMPILED = ["torchext/_C.*.so", "torchext/lib/libtorchext.so", "torchext/lib/torchextBuild.cmake"]
NOT_PYTHON = [
    "py.typed",
    "_C.pyi",
    "memory/*.html",
    "include/torchext/*.h",
    "share/cmake/torchext/*.cmake",
    "share/torchext/*.tsv",
]


def expected() -> list[str]:
    """Return patterns for the names that the wheel must contain."""
    found = [path for pattern in [*NOT_PYTHON, "**/*.py"] for path in ROOT.glob(f"torchext/{pattern}")]
    return [
        *COMPILED,
        *sorted(str(path.relative_to(ROOT)) for path in found),
        "torchext_command.py",
        "torchext_pytest.py",
        "LICENSE",
    ]


def faults(names: list[str]) -> list[str]:
    """Return the errors of a wheel with these files."""
    unexpected = [f"is not part of the package: {name}" for name in names if re.match("|".join(UNEXPECTED), name)]
    missing = [f"is missing: {each}" for each in expected() if not any(Path(name).match(each) for name in names)]
    return unexpected + missing


if __name__ == "__main__":
    found = faults(zipfile.ZipFile(sys.argv[1]).namelist())
    for fault in found:
        print(f"in {Path(sys.argv[1]).name}, this {fault}")
    sys.exit(bool(found))
