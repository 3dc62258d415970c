"""Calls on fakes do not import Dynamo, and do the same before and after the program imports it."""

from __future__ import annotations

import subprocess
import sys

import pytest

CALLS = """
import gc
import sys
from types import FunctionType
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

def are_disabled():
    functions = [one for one in gc.get_objects() if isinstance(one, FunctionType)]
    return any("__dynamo_disable" in vars(one) for one in functions)
"""


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", CALLS + code], capture_output=True, text=True, check=True).stdout


def test_calls_do_not_import_dynamo() -> None:
    assert run("calls(); print('torch._dynamo' in sys.modules)") == "False\n"


@pytest.mark.ci
def test_wrappers_are_restored_without_fakes_and_by_an_import_of_dynamo() -> None:
    code = """
before = calls()
gc.collect()
print("getattr" in vars(torch._compile))
with fake_mode():
    print("getattr" in vars(torch._compile))
    import torch._dynamo
    print("getattr" in vars(torch._compile))
print(are_disabled())
print(calls() == before)
print(are_disabled())
"""
    assert run(code).split() == ["False", "True", "False", "False", "True", "True"]


@pytest.mark.ci
def test_functions_are_disabled_if_dynamo_is_imported_first() -> None:
    code = """
import torch._dynamo
calls()
print(are_disabled())
"""
    assert run(code) == "True\n"
