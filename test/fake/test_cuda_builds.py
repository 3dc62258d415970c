"""The functions that only CUDA builds of PyTorch have, on fake devices: `torch._C`, `torch.cuda`, `torch.backends`."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from torchext.fake import fake_mode
from torchext.fake.cuda.builds import ADDED, REFUSED, REPLACED, SETTINGS, TUNING

TORCH = Path(torch.__file__).parent
OWN_NAME = r"_(?:cuda|cudnn|nccl)_?[A-Za-z]\w*"

# Modules that `torch.backends.cudnn` imports when it is loaded, and a name that only the stub has.
NOT_CALLED = {"_cudnn", "_cuda_tunableop_get_rotation_buffer_size"}

in_cpu_builds = pytest.mark.skipif(torch._C._has_cuda, reason="a CUDA build has its own functions")


def names_of_this_release() -> set[str]:
    """Return the names that PyTorch's stub declares and that its Python code calls."""
    stub = (TORCH / "_C" / "__init__.pyi").read_text()
    names = set(re.findall(rf"^def ({OWN_NAME})\(", stub, re.MULTILINE))
    for folder in ("cuda", "backends", "accelerator", "_inductor", "_dynamo", "distributed", "nn", "utils"):
        for path in (TORCH / folder).rglob("*.py"):
            names |= set(re.findall(rf"\b_C\.({OWN_NAME})\(", path.read_text()))
    return names


def test_every_function_of_this_release_exists() -> None:
    names = names_of_this_release()
    assert len(names) > 80
    with fake_mode(gpu=True):
        missing = {name for name in names if not hasattr(torch._C, name)}
    assert missing <= NOT_CALLED


@in_cpu_builds
def test_functions_exist_while_devices_do() -> None:
    before = set(vars(torch._C))
    with fake_mode(gpu=True):
        assert set(vars(torch._C)) - before
    assert set(vars(torch._C)) == before


@in_cpu_builds
def test_other_threads_have_a_build_for_cpus() -> None:
    found: list[object] = []

    def look() -> None:
        found.extend((torch.cuda.is_available(), torch.cuda.device_count(), torch.cuda.get_arch_list()))
        for call in (torch.cuda.init, lambda: torch._C._cuda_getDevice()):
            try:
                call()
            except (AssertionError, AttributeError) as error:
                found.append(str(error))

    with fake_mode(gpu=True):
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    assert found == [
        False,
        0,
        [],
        "Torch not compiled with CUDA enabled",
        "module 'torch._C' has no attribute '_cuda_getDevice'",
    ]


@in_cpu_builds
@pytest.mark.parametrize(("message", "name"), [(message, name) for message in REFUSED for name in REFUSED[message]])
def test_functions_are_refused(message: str, name: str) -> None:
    with fake_mode(gpu=True), pytest.raises(RuntimeError, match=re.escape(message)):
        getattr(torch._C, name)()


# Calls as a CUDA build answers them: PyTorch 2.14 under the null driver, with two devices that nothing has used.
CALLS: dict[str, object] = {
    "cuda.can_device_access_peer(0, 1)": True,
    "cuda.can_device_access_peer(1, 1)": False,
    "cuda.current_device()": 0,
    "cuda.get_sync_debug_mode()": 0,
    "cuda.is_current_stream_capturing()": False,
    "cuda.memory.caching_allocator_enable(True)": None,
    "cuda.memory.get_allocator_backend()": "native",
    "cuda.memory.get_per_process_memory_fraction(1)": 1.0,
    "cuda.memory._get_memory_metadata()": "",
    "cuda.memory_snapshot((0, 5))": [],
    "cuda.memory_stats(1)['num_ooms']": 0,
    "cuda.tunable.get_filename()": "",
    "cuda.tunable.get_max_tuning_duration()": 30,
    "cuda.tunable.get_max_tuning_iterations()": 100,
    "cuda.tunable.get_results()": (),
    "cuda.tunable.is_enabled()": False,
    "cuda.tunable.read_file('none.csv')": False,
    "cuda.tunable.record_untuned_is_enabled()": False,
    "cuda.tunable.tuning_is_enabled()": True,
    "cuda._sleep(100)": None,
    "cuda.ipc_collect()": None,
    "cuda.synchronize(1)": None,
    "backends.cuda.cufft_plan_cache.max_size": 4096,
    "backends.cuda.cufft_plan_cache[1].clear()": None,
    "_C._cuda_clearCublasWorkspaces()": None,
    "_C._cuda_cudaCachingAllocator_is_enabled()": True,
    "_C._cuda_get_cudnn_benchmark_limit()": 10,
    "_C._cuda_getCublasLtWorkspaceSize()": 1 << 20,
    "_C._cuda_getCublasWorkspaceSize()": 32 << 20,
    "_C._cuda_getCurrentStream(1)": (0, 1, 1),
    "_C._cuda_getDefaultStream(1)": (0, 1, 1),
    "_C._cuda_getDeviceCount()": 2,
    "_C._cuda_isHistoryEnabled()": False,
    "_C._cuda_isInBadFork()": False,
    "_C._cuda_memorySnapshot(None)['device_traces']": [[], []],
}


@pytest.mark.parametrize("call", CALLS)
def test_call_is_answered_as_by_a_cuda_build(call: str) -> None:
    with fake_mode(gpu=2):
        torch.cuda.init()
        assert eval(f"torch.{call}", {"torch": torch}) == CALLS[call]


@in_cpu_builds
@pytest.mark.parametrize(
    "name",
    sorted(name for name in TUNING | SETTINGS if "_set_" in name or name.endswith("_enable")),
)
def test_setting_refuses_another_type(name: str) -> None:
    with fake_mode(gpu=True), pytest.raises(RuntimeError, match=f"{name[1:]} expects a .*, but got list"):
        getattr(torch._C, name)([])


def test_tunable_operators_that_would_measure_are_refused() -> None:
    with fake_mode(gpu=True):
        with pytest.raises(RuntimeError, match="TunableOp measures kernels.*tuning_enable"):
            torch.cuda.tunable.enable()
        torch.cuda.tunable.tuning_enable(False)
        torch.cuda.tunable.enable()
        with pytest.raises(RuntimeError, match="TunableOp measures kernels"):
            torch.cuda.tunable.tuning_enable()
        assert torch.cuda.tunable.is_enabled()
        torch.cuda.tunable.enable(False)
        torch.cuda.tunable.tuning_enable()


def test_settings_are_checked_as_by_pytorch() -> None:
    with fake_mode(gpu=True):
        with pytest.raises(RuntimeError, match="expected one of 0,1,2"):
            torch._C._cuda_set_sync_debug_mode(7)
        with pytest.raises(RuntimeError, match="cuFFT plan cache size must be non-negative, but got -5"):
            torch.backends.cuda.cufft_plan_cache[0].max_size = -5
        torch.cuda.tunable.set_max_tuning_duration(-5)
        assert torch.cuda.tunable.get_max_tuning_duration() == 0


def test_environment_that_tunes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_TUNABLEOP_ENABLED", "1")
    with pytest.raises(RuntimeError, match=r"TunableOp measures kernels.*unset it"), fake_mode(gpu=True):
        pass
    monkeypatch.setenv("PYTORCH_TUNABLEOP_TUNING", "0")
    with fake_mode(gpu=True):
        torch.cuda.tunable.enable(False)
        torch.cuda.tunable.tuning_enable()
        assert torch.cuda.tunable.is_enabled()
        assert not torch.cuda.tunable.tuning_is_enabled()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: torch.cuda.Event().ipc_handle(), "cannot be shared with other processes"),
        (lambda: torch.cuda.Event.from_ipc_handle(0, b""), "no events of other processes"),
        (lambda: torch.backends.cuda.cufft_plan_cache.size, "number of cached cuFFT plans is unknown"),
        (lambda: torch.backends.cuda.cublas_workspace_size(5), "Set the environment variable CUBLAS_WORKSPACE_CONFIG"),
    ],
)
def test_question_about_the_driver_is_refused(call: Callable[[], Any], message: str) -> None:
    if message.startswith("Set") and not hasattr(torch.backends.cuda, "cublas_workspace_size"):
        pytest.skip("new in PyTorch 2.13")
    with fake_mode(gpu=True), pytest.raises(RuntimeError, match=message):
        call()


FIRST_USE = """
import torch
from torchext.fake import fake_mode
with fake_mode(gpu=True):
    assert not torch.cuda.is_initialized()
    assert torch.cuda.memory_allocated() == 0
    kept = torch.ones(3, device="cuda")
    assert torch.cuda.is_initialized()
    assert torch.cuda.memory_allocated() == 512
with fake_mode(gpu=True):
    assert torch.cuda.is_initialized()
    assert torch.cuda.memory_allocated() == 512
    del kept
"""


@pytest.mark.ci  # starts Python anew: tensors of other tests would be on the devices
def test_devices_are_initialized_by_their_first_use() -> None:
    subprocess.run([sys.executable, "-c", FIRST_USE], check=True)


def test_external_stream_is_the_same_stream() -> None:
    with fake_mode(gpu=2):
        stream = torch.cuda.Stream(1)
        assert torch.cuda.get_stream_from_external(stream.cuda_stream, 1) == stream
        with torch.cuda.stream(stream):
            assert torch.cuda.current_stream() == stream
        assert torch.cuda.current_device() == 0


# The values of PyTorch 2.14 under the null driver.
def test_pinned_memory_is_counted_as_by_the_host_allocator() -> None:
    with fake_mode(gpu=True):
        torch.cuda.init()
        first, second = (torch.empty(count, pin_memory=True) for count in (1000, 5000000))
        del first
        stats = torch.cuda.memory.host_memory_stats_as_nested_dict()
        assert stats["num_host_alloc"] == stats["allocations"]["current"] == 2
        assert stats["active_requests"] == {"current": 1, "peak": 2, "allocated": 2, "freed": 1}
        assert stats["allocated_bytes"] == {"current": 33558528, "peak": 33558528, "allocated": 33558528, "freed": 0}
        assert stats["active_bytes"] == {"current": 33554432, "peak": 33558528, "allocated": 33558528, "freed": 4096}
        torch.cuda.memory.reset_peak_host_memory_stats()
        assert torch.cuda.host_memory_stats()["active_bytes.peak"] == 33554432
        torch._C._host_emptyCache()
        assert torch.cuda.host_memory_stats()["allocated_bytes.current"] == 33554432
        torch.cuda.memory.reset_accumulated_host_memory_stats()
        assert torch.cuda.host_memory_stats()["allocated_bytes.freed"] == 0
        del second


def test_observers_are_called_before_the_error() -> None:
    seen: list[tuple[int, ...]] = []
    with fake_mode(gpu="L4"):
        torch._C._cuda_attach_out_of_memory_observer(lambda *numbers: seen.append(numbers))
        torch.cuda.set_per_process_memory_fraction(0.5)
        total = torch.cuda.get_device_properties().total_memory
        free, _ = torch.cuda.mem_get_info()
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(1 << 40, device="cuda")
        torch.cuda.set_per_process_memory_fraction(1.0)
        assert seen == [(0, 1 << 42, total // 2, free)]
    with fake_mode(gpu="L4"), pytest.raises(torch.OutOfMemoryError):
        torch.empty(1 << 40, device="cuda")
    assert len(seen) == 1


def test_snapshots_show_metadata_and_frames() -> None:
    with fake_mode(gpu=True):
        torch.cuda.memory._record_memory_history()
        torch.cuda.memory._set_memory_metadata("step 1")
        kept = torch.ones(3, device="cuda")
        torch.cuda.memory._set_memory_metadata("")
        trace = torch.cuda.memory._snapshot()["device_traces"][0]
        [*_, made] = [one for one in trace if one["action"] == "alloc"]  # fakes of other tests may be freed at any time
        frames = torch._C._cuda_allocationTraceback(made["addr"])
        torch.cuda.memory._record_memory_history(enabled=None)
        assert made["user_metadata"] == "step 1"
        assert frames[0]["name"] == "test_snapshots_show_metadata_and_frames"
        assert torch._C._cuda_allocationTraceback(made["addr"]) is None
        del kept


def test_clearing_workspaces_frees_them() -> None:
    with fake_mode(gpu=12), torch.cuda.device(11):  # which no other test uses
        matrix = torch.ones(64, 64, device="cuda")
        before = torch.cuda.memory_allocated()
        matrix @ matrix
        assert torch.cuda.memory_allocated() > before
        torch._C._cuda_clearCublasWorkspaces()
        assert torch.cuda.memory_allocated() == before


def test_each_function_has_one_answer() -> None:
    assert not REPLACED.keys() & ADDED.keys()


def test_settings_end_with_the_devices() -> None:
    with fake_mode(gpu=True):
        torch.cuda.memory._set_memory_metadata("step")
        torch._C._cuda_tunableop_set_filename("file", False)
        torch.backends.cuda.cufft_plan_cache[0].max_size = 7
    with fake_mode(gpu=True):
        assert torch.cuda.memory._get_memory_metadata() == ""
        assert torch._C._cuda_tunableop_get_filename() == ""
        assert torch.backends.cuda.cufft_plan_cache[0].max_size == 4096


def test_host_cache_of_the_accelerator_is_emptied() -> None:
    if not hasattr(torch.accelerator.memory, "empty_host_cache"):
        pytest.skip("new in PyTorch 2.13")
    with fake_mode(gpu=True):
        torch.empty(1000, pin_memory=True)
        torch.accelerator.memory.empty_host_cache()


def test_calls_until_the_first_use_run() -> None:
    called: list[int] = []
    before = list(torch.cuda._queued_calls)
    with fake_mode(gpu=True):
        torch.cuda._lazy_call(lambda: called.append(1))
    assert called == [1]
    assert torch.cuda._queued_calls == before


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
@pytest.mark.parametrize(
    "call",
    [
        lambda: torch.cuda.current_stream().stream_id,
        torch.cuda.memory_allocated,
        torch.accelerator.current_device_index,
    ],
)
def test_compiled_functions_break_at_calls(call: Callable[[], int]) -> None:
    """Dynamo calls `torch.accelerator.current_stream()` at each graph break."""

    @torch.compile(backend="eager")
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        torch._dynamo.graph_break()
        return y + call()

    with fake_mode(gpu=1):
        assert function(torch.ones(2)).shape == (2,)
