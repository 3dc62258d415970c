"""Compares the memory of programs on fake GPUs with PyTorch's allocator in a CUDA build.

    make oracle                                         # all programs, without a GPU
    cd test && python -m oracle.compare                 # all programs, on a GPU
    cd test && python -m oracle.compare gpt compiled:gpt
    cd test && python -m oracle.compare --gpu=A100-80GB
    cd test && python -m oracle.compare --events=gpt    # where the allocations of a program differ

Needs a CUDA build of PyTorch, for this Python or in ORACLE_PYTHON, and that GPU, or in NULLCUDA the path of the null
driver. A program runs in two processes, each for three steps: on fakes, and with the real host code, the real
allocator, and, on a machine without a GPU, kernels that do nothing. cuDNN is disabled, because neither can determine
its allocations.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TEST = Path(__file__).resolve().parent.parent
STEPS = 3
COMPILED = "compiled:"  # the first part of the names of programs whose model is compiled
# Programs that call parts of their model, or differentiate twice.
NOT_COMPILED = ("lstm_cell", "gru_cell", "graph", "lstm", "gru_both_ways", "bags", "sampling", "penalty")
GPU = "ORACLE_GPU"  # the variable of the environment with the name of the GPU
# In percent. Larger differences are failures.
ALLOCATED_BOUND = 0.5
RESERVED_BOUND = 1.0


@dataclass(frozen=True)
class Peaks:
    """The largest number of bytes in each step."""

    allocated: list[int]
    reserved: list[int]


@contextlib.contextmanager
def world(*, is_fake: bool) -> Iterator[None]:
    """Return the GPU of the programs."""
    import torch

    with contextlib.ExitStack() as block:
        block.enter_context(torch.backends.cudnn.flags(enabled=False))
        block.callback(torch.backends.cuda.enable_cudnn_sdp, torch.backends.cuda.cudnn_sdp_enabled())
        torch.backends.cuda.enable_cudnn_sdp(False)
        if is_fake:
            from torchext.fake import FakeGPU, fake_mode
            from torchext.fake.values import assuming_values

            block.enter_context(fake_mode(gpu=FakeGPU(os.environ[GPU])))
            block.enter_context(assuming_values())
        else:
            torch.cuda.init()
        yield


def step_of(name: str) -> Any:
    """Construct a program, and return the function that makes a step of it."""
    from oracle.compiled_programs import COMPILED_PROGRAMS
    from oracle.programs import PROGRAMS
    from oracle.training import compiling

    is_compiled = name.startswith(COMPILED)
    if is_compiled:
        import torch._inductor.config

        torch._inductor.config.shape_padding = False  # timing decides, and kernels of the null driver take no time
    name = name.removeprefix(COMPILED)
    if name in COMPILED_PROGRAMS:
        return COMPILED_PROGRAMS[name]()
    with compiling() if is_compiled else contextlib.nullcontext():
        return PROGRAMS[name]()


def run_peaks(name: str, *, is_fake: bool) -> Peaks:
    """Run a program in this process."""
    import torch

    peaks = Peaks([], [])
    with world(is_fake=is_fake):
        step = step_of(name)
        for _ in range(STEPS):
            torch.cuda.reset_peak_memory_stats()
            step()
            peaks.allocated.append(torch.cuda.max_memory_allocated())
            peaks.reserved.append(torch.cuda.max_memory_reserved())
    return peaks


def run_events(name: str, *, is_fake: bool) -> list[str]:
    """Return the allocator's actions in the construction and the first two steps, one per line."""
    import torch

    with world(is_fake=is_fake):
        torch.cuda.memory._record_memory_history(max_entries=10**7, context=None)
        step = step_of(name)
        step()
        step()
        trace = torch.cuda.memory._snapshot()["device_traces"][0]
    numbers: dict[int, int] = {}
    lines: list[str] = []
    for event in trace:
        if event["action"] == "alloc":
            numbers[event["addr"]] = len(lines)
            lines.append(f"+{event['size']}")
        elif event["action"] == "free_requested":
            birth = numbers[event["addr"]]
            lines.append(f"-{event['size']} of {lines[birth]}")
    return lines


def environment(*, is_fake: bool) -> dict[str, str]:
    """Return the child's environment: fakes see no GPU, a real program uses that of the machine or the null driver."""
    if is_fake:
        return dict(os.environ, TORCHEXT_ORACLE_CHILD="fake", CUDA_VISIBLE_DEVICES="")
    driver = os.environ.get("NULLCUDA")
    if driver is None:
        return dict(os.environ, TORCHEXT_ORACLE_CHILD="real")
    folder = Path(driver.rpartition(":")[2]).parent
    compiler = {f"{name}_CACHE_DIR": f"{folder}/{name.lower()}" for name in ("TRITON", "TORCHINDUCTOR")}
    compiler |= {"TRITON_LIBCUDA_PATH": str(folder), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    return dict(os.environ, TORCHEXT_ORACLE_CHILD="real", LD_PRELOAD=driver, **compiler, **null_gpu(os.environ[GPU]))


def null_gpu(name: str) -> dict[str, str]:
    """Return the variables with which the null driver simulates this GPU."""
    from torchext.descriptions import FakeGPU

    gpu = FakeGPU(name)
    described = {
        "TOTAL": gpu.memory,
        "SMS": gpu.multiprocessors,
        "THREADS_PER_SM": gpu.max_threads_per_multiprocessor,
        "CAPABILITY": 10 * gpu.capability[0] + gpu.capability[1],
        "L2_CACHE": gpu.l2_cache,
        "SHARED_MEMORY": gpu.shared_memory_per_block_optin,
    }
    return {f"NULLCUDA_{name}": str(value) for name, value in described.items()}


def why_impossible() -> str | None:
    """Return the missing requirement if there is neither a GPU nor a null driver."""
    import torch

    if "NULLCUDA" in os.environ or torch.cuda.is_available():
        return None
    return (
        "there is no GPU, so NULLCUDA must be the path of the library that stands in for the driver of CUDA: "
        "`test/cuda_host/build_null_driver python FOLDER` makes FOLDER/libnullcuda.so."
    )


def in_process(name: str, *, is_fake: bool, events: bool = False) -> Any:
    """Return the result of a program in a new process."""
    python = sys.executable if is_fake else os.environ.get("ORACLE_PYTHON", sys.executable)
    arguments = [python, "-m", "oracle.compare", *([f"--events={name}"] if events else [name])]
    variables = environment(is_fake=is_fake)
    done = subprocess.run(arguments, cwd=TEST, env=variables, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{name}, {'fake' if is_fake else 'real'}: {done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def show_events(name: str, context: int = 12) -> None:
    """Print the differing actions of both allocators."""
    real, fake = (in_process(name, is_fake=is_fake, events=True) for is_fake in (False, True))
    print("\n".join(difflib.unified_diff(real, fake, "CUDA build", "fakes", n=context, lineterm="")))


def release() -> str:
    """Return the release of PyTorch, such as `2.15`."""
    import torch

    return ".".join(torch.__version__.split(".")[:2])


def differences(real: list[int], fake: list[int]) -> float:
    """Return the largest difference of a step, in percent."""
    return max(((f - r) / r * 100 for r, f in zip(real, fake, strict=True)), key=abs)


def shown(percent: float) -> str:
    return "to the byte" if percent == 0 else f"{percent:+.3f} %"


def both(name: str) -> tuple[Peaks, Peaks] | RuntimeError:
    """Return the peaks of a program, real and fake, or the reason why there are no peaks."""
    try:
        if name.startswith(COMPILED):
            in_process(name, is_fake=False)  # measures configurations of kernels, which needs memory, and caches them
        return Peaks(**in_process(name, is_fake=False)), Peaks(**in_process(name, is_fake=True))
    except RuntimeError as error:
        return error


def compare(names: list[str], jobs: int, record: Path | None) -> bool:
    """Print a table, and return whether all programs are within the bounds. Write the real peaks to `record`."""
    print("| program | allocated (MiB) | difference | reserved (MiB) | difference |\n| --- | --: | --: | --: | --: |")
    is_good = True
    for name, peaks in zip(names, ThreadPoolExecutor(jobs).map(both, names), strict=True):
        if isinstance(peaks, RuntimeError):
            print(f"| {name} | failed | | | |\n{peaks}", flush=True)
            is_good = False
            continue
        real, fake = peaks
        if record is not None:
            with record.open("a", encoding="utf-8") as file:
                print(release(), os.environ[GPU], name, *real.allocated, *real.reserved, sep="\t", file=file)
        allocated = differences(real.allocated, fake.allocated)
        reserved = differences(real.reserved, fake.reserved)
        is_good = is_good and abs(allocated) <= ALLOCATED_BOUND and abs(reserved) <= RESERVED_BOUND
        mib = [f"{max(peaks) / 2**20:.1f}" for peaks in (real.allocated, real.reserved)]
        print(f"| {name} | {mib[0]} | {shown(allocated)} | {mib[1]} | {shown(reserved)} |", flush=True)
    return is_good


def compiled_programs() -> list[str]:
    """Return the names of the programs that are compiled."""
    from oracle.compiled_programs import COMPILED_PROGRAMS
    from oracle.programs import PROGRAMS

    return [f"{COMPILED}{name}" for name in [*COMPILED_PROGRAMS, *PROGRAMS] if name not in NOT_COMPILED]


def main() -> int:
    from oracle.programs import PROGRAMS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("programs", nargs="*", help="of programs.py; all by default")
    parser.add_argument("--jobs", type=int, default=1, help="how many programs run at once")
    parser.add_argument("--gpu", default=os.environ.get(GPU, "H100-80GB"), help="the model of the GPU")
    parser.add_argument("--record", metavar="FILE", type=Path, help="append the peaks in the CUDA build to a file")
    parser.add_argument("--events", metavar="PROGRAM", help="show where the allocations of a program differ")
    given = parser.parse_args()
    os.environ[GPU] = given.gpu
    child = os.environ.get("TORCHEXT_ORACLE_CHILD")
    if child is not None:
        is_fake = child == "fake"
        name = given.events or given.programs[0]
        result = run_events(name, is_fake=is_fake) if given.events else vars(run_peaks(name, is_fake=is_fake))
        print(json.dumps(result), flush=True)
        os._exit(0)  # an autograd thread that still runs may crash the process at its end
    if (reason := why_impossible()) is not None:
        parser.error(reason)
    if given.events:
        show_events(given.events)
        return 0
    names = given.programs or [*PROGRAMS, *compiled_programs()]
    return 0 if compare(names, given.jobs, given.record) else 1


if __name__ == "__main__":
    sys.exit(main())
