"""Common parts of AmpTensors and origins of inference tensors: the marks, and the dispatch key of marked tensors."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import forked
import pytest
import torch
from cpp_library import compiled
from torch import nn

from torchext import amp
from torchext.inference import inference_mode, normal_tensors, origin, trace_origins

ROOT = Path(__file__).parents[2]
KEY = "TESTING_ONLY_GenericMode"


def run_python(code: str) -> str:
    """Run `code` in a fresh interpreter and return its output."""
    folders = [str(ROOT / "test"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(folders)}
    result = forked.run([sys.executable, "-c", code], cwd=ROOT, env=environment)
    assert result.returncode == 0, result.stderr
    return result.stdout


def is_key_included() -> bool:
    return KEY in str(torch._C._dispatch_tls_local_include_set())


@pytest.fixture
def tracing() -> Iterator[None]:
    trace_origins()
    yield
    trace_origins(False)


class TestLifetime:
    """Each test runs in a new process, because tensors of other tests may be alive."""

    def test_marks_die_with_the_last_tensor_that_bears_them(self) -> None:
        code = """
import bindings, torch
from torchext import amp
x, y = amp.to_amp(torch.ones(2)), amp.to_amp(torch.ones(3))
view, copy = x.view(2, 1), x.detach()
counts = [bindings.live_marks()]
del x, y, copy
counts.append(bindings.live_marks())
del view
counts.append(bindings.live_marks())
print(counts)
"""
        assert run_python(code) == "[1, 1, 0]\n"

    def test_unwrapping_the_last_amp_tensor_ends_its_marks(self) -> None:
        code = """
import bindings, torch
from torchext import amp
net = amp.to_amp(torch.nn.Linear(2, 2))
net(torch.ones(1, 2)).sum().backward()
amp.to_normal(net)
print(bindings.live_marks())
"""
        assert run_python(code) == "0\n"

    def test_every_line_that_made_a_live_tensor_has_marks(self) -> None:
        code = """
import bindings, torch
from torchext.inference import inference_mode
with inference_mode(trace=True):
    x = [torch.ones(1) for _ in range(3)]
    y = torch.ones(1)
counts = [bindings.live_marks()]
del x
counts.append(bindings.live_marks())
del y
counts.append(bindings.live_marks())
print(counts)
"""
        assert run_python(code) == "[2, 1, 0]\n"

    def test_a_self_cleaning_region_leaves_none_behind(self) -> None:
        code = """
import bindings, torch
from torchext import amp
with amp.autocast("cpu", self_cleaning=True):
    x = torch.ones(2, 2) @ torch.ones(2, 2)
counts = [bindings.live_marks()]
x = x + 1
counts.append(bindings.live_marks())
print(counts)
"""
        assert run_python(code) == "[1, 0]\n"

    def test_threads_that_mark_and_drop_the_same_marks_agree(self) -> None:
        code = """
import bindings, sys, threading, torch
from torchext import amp
sys.setswitchinterval(1e-5)
wrong = []
def work():
    for _ in range(2000):
        x = amp.to_amp(torch.ones(1))
        y = x + 1
        if not (amp.is_amp(x) and amp.is_amp(y) and bindings.live_marks() > 0):
            wrong.append(x)
threads = [threading.Thread(target=work) for _ in range(4)]
for t in threads: t.start()
for t in threads: t.join()
print(len(wrong), bindings.live_marks())
"""
        assert run_python(code) == "0 0\n"


class TestWhoNeedsTheKey:
    def test_it_is_included_while_a_feature_needs_it(self) -> None:
        assert not is_key_included()
        with amp.autocast("cpu", self_cleaning=True):
            assert is_key_included()
            with inference_mode(trace=True):
                assert is_key_included()
            assert is_key_included()
        assert not is_key_included()

    def test_blocks_of_both_features_may_be_left_in_any_order(self) -> None:
        region, block = amp.autocast("cpu", self_cleaning=True), inference_mode(trace=True)
        for first, second in ((region, block), (block, region)):
            region.__enter__()
            block.__enter__()
            first.__exit__(None, None, None)
            assert is_key_included()
            second.__exit__(None, None, None)
            assert not is_key_included()

    def test_a_region_in_a_mode_does_not_trace_it(self) -> None:
        with inference_mode(), amp.autocast("cpu", self_cleaning=True):
            x = torch.ones(1)
        assert origin(x) is None

    def test_a_mode_in_a_region_does_not_trace(self) -> None:
        with amp.autocast("cpu", self_cleaning=True), inference_mode():
            x = torch.ones(1)
        assert origin(x) is None

    def test_a_traced_block_in_a_region_traces(self) -> None:
        with amp.autocast("cpu", self_cleaning=True), inference_mode(trace=True):
            x = torch.ones(1)
        assert origin(x) is not None

    def test_a_region_between_traced_blocks_does_not_end_tracing(self) -> None:
        with inference_mode(trace=True), normal_tensors(), amp.autocast("cpu", self_cleaning=True):
            torch.ones(1)
            with inference_mode():
                x = torch.ones(1)
        assert origin(x) is not None

    @pytest.mark.usefixtures("tracing")
    def test_tracing_ends_with_a_mode_of_pytorch_inside_of_a_region(self) -> None:
        with amp.autocast("cpu", self_cleaning=True):
            with torch.inference_mode():
                x = torch.ones(1)
            trace_origins(False)
            torch.ones(1)
            with inference_mode():
                y = torch.ones(1)
        assert origin(x) is not None
        assert origin(y) is None
        assert not is_key_included()

    @pytest.mark.usefixtures("tracing")
    def test_pytorchs_mode_traces_in_a_region_that_it_contains(self) -> None:
        with torch.inference_mode(), amp.autocast("cpu", self_cleaning=True):
            x = torch.ones(1)
        assert origin(x) is not None
        assert not is_key_included()

    def test_querying_a_policy_does_not_change_the_blocks(self) -> None:
        with inference_mode(trace=True), amp.autocast("cpu", self_cleaning=True):
            assert amp.policy("aten::mm", "cpu") == "lower_precision"
            x = torch.ones(2, 2)
            with inference_mode(False):
                y = torch.ones(2, 2) @ torch.ones(2, 2)
        assert origin(x) is not None
        assert amp.is_amp(y)
        assert not is_key_included()

    def test_keys_included_by_another_library_are_kept(self) -> None:
        code = f"""
import torch
library = torch.library.Library("_", "IMPL")
library.fallback(lambda op, *args, **kwargs: None, "{KEY}")
from torchext import amp
from torchext.inference import inference_mode, normal_tensors
def is_included():
    return "{KEY}" in str(torch._C._dispatch_tls_local_include_set())
with inference_mode():
    torch._C._dispatch_tls_set_dispatch_key_included("{KEY}", True)
    with normal_tensors(), amp.autocast("cpu"):
        assert is_included()
assert is_included()
"""
        run_python(code)


class TestTakenKey:
    def test_disables_only_the_features_that_need_it(self) -> None:
        code = f"""
import torch
library = torch.library.Library("_", "IMPL")
library.fallback(lambda op, *args, **kwargs: None, "{KEY}")
from torchext import amp, fake
from torchext.deferred_init import deferred_init, materialize_module
from torchext.inference import inference_mode, to_normal, trace_origins

def refused(call):
    try:
        call()
    except RuntimeError as error:
        assert "need the dispatch key `{KEY}`, which already has a fallback" in str(error), error
        return True
    return False

model = torch.nn.Linear(2, 2)
assert refused(lambda: amp.to_amp(model)) and not any(map(amp.is_amp, model.parameters()))
assert refused(lambda: amp.autocast("cpu", self_cleaning=True).__enter__())
assert refused(lambda: inference_mode(trace=True).__enter__())
assert refused(trace_origins)
assert not torch.is_inference_mode_enabled() and not torch.is_autocast_enabled("cpu")
assert amp.to_normal(model) is model

x = torch.ones(1, 2)
with amp.autocast("cpu"):
    assert model(x).dtype == torch.bfloat16
    assert amp.full_precision(model.forward)(x).dtype == torch.float32
assert amp.autocast("cpu")(model.forward)(x).dtype == torch.float32
with inference_mode():
    y = model(x)
assert y.is_inference() and not to_normal(y).is_inference()
model(x).sum().backward()
assert fake.is_fake(fake.fake_like(model)(fake.fake_like(x)))
deferred = deferred_init(torch.nn.Linear, 2, 2)
materialize_module(deferred)
assert not fake.is_fake(deferred.weight)
print("done")
"""
        assert run_python(code) == "done\n"


@pytest.fixture(scope="module")
def some_backend(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """A library that attaches metadata to tensors, like backends of other libraries."""
    library = compiled("backend_metadata", tmp_path_factory.mktemp("backend"))
    for function in (library.give_metadata, library.has_metadata):
        function.argtypes = [ctypes.c_void_p]
    return library


@pytest.mark.ci  # compiles C++
class TestMetadataOfAnotherBackend:
    def test_wrapping_such_a_tensor_is_an_error(self, some_backend: ctypes.CDLL) -> None:
        x = torch.ones(2, 3)
        some_backend.give_metadata(x._cdata)
        with pytest.raises(RuntimeError, match=r"shape \[2, 3\].* already a `.*MetadataOfSomeBackend`.*Wrap a copy"):
            amp.to_amp(x)
        assert not amp.is_amp(x)
        assert some_backend.has_metadata(x._cdata)
        assert amp.is_amp(amp.to_amp(x.clone()))

    def test_module_with_such_a_parameter_is_unchanged(self, some_backend: ctypes.CDLL) -> None:
        model = nn.Linear(2, 2)
        some_backend.give_metadata(model.bias._cdata)
        with pytest.raises(RuntimeError, match="MetadataOfSomeBackend"):
            amp.to_amp(model)
        assert not any(map(amp.is_amp, model.parameters()))

    def test_operators_leave_such_results_ordinary(self, some_backend: ctypes.CDLL) -> None:
        x, written = amp.to_amp(torch.ones(2)), torch.zeros(2)
        some_backend.give_metadata(written._cdata)
        assert torch.add(x, written, out=written) is written
        assert not amp.is_amp(written)
        with amp.autocast("cpu", self_cleaning=True):
            assert not amp.is_amp(written.view(1, 2))
        assert some_backend.has_metadata(written._cdata)
        assert amp.to_normal(written) is written

    def test_tracing_does_not_record_their_origins(self, some_backend: ctypes.CDLL) -> None:
        with inference_mode():
            x = torch.ones(2)
        some_backend.give_metadata(x._cdata)
        with inference_mode(trace=True):
            view = x.view(1, 2)
            x.add_(1)
        assert origin(x) is None
        assert view.tolist() == [[2.0, 2.0]]
        assert some_backend.has_metadata(x._cdata)
