"""Compare lower bounds of the time of a step with published measurements.

Each entry runs a step of a model with the published shape, on fake GPUs and as one rank of the published job, and
bounds its time. The bound must be below the measurement. The table of all entries is docs/reference/time_bounds.md.

    python benchmarks/time_bounds.py [--only TEXT] [--write | --check]

`--write` writes the table; `--check` exits with 1 if a bound is not below its measurement.

Published systems fuse operators, so most entries pass a compiled function to `torch.compile()`, which the dry run
ignores, but after which it counts only work that fused kernels also do. Entries with `eager` are programs of PyTorch
operators that were not compiled. Activation checkpointing is left out: it only adds work.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd, reduce_scatter_tensor_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional

from torchext.dry_run import TimeBound, bound_time, world
from torchext.fake import FakeGPU

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "time_bounds.md"


@dataclass(frozen=True)
class Shape:
    """A decoder. Without `hidden` it has a feed-forward network with GELU of four times the width, as GPT-2."""

    layers: int
    width: int
    heads: int
    key_heads: int
    hidden: int
    vocabulary: int
    is_tied: bool = False
    has_bias: bool = False


LLAMA3_8B = Shape(32, 4096, 32, 8, 14336, 128256)
LLAMA3_70B = Shape(80, 8192, 64, 8, 28672, 128256)
LLAMA3_405B = Shape(126, 16384, 128, 8, 53248, 128256)
LLAMA2_7B = Shape(32, 4096, 32, 32, 11008, 32000)
GPT2 = Shape(12, 768, 12, 12, 0, 50257, is_tied=True, has_bias=True)
GPT2_XL = Shape(48, 1600, 25, 25, 0, 50304, is_tied=True, has_bias=True)
MPT = {
    name: Shape(layers, width, heads, heads, 0, 50368, is_tied=True)
    for name, layers, width, heads in [
        *(("125m", 12, 768, 12), ("350m", 24, 1024, 16), ("760m", 24, 1536, 12), ("1b", 24, 2048, 16)),
        *(("3b", 32, 2560, 20), ("7b", 32, 4096, 32), ("13b", 40, 5120, 40), ("30b", 48, 7168, 56)),
        ("70b", 80, 8192, 64),
    ]
}


@dataclass(frozen=True)
class Entry:
    """A published measurement.

    Attributes:
        model: The name of the model.
        source: Where it was published.
        gpu: The model of the GPUs.
        ranks: Their number.
        batch: The sequences or images of a rank in a forward pass.
        seconds: The measured time of a step.
        shape: The decoder; None for ResNet-50.
        sequence: The length of the sequences.
        passes: The number of forward passes of a step.
        tensor: The number of ranks of tensor parallelism.
        stage: The number of layers, for a pipeline stage without embedding and head; 0 for whole models.
        precision: The dtype of the products, such as `float8`.
        is_eager: Whether the program runs PyTorch's operators.
        has_kernel: Whether attention is one operator.
        is_replicated: Whether each rank has all parameters.
    """

    model: str
    source: str
    gpu: str
    ranks: int
    batch: int
    seconds: float
    shape: Shape | None = None
    sequence: int = 0
    passes: int = 1
    tensor: int = 1
    stage: int = 0
    precision: str = "bfloat16"
    is_eager: bool = False
    has_kernel: bool = True
    is_replicated: bool = False


# ---- Published measurements

TITAN = "https://github.com/pytorch/torchtitan/blob/main/benchmarks/"
TITAN_H100, TITAN_H200 = (
    f"{TITAN}{page}.md"
    for page in ("llama3_h100_202412_torchtitan", "llama3_8b_h200_2025-06_torchtitan_trainy_whitefiber")
)
FOUNDRY = "https://github.com/mosaicml/llm-foundry/tree/main/scripts/train/benchmarking"
NEMO = "https://docs.nvidia.com/nemo-framework/user-guide/24.12/nemotoolkit/performance/performance_summary.html"
MEGATRON = "https://arxiv.org/abs/2104.04473"
NANO = "https://github.com/karpathy/nanoGPT"
BUILD = "https://github.com/karpathy/build-nanogpt"
LLM_C = "https://github.com/karpathy/llm.c/discussions/"
RESNET = "https://github.com/NVIDIA/DeepLearningExamples/tree/master/PyTorch/Classification/ConvNets/resnet50v1.5"


def _titan(ranks: int, rate: float, **changes: Any) -> Entry:
    """Return an entry of a table of tokens per second and GPU."""
    base = Entry("Llama 3.1 8B", TITAN_H100, "H100-80GB", ranks, 2, 0.0, LLAMA3_8B, 8192)
    one = replace(base, **changes)
    return replace(one, seconds=one.batch * one.passes * one.sequence / one.tensor / rate)


def _stage(rate: float) -> Entry:
    """Return the entry for the middle stage of a pipeline of eight, which has 15 or 16 of the 126 layers."""
    one = Entry("Llama 3.1 405B, one of 8 stages", TITAN_H100, "H100-80GB", 64, 1, 0.0, LLAMA3_405B, 8192, 32, 8, 15)
    return replace(one, precision="float8", seconds=256 * 8192 / 512 / rate)


def _foundry(name: str, gpu: str, ranks: int, sequence: int, batch: int, passes: int, rate: float) -> Entry:
    return Entry(
        f"MPT {name}", FOUNDRY, gpu, ranks, batch, batch * passes * sequence / rate, MPT[name], sequence, passes
    )


def _nemo(model: str, shape: Shape, sequence: int, passes: int, rate: float) -> Entry:
    return Entry(
        model, NEMO, "H100-80GB", 8, 1, passes * sequence / rate, shape, sequence, passes, precision="float8",
        is_replicated=True,
    )  # fmt: skip


def _megatron(name: str, layers: int, width: int, heads: int, tensor: int, ranks: int, rate: float) -> Entry:
    """Return an entry of table 1, whose rate in TFLOP/s includes one repetition of the forward pass."""
    batch, sequence, vocabulary = 512, 2048, 51200
    flops = 96.0 * batch * sequence * layers * width**2
    flops *= 1 + sequence / (6 * width) + vocabulary / (16 * layers * width)
    shape = Shape(layers, width, heads, heads, 0, vocabulary, is_tied=True, has_bias=True)
    return Entry(
        f"GPT {name}", MEGATRON, "A100-80GB", ranks, 8, flops / ranks / rate / 1e12, shape, sequence,
        batch * tensor // ranks // 8, tensor, precision="float16", is_replicated=True,
    )  # fmt: skip


def _gpt2(seconds: float, source: str = BUILD, **changes: Any) -> Entry:
    return replace(Entry("GPT-2 124M", source, "A100-80GB", 1, 16, seconds, GPT2, 1024), **changes)


ENTRIES = [
    _gpt2(1.0, precision="float32", is_eager=True, has_kernel=False),
    _gpt2(0.333, precision="tf32", is_eager=True, has_kernel=False),
    _gpt2(0.3, is_eager=True, has_kernel=False),
    _gpt2(0.13, has_kernel=False),
    _gpt2(0.096),
    _gpt2(0.093, shape=replace(GPT2, vocabulary=50304)),
    _gpt2(0.25, NANO, gpu="A100-40GB", batch=8, is_eager=True, has_kernel=False),
    _gpt2(0.135, NANO, gpu="A100-40GB", batch=8, has_kernel=False),
    _gpt2(4 * 86400 / 600_000, NANO, gpu="A100-40GB", ranks=8, batch=12, passes=5, is_replicated=True),
    _gpt2(90 * 60 / 19_560, f"{LLM_C}481", ranks=8, batch=64, is_replicated=True),
    Entry("GPT-2 1558M", f"{LLM_C}677", "H100-80GB", 8, 16, 86400 / 32_000, GPT2_XL, 1024, 8, is_replicated=True),
    Entry("ResNet-50", RESNET, "A100-80GB", 1, 256, 256 / 2470, is_eager=True),
    Entry("ResNet-50", RESNET, "A100-80GB", 1, 256, 256 / 938, precision="tf32", is_eager=True),
    _foundry("125m", "A100-80GB", 8, 512, 128, 2, 165681),
    _foundry("125m", "A100-80GB", 8, 65536, 1, 2, 20368),
    _foundry("350m", "A100-80GB", 8, 8192, 8, 2, 36569),
    _foundry("760m", "A100-80GB", 8, 2048, 24, 2, 32434),
    _foundry("1b", "A100-80GB", 8, 512, 56, 4, 23148),
    _foundry("3b", "A100-80GB", 8, 2048, 10, 2, 10811),
    _foundry("3b", "A100-80GB", 8, 512, 40, 6, 12127),
    _foundry("7b", "A100-80GB", 8, 2048, 6, 2, 4641),
    _foundry("13b", "A100-80GB", 8, 2048, 2, 3, 2262),
    _foundry("30b", "A100-40GB", 128, 2048, 6, 1, 865),
    _foundry("1b", "H100-80GB", 8, 2048, 14, 1, 45455),
    _foundry("1b", "H100-80GB", 64, 2048, 20, 1, 44402),
    _foundry("3b", "H100-80GB", 8, 512, 40, 6, 27965),
    _foundry("7b", "H100-80GB", 8, 2048, 6, 1, 10643),
    _foundry("13b", "H100-80GB", 64, 2048, 2, 1, 4800),
    _foundry("30b", "H100-80GB", 32, 2048, 14, 3, 2308),
    _foundry("70b", "H100-80GB", 64, 2048, 8, 4, 1039),
    _titan(8, 5762, is_eager=True),
    _titan(8, 6667),
    _titan(8, 8532, precision="float8"),
    _titan(128, 5605, is_eager=True),
    _titan(128, 6514),
    _titan(128, 8380, precision="float8"),
    _titan(8, 3890, batch=1, sequence=32768, precision="float8"),
    _titan(32, 10938, precision="float8", gpu="H200-141GB", source=TITAN_H200),
    _titan(256, 876, model="Llama 3.1 70B", shape=LLAMA3_70B, batch=16, tensor=8, precision="float8"),
    _stage(128),
    _nemo("Llama 2 7B", LLAMA2_7B, 4096, 16, 16934),
    _megatron("1.7B", 24, 2304, 24, 1, 32, 137),
    _megatron("3.6B", 30, 3072, 32, 2, 64, 138),
    _megatron("7.5B", 36, 4096, 32, 4, 128, 142),
]


# ---- Models


class Float8Product(torch.autograd.Function):
    """A product of matrices, and its gradients, in 8-bit dtypes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        """Return the product of `x` and the transposed weight."""
        ctx.save_for_backward(x, weight)
        return _product(x, weight.t())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of both factors."""
        x, weight = ctx.saved_tensors
        gradient = gradients[0]
        return _product(gradient, weight), _product(gradient.t(), x)


def _product(a: Tensor, b: Tensor) -> Tensor:
    one = torch.ones((), device=a.device)
    left, right = a.to(torch.float8_e4m3fn).contiguous(), b.t().to(torch.float8_e4m3fn).contiguous().t()
    product: Tensor = torch._scaled_mm(left, right, scale_a=one, scale_b=one, out_dtype=a.dtype)
    return product


class Linear(nn.Linear):
    """A linear layer whose product may have an 8-bit dtype."""

    is_float8 = False

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor with the shape of `x`, except the last dimension."""
        if not self.is_float8:
            return super().forward(x)
        y: Tensor = Float8Product.apply(x.flatten(0, -2), self.weight)  # type: ignore[no-untyped-call]
        return y.view(*x.shape[:-1], -1)


class Layer(nn.Module):
    """A decoder layer with the share of one rank of tensor parallelism, which shards the sequence outside of products.

    Args:
        shape: The whole model.
        has_kernel: Whether attention is one operator.
        group: The ranks of tensor parallelism; None for one.
    """

    def __init__(self, shape: Shape, has_kernel: bool, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        share = 1 if group is None else group.size()
        size = shape.width // shape.heads
        self.heads, self.key_heads = shape.heads // share, shape.key_heads // share
        self.group, self.has_kernel = group, has_kernel
        linear = partial(Linear, bias=shape.has_bias)
        norm = nn.RMSNorm if shape.hidden else nn.LayerNorm
        self.norm1, self.norm2 = norm(shape.width), norm(shape.width)
        self.qkv = linear(shape.width, (self.heads + 2 * self.key_heads) * size)
        self.out = linear(self.heads * size, shape.width)
        hidden = (shape.hidden or 4 * shape.width) // share
        self.gate = linear(shape.width, hidden) if shape.hidden else None
        self.up, self.down = linear(shape.width, hidden), linear(hidden, shape.width)

    def _gathered(self, x: Tensor) -> Tensor:
        return x if self.group is None else all_gather_tensor_autograd(x, 1, self.group)

    def _scattered(self, x: Tensor) -> Tensor:
        return x if self.group is None else reduce_scatter_tensor_autograd(x, "sum", 1, self.group)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`: (batch, sequence, width)."""
        qkv = self.qkv(self._gathered(self.norm1(x))).unflatten(-1, (self.heads + 2 * self.key_heads, -1))
        q, k, v = qkv.transpose(1, 2).split((self.heads, self.key_heads, self.key_heads), dim=1)
        attend = functional.scaled_dot_product_attention if self.has_kernel else _attend
        y = attend(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self._scattered(self.out(y.transpose(1, 2).flatten(2)))
        y = self._gathered(self.norm2(x))
        y = functional.gelu(self.up(y)) if self.gate is None else functional.silu(self.gate(y)) * self.up(y)
        return x + self._scattered(self.down(y))


def _attend(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, enable_gqa: bool) -> Tensor:
    """Return attention of single operators, without a mask."""
    return (q @ k.transpose(-2, -1)).softmax(-1) @ v


class Decoder(nn.Module):
    """A language model, or a stage of it."""

    def __init__(self, entry: Entry, shape: Shape, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        share = 1 if group is None else group.size()
        self.layers = nn.ModuleList(Layer(shape, entry.has_kernel, group) for _ in range(entry.stage or shape.layers))
        self.words = self.head = None
        if not entry.stage:
            self.words = nn.Embedding(shape.vocabulary // share, shape.width)
            self.head = nn.Linear(shape.width, shape.vocabulary // share, bias=False)
            if shape.is_tied:
                self.head.weight = self.words.weight
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        """Return the loss for tokens (batch, sequence), or the output of a stage."""
        tokens = x
        if self.words is not None:
            x = self.words(tokens)
            x = x if self.group is None else x.chunk(self.group.size(), 1)[0]
        for layer in self.layers:
            x = layer(x)
        if self.head is None:
            return x
        x = x if self.group is None else all_gather_tensor_autograd(x, 1, self.group)
        return functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


class Block(nn.Module):
    """A block of ResNet-50."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        sizes = ((inputs, width, 1, 1), (width, width, 3, stride), (width, 4 * width, 1, 1))
        self.convolutions = nn.ModuleList(_convolution(*size) for size in sizes)
        self.shortcut = _convolution(inputs, 4 * width, 1, stride) if inputs != 4 * width else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Return the features (batch, 4 * width, height, width)."""
        y = x
        for number, convolution in enumerate(self.convolutions):
            y = convolution(y) if number == 2 else convolution(y).relu_()
        return y.add_(self.shortcut(x)).relu_()


def _convolution(inputs: int, outputs: int, kernel: int, stride: int) -> nn.Module:
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs))


def resnet50() -> nn.Module:
    """Return a ResNet-50 v1.5."""
    parts: list[nn.Module] = [_convolution(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    inputs = 64
    for width, count in zip((64, 128, 256, 512), (3, 4, 6, 3), strict=True):
        for number in range(count):
            parts.append(Block(inputs, width, 2 if number == 0 and width > 64 else 1))
            inputs = 4 * width
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000))


# ---- Steps


def bound_of(entry: Entry) -> TimeBound:
    """Run the entry on fake GPUs, and return the bound of its step."""
    gpu = FakeGPU(entry.gpu, memory=2**50)  # without checkpointing it may need more than the GPU has
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest" if entry.precision == "float32" else "high")
    try:
        with world(entry.ranks, 0, gpu):
            if not entry.is_eager:
                torch.compile(_nothing)()
            step = _step_of_images(entry) if entry.shape is None else _step_of_tokens(entry, entry.shape)
            step()
            return bound_time(step)
    finally:
        torch.set_float32_matmul_precision(precision)


def _nothing() -> None:
    """Stand for a compiled part of the program."""


def _dtype(entry: Entry) -> torch.dtype:
    return {"float16": torch.float16, "float32": torch.float32, "tf32": torch.float32}.get(
        entry.precision, torch.bfloat16
    )


def _step_of_images(entry: Entry) -> Callable[[], object]:
    model = resnet50().cuda().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    images = torch.ones(entry.batch, 3, 224, 224, device="cuda").contiguous(memory_format=torch.channels_last)
    labels = torch.zeros(entry.batch, dtype=torch.long, device="cuda")

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16, enabled=entry.precision == "bfloat16"):
            loss = functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _step_of_tokens(entry: Entry, shape: Shape) -> Callable[[], object]:
    mesh: DeviceMesh = init_device_mesh(
        "cuda", (entry.ranks // entry.tensor, entry.tensor), mesh_dim_names=("data", "tensor")
    )
    group = mesh["tensor"].get_group() if entry.tensor > 1 else None
    with torch.device("cuda"):
        model = Decoder(entry, shape, group)
    for module in model.modules():
        if isinstance(module, Linear):
            module.is_float8 = entry.precision == "float8"
    is_sharded = entry.ranks > entry.tensor and not entry.is_replicated
    if is_sharded:
        policy = MixedPrecisionPolicy(param_dtype=_dtype(entry), reduce_dtype=torch.float32)
        for layer in model.layers:
            fully_shard(layer, mesh=mesh["data"], mp_policy=policy)
        fully_shard(model, mesh=mesh["data"], mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), fused=not entry.is_eager)
    inputs = torch.zeros(entry.batch, entry.sequence, dtype=torch.long, device="cuda")
    if entry.stage:
        size = (entry.batch, entry.sequence // entry.tensor, shape.width)
        inputs = torch.ones(size, dtype=torch.bfloat16, device="cuda", requires_grad=True)

    def step() -> None:
        for _ in range(entry.passes):
            with torch.autocast("cuda", _dtype(entry), enabled=not is_sharded and _dtype(entry) != torch.float32):
                loss = model(inputs)
            loss.sum().backward()
        if entry.is_replicated and entry.ranks > entry.tensor:
            for parameter in model.parameters():
                assert parameter.grad is not None
                dist.all_reduce(parameter.grad, group=mesh["data"].get_group())
        optimizer.step()
        optimizer.zero_grad()

    return step


# ---- The table

HEAD = """\
# Bounds of time and published measurements

`python benchmarks/time_bounds.py --write` makes this table. Each row runs a step of the published shape on fake GPUs,
as one rank of the published job. It divides the [bound of its time](../how_to/dry_runs.md#bound-the-time-of-a-step)
by the published time. A ratio of 1 or more would refute the bound.

The models have the published layers, widths, heads and vocabulary. Rows without "eager" are fused or compiled
implementations: only work that fused kernels do is counted. Activation checkpointing is not counted in any row. The
sources give tokens or images per second, or FLOP/s, from which the time of a step follows.

| model | GPUs | batch per rank | sequence | precision | bound, s | published, s | ratio |
| --- | --- | --: | --: | --- | --: | --: | --: |
"""


def _row(entry: Entry, bound: TimeBound) -> str:
    batch = f"{entry.passes} x {entry.batch}" if entry.passes > 1 else str(entry.batch)
    precision = entry.precision + (", eager" if entry.is_eager else "")
    gpus = f"{entry.ranks * (8 if entry.stage else 1)} x {entry.gpu}" + (
        f", TP {entry.tensor}" if entry.tensor > 1 else ""
    )
    cells = (f"[{entry.model}]({entry.source})", gpus, batch, entry.sequence or 224, precision)
    times = (f"{bound.seconds:.3g}", f"{entry.seconds:.3g}", f"{bound.seconds / entry.seconds:.2f}")
    return f"| {' | '.join(map(str, (*cells, *times)))} |"


def main() -> int:
    """Print the table, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="only entries whose row contains the text")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bound is not below the measurement")
    options = parser.parse_args()
    rows, wrong = [], 0
    for entry in ENTRIES:
        if options.only not in f"{entry.model} {entry.gpu} {entry.precision} {entry.source}":
            continue
        start = time.perf_counter()
        bound = bound_of(entry)
        rows.append(_row(entry, bound))
        wrong += bound.seconds >= entry.seconds
        print(rows[-1], f"{time.perf_counter() - start:.0f} s", flush=True)
    if options.write:
        PAGE.write_text(HEAD + "\n".join(rows) + "\n", encoding="utf-8")
    return int(bool(options.check and wrong))


if __name__ == "__main__":
    sys.exit(main())
