"""The public API: its table, names of the package, and exceptions."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path
from types import ModuleType

import pytest
import torch
from common import too_large_to_copy

import torchext
from torchext import errors
from torchext.deferred_init import deferred_init, materialize_tensor

ROOT = Path(__file__).parents[2]


def run_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


@pytest.mark.ci
def test_table_is_up_to_date() -> None:
    command = [sys.executable, ROOT / "docs" / "reference" / "api_table.py", "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_package_lists_public_names_only() -> None:
    assert dir(torchext) == sorted(torchext.__all__)
    assert [name for name in dir(torchext) if name.startswith("_")] == ["__version__"]
    assert set(errors.__all__) <= set(dir(torchext))


@pytest.mark.parametrize("name", [name for name in torchext.__all__ if isinstance(getattr(torchext, name), ModuleType)])
def test_public_modules_list_public_names_only(name: str) -> None:
    module = getattr(torchext, name)
    assert dir(module) == sorted(module.__all__)


@pytest.mark.ci
def test_star_import_is_the_public_names() -> None:
    code = "from torchext import *; print(*sorted(name for name in globals() if not name.startswith('_')))"
    assert run_python(code).split() == [name for name in sorted(torchext.__all__) if name != "__version__"]


@pytest.mark.ci
def test_dry_run_is_imported_at_its_first_use() -> None:
    code = """
import sys, torchext
print("torchext.dry_run" in sys.modules, torchext.dry_run.world.__name__, "torchext.dry_run" in sys.modules)
"""
    assert run_python(code) == "False world True\n"


def test_name_of_a_module_of_the_package_is_suggested() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'fits'\. Did you mean torchext\.memory\.fits\?"):
        torchext.fits  # noqa: B018


def test_unknown_attribute_of_the_package_raises() -> None:
    with pytest.raises(AttributeError, match="module 'torchext' has no attribute 'nothing'"):
        torchext.nothing  # noqa: B018


@pytest.mark.parametrize(
    ("cls", "builtin"),
    [
        (torchext.MaterializationError, RuntimeError),
        (torchext.RankFailedError, RuntimeError),
        (torchext.RanksDifferError, RuntimeError),
        (torchext.CheckpointError, ValueError),
        (torchext.CheckpointError, RuntimeError),
        (torchext.DataDependentError, RuntimeError),
        (torchext.UnsupportedOperatorError, NotImplementedError),
        (torchext.PatchError, RuntimeError),
    ],
)
def test_exceptions_are_caught_by_builtin_classes(cls: type[Exception], builtin: type[Exception]) -> None:
    assert issubclass(cls, builtin)
    assert issubclass(cls, torchext.TorchextError)
    assert cls.__module__ == "torchext"


def test_warnings_have_one_base_class() -> None:
    for cls in (torchext.TorchextDeprecationWarning, torchext.TorchextFutureWarning):
        assert issubclass(cls, torchext.TorchextWarning)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", torchext.TorchextWarning)
        torchext.fake.fake_mode(fake_cuda=False)
    assert not caught


class TestMaterializationError:
    @staticmethod
    def unusable() -> torch.Tensor:
        real = too_large_to_copy()
        tensor = deferred_init(lambda: torch.zeros(2) + real)
        real.add_(1)
        return tensor

    def test_is_raised_by_materializing(self) -> None:
        with pytest.raises(
            torchext.MaterializationError, match=r"while materializing what `aten::add\.Tensor`|changed"
        ):
            materialize_tensor(self.unusable())

    def test_is_raised_by_reading_a_value(self) -> None:
        tensor = self.unusable()
        with pytest.raises(torchext.MaterializationError):
            tensor[0].item()
        with pytest.raises(torchext.MaterializationError):
            tensor.numpy()

    def test_other_classes_of_a_kernel_stay(self) -> None:
        tensor = deferred_init(lambda: torch.ones(2)[torch.tensor([7])])
        with pytest.raises(IndexError):
            materialize_tensor(tensor)
