"""Libraries with their own kernels in a dry run: Triton and bitsandbytes, by packages with the same structure."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import forked
import pytest

# The launch code that Triton 3.4 to 3.9 have in common. Anything that needs a driver raises.
TRITON = {
    "triton/__init__.py": """
        from .runtime import driver
        from .runtime.autotuner import Autotuner, Config, Heuristics
        from .runtime.jit import JITFunction
        jit = JITFunction
        def autotune(configs, key):
            return lambda fn: Autotuner(fn, fn.arg_names, configs, key)
        def heuristics(values):
            return lambda fn: Heuristics(fn, fn.arg_names, values)
        """,
    "triton/runtime/__init__.py": "from .driver import driver",
    "triton/runtime/driver.py": """
        class DriverConfig:
            _active = None
            @property
            def active(self):
                if self._active is None:
                    raise RuntimeError("0 active drivers ([]). There should only be one.")
                return self._active
            def set_active(self, driver):
                self._active = driver
        driver = DriverConfig()
        """,
    "triton/backends/__init__.py": "",
    "triton/backends/compiler.py": """
        from dataclasses import dataclass
        @dataclass(frozen=True)
        class GPUTarget:
            backend: str
            arch: int
            warp_size: int
        """,
    "triton/runtime/jit.py": """
        import inspect
        from .driver import driver
        class KernelInterface:
            def __getitem__(self, grid):
                return lambda *args, **kwargs: self.run(grid=grid, warmup=False, *args, **kwargs)
        class JITFunction(KernelInterface):
            def __init__(self, fn):
                self.fn = fn
                self.__name__ = fn.__name__
                self.signature = inspect.signature(fn)
                self.arg_names = list(self.signature.parameters)
                self.pre_run_hooks = []
            def run(self, *args, grid, warmup, **kwargs):
                raise RuntimeError("libcuda.so cannot found!")
        """,
    "triton/runtime/autotuner.py": """
        from .jit import KernelInterface
        class Config:
            def __init__(self, kwargs, num_warps=4, pre_hook=None):
                self.kwargs, self.num_warps, self.pre_hook = kwargs, num_warps, pre_hook
            def all_kwargs(self):
                return {**self.kwargs, "num_warps": self.num_warps}
        class Autotuner(KernelInterface):
            def __init__(self, fn, arg_names, configs, keys):
                self.fn, self.arg_names, self.configs, self.keys, self.cache = fn, arg_names, configs, keys, {}
            def run(self, *args, **kwargs):
                raise RuntimeError("libcuda.so cannot found!")
        class Heuristics(KernelInterface):
            def __init__(self, fn, arg_names, values):
                self.fn, self.arg_names, self.values = fn, arg_names, values
            def run(self, *args, **kwargs):
                for name, value in self.values.items():
                    kwargs[name] = value({**dict(zip(self.arg_names, args)), **kwargs})
                return self.fn.run(*args, **kwargs)
        """,
}

KERNELS = """
    import json, torch, triton
    @triton.jit
    def scale(x, out, n, factor=2.0, BLOCK=128): raise AssertionError("a kernel runs")
    def report(**values): print(json.dumps(values))
"""


def run(tmp_path: Path, program: str, packages: dict[str, str]) -> list[Any]:
    """Run `program` in a world of eight GPUs. Return its output as JSON, and the remarks of the report."""
    for name, text in packages.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(dedent(text))
    (tmp_path / "program.py").write_text(dedent(program))
    start = """
        import json, runpy
        from torchext.dry_run import world
        from torchext.memory import track_memory
        with world(8, 3, values="raise") as job, track_memory():
            runpy.run_path("program.py")
        print(json.dumps(job.remarks))
    """
    command = [sys.executable, "-c", dedent(start)]
    done = forked.run(command, cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_launches_do_nothing_and_are_counted(tmp_path: Path) -> None:
    program = (
        dedent(KERNELS)
        + """
x = torch.ones(1000, device="cuda")
grids = []
for i in range(3):
    out = torch.empty_like(x)
    scale[lambda meta: grids.append(meta["BLOCK"] + meta["n"]) or (8,)](x, out, 1000, BLOCK=256, num_warps=8)
scale[(1, 1)](x, out, n=1000)
report(grids=grids, allocated=torch.cuda.memory_allocated(3))
"""
    )
    said, remarks = run(tmp_path, program, TRITON)
    assert said == {"grids": [1256] * 3, "allocated": 2 * 4096}
    assert remarks == ["Triton kernels were launched but not run, so their results have no values: 4 x scale."]


def test_launch_makes_known_values_of_its_arguments_unknown(tmp_path: Path) -> None:
    program = (
        dedent(KERNELS)
        + """
counter = torch.zeros((), device="cuda")
before, version = counter.item(), counter._version
scale[(1,)](counter, (torch.ones(3, device="cuda"), counter), 1)
try:
    after = counter.item()
except RuntimeError as error:
    after = type(error).__name__
report(before=before, after=after, is_same_version=version == counter._version)
"""
    )
    said, _ = run(tmp_path, program, TRITON)
    assert said == {"before": 0.0, "after": "DataDependentError", "is_same_version": True}


def test_descriptors_of_tensors_in_tuples_and_lists_are_arguments(tmp_path: Path) -> None:
    program = (
        dedent(KERNELS)
        + """
class Descriptor:
    def __init__(self, base):
        self.base = base
counters = [torch.zeros((), device="cuda") for _ in range(3)]
scale[(1,)]((Descriptor(counters[0]), [Descriptor(counters[1])]), Descriptor(counters[2]), 1)
after = []
for counter in counters:
    try:
        after.append(counter.item())
    except RuntimeError as error:
        after.append(type(error).__name__)
report(after=after)
"""
    )
    said, remarks = run(tmp_path, program, TRITON)
    assert said == {"after": ["DataDependentError"] * 3}
    assert remarks == ["Triton kernels were launched but not run, so their results have no values: 1 x scale."]


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("scale[(1,)](torch.ones(3), torch.ones(3), 3)", "Pointer argument (at 0) cannot be accessed from Triton"),
        ("scale[(1,)](torch.ones(3, device='cuda'))", "missing a required argument: 'out'"),
        ("scale[lambda meta: meta['SIZE']](torch.ones(3, device='cuda'), 1, 2)", "'SIZE'"),
    ],
    ids=["tensor-on-cpu", "missing-argument", "wrong-grid"],
)
def test_launch_raises_the_errors_of_a_real_one(call: str, message: str, tmp_path: Path) -> None:
    program = dedent(KERNELS) + f"\ntry: {call}\nexcept Exception as error: report(message=str(error))\n"
    said, _ = run(tmp_path, program, TRITON)
    assert message in said["message"]


def test_autotuner_and_heuristics_choose_without_measuring(tmp_path: Path) -> None:
    program = (
        dedent(KERNELS)
        + """
hooks, evens = [], []
first = triton.Config({"BLOCK": 64}, pre_hook=lambda nargs: hooks.append(nargs["BLOCK"]))
even = triton.heuristics({"factor": lambda a: evens.append(a["n"] % 2)})
tuned = triton.autotune([first, triton.Config({"BLOCK": 2})], key=["n"])(even(scale))
x = torch.ones(1000, device="cuda")
peaks = []
for n in (1000, 1000, 999):
    torch.cuda.reset_peak_memory_stats(3)
    tuned[lambda meta: (meta["BLOCK"],)](x, x, n)
    peaks.append(torch.cuda.max_memory_allocated(3) >> 20)
report(hooks=hooks, evens=evens, best=tuned.best_config.kwargs, peaks=peaks)
"""
    )
    said, remarks = run(tmp_path, program, TRITON)
    # `do_bench()` allocates a buffer of 256 MiB for each new key.
    assert said == {"hooks": [64] * 3, "evens": [0, 0, 1], "best": {"BLOCK": 64}, "peaks": [256, 0, 256]}
    assert "3 x scale" in remarks[0]


def test_driver_answers_for_the_fake_gpus_while_the_world_is_open(tmp_path: Path) -> None:
    program = """
        import json, torch, triton
        driver = triton.driver.active
        target = driver.get_current_target()
        count = driver.utils.get_device_properties(0)["multiprocessor_count"]
        print(json.dumps([target.backend, target.arch, driver.get_current_device(), count]))
        import atexit
        atexit.register(lambda: print(json.dumps(triton.driver._active)))
    """
    said, _, after = run(tmp_path, program, TRITON)
    assert said == ["cuda", 90, 3, 132]
    assert after is None


def test_number_of_the_current_stream_is_there_for_libraries(tmp_path: Path) -> None:
    program = """
        import json, torch
        raw = torch._C._cuda_getCurrentRawStream
        with torch.cuda.stream(torch.cuda.Stream(3)) as stream:
            inside = raw(3) == torch.cuda.current_stream(3).cuda_stream != 0
        print(json.dumps([raw(3), inside]))
    """
    said, _ = run(tmp_path, program, {})
    assert said == [0, True]


def test_paged_memory_is_refused(tmp_path: Path) -> None:
    packages = {
        "bitsandbytes/__init__.py": "from . import functional",
        "bitsandbytes/functional.py": "def get_paged(*shape, dtype=None, device=None): raise SystemExit(77)",
    }
    program = """
        import json, bitsandbytes
        try:
            bitsandbytes.functional.get_paged(4, 4)
        except RuntimeError as error:
            print(json.dumps(str(error)))
    """
    said, _ = run(tmp_path, program, packages)
    assert "Use the optimizer without paging, such as AdamW8bit" in said


def test_rank_that_checks_its_modules_against_rank_0_agrees(tmp_path: Path) -> None:
    packages = {
        "deepspeed/__init__.py": "",
        "deepspeed/runtime/__init__.py": "",
        "deepspeed/runtime/zero/__init__.py": "",
        "deepspeed/runtime/zero/utils.py": """
            import torch, torch.distributed as dist
            def assert_lst_len_same_as_other_ranks(lst):
                length = torch.tensor(len(lst) if dist.get_rank() == 0 else -1, dtype=int, device="cuda")
                dist.broadcast(length, src=0)
                if length.cpu().item() != len(lst):
                    raise RuntimeError(f"rank 0 has {length.cpu().item()}")
            def get_lst_from_rank0(lst):
                values = torch.tensor(lst if dist.get_rank() == 0 else [-1] * len(lst), dtype=int, device="cuda")
                dist.broadcast(values, src=0)
                return [t.item() for t in values.cpu()]
            def assert_ints_same_as_other_ranks(ints):
                assert_lst_len_same_as_other_ranks(ints)
                if ints != get_lst_from_rank0(ints):
                    raise RuntimeError("rank 0 has others")
            """,
    }
    program = """
        import json
        from deepspeed.runtime.zero.utils import assert_ints_same_as_other_ranks
        from torchext.dry_run.current import current
        assert_ints_same_as_other_ranks([3, 1, 2])
        print(json.dumps([(c.operator, c.bytes_sent) for c in current().recorder.collectives]))
    """
    sent, _ = run(tmp_path, program, packages)
    assert sent == [["broadcast", 8], ["broadcast", 24]]
