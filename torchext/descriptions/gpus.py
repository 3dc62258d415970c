"""Descriptions of fake CUDA devices."""

from __future__ import annotations

import difflib
import functools
import re
from dataclasses import dataclass, field

from ..internals.arguments import check_is_int
from ..internals.text import bytes_of
from .rates import RATES, PeakRates

__all__ = ["UNLIMITED", "FakeGPU", "as_fake_gpu"]

UNLIMITED = 1 << 50  # bytes: more than any device has, to measure the memory that a program needs
MIB = 2**20
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


def as_fake_gpu(gpu: str | int | FakeGPU | None, model: str = "H100-80GB") -> FakeGPU | None:
    """Return the description for an argument `gpu`, or None for None, False and 0: no GPU.

    Args:
        gpu: A description, the name of a model, or a number of devices (True is one).
        model: The model of the devices if only their number is given.

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
    return FakeGPU(model, count=int(gpu)) if gpu else None
