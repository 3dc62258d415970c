"""Advice: remedies lower the peak by the promised bytes when their snippets are applied by hand."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchext.advice.remedies import Accumulate, Checkpoint, Remedy, blocks_of
from torchext.advice.remedies import Block as Layer
from torchext.advice.searching import _Search, _Simulation
from torchext.fake import FakeGPU, fake_mode
from torchext.memory import Advice, Outcome, advise, fits

GPU = "RTX-4090-24GB"
VOCABULARY = 32000


class Block(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))))
        return y


class Model(nn.Module):
    def __init__(self, hidden: list[int], width: int = 256) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Block(width, one) for one in hidden)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x)
        return logits


@dataclass
class Program:
    """A program with a place for each change that a snippet describes."""

    hidden: tuple[int, ...] = (1024,) * 4
    batch: int = 8
    length: int = 256
    set_to_none: bool = True
    optimizer: Any = torch.optim.AdamW
    optimizer_arguments: dict[str, Any] | None = None
    micro_batches: int = 1
    around: Callable[[], Any] = nullcontext
    prologue: str = ""
    code: str = ""

    def make_step(self, batch: int | None = None) -> Callable[[], None]:
        exec(self.prologue, {"torch": torch})
        model = Model(list(self.hidden)).cuda()
        names: dict[str, Any] = {"model": model}
        exec(self.code, names)
        cross_entropy = names.get("cross_entropy_in_chunks", nn.functional.cross_entropy)
        optimizer = self.optimizer(model.parameters(), **(self.optimizer_arguments or {}))
        size = (batch or self.batch) // self.micro_batches
        tokens = torch.zeros(size, self.length, dtype=torch.int64, device="cuda")

        def step() -> None:
            for _ in range(self.micro_batches):
                with self.around():
                    logits = model(tokens)
                loss = cross_entropy(logits.flatten(0, 1), tokens.flatten())
                (loss if self.micro_batches == 1 else loss / self.micro_batches).backward()
                del logits, loss
            optimizer.step()
            optimizer.zero_grad(set_to_none=self.set_to_none)

        return step

    def measure(self) -> tuple[int, int]:
        """Return the peaks of the program, without advice."""

        def run() -> None:
            step = self.make_step()
            step()
            step()

        fit = fits(run, GPU)
        assert fit
        return fit.peak_reserved, fit.peak_allocated


@contextmanager
def environment(remedies: tuple[Remedy, ...]) -> Iterator[None]:
    """Set the allocator as the snippet exports it."""
    settings = [one.snippet.partition("=")[2] for one in remedies if one.kind == "allocator"]
    torch._C._accelerator_setAllocatorSettings(settings[0] if settings else "")
    yield
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
    torch._C._accelerator_setAllocatorSettings("")


def applied_by_hand(remedies: tuple[Remedy, ...], **settings: Any) -> Program:
    """Return the program with the changes that the snippets describe."""
    program = Program(**settings)
    for one in remedies:
        if one.kind == "bfloat16":
            program.prologue = one.snippet
        elif one.kind in ("checkpointing", "loss"):
            program.code += one.snippet + "\n"
        elif one.kind == "optimizer":
            option = "foreach" if "foreach=False" in one.snippet else "fused"
            program.optimizer_arguments = {option: option == "fused"}
        elif one.kind == "gradients":
            program.set_to_none = "set_to_none=True" in one.snippet
        elif one.kind == "offload":
            assert "with torch.autograd.graph.save_on_cpu(pin_memory=True):" in one.snippet
            program.around = lambda: torch.autograd.graph.save_on_cpu(pin_memory=True)
        elif one.kind == "micro-batches":
            program.micro_batches = program.batch // int(one.snippet.partition("batches of ")[2].partition(";")[0])
        else:
            assert one.kind == "allocator"
    return program


def check_all(advice: Advice, **settings: Any) -> set[str]:
    """Compare each run with the program that was changed by hand. Return the kinds of remedies."""
    assert not advice.failed
    for one in advice.outcomes:
        with environment(one.remedies):
            before = torch.get_default_dtype()
            try:
                measured = applied_by_hand(one.remedies, **settings).measure()
            finally:
                torch.set_default_dtype(before)
        assert (one.peak_reserved, one.peak_allocated) == measured, one.name
    return {remedy.kind for one in advice.outcomes for remedy in one.remedies}


@pytest.mark.ci
def test_snippets_applied_by_hand_give_the_promised_peaks() -> None:
    settings: dict[str, Any] = {"set_to_none": False}
    limit = "900MiB"
    advice = advise(
        Program(**settings).make_step,
        GPU,
        batch=8,
        target=limit,
        allow_numerics=True,
        seconds=None,
    )
    kinds = check_all(advice, **settings)
    expected = {"allocator", "bfloat16", "checkpointing", "gradients", "loss", "micro-batches", "offload", "optimizer"}
    assert kinds == expected


def test_printed_micro_batches_reach_the_promised_peak() -> None:
    def make_step(batch: int) -> Callable[[], None]:
        weight = torch.zeros(2**20, device="cuda", requires_grad=True)
        optimizer = torch.optim.SGD([weight])
        x = torch.zeros(batch, 2**20, device="cuda")

        def step() -> None:
            (x * weight).mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    advice = advise(make_step, GPU, batch=8, remedies=["micro-batches"], seconds=None)
    for one in advice.outcomes[1:]:

        def program(one: Outcome = one) -> None:
            weight = torch.zeros(2**20, device="cuda", requires_grad=True)
            batches = [torch.zeros(8 // one.micro_batches, 2**20, device="cuda")] * 2 * one.micro_batches
            names = {"weight": weight, "optimizer": torch.optim.SGD([weight]), "loader": batches}
            exec(one.remedies[0].snippet.replace("...", "(micro_batch * weight).mean()"), names)

        assert fits(program, GPU).peak_allocated == one.peak_allocated, one.name
    assert [one.micro_batches for one in advice.outcomes] == [1, 2, 4, 8]


@pytest.mark.ci
@pytest.mark.parametrize("seed", [*range(20), *(pytest.param(s, marks=pytest.mark.long) for s in range(20, 200))])
def test_advice_for_random_models_is_what_programs_need(seed: int) -> None:
    choose = random.Random(seed)
    kinds = [choose.choice([256, 512, 1024, 2048]) for _ in range(choose.randint(1, 2))]
    settings: dict[str, Any] = {
        "hidden": tuple(choose.choice(kinds) for _ in range(choose.randint(2, 4))),
        "length": choose.choice([64, 200, 512]),
        "set_to_none": choose.random() < 0.7,
        "optimizer": choose.choice([torch.optim.AdamW, torch.optim.SGD, torch.optim.Adam]),
    }
    base = fits(lambda: [Program(**settings).make_step()() for _ in range(1)], GPU).peak_reserved
    target = int(base * choose.uniform(0.5, 1.1))
    advice = advise(Program(**settings).make_step, GPU, target=target, seconds=None, runs=10)
    shown = {
        one.name: one
        for one in (*advice.trade_offs, *([advice.solution] if advice.solution else []), advice.lowest_peak)
    }
    for one in shown.values():
        with environment(one.remedies):
            assert applied_by_hand(one.remedies, **settings).measure() == (one.peak_reserved, one.peak_allocated)
    if advice.solution is not None:
        assert advice.solution.peak_reserved <= target


def model_of(seed: int) -> Model:
    choose = random.Random(seed)
    kinds = [choose.randrange(256, 4096, 64) for _ in range(1 if seed % 2 == 0 else choose.randint(2, 4))]
    model = Model([choose.choice(kinds) for _ in range(4 if seed < 4 else choose.randint(4, 8))])
    model.head = nn.Linear(256, 8)
    return model


@pytest.mark.ci
@pytest.mark.parametrize("seed", [*range(2), *(pytest.param(s, marks=pytest.mark.long) for s in range(2, 50))])
def test_brute_force_finds_no_cheaper_blocks(seed: int) -> None:
    def make_step() -> Callable[[], None]:
        model = model_of(seed).cuda()
        optimizer = torch.optim.SGD(model.parameters())
        tokens = torch.zeros(64, 256, dtype=torch.int64, device="cuda")

        def step() -> None:
            model(tokens).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    with fake_mode():
        blocks = [block for block, _ in blocks_of(model_of(seed))]
    simulation = _Simulation(make_step, FakeGPU(GPU), None, 2, "raise")
    every = []
    for chosen in itertools.product([False, True], repeat=len(blocks)):
        some = tuple(itertools.compress(blocks, chosen))
        one = simulation.run((Checkpoint(some, len(blocks)),) if some else ())
        every.append((one.peak_reserved, one.flops or 0))
    peaks = sorted(peak for peak, _ in every)
    target = random.Random(seed).choice(peaks[: len(peaks) // 2])
    advice = advise(make_step, GPU, target=target, remedies=["checkpointing"], seconds=None)
    assert advice.is_complete
    assert advice.solution is not None
    assert (advice.solution.flops or 0) <= 1.02 * min(flops for peak, flops in every if peak <= target)
    for peak, flops in every:
        assert any(one.peak_reserved <= 1.02 * peak and (one.flops or 0) <= 1.02 * flops for one in advice.trade_offs)


def outcome(remedy: Remedy | None, peak: int, flops: int | None, pinned: int = 0) -> Outcome:
    return Outcome(() if remedy is None else (remedy,), True, peak, peak, flops, pinned)


def test_the_front_keeps_the_batch_also_if_less_memory_is_pinned() -> None:
    baseline, split = outcome(None, 100, 8, pinned=8), outcome(Accumulate(2, 4), 50, 4, pinned=4)
    assert Advice(GPU, 60, baseline, (baseline, split)).trade_offs == (baseline,)


def test_blocks_of_different_roots_are_not_interchangeable() -> None:
    blocks = [Layer("A", "0", 0), Layer("B", "0", 0), Layer("A", "1", 0)]
    assert _Search._first_and_last(blocks) == [blocks[0], blocks[2], blocks[1]]


def test_answers_name_operations_only_if_they_were_counted() -> None:
    for flops, is_named in ((None, False), (8, True)):
        baseline, less = outcome(None, 100, flops), outcome(Checkpoint((), 0), 50, flops)
        answer = str(Advice(GPU, 60, baseline, (baseline, less)))
        assert (", with +0.0 % operations:" in answer) is is_named
