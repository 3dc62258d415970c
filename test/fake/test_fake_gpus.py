"""Descriptions of fake CUDA devices."""

from __future__ import annotations

import ast
import copy
import inspect
import pickle
import re
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

import forked
import pytest
import torch

from torchext import TorchextDeprecationWarning
from torchext.descriptions import as_fake_gpu
from torchext.fake import FakeGPU, fake_mode
from torchext.fake.cuda.devices import CACHED

pytestmark = pytest.mark.usefixtures("empty_devices")

GIB = 2**30


@pytest.fixture
def allocator_settings() -> Iterator[Callable[[str], None]]:
    """Set the options of PYTORCH_ALLOC_CONF."""
    yield torch._C._accelerator_setAllocatorSettings
    torch._C._accelerator_setAllocatorSettings("")


class TestDescriptions:
    @pytest.mark.parametrize(
        "name",
        ["H100-80GB", "h100", "H100-80", "NVIDIA H100", "NVIDIA H100 80GB HBM3", "H100_80gb", "Nvidia Tesla H100"],
    )
    def test_models_have_several_spellings(self, name: str) -> None:
        assert FakeGPU(name) == FakeGPU("H100-80GB")

    def test_of_one_model_the_memory_decides(self) -> None:
        assert FakeGPU("A100-40GB").memory < FakeGPU("A100-80GB").memory

    @pytest.mark.parametrize(
        ("name", "gib", "capability"),  # the memory that PyTorch prints in errors of published programs
        [
            ("T4", 14.75, (7, 5)),
            ("V100-16GB", 15.78, (7, 0)),
            ("V100", 31.75, (7, 0)),
            ("A10G", 22.19, (8, 6)),
            ("L40S", 44.42, (8, 9)),
            ("RTX 4090", 23.52, (8, 9)),
            ("B200", 178.36, (10, 0)),
            ("GB200", 184.31, (10, 0)),
        ],
    )
    def test_have_the_memory_of_the_real_ones(self, name: str, gib: float, capability: tuple[int, int]) -> None:
        gpu = FakeGPU(name)
        assert (round(gpu.memory / GIB, 2), gpu.capability) == (gib, capability)
        assert gpu.rates is not None

    @pytest.mark.parametrize(
        "name",
        [
            "MI300X",
            "AMD Instinct MI250X",
            "mi325x",
            "Radeon RX 7900 XTX",
            "Radeon9700",
            "gfx942",
            "gfx90a",
            "MI300X_192GB",
        ],
    )
    def test_of_amd_are_refused(self, name: str) -> None:
        with pytest.raises(ValueError, match="is an AMD GPU, which torchext does not support: the allocator of HIP"):
            FakeGPU(name, memory=GIB)

    def test_are_copied_with_their_sizes(self) -> None:
        gpu = FakeGPU("mine", memory="24GiB")
        for copied in (copy.copy(gpu), copy.deepcopy(gpu), pickle.loads(pickle.dumps(gpu)), replace(gpu)):
            assert copied == gpu
            assert copied.memory == 24 * GIB
        assert asdict(gpu)["memory"] == 24 * GIB
        assert str(inspect.signature(FakeGPU)).startswith("(name: 'str', count: 'int' = 1, memory: 'int | str' = 0,")

    def test_sizes_may_have_units(self) -> None:
        gpu = FakeGPU("mine", memory="24GiB", context="500MB")
        assert (gpu.memory, gpu.context) == (24 * GIB, 500 * 10**6)
        with pytest.raises(ValueError, match="`memory` expects a size such as '5GB' or '1GiB', got 'much'"):
            FakeGPU("mine", memory="much")

    def test_of_other_devices_give_their_memory(self) -> None:
        gpu = FakeGPU("mine", memory=GIB, capability=(7, 5), multiprocessors=40)
        assert (gpu.memory, gpu.capability, gpu.multiprocessors) == (GIB, (7, 5), 40)

    def test_of_unknown_models_are_refused(self) -> None:
        with pytest.raises(ValueError, match=r"Unknown GPU 'X9'\. Known models: .* pass FakeGPU\(name, memory=<bytes>"):
            FakeGPU("X9")

    @pytest.mark.parametrize("name", ["A10", "L40", "H20", "H"])  # all but the last are other GPUs that exist
    def test_part_of_a_number_or_a_single_letter_is_not_a_model(self, name: str) -> None:
        with pytest.raises(ValueError, match="Unknown GPU"):
            FakeGPU(name)

    def test_of_unknown_models_name_the_nearest(self) -> None:
        with pytest.raises(ValueError, match=r"Unknown GPU 'H1000-80GB'\. Did you mean H100-80GB\b"):
            FakeGPU("H1000-80GB")
        with pytest.raises(ValueError, match=r"Did you mean .*H200-141GB"):
            FakeGPU("H201")

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"count": 65}, "`count`: expected a number of devices from 1 to 64, got 65"),
            ({"memory": -1}, "`memory`: expected a number of at least 0, got -1"),
            ({"memory": 1.5 * 2**30}, "`memory`: expected a number of at least 0, got 1610612736.0"),
            ({"memory": float("inf")}, "`memory`: expected a number of at least 0, got inf"),
            ({"memory": b"24"}, "`memory`: expected a number of at least 0, got b'24'"),
            ({"context": True}, "`context`: expected a number of at least 0, got True"),
            ({"context": 10**12}, "has to be smaller than `memory`"),
        ],
        ids=str,
    )
    def test_with_impossible_numbers_are_refused(self, arguments: dict[str, object], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            FakeGPU("H100", **arguments)  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"name": 8}, "`name`: expected the name of a GPU, got 8"),
            ({"count": 1.5}, "`count`: expected an int, got 1.5"),
            ({"has_limit": "no"}, "`has_limit`: expected a bool, got 'no'"),
            ({"count": True}, "`count`: expected an int, got True"),
            ({"capability": 9}, r"`capability`: expected a pair of ints such as \(9, 0\), got 9"),
            ({"capability": ("9", "0")}, "`capability`: expected a pair of ints"),
        ],
        ids=str,
    )
    def test_with_wrong_types_are_refused(self, arguments: dict[str, object], message: str) -> None:
        with pytest.raises(TypeError, match=message):
            FakeGPU(**{"name": "H100", **arguments})  # type: ignore[arg-type]


class TestArguments:
    @pytest.mark.parametrize("gpu", ["H100-80GB", "H100", FakeGPU("H100-80GB")], ids=str)
    def test_gpu_is_a_name_or_a_description(self, gpu: str | FakeGPU) -> None:
        with fake_mode(gpu=gpu):
            assert torch.cuda.get_device_name() == "NVIDIA H100 80GB HBM3"

    @pytest.mark.parametrize("gpu", [True, 1, 3])
    def test_gpu_is_a_count(self, gpu: int) -> None:
        with fake_mode(gpu=gpu):
            assert torch.cuda.device_count() == int(gpu)

    @pytest.mark.parametrize("gpu", [None, False, 0])
    def test_none_and_zero_are_no_gpu(self, gpu: int | None) -> None:
        assert as_fake_gpu(gpu) is None

    def test_count_has_no_model_and_no_limit(self) -> None:
        described = as_fake_gpu(4)
        assert described is not None
        assert (described.count, described.name, described.has_limit) == (4, "torchext fake CUDA device", False)
        assert as_fake_gpu(True) == replace(described, count=1)

    @pytest.mark.parametrize("gpu", [1.5, [1]], ids=str)
    def test_other_types_are_refused(self, gpu: object) -> None:
        with pytest.raises(TypeError, match="`gpu`: expected the name of a model, a number of devices, or a FakeGPU"):
            as_fake_gpu(gpu)  # type: ignore[arg-type]

    def test_old_name_fake_cuda_warns(self) -> None:
        with pytest.warns(TorchextDeprecationWarning, match=r"`fake_mode\(fake_cuda=\)` is deprecated: use `gpu=`"):
            block = fake_mode(fake_cuda=2)  # type: ignore[call-arg]
        with block:
            assert torch.cuda.device_count() == 2


class TestDevices:
    def test_match_the_description_by_torch_cuda(self) -> None:
        with fake_mode(gpu=FakeGPU("L4", count=3)):
            properties = torch.cuda.get_device_properties(2)
            assert torch.cuda.device_count() == 3
            assert torch.cuda.get_device_name() == "NVIDIA L4"
            assert torch.cuda.get_device_capability() == (8, 9)
            assert properties.total_memory == FakeGPU("L4").memory

    def test_have_the_dtypes_of_real_ones(self) -> None:
        with fake_mode(gpu=True):
            supported = torch.accelerator.get_device_capability("cuda")["supported_dtypes"]
        assert {torch.float8_e4m3fn, torch.bfloat16, torch.complex64} <= supported

    def test_report_the_memory_in_use(self) -> None:
        with fake_mode(gpu=FakeGPU("mine", memory=GIB)):
            kept = torch.empty(GIB // 4, dtype=torch.uint8, device="cuda")
            assert torch.cuda.device_memory_used() == GIB // 4
            del kept

    def test_have_the_memory_that_is_left_by_the_context(self) -> None:
        with fake_mode(gpu=FakeGPU("mine", memory=GIB, context=GIB // 4)):
            assert torch.cuda.mem_get_info() == (3 * GIB // 4, GIB)

    def test_of_an_inner_block_are_its_own(self) -> None:
        with fake_mode(gpu=FakeGPU("L4")):
            with fake_mode(gpu=FakeGPU("A100-40GB")):
                assert torch.cuda.get_device_capability() == (8, 0)
            assert torch.cuda.get_device_capability() == (8, 9)

    def test_stay_as_they_were_for_a_backward_pass_after_the_block(self) -> None:
        with fake_mode(gpu=FakeGPU("mine", memory=GIB)):
            x = torch.ones(GIB // 16, device="cuda", requires_grad=True)
            y = (x * 2).sum()
        z = y * torch.ones((), device="cuda") if torch.cuda.is_available() else y
        z.backward()
        assert x.grad is not None
        assert x.grad.device.type == "cuda"


class TestMemory:
    def test_is_counted_as_pytorch_rounds_it(self) -> None:
        with fake_mode(gpu=True):
            small = torch.empty(100, device="cuda")
            large = torch.empty(3 * 2**20, device="cuda")
            assert torch.cuda.memory_allocated() == 512 + 12 * 2**20
            assert torch.cuda.memory_reserved() == 2 * 2**20 + 12 * 2**20
            del large
            torch.cuda.empty_cache()
            assert torch.cuda.memory_reserved() == 2 * 2**20
            assert torch.cuda.max_memory_allocated() == 512 + 12 * 2**20
            torch.cuda.reset_peak_memory_stats()
            assert torch.cuda.max_memory_allocated() == 512
            del small

    def test_runs_out_with_the_words_of_pytorch(self) -> None:
        with fake_mode(gpu=FakeGPU("mine", memory=2 * GIB)):
            kept = torch.empty(GIB // 2, dtype=torch.uint8, device="cuda")
            with pytest.raises(
                torch.cuda.OutOfMemoryError,
                match=r"CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 2.00 GiB of "
                r"which 1.50 GiB is free. Of the allocated memory 512.00 MiB is allocated by PyTorch",
            ):
                torch.empty(2 * GIB, dtype=torch.uint8, device="cuda")
            assert torch.cuda.memory_allocated() == GIB // 2
            assert torch.cuda.memory_stats()["num_ooms"] == 1
            del kept

    def test_does_not_run_out_on_devices_without_description(self) -> None:
        with fake_mode(gpu=True):
            total = torch.cuda.get_device_properties().total_memory
            model = [torch.empty(total // 4 * 3, dtype=torch.uint8, device="cuda") for _ in range(2)]
            assert torch.cuda.memory_allocated() > total
            assert torch.cuda.mem_get_info() == (0, total)
            del model

    def test_is_that_of_a_new_process_in_a_new_block(self) -> None:
        with fake_mode(gpu=True):
            torch.empty(2**20, device="cuda")
        with fake_mode(gpu=True):
            assert torch.cuda.max_memory_allocated() == 0
            assert torch.cuda.memory_reserved() == 0

    def test_of_tensors_from_another_block_counts(self) -> None:
        with fake_mode(gpu=True):
            left = torch.empty(2**20, device="cuda")
        with fake_mode(gpu=True):
            assert torch.cuda.memory_allocated() == 4 * 2**20
        del left

    def test_can_be_limited(self) -> None:
        with fake_mode(gpu=FakeGPU("mine", memory=GIB)):
            torch.cuda.set_per_process_memory_fraction(0.25)
            with pytest.raises(torch.OutOfMemoryError, match="256.00 MiB allowed"):
                torch.empty(GIB // 2, dtype=torch.uint8, device="cuda")

    def test_history_names_files_that_are_not_utf8(self) -> None:
        with fake_mode(gpu=True):
            torch.cuda.memory._record_memory_history(context="all")
            names = {"x": torch.ones(3, device="cuda")}
            exec(compile("y = x * 2\ndel x, y", "caf\udce9.py", "exec"), names)
            [trace] = torch.cuda.memory._snapshot()["device_traces"]
            torch.cuda.memory._record_memory_history(enabled=None)
        freed = [entry["frames"] for entry in trace if entry["action"] == "free_completed"]
        assert [frames[0]["filename"] for frames in freed] == ["caf\\udce9.py"] * 2

    def test_has_a_history(self) -> None:
        with fake_mode(gpu=True):
            torch.cuda.memory._record_memory_history()
            torch.empty(100, device="cuda")
            actions = [entry["action"] for entry in torch.cuda.memory._snapshot()["device_traces"][0]]
            torch.cuda.memory._record_memory_history(enabled=None)
        assert actions == ["segment_alloc", "alloc", "free_requested", "free_completed"]

    def test_has_a_history_with_the_functions_that_were_running(self) -> None:
        with fake_mode(gpu=True):
            torch.cuda.memory._record_memory_history(context="all")
            kept = torch.empty(100, device="cuda")
            torch.empty(200, device="cuda")
            snapshot = torch.cuda.memory._snapshot()
            torch.cuda.memory._record_memory_history(enabled=None)
            del kept
        actions = {entry["action"]: entry for entry in snapshot["device_traces"][0]}
        name = "test_has_a_history_with_the_functions_that_were_running"
        assert actions["alloc"]["frames"][0]["name"] == name
        assert actions["alloc"]["frames"][0]["filename"] == __file__
        assert actions["free_completed"]["frames"][0]["name"] == name
        blocks = [block for segment in snapshot["segments"] for block in segment["blocks"]]
        assert [bool(block["frames"]) for block in blocks] == [block["state"] != "inactive" for block in blocks]

    def test_can_be_described_while_garbage_is_collected(self) -> None:
        program = (
            "import gc\n"
            "import torch\n"
            "from torchext.fake import fake_mode\n"
            "with fake_mode(gpu=True):\n"
            "    kept = [torch.empty(100, device='cuda') for _ in range(2000)]\n"
            "    gc.collect()\n"
            "    gc.set_threshold(500)\n"
            "    cycle = [torch.empty(100, device='cuda')]\n"
            "    cycle.append(cycle)\n"
            "    del cycle\n"
            "    print(len(torch.cuda.memory._snapshot()['segments']))\n"
        )
        done = forked.run([sys.executable, "-c", program], check=True)
        assert done.stdout.strip() == "1"

    @pytest.mark.parametrize("context", [None, "alloc"])
    def test_has_a_history_with_the_requested_stacks(self, context: str | None) -> None:
        with fake_mode(gpu=True):
            torch.cuda.memory._record_memory_history(context=context)
            torch.empty(100, device="cuda")
            trace = torch.cuda.memory._snapshot()["device_traces"][0]
            torch.cuda.memory._record_memory_history(enabled=None)
        found = {entry["action"]: bool(entry["frames"]) for entry in trace}
        assert (found["alloc"], found["free_completed"]) == (context is not None, False)

    def test_fraction_is_returned(self) -> None:
        with fake_mode(gpu=FakeGPU("mine", memory=GIB)):
            assert torch.cuda.get_per_process_memory_fraction() == 1.0
            torch.cuda.set_per_process_memory_fraction(0.25)
            assert torch.cuda.get_per_process_memory_fraction() == 0.25

    def test_fraction_may_be_a_setting(self, allocator_settings: Callable[[str], None]) -> None:
        allocator_settings("per_process_memory_fraction:0.25")
        with (
            fake_mode(gpu=FakeGPU("mine", memory=GIB)),
            pytest.raises(torch.OutOfMemoryError, match="256.00 MiB allowed"),
        ):
            torch.empty(GIB // 2, dtype=torch.uint8, device="cuda")

    @pytest.mark.skipif(torch.version.cuda is not None, reason="a CUDA build parses these settings itself")
    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ("backend:cudaMallocAsync", "`backend:cudaMallocAsync` in PYTORCH_ALLOC_CONF is not simulated"),
            ("expandable:True", "Unrecognized key 'expandable' in Accelerator allocator config"),
            ("per_process_memory_fraction:2.0", "per_process_memory_fraction is invalid"),
            ("pinned_num_register_threads:3", "Number of register threads has to be power of 2, got 3"),
            ("pinned_num_register_threads:256", "register threads should be less than or equal to 128, got 256"),
            ("pinned_use_cuda_host_register:maybe", "Expected 'True' or 'False' at index 2"),
            ("throw_on_cudamalloc_oom:1", "Expected 'True' or 'False' at index 2"),
        ],
    )
    def test_settings_that_a_device_would_refuse_are_refused(
        self, allocator_settings: Callable[[str], None], settings: str, message: str
    ) -> None:
        allocator_settings(settings)
        with fake_mode(gpu=True):
            with pytest.raises(ValueError, match=message):
                torch.empty(1, device="cuda")
            # Where there are devices, they are refused before they are stored.
            allocator_settings("")
            with pytest.raises(ValueError, match=message):
                torch._C._accelerator_setAllocatorSettings(settings)
            assert torch.empty(1, device="cuda").is_cuda


class TestLibraries:
    """CUDA libraries that programs query."""

    def test_load_checkpoints_onto_the_device(self, tmp_path: Path) -> None:
        module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
        module[1].weight = module[0].weight
        torch.save(module.state_dict(), tmp_path / "weights.pt")
        with fake_mode(gpu=2):
            for location in ("cuda:1", torch.device("cuda", 1), {"cpu": "cuda:1"}, lambda storage, _: storage.cuda(1)):
                state = torch.load(tmp_path / "weights.pt", map_location=location)
                assert {str(tensor.device) for tensor in state.values()} == {"cuda:1"}
                assert state["0.weight"].shape == (3, 3)
                assert state["0.weight"].untyped_storage()._cdata == state["1.weight"].untyped_storage()._cdata
            assert torch.load(tmp_path / "weights.pt", map_location="cpu")["0.bias"].device.type == "cpu"

    def test_count_the_memory_of_loaded_tensors(self, tmp_path: Path) -> None:
        torch.save(torch.ones(2**20), tmp_path / "tensor.pt")
        with fake_mode(gpu=True):
            tensor = torch.load(tmp_path / "tensor.pt", map_location="cuda")
            assert torch.cuda.memory_allocated() == 4 * 2**20
            del tensor

    def test_mark_ranges_of_profilers(self) -> None:
        with fake_mode(gpu=True), torch.cuda.nvtx.range("step"), torch.cuda.profiler.profile():
            torch.cuda.nvtx.mark("here")
            torch.ones(2, device="cuda")

    def test_profile_without_warnings(self, capfd: pytest.CaptureFixture[str]) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with fake_mode(gpu=True), torch.profiler.profile(activities=activities, acc_events=True) as profile:
            torch.ones(2, device="cuda") + 1
        assert "aten::add" in {event.key for event in profile.key_averages()}
        assert "Failed to record" not in capfd.readouterr().err

    def test_answer_for_versions_and_settings(self) -> None:
        with fake_mode(gpu=2):
            assert torch.cuda.nccl.version() >= (2, 0)
            assert torch.cuda.can_device_access_peer(0, 1)
            torch.cuda.set_sync_debug_mode("warn")
            assert torch.cuda.get_sync_debug_mode() == 1
            torch.cuda.set_sync_debug_mode(0)
            torch.cuda.ipc_collect()

    @pytest.mark.parametrize(
        "use",
        [
            partial(torch.cuda.MemPool, object()),
            partial(torch.cuda.memory.CUDAPluggableAllocator, "allocator.so", "allocate", "free"),
            partial(torch.cuda.memory.change_current_allocator, None),
        ],
    )
    def test_refuse_other_allocators(self, use: Callable[[], object]) -> None:
        refused = pytest.raises(RuntimeError, match="only PyTorch's caching allocator")
        with fake_mode(gpu=True), refused:
            use()

    def test_do_not_disable_the_allocator(self) -> None:
        with fake_mode(gpu=True):
            torch.cuda.init()  # PyTorch ignores the call before
            torch.cuda.memory.caching_allocator_enable(True)
            with pytest.raises(RuntimeError, match=r"without caching_allocator_enable\(False\)"):
                torch.cuda.memory.caching_allocator_enable(False)

    def test_have_streams_of_their_class(self) -> None:
        with fake_mode(gpu=2):
            stream = torch.cuda.Stream(1)
            assert isinstance(stream, torch.cuda.Stream)
            assert isinstance(torch.cuda.current_stream(), torch.cuda.Stream)
            assert isinstance(stream.record_event(), torch.cuda.Event)
            assert torch.cuda.ExternalStream(stream.cuda_stream, device=1) == stream
            assert not isinstance(stream, torch.cuda.Event)

    def test_allocate_without_a_tensor(self) -> None:
        with fake_mode(gpu=2):
            stream = torch.cuda.Stream(1)
            addresses = [
                torch.cuda.caching_allocator_alloc(1000, 1),
                torch.cuda.caching_allocator_alloc(1000, 1, stream),
                torch.cuda.caching_allocator_alloc(1000, 1, stream.cuda_stream),
            ]
            assert len(set(addresses)) == 3
            assert torch.cuda.memory_allocated(1) == 3 * 1024
            assert torch.cuda.memory_allocated(0) == 0
            assert {segment["stream"] for segment in torch.cuda.memory_snapshot()} == {0, stream.cuda_stream}
            for address in addresses:
                torch.cuda.caching_allocator_delete(address)
            assert torch.cuda.memory_allocated(1) == 0
            with pytest.raises(RuntimeError, match="invalid device pointer"):
                torch.cuda.caching_allocator_delete(addresses[0])
            with pytest.raises(TypeError, match="Invalid type for stream argument"):
                torch.cuda.caching_allocator_alloc(1000, 1, "stream")

    def test_free_memory_without_a_tensor_after_the_last_block(self) -> None:
        with fake_mode(gpu=True):
            torch.cuda.caching_allocator_alloc(2**20)
        with fake_mode(gpu=True):
            assert torch.cuda.memory_allocated() == 0

    def test_have_default_generators(self) -> None:
        before = torch.cuda.default_generators
        with fake_mode(gpu=3):
            first = torch.cuda.default_generators[0]
            assert len(torch.cuda.default_generators) == 3
            assert torch.cuda.default_generators[-1].device == torch.device("cuda", 2)
            assert first in torch.cuda.default_generators
            assert repr(first) in repr(torch.cuda.default_generators)
            first.manual_seed(5)
            assert torch.cuda.initial_seed() == 5
            with ThreadPoolExecutor() as elsewhere:
                assert elsewhere.submit(lambda: len(torch.cuda.default_generators)).result() == len(before)
        assert torch.cuda.default_generators is before

    def test_have_no_generators_beyond_the_last_device(self) -> None:
        with fake_mode(gpu=2):
            state = torch.cuda.get_rng_state(1)
            for use in (lambda: torch.cuda.get_rng_state(2), lambda: torch.cuda.set_rng_state(state, 2)):
                with pytest.raises(IndexError, match="out of range"):
                    use()

    @pytest.mark.parametrize(("name", "has_units"), [("V100-32GB", False), ("A100-40GB", True)])
    def test_compute_in_bfloat16_without_emulation_if_they_have_units(self, name: str, has_units: bool) -> None:
        with fake_mode(gpu=name):
            assert torch.cuda.is_bf16_supported(including_emulation=False) is has_units
            assert torch.cuda.is_bf16_supported()

    @pytest.mark.skipif(not hasattr(torch.backends.cuda, "cublas_workspace_size"), reason="PyTorch before 2.14")
    @pytest.mark.parametrize("library", ["cublas", "cublaslt"])
    def test_return_the_size_of_workspaces_and_keep_it(self, library: str) -> None:
        size = getattr(torch.backends.cuda, f"{library}_workspace_size")
        with fake_mode(gpu=True):
            assert size() == size(size()) == {"cublas": 32 * 2**20, "cublaslt": 2**20}[library]
            with pytest.raises(RuntimeError, match=f"environment variable {library.upper()}_WORKSPACE"):
                size(2**21)

    def test_are_idle(self) -> None:
        with fake_mode(gpu=2):
            assert torch.cuda.utilization() == torch.cuda.power_draw(1) == torch.cuda.clock_rate() == 0
            assert torch.cuda.current_blas_handle() != 0
            with pytest.raises(RuntimeError, match="invalid device ordinal"):
                torch.cuda.utilization(2)

    def test_scale_gradients(self) -> None:
        with fake_mode(gpu=True):
            model = torch.nn.Linear(4, 4, device="cuda")
            optimizer = torch.optim.AdamW(model.parameters(), fused=True)
            scaler = torch.amp.GradScaler("cuda")
            scaler.scale(model(torch.ones(2, 4, device="cuda")).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            assert model.weight in optimizer.state


class TestCachedAnswers:
    """Answers about devices that PyTorch keeps for the life of the process."""

    # Cached functions that query devices, and whose answers may stay.
    KEPT: ClassVar = {
        "torch._dynamo.variables.torch.TorchInGraphFunctionVariable._get_handlers": "the functions that Dynamo handles",
        "torch._inductor.compile_fx._warn_tf32_disabled": "a warning that appears once",
        "torch._inductor.fx_passes.freezing_patterns.addmm_patterns_init": "adds patterns for all devices",
        "torch._inductor.fx_passes.fuse_attention._warn_tf32_disabled": "a warning that appears once",
        "torch._inductor.fx_passes.misc_patterns._misc_patterns_init": "patterns, by device",
        "torch._inductor.fx_passes.pad_mm._pad_mm_init": "patterns, by device",
        "torch._inductor.runtime.benchmarking.InductorBenchmarker.L2_cache_size": "an attribute of an object",
        "torch._inductor.select_algorithm.get_num_workers": "processes for compilers",
        "torch._inductor.utils._rocm_native_device_arch_name": "GPUs of AMD",
        "torch._inductor.utils.rocm_gfx_arch": "GPUs of AMD",
        "torch._inductor.utils.using_rocm_rdna3": "GPUs of AMD",
        "torch._subclasses.fake_tensor.init_gpu_context": "not called while devices are fake",
        "torch.overrides.get_testing_overrides": "signatures",
        "torch.utils._pallas.has_cuda_pallas": "JAX has no fake devices",
        "torch.utils._pallas.has_jax_cuda_backend": "JAX has no fake devices",
        "torch.xpu.get_device_capability": "GPUs of Intel",
    }
    QUERIES = re.compile(
        r"\b(get_device_(properties|capability|name)|is_available|device_count|has_triton|get_interface_for_device"
        r"|get_current_target|get_gpu_type|is_big_gpu|current_accelerator)\b"
    )

    def test_are_those_of_each_block(self) -> None:
        from torch._inductor.utils import is_big_gpu, using_b200

        assert not using_b200()
        with fake_mode(gpu=FakeGPU("B200")):
            assert using_b200()
            assert is_big_gpu()
            with fake_mode(gpu=FakeGPU("T4")):
                assert not using_b200()
                assert not is_big_gpu()
            assert using_b200()
        assert not using_b200()
        if find_spec("triton"):
            from torch.utils._triton import has_triton

            assert not has_triton()
            with fake_mode(gpu=FakeGPU("B200")):
                assert has_triton()
            assert not has_triton()

    @pytest.mark.ci
    def test_are_all_known(self) -> None:
        root = Path(torch.__file__).parent
        unknown = []
        for path in sorted(root.rglob("*.py")):
            source = path.read_text(errors="replace")
            parts = path.relative_to(root.parent).with_suffix("").parts
            if "cache" in source and self.QUERIES.search(source) and parts[1] not in ("testing", "distributed"):
                module = ".".join(parts).removesuffix(".__init__")
                listed = {*CACHED.get(module, ())}
                names = {name for name in self._cached_functions(source) if f"{module}.{name}" not in self.KEPT}
                unknown += [f"{module}.{name}" for name in sorted(names - listed)]
        assert not unknown

    def _cached_functions(self, source: str) -> Iterator[str]:
        """Yield the names of cached functions that query devices."""
        for node in ast.parse(source).body:
            members = node.body if isinstance(node, ast.ClassDef) else [node]
            for member in members:
                if (
                    isinstance(member, ast.FunctionDef)
                    and any("cache" in ast.unparse(decorator) for decorator in member.decorator_list)
                    and self.QUERIES.search("\n".join(map(ast.unparse, member.body)))
                ):
                    yield f"{node.name}.{member.name}" if isinstance(node, ast.ClassDef) else member.name


@pytest.mark.parametrize("mebibytes", [1600, 1900])
def test_backward_pass_that_runs_out_of_memory_leaves_nothing(mebibytes: int) -> None:
    with fake_mode(gpu=FakeGPU("A100-40GB", memory=mebibytes * 2**20)):
        x = torch.empty(64 * 2**20, device="cuda", requires_grad=True)
        held = torch.cuda.memory_allocated()
        with pytest.raises(torch.OutOfMemoryError):
            (x.exp() * x.sin().exp() * x.cos()).sum().backward()
        x.grad = None
        assert torch.cuda.memory_allocated() == held


@pytest.mark.parametrize("count", [1, 2])
def test_described_devices_are_refused_where_there_are_real_ones(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr("torchext._C.enter_fake_cuda", lambda count: None)
    with (
        pytest.raises(RuntimeError, match=r"A100-SXM4-40GB describes .* CUDA_VISIBLE_DEVICES= \(empty\)"),
        fake_mode(gpu=FakeGPU("A100-40GB", count=count)),
    ):
        pass
    with fake_mode(gpu=count):
        pass
