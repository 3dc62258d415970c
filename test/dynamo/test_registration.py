"""The guards are added to Dynamo's tables when Dynamo is imported, without other effects."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from torchext import dynamo
from torchext.errors import TorchextWarning

COMPILES = """
    def function(x):
        with torchext.amp.autocast("cpu"):
            return x @ x
    assert torch.compile(function, backend="eager", fullgraph=True)(torch.eye(2)).dtype is torch.bfloat16
"""


def run_python(code: str) -> None:
    lines = "\n".join(line.strip() if not line.startswith("     ") else line[4:] for line in code.splitlines())
    folder = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-W", "error::RuntimeWarning", "-c", lines], check=True, cwd=folder)


@pytest.mark.ci
def test_importing_torchext_does_not_import_dynamo() -> None:
    run_python("""
    import sys, torch, torchext
    assert "torch._dynamo" not in sys.modules
    """)


@pytest.mark.ci
@pytest.mark.parametrize(
    "imports", ["torch, torchext", "torch, torch._dynamo, torchext", "torch, torch._inductor, torchext"]
)
def test_works_in_any_import_order(imports: str) -> None:
    run_python(f"import {imports}" + COMPILES)


def test_other_builds_of_pytorch_get_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.variables.builder import VariableBuilder

    monkeypatch.delattr(VariableBuilder, "_id_dispatch")
    with pytest.warns(TorchextWarning, match="guards of torchext break the graphs.*AttributeError.*_id_dispatch"):
        dynamo._register()
