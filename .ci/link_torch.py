"""Make PyTorch and its requirements visible in another environment of the same Python.

    .ci/link_torch.py FOLDER     the site-packages folder of that environment

Nothing else of the present environment becomes visible: not its installed torchext, and no package that torchext itself
would have to require.
"""

from __future__ import annotations

import re
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path


def required_by(name: str, found: dict[str, set[Path]]) -> dict[str, set[Path]]:
    """Return the installed files and folders of a distribution and of its requirements."""
    try:
        installed = distribution(name)
    except PackageNotFoundError:  # for another platform, or an extra
        return found
    tops = {file.parts[0] for file in installed.files or [] if file.parts[0] not in ("..", "__pycache__")}
    found[name] = {Path(str(installed.locate_file(top))) for top in tops}
    for requirement in installed.requires or []:
        needed = re.split(r"[^\w.-]", requirement)[0]
        if "extra ==" not in requirement and needed not in found:
            required_by(needed, found)
    return found


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    for paths in required_by("torch", {}).values():
        for path in paths:
            if not (folder / path.name).exists():
                (folder / path.name).symlink_to(path)
