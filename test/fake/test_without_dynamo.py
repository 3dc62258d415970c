"""Calls on fakes do not import Dynamo, and do the same before and after the program imports it."""

from __future__ import annotations

import subprocess
import sys

CALLS = """
import gc
import sys
import torch
from torchext.fake import cache_clear, fake_mode

def calls():
    cache_clear()
    with fake_mode():
        x = torch.randn(4, 4, requires_grad=True)
        y = torch.nn.functional.gelu(x) * 2 + x.softmax(-1).to(torch.float64)
        y.sum().backward()
        torch.nn.init.trunc_normal_(torch.empty(3, 4))
        out = torch.add(x.detach(), 1, out=torch.empty(4, 4))
        return [(one.shape, one.stride(), one.dtype) for one in (x, y, x.grad, out)]
"""


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", CALLS + code], capture_output=True, text=True, check=True).stdout


def test_calls_do_not_import_dynamo() -> None:
    assert run("calls(); print('torch._dynamo' in sys.modules)") == "False\n"


def test_functions_are_restored_without_fakes_and_by_an_import_of_dynamo() -> None:
    code = """
from torchext.fake import without_dynamo
import torch._refs
normal = next(one for one in without_dynamo._disabled_functions() if one.__name__ == "normal")
before = calls()
gc.collect()
print(hasattr(normal, "__dynamo_disable"))
with fake_mode():
    print(getattr(normal, "__dynamo_disable") is normal)
    import torch._dynamo
    print(hasattr(normal, "__dynamo_disable"))
print(calls() == before)
print(getattr(normal, "__dynamo_disable") is normal)
print(getattr(normal, "__dynamo_disable")._torchdynamo_disable)
"""
    assert run(code).split() == ["False", "True", "False", "True", "False", "True"]


def test_functions_are_disabled_if_dynamo_is_imported_first() -> None:
    code = """
import torch._dynamo
from torchext.fake import without_dynamo
import torch._refs
normal = next(one for one in without_dynamo._disabled_functions() if one.__name__ == "normal")
calls()
print(getattr(normal, "__dynamo_disable")._torchdynamo_disable)
"""
    assert run(code) == "True\n"
