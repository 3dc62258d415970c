"""Descriptions of GPUs, their rates, meshes and assumed values, which commands use without importing PyTorch."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace

from .internals.arguments import check_is_int
from .internals.text import bytes_of

__all__ = [
    "DEFAULT_VALUES",
    "ENGINES",
    "INTEGER",
    "KINDS",
    "NUMBER",
    "OTHER",
    "RATES",
    "SHAPE",
    "TRUTH",
    "UNLIMITED",
    "FakeGPU",
    "PeakRates",
    "as_fake_gpu",
    "parse_mesh",
]


# ---- The highest rates of GPUs: operations, memory traffic and communication per second, from vendors' data sheets


TERA = 1e12
GIGA = 1e9
DTYPES = ("float64", "float32", "tf32", "float16", "bfloat16", "float8")


@dataclass(frozen=True)
class PeakRates:
    """The highest rates of a GPU, for lower bounds of time.

    Products of matrices are counted, in dense operations per second: structured sparsity is not used.

    Args:
        float64: The rate of float64, in FLOP/s. A rate of 0 is unknown, and its operations are not counted.
        float32: The rate of float32 without TF32, in FLOP/s.
        tf32: The rate of float32 with TF32, in FLOP/s.
        float16: The rate of float16, in FLOP/s.
        bfloat16: The rate of bfloat16, in FLOP/s.
        float8: The rate of the 8-bit floating-point dtypes, in FLOP/s.
        memory: The memory bandwidth, in bytes/s.
        link: The bandwidth to the GPUs of the same machine, in bytes/s and per direction.
        network: The bandwidth to other machines, in bytes/s, per GPU and direction. Default: 400 Gb/s, as of an
            InfiniBand NDR or 400 Gigabit Ethernet adapter for each GPU.
        boost: The highest clock of the GPU, relative to the clock for which the rates of operations are given.

    Raises:
        ValueError: A rate is negative, or `memory`, `link`, `network` or `boost` is not positive.

    Example:
        >>> from torchext.fake import FakeGPU, PeakRates
        >>> rates = PeakRates(bfloat16=500e12, memory=2e12, link=300e9)
        >>> FakeGPU("my GPU", memory=64 * 2**30, rates=rates).rates.network
        50000000000.0
    """

    float64: float = 0.0
    float32: float = 0.0
    tf32: float = 0.0
    float16: float = 0.0
    bfloat16: float = 0.0
    float8: float = 0.0
    memory: float = float("inf")
    link: float = float("inf")
    network: float = 400e9 / 8
    boost: float = 1.0

    def __post_init__(self) -> None:
        for one in fields(self):
            value, is_positive = getattr(self, one.name), one.name in ("memory", "link", "network", "boost")
            if not isinstance(value, int | float) or not (value > 0 or (value == 0 and not is_positive)):
                limit = "a positive number" if is_positive else "a number of at least 0"
                raise ValueError(f"`{one.name}`: expected {limit}, got {value!r}.")

    def with_text(self, text: str) -> PeakRates:
        """Return a copy with the rates of a flag such as `bfloat16=989,memory=3350,network=50`.

        Args:
            text: Rates of operations in TFLOP/s, and bandwidths in GB/s.

        Raises:
            ValueError: A part is not a known name with a number.
        """
        names = {one.name for one in fields(self)} - {"boost"}
        changes = {}
        for part in text.split(","):
            name, equals, number = part.strip().partition("=")
            try:
                value = float(number)
            except ValueError:
                value = -1.0
            if name not in names or not equals or not 0 < value < float("inf"):
                raise ValueError(
                    f"expected rates such as memory=3350,network=50 (GB/s) and bfloat16=989 (TFLOP/s), with the names "
                    f"{', '.join(one.name for one in fields(self) if one.name in names)}; got {part!r}"
                )
            changes[name] = value * (GIGA if name in ("memory", "link", "network") else TERA)
        return replace(self, **changes)


def _rates(tera: tuple[float, ...], memory: float, link: float, boost: float = 1.0) -> PeakRates:
    """Return rates that are given in TFLOP/s, for `DTYPES`, and in GB/s."""
    operations = dict(zip(DTYPES, (rate * TERA for rate in tera), strict=True))
    return PeakRates(**operations, memory=memory * GIGA, link=link * GIGA, boost=boost)


# GPUs run at more than the clock of their data sheets if power allows it, for example with matrices of zeros. `boost`
# is the highest clock (`nvidia-smi -q -d CLOCK`) over the clock for which the data sheet gives its rates.
#
# "NVIDIA Turing GPU Architecture", appendix A, and the data sheet of T4. Its Tensor Cores have no TF32 and no bfloat16.
# PCIe 3.0 x16.
_T4 = _rates((0.25, 8.1, 8.1, 65, 8.1, 0), 320, 16)
# "NVIDIA V100 Tensor Core GPU" data sheet. NVLink: 300 GB/s in both directions.
_V100 = _rates((7.8, 15.7, 15.7, 125, 15.7, 0), 900, 150)
# "NVIDIA A10G" data sheet (Amazon EC2 G5). PCIe 4.0 x16.
_A10G = _rates((1.1, 35, 35, 70, 70, 0), 600, 32)
# "NVIDIA A100 Tensor Core GPU" data sheet, www.nvidia.com/en-us/data-center/a100. NVLink: 600 GB/s in both directions.
_A100 = _rates((19.5, 19.5, 156, 312, 312, 0), 2039, 300)
# "NVIDIA H100 Tensor Core GPU Architecture", tables 1 and 2 (1830 MHz for Tensor Cores), and the data sheet,
# www.nvidia.com/en-us/data-center/h100. NVLink: 900 GB/s in both directions.
_H100 = _rates((66.9, 66.9, 494.7, 989.4, 989.4, 1978.9), 3350, 450, 1980 / 1830)
# "NVIDIA H200 Tensor Core GPU" data sheet, www.nvidia.com/en-us/data-center/h200.
_H200 = replace(_H100, memory=4800 * GIGA)
# "NVIDIA Blackwell Architecture Technical Brief" and the data sheet of DGX B200, for one of eight GPUs. NVLink:
# 1.8 TB/s in both directions. cuBLAS can emulate float32 by nine products of bfloat16 (BF16x9), which is faster. It can
# also emulate float64, by products of integers.
_B200 = _rates((0, 2250 / 9, 1125, 2250, 2250, 4500), 8000, 900, 1965 / 1850)
# "NVIDIA GB200 NVL72" data sheet, for one of 72 GPUs, with the clocks and the emulations of B200.
_GB200 = _rates((0, 2500 / 9, 1250, 2500, 2500, 5000), 8000, 900, 1965 / 1850)
# "NVIDIA L4 Tensor Core GPU" data sheet, www.nvidia.com/en-us/data-center/l4. PCIe 4.0 x16.
_L4 = _rates((0.49, 30.3, 60.5, 121, 121, 242.5), 300, 32)
# "NVIDIA L40S" data sheet, www.nvidia.com/en-us/data-center/l40s. PCIe 4.0 x16.
_L40S = _rates((1.4, 91.6, 183, 362, 362, 733), 864, 32)
# "NVIDIA Ada GPU Architecture", appendix A: float16 and float8 with accumulation in float16. PCIe 4.0 x16.
_RTX_4090 = _rates((1.3, 82.6, 82.6, 330.3, 165.2, 660.6), 1008, 32, 3105 / 2520)

RATES = {
    "Tesla T4": _T4,
    "Tesla V100-SXM2-16GB": _V100,
    "Tesla V100-SXM2-32GB": _V100,
    "NVIDIA A10G": _A10G,
    "NVIDIA A100-SXM4-40GB": replace(_A100, memory=1555 * GIGA),
    "NVIDIA A100-SXM4-80GB": _A100,
    "NVIDIA H100 80GB HBM3": _H100,
    "NVIDIA H200": _H200,
    "NVIDIA B200": _B200,
    "NVIDIA GB200": _GB200,
    "NVIDIA L4": _L4,
    "NVIDIA L40S": _L40S,
    "NVIDIA GeForce RTX 4090": _RTX_4090,
}


# ---- Descriptions of fake CUDA devices


# Bytes: more than any device has, to measure the memory that a program needs. Without a limit, fractions of the memory
# that the program itself sets (`set_per_process_memory_fraction()`) would still be limits.
UNLIMITED = 1 << 50

# The devices of `gpu=8`, as in `GpuDescription` (fake_cuda.h): a count does not describe the memory.
NO_MODEL, NO_MODELS_MEMORY = "torchext fake CUDA device", 80 * 2**30
MIB = 2**20

# The policy for reads of values that do not exist: `ValuePolicy`.
DEFAULT_VALUES = "assume,masks=all,routing=balanced"
MAX_DEVICES = 64  # PyTorch's own limit, `C10_COMPILE_TIME_MAX_GPUS`


@dataclass(frozen=True)
class _Model:
    """The values of `cudaGetDeviceProperties` for a model."""

    name: str  # as the driver spells it
    memory: int  # bytes
    capability: tuple[int, int]
    multiprocessors: int
    l2_cache: int  # bytes
    shared_memory_per_block_optin: int  # bytes
    max_threads_per_multiprocessor: int = 2048


# `memory` is the total capacity that PyTorch prints for such a device. It is less than the name implies, because the
# driver reserves a part (and vendors count in GB, not GiB). Shared memory and threads follow from the capability, by
# the tables of NVIDIA's CUDA programming guide.
MODELS = {
    "T4-16GB": _Model("Tesla T4", 15102 * MIB, (7, 5), 40, 4 * MIB, 65536, 1024),
    "V100-16GB": _Model("Tesla V100-SXM2-16GB", 16160 * MIB, (7, 0), 80, 6 * MIB, 98304),
    "V100-32GB": _Model("Tesla V100-SXM2-32GB", 32510 * MIB, (7, 0), 80, 6 * MIB, 98304),
    "A10G-24GB": _Model("NVIDIA A10G", 22723 * MIB, (8, 6), 80, 6 * MIB, 101376, 1536),
    "A100-40GB": _Model("NVIDIA A100-SXM4-40GB", 40444 * MIB, (8, 0), 108, 40 * MIB, 166912),
    "A100-80GB": _Model("NVIDIA A100-SXM4-80GB", 81154 * MIB, (8, 0), 108, 40 * MIB, 166912),
    "H100-80GB": _Model("NVIDIA H100 80GB HBM3", 81105 * MIB, (9, 0), 132, 50 * MIB, 232448),
    "H200-141GB": _Model("NVIDIA H200", 143155 * MIB, (9, 0), 132, 60 * MIB, 232448),
    "B200-180GB": _Model("NVIDIA B200", 182642 * MIB, (10, 0), 148, 126 * MIB, 232448),
    "GB200-186GB": _Model("NVIDIA GB200", 188733 * MIB, (10, 0), 152, 126 * MIB, 232448),
    "L4-24GB": _Model("NVIDIA L4", 22574 * MIB, (8, 9), 58, 48 * MIB, 101376, 1536),
    "L40S-48GB": _Model("NVIDIA L40S", 45487 * MIB, (8, 9), 142, 96 * MIB, 101376, 1536),
    "RTX-4090-24GB": _Model("NVIDIA GeForce RTX 4090", 24080 * MIB, (8, 9), 128, 72 * MIB, 101376, 1536),
}


# AMD GPUs. The allocator of HIP follows different rules, and AMD's libraries have other workspaces.
AMD = re.compile(r"AMD\b|INSTINCT\b|MI[0-9]{2,3}[A-Z]?(?![A-Z0-9])|RADEON|GFX[0-9]")


def _words(name: str) -> tuple[str, ...]:
    """Return the parts of `name` without the brand: `("H", "100", "80", "GB")`. A10G has `("A", "10G")`, unlike A10."""
    words = re.findall(r"[0-9]+[A-Z](?![A-Z0-9])|[A-Z]+|[0-9]+", name.upper())
    while words[:1] in (["NVIDIA"], ["TESLA"]):
        del words[0]
    return tuple(words)


@functools.cache
def _find(name: str) -> _Model | None:
    """Return the model that `name` is, or that it begins. The largest memory counts if a model has several."""
    words = _words(name)
    if not any(word[0].isdigit() for word in words):
        return None
    found = [
        full for full, model in MODELS.items() for known in (full, model.name) if _words(known)[: len(words)] == words
    ]
    is_one_model = len({full.rpartition("-")[0] for full in found}) == 1
    return max(map(MODELS.__getitem__, found), key=lambda model: model.memory) if is_one_model else None


class _Size:
    """A field in bytes, which may be given as a text with a unit. Its default is 0."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type) -> int:
        size: int = vars(instance).get(self._name, 0) if instance is not None else 0
        return size

    def __set__(self, instance: object, size: int | str) -> None:
        vars(instance)[self._name] = bytes_of(size, self._name) if isinstance(size, str) else size


@dataclass(frozen=True)
class FakeGPU:
    """Describe fake CUDA devices, for `fake_mode(gpu=...)` and the other functions with an argument `gpu`.

    Args:
        name: A known model (`T4-16GB`, `V100-16GB`, `V100-32GB`, `A10G-24GB`, `A100-40GB`, `A100-80GB`, `H100-80GB`,
            `H200-141GB`, `B200-180GB`, `GB200-186GB`, `L4-24GB`, `L40S-48GB`, `RTX-4090-24GB`), its beginning (`H100`;
            the largest memory of a model is the default), or the name that the driver reports. Case and separators do
            not matter. Any other name needs `memory`. AMD GPUs are not supported.
        count: The number of devices, from 1 to 64.
        memory: The memory of each device in bytes or as a text such as `"24GiB"`, as
            `torch.cuda.get_device_properties().total_memory` reports it. Default: that of the model.
        capability: The compute capability, such as `(9, 0)`. Default: that of the model; (9, 0) for unknown models.
        multiprocessors: The number of streaming multiprocessors. Default: that of the model; 132 for unknown models.
        context: The memory that a CUDA context and its libraries occupy in each process, which PyTorch cannot
            allocate, in bytes or as a text. It depends on the driver. Default: 0.
        has_limit: Whether the memory can run out. If not, `memory` is only what the device reports.
        rates: The highest rates of operations, memory and communication. Default: those of the model; None for unknown
            models.

    Raises:
        TypeError: `name` is not a string, `count` is not an int, or `capability` is not a pair of ints.
        ValueError: The model is unknown and `memory` is not given, it is an AMD GPU, or a number is out of range.

    Example:
        >>> FakeGPU("H100-80GB", count=8).memory
        85044756480
    """

    name: str
    count: int = 1
    memory: _Size = _Size()
    capability: tuple[int, int] = (0, 0)
    multiprocessors: int = 0
    context: _Size = _Size()
    has_limit: bool = field(default=True, kw_only=True)
    max_threads_per_multiprocessor: int = field(default=0, repr=False)
    shared_memory_per_block_optin: int = field(default=0, repr=False)
    l2_cache: int = field(default=0, repr=False)
    rates: PeakRates | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self._check_types()
        model = _find(self.name)
        if model is None and not self.memory:
            raise ValueError(_unknown(self.name))
        model = model or _Model(self.name, self.memory, (9, 0), 132, 50 * MIB, 232448)
        if model.name != self.name:
            object.__setattr__(self, "name", model.name)
        for attribute in (
            *("memory", "capability", "multiprocessors", "l2_cache"),
            *("max_threads_per_multiprocessor", "shared_memory_per_block_optin"),
        ):
            if not any(_numbers(getattr(self, attribute))):
                object.__setattr__(self, attribute, getattr(model, attribute))
        if self.rates is None:
            object.__setattr__(self, "rates", RATES.get(model.name))
        self._check()

    def _check_types(self) -> None:
        if not isinstance(self.name, str):
            raise TypeError(f"`name`: expected the name of a GPU, got {self.name!r}.")
        if AMD.match(self.name.upper()):
            raise ValueError(
                f"{self.name!r} is an AMD GPU, which torchext does not support: the allocator of HIP follows different "
                f"rules. Pass the name of an NVIDIA GPU: {', '.join(MODELS)}."
            )
        check_is_int(self.count, "count")
        if not isinstance(self.has_limit, bool):
            raise TypeError(f"`has_limit`: expected a bool, got {self.has_limit!r}.")
        if not (isinstance(self.capability, tuple) and all(type(part) is int for part in self.capability)):
            raise TypeError(f"`capability`: expected a pair of ints such as (9, 0), got {self.capability!r}.")

    def _check(self) -> None:
        if not 1 <= self.count <= MAX_DEVICES:
            raise ValueError(f"`count`: expected a number of devices from 1 to {MAX_DEVICES}, got {self.count!r}.")
        for attribute in ("memory", "multiprocessors", "context"):
            value = getattr(self, attribute)
            if type(value) is not int or value < 0:
                raise ValueError(f"`{attribute}`: expected a number of at least 0, got {value!r}.")
        if self.context >= self.memory:
            raise ValueError(f"`context` ({self.context} bytes) has to be smaller than `memory` ({self.memory} bytes).")
        if len(self.capability) != 2:
            raise ValueError(f"`capability`: expected a pair such as (9, 0), got {self.capability!r}.")


# `inspect.signature()` shows these types to users.
FakeGPU.__init__.__annotations__.update(memory="int | str", context="int | str")


def _numbers(value: int | tuple[int, ...]) -> tuple[int, ...]:
    return value if isinstance(value, tuple) else (value,)


def _unknown(name: str) -> str:
    keys = {"".join(_words(known)): full for full in MODELS for known in (full, full.rpartition("-")[0])}
    near = dict.fromkeys(keys[key] for key in difflib.get_close_matches("".join(_words(name)), keys))
    hint = f"Did you mean {' or '.join(near)}? " if near else ""
    return (
        f"Unknown GPU {name!r}. {hint}Known models: {', '.join(MODELS)}. For another one, pass "
        "FakeGPU(name, memory=<bytes>, capability=...)."
    )


def as_fake_gpu(gpu: str | int | FakeGPU | None) -> FakeGPU | None:
    """Return the description for an argument `gpu`, or None for None, False and 0: no GPU.

    Args:
        gpu: A description, the name of a model, or a number of devices without a memory limit (True is one).

    Raises:
        TypeError: `gpu` is of another type.
        ValueError: The model is unknown, or the number is out of range.
    """
    if gpu is None or isinstance(gpu, FakeGPU):
        return gpu
    if isinstance(gpu, str):
        return FakeGPU(gpu)
    if not isinstance(gpu, int):
        raise TypeError(
            f"`gpu`: expected the name of a model, a number of devices, or a FakeGPU, got {type(gpu).__name__} {gpu!r}."
        )
    return FakeGPU(NO_MODEL, count=int(gpu), memory=NO_MODELS_MEMORY, has_limit=False) if gpu else None


# ---- Meshes and the engines that shard models on them, by the names that commands take


ENGINES: dict[str, tuple[tuple[int, ...], str]] = {
    "fsdp2": ((1, 2), "one dimension to shard, or one to replicate and one to shard,"),
    "hsdp": ((2,), "one dimension to replicate and one to shard"),
    "tp": ((0,), "no dimension"),
    "ddp": ((1,), "one dimension"),
    "none": ((), "any dimensions"),
}
"""For each engine, how many dimensions of the mesh it may use besides tensor parallelism, in numbers and in words."""


def parse_mesh(mesh: str | Mapping[str, int]) -> dict[str, int]:
    """Return the sizes of the dimensions of a mesh by name.

    Raises:
        ValueError: It is not of the form `fsdp=8,tp=2`, or a size is less than 1.
    """
    pairs = list(mesh.items()) if isinstance(mesh, Mapping) else [one.partition("=")[::2] for one in mesh.split(",")]
    sizes = {str(name).strip(): int(size) if re.fullmatch(r"\s*\d+\s*", str(size)) else 0 for name, size in pairs}
    if len(sizes) < len(pairs) or not all(name.isidentifier() and size > 0 for name, size in sizes.items()):
        raise ValueError(f"mesh: expected sizes by name such as fsdp=8,tp=2, got {mesh!r}")
    return sizes


# ---- Reads of values that do not exist


# Kinds of assumed values. Kinds that affect control flow come first.
TRUTH, SHAPE, INTEGER, NUMBER, OTHER = KINDS = ("truth value", "shape", "integer", "number", "other value")
