"""Changes of a program that raise its memory, and the source lines that `dry-run --compare` names for them."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import NamedTuple

import pytest

from torchext.commands import main
from torchext.dry_run import Report, compare, load_report

# A small language model with checkpointing. With several ranks each block is sharded.
TRAIN = """
    import torch
    import torch.nn.functional as F
    from torch import nn
    from torch.distributed.fsdp import fully_shard
    from torch.utils.checkpoint import checkpoint

    class Norm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(256))

        def forward(self, x):
            y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
            return (self.weight * y).type_as(self.weight)

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.out = nn.Linear(256, 768), nn.Linear(256, 256)

        def forward(self, x):
            q, k, v = (p.unflatten(-1, (4, 64)).transpose(1, 2) for p in self.qkv(x).chunk(3, -1))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.out(y.transpose(1, 2).flatten(2))

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.attention = Norm(), Attention()
            self.up, self.down = nn.Linear(256, 1024), nn.Linear(1024, 256)

        def forward(self, x):
            x = x + self.attention(self.norm(x))
            return x + self.down(F.gelu(self.up(x)))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(4096, 256)
            self.blocks = nn.ModuleList(Block() for _ in range(3))
            self.head = nn.Linear(256, 4096)

        def forward(self, tokens):
            x = self.words(tokens)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return self.head(x)

    model = Model().to("cuda", torch.bfloat16)
    if torch.distributed.is_torchelastic_launched():
        torch.distributed.init_process_group("nccl")
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for step in range(3):
        tokens = torch.randint(4096, (8, 512), device="cuda")
        logits = model(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
        optimizer.step()
        optimizer.zero_grad()
"""


class Regression(NamedTuple):
    """A change of the program.

    Attributes:
        old: The code before.
        new: The code after.
        line: The code of the line that the comparison names first.
        at_any_moment: Whether it is named among the peaks of the lines, because the peak of the program is at another
            moment, or grew in reserved memory only.
        world_size: The number of ranks.
    """

    old: str
    new: str
    line: str
    at_any_moment: bool = False
    world_size: int = 1


LOSS = "    loss = F"
LOGITS = "    return self.head(x)"
REGRESSIONS = {
    "logits upcast": Regression(LOSS, f"    logits = logits.float()\n    {LOSS}", "logits = logits.float()"),
    "lost checkpoint": Regression(
        "checkpoint(block, x, use_reentrant=False)", "block(x)", "return x + self.down(F.gelu(self.up(x)))"
    ),
    "norm in float32": Regression(
        "y = x * torch", "x = x.float()\n            y = x * torch", "x = x.float()", at_any_moment=True
    ),
    "attention with its matrix": Regression(
        "y = F.scaled_dot_product_attention(q, k, v, is_causal=True)",
        "y = (q @ k.transpose(-1, -2) * 0.125).softmax(-1) @ v",
        "y = (q @ k.transpose(-1, -2) * 0.125).softmax(-1) @ v",
        at_any_moment=True,
    ),
    "gradients set to zero": Regression("zero_grad()", "zero_grad(set_to_none=False)", "loss.backward()"),
    "optimizer step for all parameters at once": Regression(
        ", foreach=False)\n    for", ")\n    for", "optimizer.step()", at_any_moment=True
    ),
    "copy of the logits": Regression(LOGITS, f"{LOGITS}.clone()", "return self.head(x).clone()", at_any_moment=True),
    "targets as probabilities": Regression(
        f"{LOSS}.cross_entropy(logits.flatten(0, 1), tokens.flatten())",
        "    target = F.one_hot(tokens.flatten(), 4096).float()\n    "
        f"{LOSS}.cross_entropy(logits.flatten(0, 1), target)",
        "target = F.one_hot(tokens.flatten(), 4096).float()",
    ),
    "parameters in float32": Regression('"cuda", torch.bfloat16', '"cuda"', 'model = Model().to("cuda")'),
    "kept outputs": Regression(
        LOGITS,
        f"    self.last = x.detach().repeat(4, 1, 1)\n        {LOGITS}",
        "self.last = x.detach().repeat(4, 1, 1)",
    ),
    "graph of the gradients": Regression(
        "loss.backward()", "loss.backward(create_graph=True)", "loss.backward(create_graph=True)"
    ),
    "one wrapper around all blocks": Regression(
        "    fully_shard(block)", "    pass", "logits = model(tokens)", world_size=8
    ),
    "parameters that stay gathered": Regression(
        "fully_shard(block)",
        "fully_shard(block, reshard_after_forward=False)",
        "x = checkpoint(block, x, use_reentrant=False)",
        world_size=8,
    ),
}


def report_of(text: str, world_size: int) -> Report:
    """Run the program in the current folder."""
    Path("train.py").write_text(dedent(text))
    job = ["--world-size", str(world_size)] if world_size > 1 else []
    assert main(["dry-run", "--quiet", "--no-flops", "--json", "report.json", *job, "--", "train.py"]) == 0
    return load_report("report.json")


@functools.cache
def base_of(world_size: int) -> Report:
    """Run the unchanged program, once in a process of tests."""
    return report_of(TRAIN, world_size)


@pytest.fixture
def in_folder(forked_ranks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", REGRESSIONS)
def test_regression_is_located(in_folder: None, name: str) -> None:
    one = REGRESSIONS[name]
    assert TRAIN.count(one.old) == 1
    head = report_of(TRAIN.replace(one.old, one.new), one.world_size)
    [device, *_] = compare(base_of(one.world_size), head).ranks[0].devices
    found = device.line_peaks if one.at_any_moment else device.lines
    assert found[0].code == one.line, found
    assert found[0].growth > 0
    if not one.at_any_moment:
        assert device.peak_allocated.growth > 0


@pytest.mark.ci
@pytest.mark.parametrize("runs", [2, pytest.param(100, marks=pytest.mark.long)], ids=["two", "hundred"])
def test_runs_differ_in_measured_times_only(tmp_path: Path, runs: int) -> None:
    """Interpreters with different hash seeds, and two ranks each."""
    (tmp_path / "train.py").write_text(dedent(TRAIN))
    flags = ["--world-size", "8", "--rank", "0,7", "--quiet", "--json", "-"]
    command = [sys.executable, "-m", "torchext", "dry-run", *flags, "--", "train.py"]
    found = []
    for seed in range(runs):
        root = str(Path(__file__).parents[2])
        environment = {**os.environ, "PYTHONHASHSEED": str(seed), "PYTHONPATH": root}
        out = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, check=True).stdout
        report = json.loads(out)
        assert [sorted(measured) for measured in report.pop("measured")] == [["seconds", "timeline"]] * 2
        found.append(report)
        assert found[-1] == found[0]
