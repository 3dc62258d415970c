"""The report of the command `torchext env`: the versions and the state that a bug report needs."""

from __future__ import annotations

import argparse
import os
import platform
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .. import _C
from ..deferred_init import deferred_init
from ..fake import fake_mode
from ..inference import inference_mode
from ..inspect import patches
from ..installation import library_path
from ..internals import terminal

__all__ = ["run"]

VARIABLES = ("TORCHEXT_", "TORCH_", "PYTORCH_", "CUDA_", "LD_PRELOAD", "OMP_NUM_THREADS")
"""The beginnings of the environment variables that change the behavior of torch and torchext."""


def run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Print the report, and return the exit code."""
    found = describe_environment()
    if not options.quiet and options.json != terminal.STDOUT:
        print("\n".join(_lines(found)))
    terminal.write_json(options.json, "env", found)
    return 0


def describe_environment() -> dict[str, Any]:
    """Return the content of the report: builtin types by name. Takes the dispatch keys of torchext."""
    return {
        "versions": terminal.versions(),
        "system": {
            "platform": platform.platform(),
            "libc": " ".join(platform.libc_ver()),
            "cuda_of_torch": torch.version.cuda,
            "cuda_devices": torch.cuda.device_count(),
            "compiler_of_torch": _compiler_of_torch(),
            "threads": torch.get_num_threads(),
        },
        "build": _build(),
        "dispatch_keys": _owners(),
        "self_tests": {
            name: {"passed": passed, "verified_up_to_torch": _release(_C.verified_pieces[name])}
            for name, passed in _C.self_test_results().items()
        },
        "installed_patches": [patch.target for patch in patches() if patch.is_installed],
        "variables": {name: value for name, value in os.environ.items() if name.startswith(VARIABLES)},
    }


def _compiler_of_torch() -> str:
    lines = [line.strip(" -") for line in torch.__config__.show().splitlines()]
    return next((line for line in lines if line.startswith(("GCC", "clang", "MSC"))), "unknown")


def _release(number: int) -> str:
    return f"{number // 100}.{number % 100}"


def _build() -> dict[str, str]:
    """Return the facts that the build has written beside the library."""
    path = Path(library_path(), "torchextBuild.cmake")
    found = re.findall(r'^set\(torchext_(\w+) "(.*)"\)$', path.read_text(), re.M) if path.exists() else []
    return {"folder": library_path(), **{name.lower(): value for name, value in found}}


def _owners() -> dict[str, str]:
    """Return the owner of each dispatch key that torchext takes, by taking it."""

    def use_fakes() -> None:
        with fake_mode():
            torch.ones(1)

    def use_marks() -> None:
        with inference_mode(trace=True):
            torch.ones(1)

    uses: dict[str, Callable[[], object]] = {
        "Fake": use_fakes,
        "DeferredInit": lambda: deferred_init(torch.ones, 1),
        "TESTING_ONLY_GenericMode": use_marks,
    }
    return {key: _owner(key, use) for key, use in uses.items()}


def _owner(key: str, use: Callable[[], object]) -> str:
    is_taken = torch._C._dispatch_has_backend_fallback(torch._C._dispatch_key_parse(key))
    try:
        use()
    except RuntimeError as error:
        return f"not torchext: {error}"
    return "torchext; the key had a fallback before, of torchext or of another library" if is_taken else "torchext"


def _text(value: object) -> str:
    return ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else str(value)


def _lines(found: dict[str, Any]) -> list[str]:
    lines = []
    for title, content in found.items():
        lines.append(f"{title.replace('_', ' ')}:")
        if isinstance(content, dict):
            lines += [f"  {name.replace('_', ' ')}: {_text(value)}" for name, value in content.items()]
        else:
            lines += [f"  {entry}" for entry in content] or ["  none"]
    return lines
