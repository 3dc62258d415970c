"""The first use of each feature in a process, inside of modes and blocks that are not ours.

Self-tests, declarations of patches and registrations run then. The code of the modes must not see them.
"""

from __future__ import annotations

import sys

import forked
import pytest

FEATURES = {
    "fake_mode": "with fake_mode(gpu=2):\n        pass",
    "deferred_init": "with deferred_init():\n        pass",
    "trace_origins": "inference.trace_origins(True)\n    with inference.inference_mode():\n        pass",
    "autocast": "with amp.autocast('cpu'):\n        pass",
    "self-cleaning region": "with amp.autocast('cpu', self_cleaning=True):\n        pass",
    "wrap": "amp.to_amp(torch.nn.Module())",
    "patches": "inspect.patches()",
    "route": "inspect.route('aten::add.Tensor', real, real)",
}
BLOCKS = {
    "dispatch mode": "Dispatch()",
    "function mode": "Function()",
    "PyTorch's FakeTensorMode": "FakeTensorMode()",
    "inference mode": "torch.inference_mode()",
    "autocast": "torch.autocast('cpu', torch.float16)",
    "default device": "torch.device('meta')",
    "deterministic": "torch.use_deterministic_algorithms(True)",
}
PROGRAM = """
import contextlib, faulthandler
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torchext import amp, inference, inspect
from torchext.deferred_init import deferred_init
from torchext.fake import fake_mode

faulthandler.enable()
real = torch.ones(2)
seen = []

class Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        seen.append(func)
        return func(*args, **(kwargs or {{}}))

class Function(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        seen.append(func)
        return func(*args, **(kwargs or {{}}))

with {block} or contextlib.nullcontext():
    {feature}
print(seen)
"""


@pytest.mark.cases(6)
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("feature", FEATURES)
def test_modes_do_not_see_the_preparations_of_the_first_use(feature: str, block: str) -> None:
    program = PROGRAM.format(feature=FEATURES[feature], block=BLOCKS[block])
    done = forked.run([sys.executable, "-c", program])
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[]\n", done.stderr


@pytest.mark.ci
def test_self_cleaning_regions_are_refused_by_the_first_export() -> None:
    program = """
import torch
from torchext import amp

class Model(torch.nn.Module):
    def forward(self, x):
        with amp.autocast("cpu", self_cleaning=True):
            return x @ x

torch.export.export(Model(), (torch.eye(2),), strict=False)
"""
    done = forked.run([sys.executable, "-c", program])
    assert done.returncode == 1, done.stderr
    assert "NotImplementedError: torch.export cannot trace a self-cleaning region" in done.stderr
