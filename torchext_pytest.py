"""The entry point of the pytest plugin `torchext.testing.plugin`.

pytest imports this module in every run, so it is not part of the package `torchext`, which imports PyTorch. It only
adds the options and the fixture `assert_fits`; with `--torchext` it imports the plugin.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from torchext.memory import Fit

__all__ = ["assert_fits", "pytest_addoption", "pytest_cmdline_main"]

RECORDER = Path(__file__).parent / "torchext" / "testing" / "child" / "torchext_recorder.py"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the plugin."""
    spec = importlib.util.spec_from_file_location("torchext_options", RECORDER)
    assert spec is not None
    assert spec.loader is not None
    recorder = sys.modules["torchext_options"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(recorder)
    recorder.pytest_addoption(parser)


def pytest_cmdline_main(config: pytest.Config) -> int | None:
    """Run the suite without torchext and with it if `--torchext` is given, otherwise do nothing."""
    if config.getoption("--torchext") is None:
        return None
    from torchext.testing import plugin

    return plugin.pytest_cmdline_main(config)


@pytest.fixture
def assert_fits() -> Callable[..., Fit]:
    """Return `assert_fits(program, gpu="H100-80GB", *, headroom=0, values="assume")`.

    It fails the test unless `program` fits on the fake GPU and leaves `headroom`, in bytes or as a text such as "2GiB".
    It returns the `torchext.memory.Fit`. The other arguments are those of `torchext.memory.fits()`.
    """
    from torchext.testing.plugin import assert_fits

    return assert_fits
