"""Changes public training programs so that they need more memory, and checks the line that a comparison names.

    python -m frameworks.public_programs FOLDER [PROGRAM ...]

Run it in the folder `test`. It clones the repositories into FOLDER at fixed commits, makes synthetic data, and runs
each program on fake GPUs, before and after each change. The programs are not modified otherwise. It needs git, GitHub
or clones that are already in FOLDER, numpy, and about a quarter of a minute for each run.

The exit code is 1 if a program fails, or another line is named first.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from torchext.dry_run import Difference, Report, compare, load_report

REPOSITORIES = {
    "nanoGPT": ("https://github.com/karpathy/nanoGPT", "3adf61e154c3fe3fca428ad6bc3818b27a3b8291"),
    "examples": ("https://github.com/pytorch/examples", "77f55b912142e11fcfdf5b530231fb9c52f181e8"),
}


class Change(NamedTuple):
    """A change of a program.

    Attributes:
        file: The file.
        old: The code before, a part of one line.
        new: The code after.
        line: The code of the line that the comparison has to name first, among the lines at the peak or the peaks of
            lines.
    """

    file: str
    old: str
    new: str
    line: str


class Program(NamedTuple):
    """A public training program.

    Attributes:
        folder: Its folder in a repository.
        arguments: The script and its arguments.
        world_size: The number of ranks; the last one runs.
        changes: Changes that raise its memory.
    """

    folder: str
    arguments: Sequence[str]
    world_size: int
    changes: Sequence[Change]


NORM = "x = self.transformer.ln_f(x)"
KEPT = "x = self.transformer.ln_f(x); self.kept = x.detach().repeat(8, 1, 1)"
WRAP = "fully_shard(layer, **fsdp_kwargs)"
PROGRAMS = {
    "nanoGPT": Program(
        "nanoGPT",
        ["train.py", "--dataset=synthetic", "--compile=False", "--batch_size=4", "--n_layer=4", "--eval_iters=1"],
        1,
        [
            Change("model.py", "logits = self.lm_head(x)\n", "logits = self.lm_head(x).float()\n", ".float()"),
            Change("model.py", "x = self.gelu(x)", "x = self.gelu(x.float())", "x = self.gelu(x.float())"),
            Change("model.py", NORM, KEPT, KEPT),
        ],
    ),
    "FSDP2": Program(
        "examples/distributed/FSDP2",
        ["example.py"],
        4,
        [
            Change("example.py", WRAP, "pass", "loss = model(x).sum()"),
            Change("example.py", WRAP, WRAP.replace(",", ", reshard_after_forward=False,"), "h = layer(h)"),
        ],
    ),
    "FSDP with TP": Program(
        "examples/distributed/tensor_parallelism",
        ["fsdp_tp_example.py"],
        8,
        [
            Change("fsdp_tp_example.py", "backward()", "backward(create_graph=True)", "create_graph=True"),
            Change("fsdp_tp_example.py", "output.sum()", "output.softmax(-1).log().sum()", "softmax"),
        ],
    ),
}


def clone(name: str, folder: Path) -> None:
    """Clone a repository at its commit, unless it is in `folder`."""
    url, commit = REPOSITORIES[name]
    if not (folder / name).exists():
        subprocess.run(["git", "clone", "--quiet", url, str(folder / name)], check=True)
        subprocess.run(["git", "-C", str(folder / name), "checkout", "--quiet", commit], check=True)


def make_data(folder: Path) -> None:
    """Write the tokens that nanoGPT reads."""
    path = folder / "nanoGPT" / "data" / "synthetic"
    path.mkdir(exist_ok=True)
    for seed, name in enumerate(("train.bin", "val.bin")):
        np.random.default_rng(seed).integers(0, 50257, 100_000, dtype=np.uint16).tofile(path / name)


def report_of(program: Program, folder: Path) -> Report:
    """Run the last rank of a program.

    Raises:
        RuntimeError: The program fails.
    """
    rank = ["--world-size", str(program.world_size), "--rank", str(program.world_size - 1)]
    path = folder / "report.json"
    flags = ["--quiet", "--no-flops", "--json", str(path), *(rank if program.world_size > 1 else [])]
    command = [sys.executable, "-m", "torchext", "dry-run", *flags, "--", *program.arguments]
    ended = subprocess.run(command, cwd=folder / program.folder, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise RuntimeError(ended.stdout + ended.stderr)
    return load_report(path)


@contextmanager
def changed(path: Path, change: Change) -> Iterator[None]:
    """Change the first matching line of a file in the block."""
    text = path.read_text(encoding="utf-8")
    if change.old not in text:
        raise ValueError(f"{path} has no line with {change.old!r}.")
    path.write_text(text.replace(change.old, change.new, 1), encoding="utf-8")
    try:
        yield
    finally:
        path.write_text(text, encoding="utf-8")


def named_lines(base: Report, head: Report) -> list[Difference]:
    """Return the lines that a comparison names first: those at the peak, and at any moment."""
    [device, *_] = compare(base, head).ranks[0].devices
    return [lines[0] for lines in (device.lines, device.line_peaks) if lines]


def main() -> None:
    """Run the programs that the command line names, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("programs", nargs="*", metavar="PROGRAM", help=f"of {', '.join(PROGRAMS)} (default: all)")
    options = parser.parse_args()
    folder = options.folder.resolve()
    folder.mkdir(exist_ok=True)
    for name in REPOSITORIES:
        clone(name, folder)
    make_data(folder)
    missed = 0
    for name in options.programs or PROGRAMS:
        program = PROGRAMS[name]
        base = report_of(program, folder)
        for change in program.changes:
            with changed(folder / program.folder / change.file, change):
                lines = named_lines(base, report_of(program, folder))
            is_named = any(change.line in line.code and line.growth > 0 for line in lines)
            missed += not is_named
            named = " / ".join(line.code for line in lines)
            print(f"{'named' if is_named else 'MISSED'}  {name}: {change.new.strip()}: {named}", flush=True)
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
