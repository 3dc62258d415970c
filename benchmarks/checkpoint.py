"""Compares writing and loading the initial checkpoint of a model with the usual ways.

Prints for each way the seconds, MiB per second, and the growth of resident memory. The first lines are limits: a plain
write of as many bytes, and computing without writing. The model is a Llama of transformers, in float32, in one file.

    python benchmarks/checkpoint.py [--gib N] [--max-memory SIZE] [--repeats N] [--folder FOLDER]

Each measurement is a separate process; times are medians. Written data is flushed to the disk. Files are read from the
system's cache. Loaded tensors are read once, so that mapped files are comparable.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from torchext import _C
from torchext.checkpoint import load_checkpoint, save_safetensors
from torchext.checkpoint.saving import planned
from torchext.deferred_init import deferred_init

LAYER = 4 * 2048 * 2048 + 3 * 2048 * 8192 + 2 * 2048  # parameters


def construct(gib: float) -> Any:
    """Return a Llama of about `gib` GiB."""
    import transformers

    transformers.logging.set_verbosity_error()
    layers = max(1, round(gib * 2**30 / 4 / LAYER))
    config = transformers.LlamaConfig(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=layers,
        num_attention_heads=16,
        vocab_size=1000,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config)


def nbytes_of(model: torch.nn.Module) -> int:
    """Return the size of all parameters."""
    return sum(parameter.nbytes for parameter in model.parameters())


def write_plainly(folder: Path, options: argparse.Namespace) -> None:
    """Write as many bytes from existing memory."""
    total, content = nbytes_of(deferred_init(construct, options.gib)), b"x" * (16 << 20)
    with (folder / "plain").open("wb") as file:
        for _ in range(total // len(content)):
            file.write(content)
        flush(file.fileno())


def flush(descriptor: int) -> None:
    """Flush to the disk."""
    os.fsync(descriptor)


def flushed(function: Callable[[], object], folder: Path) -> None:
    """Call the function, and flush the files that it has written."""
    function()
    for path in folder.iterdir():
        with path.open("rb") as file:
            flush(file.fileno())


def compute(folder: Path, options: argparse.Namespace) -> None:
    """Compute all pieces without writing."""
    model = deferred_init(construct, options.gib)
    plan = planned(model, folder, max_shard_size="1TB", max_memory=options.max_memory, dtype=None)
    memory = _C.RecycledMemory(plan.budget.slack)
    for pieces in plan.pieces.values():
        for _ in pieces.values(memory):
            pass


def save_ours(folder: Path, options: argparse.Namespace) -> None:
    """Save with torchext."""
    model = deferred_init(construct, options.gib)
    save_safetensors(model, folder, max_shard_size="1TB", max_memory=options.max_memory)


def save_file(folder: Path, options: argparse.Namespace) -> None:
    """Construct eagerly, and save with safetensors."""
    state = construct(options.gib).state_dict()
    state.pop("lm_head.weight")
    flushed(lambda: safetensors.torch.save_file(state, folder / "model.safetensors", {"format": "pt"}), folder)


def save_pretrained(folder: Path, options: argparse.Namespace) -> None:
    """Construct eagerly, and save with transformers."""
    model = construct(options.gib)
    flushed(lambda: model.save_pretrained(folder, max_shard_size="1TB"), folder)


def torch_save(folder: Path, options: argparse.Namespace) -> None:
    """Construct eagerly, and save with PyTorch."""
    state = construct(options.gib).state_dict()
    flushed(lambda: torch.save(state, folder / "model.pt"), folder)


def read(model: torch.nn.Module) -> None:
    """Read all tensors once."""
    for parameter in model.parameters():
        parameter.detach().view(torch.int32).max()


def load_ours(folder: Path, options: argparse.Namespace) -> None:
    """Load with torchext."""
    model = deferred_init(construct, options.gib)
    load_checkpoint(model, folder)
    read(model)


def load_file(folder: Path, options: argparse.Namespace) -> None:
    """Construct on the meta device, and load with safetensors."""
    with torch.device("meta"):
        model = construct(options.gib)
    model.load_state_dict(safetensors.torch.load_file(folder / "model.safetensors"), strict=False, assign=True)
    model.tie_weights()
    read(model)


def from_pretrained(folder: Path, options: argparse.Namespace) -> None:
    """Load with transformers."""
    import transformers

    transformers.logging.set_verbosity_error()
    read(transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32))


SAVING = [write_plainly, compute, save_ours, save_file, save_pretrained, torch_save]
LOADING = [load_ours, load_file, from_pretrained]
WAYS = {way.__name__: way for way in [*SAVING, *LOADING]}


def memory(name: str) -> float:
    """Return a memory statistic of this process, in MiB."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith(name))


def measure(name: str, folder: Path, options: argparse.Namespace) -> tuple[float, float, float]:
    """Return the seconds, the growth in MiB, and the MiB of the model."""
    warm = argparse.Namespace(gib=0.01, max_memory=options.max_memory)
    with tempfile.TemporaryDirectory() as small:
        save_ours(Path(small), warm)
        load_ours(Path(small), warm)  # first-use imports and checks
    size = nbytes_of(deferred_init(construct, options.gib)) / 2**20
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    start = time.perf_counter()
    WAYS[name](folder, options)
    return time.perf_counter() - start, memory("VmHWM") - before, size


def measure_apart(name: str, folder: Path, options: argparse.Namespace) -> tuple[float, float, float]:
    """Measure in a separate process."""
    command = [sys.executable, __file__, "--gib", str(options.gib), "--max-memory", options.max_memory]
    command += ["--measure", name, "--folder", str(folder)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    seconds, grown, size = json.loads(done.stdout.splitlines()[-1])
    return seconds, grown, size


def report(name: str, results: list[tuple[float, float, float]]) -> None:
    """Print a row of the table."""
    seconds = statistics.median(result[0] for result in results)
    grown = max(result[1] for result in results)
    size = results[0][2]
    print(f"| `{name}` | {seconds:.2f} | {size / seconds:,.0f} | {grown:,.0f} |", flush=True)


def main() -> None:
    """Measure all ways, or one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=8)
    parser.add_argument("--max-memory", default="256MiB")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="folder on the measured disk")
    parser.add_argument("--measure", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure, options.folder, options)))
        return
    print("| | seconds | MiB/s | memory grew by, MiB |\n| --- | ---: | ---: | ---: |")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        results: dict[str, list[tuple[float, float, float]]] = {way.__name__: [] for way in SAVING}
        for _ in range(options.repeats):
            for name, found in results.items():  # alternately, because disks change their speed
                found.append(measure_apart(name, new_folder(folder), options))
        for name, found in results.items():
            report(name, found)
        saved = new_folder(folder)
        save_ours(saved, options)
        deferred_init(construct, 0.01).config.save_pretrained(saved)
        config = json.loads((saved / "config.json").read_text())
        config["num_hidden_layers"] = max(1, round(options.gib * 2**30 / 4 / LAYER))
        (saved / "config.json").write_text(json.dumps(config))
        for way in LOADING:
            report(way.__name__, [measure_apart(way.__name__, saved, options) for _ in range(options.repeats)])


def new_folder(folder: str) -> Path:
    """Replace the folder by an empty one."""
    path = Path(folder, "checkpoint")
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    return path


if __name__ == "__main__":
    main()
