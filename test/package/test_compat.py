"""torchext as a replacement of torchdistx."""

from __future__ import annotations

import sys
from types import ModuleType

import forked
import pytest

import torchext.deferred_init
import torchext.fake
from torchext.compat import install_as_torchdistx


@pytest.fixture(autouse=True)
def _leave_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove everything that the test installs, and restore FSDP's state if it is imported."""
    for name in ("torchdistx", "torchdistx.deferred_init", "torchdistx.fake"):
        monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.delitem(sys.modules, name)


def test_names_are_those_of_torchdistx() -> None:
    install_as_torchdistx()
    import torchdistx
    import torchdistx.fake
    from torchdistx import deferred_init
    from torchdistx.deferred_init import materialize_module

    assert deferred_init is torchext.deferred_init
    assert torchdistx.fake is torchext.fake
    assert materialize_module is torchext.deferred_init.materialize_module


def test_installing_twice_changes_nothing() -> None:
    install_as_torchdistx()
    first = sys.modules["torchdistx"]
    install_as_torchdistx()
    assert sys.modules["torchdistx"] is first


def test_other_modules_of_torchdistx_are_missing() -> None:
    install_as_torchdistx()
    with pytest.raises(ModuleNotFoundError, match="torchdistx.slowmo"):
        __import__("torchdistx.slowmo")


@pytest.mark.parametrize("name", ["torchdistx", "torchdistx.fake"])
def test_real_torchdistx_is_not_replaced(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = ModuleType(name)
    real.__file__ = "/somewhere/torchdistx/__init__.py"
    if name == "torchdistx":
        real.fake = ModuleType("torchdistx.fake")
    monkeypatch.setitem(sys.modules, name, real)
    with pytest.raises(RuntimeError, match=rf"`{name}` has been imported from /somewhere/.* uninstall torchdistx"):
        install_as_torchdistx()
    assert sys.modules[name] is real


@pytest.mark.ci
@pytest.mark.parametrize("fsdp_first", [True, False], ids=["fsdp_first", "torchext_first"])
def test_fsdp_takes_its_deferred_path(fsdp_first: bool) -> None:
    lines = ["import torch.distributed.fsdp", "from torchext.compat import install_as_torchdistx as i; i()"]
    code = f"""
{chr(10).join(lines if fsdp_first else lines[::-1])}
import torch, torchext
from torch.distributed.fsdp import _init_utils as fsdp
from torchext.deferred_init import deferred_init
assert fsdp._TORCHDISTX_AVAIL
assert fsdp.deferred_init is torchext.deferred_init
module = deferred_init(torch.nn.Linear, 2, 2)
assert fsdp._need_to_materialize_module(module, set(), set()) == (False, True)
assert fsdp._need_to_materialize_module(torch.nn.Linear(2, 2), set(), set()) == (False, False)
"""
    result = forked.run([sys.executable, "-c", code])
    assert result.returncode == 0, result.stderr


def test_importing_torchext_installs_nothing() -> None:
    code = "import sys, torchext, torchext.compat; assert 'torchdistx' not in sys.modules"
    assert forked.run([sys.executable, "-c", code]).returncode == 0
