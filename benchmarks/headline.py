"""Measure the headline results, and write them to the README and docs/reference/results.md.

    python benchmarks/headline.py [ROW ...]     # measure the given rows (default: all that need no GPU)
    python benchmarks/headline.py --check       # exit with 1 if a page differs from docs/reference/results.json

Each row runs its command, takes the value from the output, and is stored in docs/reference/results.json with the date,
the hardware and the versions. The two pages are rendered from that file, so they cannot disagree.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "reference" / "results.json"
PAGE = RESULTS.with_suffix(".md")
README = ROOT / "README.md"
BEGIN, END = "<!-- results: benchmarks/headline.py -->\n", "<!-- end of results -->"
SHARD = (
    "python examples/sharded_llama.py --world 512 --rank 300 --tensor 8 --hidden 4096 --layers 32 --vocabulary 128256"
)


@dataclass(frozen=True)
class Row:
    """A result: its title, the command that measures it, and a function that finds the value in the output."""

    title: str
    command: str
    value: Callable[[str], str]
    in_readme: bool = True
    needs: str = ""
    """The required hardware or software. Such rows are measured only if they are named."""


def found(pattern: str, output: str) -> re.Match[str]:
    """Return the first match. Exits with the output if nothing matches."""
    match = re.search(pattern, output, re.M)
    return match if match is not None else sys.exit(f"The output does not match {pattern!r}:\n{output}")


def _construction(output: str) -> str:
    match = found(r"6\.74 B parameters.*\n\s+deferred construction\s+([\d.]+) s\s+(\d+) MiB", output)
    return f"{match[1]} s and {match[2]} MiB instead of 27 GB"


def _shard(output: str) -> str:
    match = found(r"holds ([\d.]+) of ([\d.,]+) MiB: ([\d.]+) s, memory grew by (\d+) MiB", output)
    return f"{match[3]} s and {match[4]} MiB for a shard of {match[1]} MiB (whole model: {match[2]} MiB)"


def _oracle(output: str) -> str:
    rows = re.findall(r"^\| \w+ \| .*\|$", output, re.M)
    allocated, reserved = (sum(row.split("|")[column].strip() == "to the byte" for row in rows) for column in (3, 5))
    return f"equal to the byte: reserved {reserved} of {len(rows)}, allocated {allocated} of {len(rows)}"


def _public_models(output: str) -> str:
    match = found(r"test_public_models\.py` \|.*\| ([\d,]+) \| 0 \|", output)
    return f"{match[1]} of {match[1]} models equal, bit for bit"


def _faster(pattern: str) -> Callable[[str], str]:
    def value(output: str) -> str:
        return f"{1 / float(found(pattern, output)[1]):.1f}x faster"

    return value


ROWS = {
    "bits": Row(
        "Initial values on CUDA, compared with eager construction (torchvision, timm, transformers)",
        "make gpu",
        _public_models,
        needs="a GPU",
    ),
    "construction": Row(
        "Construct Llama-2-7B (6.7 B parameters), deferred",
        "python examples/deferred_transformers.py",
        _construction,
    ),
    "shard": Row("Compute one rank's shard of an 8 B parameter Llama on 512 ranks", SHARD, _shard),
    "memory": Row(
        "Simulated peak GPU memory of training programs, compared with PyTorch's CUDA allocator "
        "(stubbed driver, cuDNN off)",
        "make oracle",
        _oracle,
        needs="a CUDA build of PyTorch",
    ),
    "materialization": Row(
        "Materialize a 50 M parameter transformer, compared with eager construction",
        "python benchmarks/materialize.py --millions 50 --threads 1 --models 'transformer, written twice'",
        _faster(r"^transformer, written twice +\d+ +[\d.]+ +[\d.]+ +[\d.]+ +([\d.]+)"),
        in_readme=False,
    ),
    "inference": Row(
        "Enter and leave inference mode, compared with `torch.inference_mode`",
        "python benchmarks/inference_mode.py",
        _faster(r"^a new block .* ([\d.]+)$"),
    ),
}


def hardware() -> str:
    """Return the processor, or the GPU, that the rows are measured on."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    info = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*: (.+)$", info.read_text(), re.M) if info.exists() else []
    return f"{os.cpu_count()} cores, {names[0] if names else platform.machine()}"


def measure(row: Row) -> dict[str, str]:
    """Run the command of a row, and return its value and stamp."""
    command = [sys.executable if word == "python" else word for word in shlex.split(row.command)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    return {
        "value": row.value(done.stdout),
        "date": dt.datetime.now(tz=dt.timezone.utc).date().isoformat(),
        "hardware": hardware(),
        "versions": f"torch {torch.__version__}, Python {platform.python_version()}",
    }


def page(results: dict[str, dict[str, str]]) -> str:
    """Return the text of docs/reference/results.md."""
    lines = [
        "# Headline results",
        "",
        "`python benchmarks/headline.py` measures these results and writes this page and the table in the README.",
        "[Verification](proof.md) lists everything else that was run by hand.",
        "",
        "| result | value | command | measured |",
        "| --- | --- | --- | --- |",
    ]
    for name, row in ROWS.items():
        stored = results[name]
        stamp = f"{stored['date']}; {stored['hardware']}; {stored['versions']}"
        lines.append(f"| {row.title} | {stored['value']} | `{row.command}` | {stamp} |")
    return "\n".join(lines) + "\n"


def table(results: dict[str, dict[str, str]]) -> str:
    """Return the table of the README."""
    rows = [(row, results[name]) for name, row in ROWS.items() if row.in_readme]
    lines = ["| result | value | command |", "| --- | --- | --- |"]
    lines += [f"| {row.title} | **{stored['value']}** | `{_short(row.command)}` |" for row, stored in rows]
    return "\n".join(lines) + "\n"


def _short(command: str) -> str:
    return command if len(command) < 60 else f"{' '.join(command.split()[:2])} ..."


def rendered() -> dict[Path, str]:
    """Return the two pages as they must be."""
    results = json.loads(RESULTS.read_text())
    before, _, rest = README.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    return {PAGE: page(results), README: f"{before}{BEGIN}\n{table(results)}\n{END}{after}"}


def main() -> None:
    """Measure and write, or check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"one of {', '.join(ROWS)}")
    parser.add_argument("--check", action="store_true", help="only compare the pages with the stored results")
    options = parser.parse_args()
    if unknown := set(options.rows) - ROWS.keys():
        parser.error(f"unknown rows: {', '.join(sorted(unknown))}; expected some of {', '.join(ROWS)}")
    if options.check:
        stale = [path.name for path, text in rendered().items() if not path.exists() or path.read_text() != text]
        sys.exit(f"Run `python benchmarks/headline.py`: {', '.join(stale)} differ." if stale else 0)
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in options.rows or [name for name, row in ROWS.items() if not row.needs]:
        results[name] = measure(ROWS[name])
        print(f"{name}: {results[name]['value']}", flush=True)
        RESULTS.write_text(json.dumps(results, indent=2) + "\n")
    for path, text in rendered().items():
        path.write_text(text)


if __name__ == "__main__":
    main()
