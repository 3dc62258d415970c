"""Python runs this module at startup if its folder is on the path.

It keeps the files of a dry run apart, and lets the process enter the job when it has imported PyTorch.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
NAME = "torchext_dry_run_files"
JOB = "TORCHEXT_DRY_RUN_JOB"  # a module and its data: see `announce()` in current.py


def _start(folder: str) -> None:
    """Import the package under a separate name, because `torchext` would import PyTorch."""
    spec = importlib.util.spec_from_file_location(NAME, f"{os.path.dirname(HERE)}/__init__.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[NAME] = module
    spec.loader.exec_module(module)
    module.install(folder)
    if JOB in os.environ:
        module.when_imported("torch", lambda torch: _enter_job())


def _enter_job() -> None:
    name = os.environ[JOB].partition(" ")[0]
    if importlib.util.find_spec(name.partition(".")[0]) is not None:  # not in an environment without torchext
        importlib.import_module(name).enter()


def _run_next() -> None:
    """Run the next `sitecustomize` on the path."""
    path = [folder for folder in sys.path if os.path.realpath(folder or ".") != HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", path)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if _folder := os.environ.get("TORCHEXT_DRY_RUN_FILES"):
    _start(_folder)
_run_next()
