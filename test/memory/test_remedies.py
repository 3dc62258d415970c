"""Remedies in programs of other libraries, and in ranks of a job."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from torchext.advice.applying import applying
from torchext.advice.remedies import (
    Accumulate,
    Block,
    Checkpoint,
    ChunkedLoss,
    Findings,
    NoGradients,
    OptimizerOption,
    Remedy,
    Reshard,
)
from torchext.dry_run import world
from torchext.memory import advise, track_memory


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Sequential(nn.Linear(512, 2048)), nn.Linear(2048, 512)
        self.checkpoints = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = checkpoint(self.up, x, use_reentrant=False) if self.checkpoints else self.up(x)
        y: torch.Tensor = x + self.down(inner.relu())
        return y


def sharded_peaks(remedies: tuple[Remedy, ...], snippet: str = "") -> tuple[int, int]:
    gc.collect()  # models of earlier runs, which would count
    with world(8, gpu="H100"), applying(remedies), track_memory() as memory:
        model = nn.Sequential(*(Layer() for _ in range(6))).cuda()
        for layer in (*model, model):
            fully_shard(layer, mesh=init_device_mesh("cuda", (8,)), reshard_after_forward=False)
        exec(snippet, {"model": model})
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            model(torch.zeros(1024, 512, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return memory.peak_reserved().reserved, memory.peak_allocated().allocated


@pytest.mark.ci
def test_resharding_and_checkpointing_of_fsdp2_are_their_snippets() -> None:
    blocks = tuple(Block("FSDPSequential", str(i), 0) for i in range(6))
    for remedy in (Reshard(), Checkpoint(blocks[:4], 6)):
        assert sharded_peaks((remedy,)) == sharded_peaks((), remedy.snippet)
        assert sharded_peaks((remedy,))[1] < sharded_peaks(())[1]


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
def test_layers_of_transformers_are_checkpointed_without_their_cache() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=256, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=4, vocab_size=1000
    )

    def program(snippet: str = "", enables: bool = False) -> Any:
        def make_step() -> Any:
            model = transformers.LlamaForCausalLM(config).cuda().train()
            exec(snippet, {"model": model})
            if enables:
                model.gradient_checkpointing_enable({"use_reentrant": False})
            tokens = torch.zeros(8, 512, dtype=torch.int64, device="cuda")

            def step() -> None:
                model(input_ids=tokens, labels=tokens).loss.backward()
                model.zero_grad()

            return step

        return make_step

    advice = advise(program(), remedies=["checkpointing"], seconds=None)
    full = next(one for one in advice.outcomes if one.checkpointed == 4)
    assert not advice.failed
    assert full.peak_allocated < advice.baseline.peak_allocated
    by_hand = advise(program(full.snippet), remedies=["checkpointing"], seconds=None)
    assert (by_hand.baseline.peak_reserved, by_hand.baseline.flops) == (full.peak_reserved, full.flops)
    enabled = advise(program(enables=True), remedies=["checkpointing"], seconds=None)
    assert len(enabled.outcomes) == len(by_hand.outcomes) == 1  # these blocks are left alone


def test_layers_of_encoder_decoders_of_transformers_are_checkpointed() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(d_model=128, num_layers=2, num_heads=2, vocab_size=100, decoder_start_token_id=0)

    def make_step(snippet: str = "") -> Any:
        model = transformers.T5ForConditionalGeneration(config).cuda().train()
        exec(snippet, {"model": model})
        tokens = torch.zeros(8, 256, dtype=torch.int64, device="cuda")
        return lambda: model(input_ids=tokens, labels=tokens).loss.backward()

    advice = advise(make_step, remedies=["checkpointing"], runs=2)
    (remedy,) = advice.lowest_peak.remedies
    assert isinstance(remedy, Checkpoint)
    expected = ["encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1"]
    assert [one.path for one in remedy.blocks] == expected
    by_hand = advise(lambda: make_step(remedy.snippet), remedies=["allocator"], runs=1)
    assert advice.lowest_peak.peak_allocated == by_hand.baseline.peak_allocated < advice.baseline.peak_allocated


@pytest.mark.parametrize("use_reentrant", [False, True, None], ids=["non-reentrant", "reentrant", "inside"])
def test_blocks_that_are_checkpointed_are_left_alone(use_reentrant: bool | None) -> None:
    def make_step() -> Any:
        layers = nn.ModuleList(Layer() for _ in range(3)).cuda()
        setattr(layers[0], "checkpoints", use_reentrant is None)  # noqa: B010

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layers = layers

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                first, *others = self.layers
                x = first(x) if use_reentrant is None else checkpoint(first, x, use_reentrant=use_reentrant)
                for layer in others:
                    x = layer(x)
                return x

        model = Model()
        x = torch.zeros(1024, 512, device="cuda", requires_grad=True)
        return lambda: model(x).sum().backward()

    advice = advise(make_step, remedies=["checkpointing"], seconds=None)
    paths = {block.path for one in advice.outcomes for remedy in one.remedies for block in remedy.blocks}  # type: ignore[attr-defined]
    assert paths == {"layers.1", "layers.2"}


def test_blocks_that_update_buffers_are_left_alone() -> None:
    def make_step() -> Any:
        layers = [Layer() for _ in range(4)]
        layers[1].up.append(nn.BatchNorm1d(2048))
        layers[2].up.append(nn.BatchNorm1d(2048).eval())
        layers[3].register_buffer("scale", torch.ones(1))
        model = nn.Sequential(*layers).cuda()
        x = torch.zeros(1024, 512, device="cuda")
        return lambda: model(x).sum().backward()

    full = advise(make_step, remedies=["checkpointing"], runs=2).lowest_peak
    assert [block.path for remedy in full.remedies for block in remedy.blocks] == ["0", "2", "3"]  # type: ignore[attr-defined]


def test_advice_without_a_solution_names_the_lowest_peak() -> None:
    def make_step() -> Any:
        weight = torch.empty(2**20, device="cuda", requires_grad=True)
        return lambda: (weight * 2).sum().backward()

    advice = advise(make_step, target="1MiB")
    assert not advice
    assert advice.solution is None
    assert "No simulated combination fits. The lowest peak is" in str(advice)
    assert json.loads(json.dumps(advice.to_dict()))["solution"] is None


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="`remedies`: expected kinds among allocator, bfloat16, .*; got 'loss'"):
        advise(lambda: lambda: None, remedies="loss")
    with pytest.raises(ValueError, match="`remedies`: 'bfloat16' needs the argument `allow_numerics=True`"):
        advise(lambda: lambda: None, remedies=["bfloat16"])
    with pytest.raises(ValueError, match="`remedies`: 'micro-batches' needs the argument `batch=`"):
        advise(lambda: lambda: None, remedies=["micro-batches"], allow_numerics=True)
    for seconds in ("60", True):
        with pytest.raises(TypeError, match=f"`seconds`: expected a number or None, got {seconds!r}"):
            advise(lambda: lambda: None, seconds=seconds)  # type: ignore[arg-type]
    for number in (-1, float("nan")):
        with pytest.raises(ValueError, match=f"`seconds`: expected at least 0, got {number}"):
            advise(lambda: lambda: None, seconds=number)
    with pytest.raises(ValueError, match="`steps`: expected at least 1, got 0"):
        advise(lambda: lambda: None, steps=0)
    with pytest.raises(TypeError, match="expected to return a function that runs one step, got NoneType"):
        advise(lambda: None)  # type: ignore[arg-type, return-value]


def test_training_in_other_threads_is_not_changed() -> None:
    def train() -> tuple[Any, ...]:
        torch.manual_seed(0)
        model = nn.Sequential(Layer(), Layer())
        weight: Any = model[0].get_parameter("down.weight")
        options = [
            (optimizer := torch.optim.SGD(params, lr=0.1)).defaults["foreach"]
            for params in (model.parameters(), [{"params": model.parameters()}], model.named_parameters())
        ]
        nn.functional.cross_entropy(model(torch.ones(2, 512)), torch.tensor([0, 1])).backward()
        gradient = weight.grad.clone()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return options == [None] * 3, ["forward" in vars(one) for one in model], gradient, weight.detach(), weight.grad

    blocks = tuple(Block("Sequential", str(i), 0) for i in range(2))
    remedies = (Checkpoint(blocks, 2), OptimizerOption("foreach"), NoGradients(), ChunkedLoss(), Accumulate(2, 4))
    with ThreadPoolExecutor(1) as pool:
        expected = pool.submit(train).result()
        with applying(remedies) as application:
            found = pool.submit(train).result()
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert application.findings == Findings(allocator=torch._C._accelerator_getAllocatorSettings())


def test_errors_of_the_program_are_raised_and_pytorch_is_restored() -> None:
    functions = nn.functional.cross_entropy.__code__, torch.optim.Optimizer.zero_grad.__code__
    settings = torch._C._accelerator_getAllocatorSettings()
    with pytest.raises(ZeroDivisionError):
        advise(lambda: lambda: 1 / 0)
    advise(lambda: lambda: torch.empty(2**20, device="cuda"), remedies=["allocator"])
    assert (nn.functional.cross_entropy.__code__, torch.optim.Optimizer.zero_grad.__code__) == functions
    assert torch._C._accelerator_getAllocatorSettings() == settings


PROGRAM = """
import sys, torch
from torch import nn
batch = int(sys.argv[-1]) if len(sys.argv) > 1 else 4096
layers = nn.Sequential(*(nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256)) for _ in range(4))).cuda()
optimizer = torch.optim.AdamW(layers.parameters())
print("output")
while True:
    layers(torch.zeros(batch, 256, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
"""


def dry_run(folder: Path, *flags: str) -> Any:
    (folder / "train.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "torchext", "dry-run", *flags, "--", "train.py"]
    return forked.run(command, cwd=folder)


@pytest.mark.ci
def test_command_prints_advice_and_writes_it_as_json(tmp_path: Path) -> None:
    flags = ["--gpu", "H100", "--target", "150MiB", "--advise", "--advise-runs", "3", "--try", "16"]
    done = dry_run(tmp_path, *flags, "--json", "report.json")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("output") == 1  # not that of the runs with remedies
    assert "The cheapest combination that fits reserves" in done.stdout
    advice = json.loads((tmp_path / "report.json").read_text())["advice"]
    assert advice["limit"] == 150 * 2**20
    assert advice["solution"]["name"] == "16"
    assert advice["baseline"]["peak_reserved"] > 150 * 2**20 >= advice["solution"]["peak_reserved"]
    assert not advice["is_complete"]
    names = [one["name"] for one in advice["outcomes"]]
    assert names == ["unchanged", "16", "expandable_segments:True"]


@pytest.mark.cases(4)
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--target", "1GiB"], "--target needs --advise"),
        (["--try", "a"], "--try needs --advise"),
        (["--advise", "--advise-runs", "0"], "--advise-runs: expected at least 1, got 0"),
        (["--advise", "--target", "much"], "--target` expects a size such as '5GB'"),
        (["--advise", "--try", "'"], "--try: No closing quotation"),
    ],
)
def test_wrong_flags_are_refused(tmp_path: Path, flags: list[str], message: str) -> None:
    done = dry_run(tmp_path, *flags)
    assert done.returncode == 2
    assert message in done.stderr


def test_compiled_steps_are_advised_as_eager_ones() -> None:
    def make_step(compile_model: bool) -> Callable[[], None]:
        layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3))).cuda()
        model = torch.compile(mode="default")(layers) if compile_model else layers
        return lambda: model(torch.ones(8, 64, device="cuda")).sum().backward()

    original = torch.compile
    compiled, eager = (advise(partial(make_step, one), "H100", target="60GiB", runs=2) for one in (True, False))
    assert compiled.to_dict() == eager.to_dict()
    assert torch.compile is original
