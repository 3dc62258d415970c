"""Installs real frameworks, runs them dry, and compares the reports with arithmetic.

    python -m frameworks.run FOLDER [PROGRAM ...] [--world-size 8,512] [--rank first,last]

Run it in the folder `test`. It creates an environment in FOLDER with the frameworks of `requirements.txt` and the
current torch. Each program runs in a folder that already contains files with the names of its outputs; these are
compared before and after. The table is printed and saved in FOLDER. It needs PyPI, and half a minute of CPU time for
each rank.

The exit code is 1 if a program fails, a check does not hold, or a file has changed.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch

import torchext

from . import checks
from .checks import Check, Checks
from .reports import RankText, ranks_in

HERE = Path(__file__).parent


@dataclass
class Program:
    """A program and the expected numbers of its reports.

    Attributes:
        framework: The distribution whose version is reported.
        script: The file in `programs`, or the name of a module.
        arguments: Its arguments; `{nodes}` is replaced by the number of machines.
        options: The options of the dry run.
        checks: The numbers to compare.
        sizes: The world sizes to run; empty for all.
    """

    framework: str
    script: str
    arguments: str = ""
    options: str = ""
    checks: Checks = lambda report: ()
    sizes: tuple[int, ...] = ()


LLAMA, FEW = checks.llama(), checks.adapters(only_attention=True)
ENCODER = sum(math.prod(shape) for shape in checks.encoder())
UNET = 7134595  # parameters of the real model

PROGRAMS = {
    "zero-1": Program("deepspeed", "deepspeed_zero.py", "--stage 1", checks=checks.zero(LLAMA)),
    "zero-2": Program("deepspeed", "deepspeed_zero.py", "--stage 2", checks=checks.zero(LLAMA)),
    "zero-3": Program("deepspeed", "deepspeed_zero.py", "--stage 3", checks=checks.zero_3(LLAMA)),
    "accelerate-fsdp2": Program("accelerate", "accelerate_fsdp2.py", checks=checks.fsdp2(LLAMA)),
    "trainer-ddp": Program(
        "transformers", "transformers_trainer.py", "--engine ddp", checks=checks.ddp(LLAMA, fused=True)
    ),
    "trainer-fsdp2": Program(
        "transformers", "transformers_trainer.py", "--engine fsdp2", checks=checks.fsdp2(LLAMA, fused=True)
    ),
    "trainer-deepspeed": Program(
        "transformers", "transformers_trainer.py", "--engine deepspeed", checks=checks.zero(LLAMA, fused=True)
    ),
    "sft": Program("trl", "trl_trainers.py", "--method sft", checks=checks.ddp(LLAMA, fused=True)),
    "sft-lora": Program("trl", "trl_trainers.py", "--method sft --lora"),
    "dpo": Program("trl", "trl_trainers.py", "--method dpo", checks=checks.ddp(LLAMA, fused=True)),
    "grpo": Program("trl", "trl_trainers.py", "--method grpo", checks=checks.ddp(LLAMA, fused=True)),
    "lora": Program("peft", "peft_lora.py", checks=checks.ddp(checks.adapters())),
    "lightning-ddp": Program(
        "lightning", "lightning_fit.py", "--strategy ddp --nodes {nodes}", checks=checks.reduced(ENCODER)
    ),
    "lightning-fsdp": Program("lightning", "lightning_fit.py", "--strategy fsdp --nodes {nodes}"),
    "lightning-fsdp2": Program("lightning", "lightning_fit.py", "--strategy fsdp2 --nodes {nodes}"),
    "unet": Program("diffusers", "diffusers_unet.py", checks=checks.reduced(UNET)),
    "unet-generate": Program("diffusers", "diffusers_unet.py", "--generate", "--forwards 20", sizes=(1,)),
    "liger": Program("liger-kernel", "liger_llama.py", checks=checks.ddp(LLAMA, itemsize=2)),
    "adam-8bit": Program("bitsandbytes", "bitsandbytes_qlora.py", checks=checks.adam_8bit(LLAMA, 2)),
    "qlora": Program("bitsandbytes", "bitsandbytes_qlora.py", "--adapters", checks=checks.adam_8bit(FEW, 4)),
    "megatron-tp": Program("megatron-core", "megatron_gpt.py", "--tensor 2", checks=checks.megatron(2)),
    "megatron-pp": Program("megatron-core", "megatron_gpt.py", "--tensor 2 --pipeline 2"),
    "megatron-zero": Program(
        "megatron-core",
        "megatron_gpt.py",
        "--tensor 2 --distributed-optimizer",
        checks=checks.megatron(2, distributed=True),
    ),
}

# Output files of programs, which exist before they run.
FILES = (
    "checkpoints/checkpoint-1/model.safetensors",
    "checkpoints/checkpoint-1/optimizer.pt",
    "checkpoints/checkpoint-1/trainer_state.json",
    "checkpoints/checkpoint-2/model.safetensors",
    "checkpoints/global_step8/mp_rank_00_model_states.pt",
    "checkpoints/latest",
    "checkpoints/model.safetensors",
    "checkpoints/pytorch_model_fsdp_0/.metadata",
    "checkpoints/__0_0.distcp",
    "checkpoints/common.pt",
    "checkpoints/metadata.json",
    "adapter/adapter_model.safetensors",
    "final/model.safetensors",
    "final/config.json",
    "pipeline/unet/diffusion_pytorch_model.safetensors",
    "lightning_logs/version_0/metrics.csv",
    "lightning_logs/version_0/checkpoints/epoch=0-step=8.ckpt",
    "0.png",
    ".cache/huggingface/token",
    ".triton/autotune/cache",
)


def digest(folder: Path) -> str:
    """Return a digest of the names, modes, owners, times and bytes of everything in a folder."""
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        found.update(repr((str(path), status.st_mode, status.st_uid, status.st_gid, status.st_mtime_ns)).encode())
        found.update(path.read_bytes() if path.is_file() else b"")
    return found.hexdigest()


def fill(folder: Path) -> None:
    """Create the files, unless they exist."""
    for number, name in enumerate(FILES):
        path = folder / name
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(hashlib.sha256(name.encode()).digest() * 1000)
            path.chmod(0o600 if number % 2 else 0o444)


def environment(folder: Path) -> Path:
    """Return the Python of an environment with the frameworks, and create it if necessary."""
    python = folder / "bin" / "python"
    if (folder / "ready").exists():
        return python
    venv.create(folder, with_pip=True, clear=True)
    here, beside = (sysconfig.get_path("purelib"), str(Path(torchext.__file__).parents[1]))
    library = next(folder.glob("lib/python*/site-packages"))
    (library / "beside.pth").write_text(f"{here}\n{beside}\n")
    constraints = folder / "constraints.txt"
    constraints.write_text(f"torch=={torch.__version__.partition('+')[0]}\n")
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "-q"]
    subprocess.run([*pip, "-c", str(constraints), "-r", str(HERE / "requirements.txt")], check=True)
    if any(library.glob("torch-*.dist-info")):
        raise RuntimeError("pip has installed another torch")
    (folder / "ready").touch()
    return python


@dataclass
class Outcome:
    """The outcome of a program at a size."""

    name: str
    program: Program
    size: int
    code: int
    ranks: list[RankText]
    output: str
    has_changed: bool

    @property
    def checks(self) -> Iterator[Check]:
        """The checks of all ranks."""
        for report in self.ranks:
            yield from self.program.checks(report)

    @property
    def is_right(self) -> bool:
        """Whether the dry run fits, and all checks hold."""
        return self.code == 0 and bool(self.ranks) and not self.has_changed and all(one.holds for one in self.checks)

    def row(self, versions: dict[str, str]) -> str:
        """A row of the table."""
        result = self.ranks[-1].verdict.partition(" in ")[0] if self.ranks else self.output.strip()[-80:]
        told = {f"{one.what} {one.found}" + ("" if one.holds else f", not {one.expected}") for one in self.checks}
        if self.has_changed:
            told.add("**files have changed**")
        cells = [
            f"{self.program.framework} {versions[self.program.framework]}",
            f"`{self.program.script} {self.program.arguments}`".replace(" `", "`").replace(" --nodes {nodes}", ""),
            str(self.size),
            ", ".join(str(report.rank) for report in self.ranks),
            result + (f" (code {self.code})" if self.code else ""),
            ", ".join(dict.fromkeys(report.peak for report in self.ranks)),
            "; ".join(sorted(told)),
        ]
        return f"| {' | '.join(cells)} |"


HEADINGS = """\
| framework | program | world | ranks | result | peak | checked |
| --- | --- | ---: | --- | --- | --- | --- |"""


def run(python: Path, folder: Path, name: str, size: int, ranks: Sequence[str]) -> Outcome:
    """Run a program dry in the folder of files."""
    program, files = PROGRAMS[name], folder / "files"
    fill(files)
    before = digest(files)
    chosen = ",".join(dict.fromkeys({"first": "0", "last": str(size - 1)}.get(rank, rank) for rank in ranks))
    arguments = program.arguments.format(nodes=-(-size // 8)).split()
    command = [str(python), "-m", "torchext", "dry-run", *program.options.split()]
    if size > 1:
        command += ["--world-size", str(size), "--rank", chosen]
    command += ["--", str(HERE / "programs" / program.script), *arguments]
    variables = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "HOME": str(files)}
    done = subprocess.run(command, cwd=files, env={**os.environ, **variables}, capture_output=True, text=True)
    (folder / f"{name}-{size}.txt").write_text(done.stdout + done.stderr)
    found = ranks_in(done.stdout)
    return Outcome(name, program, size, done.returncode, found, done.stdout + done.stderr, digest(files) != before)


def versions_in(python: Path) -> dict[str, str]:
    """Return the versions of the packages in the environment."""
    code = "import importlib.metadata as m; print(*(f'{d.name}={d.version}' for d in m.distributions()))"
    out = subprocess.run([str(python), "-c", code], check=True, capture_output=True, text=True).stdout
    pairs = [pair.partition("=") for pair in out.split()]
    return {name.lower().replace("_", "-"): number for name, _, number in reversed(pairs)}  # the first one is imported


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the programs and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("programs", nargs="*", metavar="PROGRAM", help=f"of {', '.join(PROGRAMS)}; by default all")
    parser.add_argument("--world-size", default="8,512")
    parser.add_argument("--rank", default="first,last", help="which ranks, such as first,3,last")
    options = parser.parse_args(arguments)
    folder = options.folder.resolve()
    python = environment(folder / "environment")
    versions = versions_in(python)
    print(f"torch {version('torch')}\n\n{HEADINGS}", flush=True)
    outcomes = []
    for name in options.programs or PROGRAMS:
        for size in PROGRAMS[name].sizes or map(int, options.world_size.split(",")):
            outcomes.append(run(python, folder, name, size, options.rank.split(",")))
            print(outcomes[-1].row(versions), flush=True)
    (folder / "table.md").write_text("\n".join([HEADINGS, *(one.row(versions) for one in outcomes)]) + "\n")
    return 0 if all(one.is_right for one in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
