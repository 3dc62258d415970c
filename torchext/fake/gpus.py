"""What fake CUDA devices are like."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["FakeGPU"]

MIB = 2**20


@dataclass(frozen=True)
class _Model:
    """What `cudaGetDeviceProperties` says of a model."""

    name: str  # as the driver spells it
    memory: int  # bytes
    capability: tuple[int, int]
    multiprocessors: int
    l2_cache: int  # bytes
    shared_memory_per_block_optin: int  # bytes
    max_threads_per_multiprocessor: int = 2048


# `total_memory` is what PyTorch prints as the total capacity of such a device: less than the name says, because the
# driver keeps some (and the GB of vendors are not GiB). The amount of shared memory and of threads is that of the
# capability, in the tables of NVIDIA's CUDA programming guide.
MODELS = {
    "A100-40GB": _Model("NVIDIA A100-SXM4-40GB", 40444 * MIB, (8, 0), 108, 40 * MIB, 166912),
    "A100-80GB": _Model("NVIDIA A100-SXM4-80GB", 81154 * MIB, (8, 0), 108, 40 * MIB, 166912),
    "H100-80GB": _Model("NVIDIA H100 80GB HBM3", 81105 * MIB, (9, 0), 132, 50 * MIB, 232448),
    "H200-141GB": _Model("NVIDIA H200", 143155 * MIB, (9, 0), 132, 60 * MIB, 232448),
    "B200-180GB": _Model("NVIDIA B200", 182642 * MIB, (10, 0), 148, 126 * MIB, 232448),
    "L4-24GB": _Model("NVIDIA L4", 22574 * MIB, (8, 9), 58, 48 * MIB, 101376, 1536),
    "RTX-4090-24GB": _Model("NVIDIA GeForce RTX 4090", 24080 * MIB, (8, 9), 128, 72 * MIB, 101376, 1536),
}


def _key(name: str) -> str:
    """The letters and digits of `name`, which may be spelled in several ways."""
    return "".join(letter for letter in name.upper() if letter.isalnum()).removeprefix("NVIDIA")


def _names(name: str) -> list[str]:
    """What a model may be called: with or without the unit, and with or without its memory if it is the largest."""
    full = _key(name)
    plain = _key(name.rpartition("-")[0])
    return [full, full.removesuffix("GB"), plain]


BY_KEY = {key: model for name, model in MODELS.items() for key in (*_names(name), _key(model.name))}


@dataclass(frozen=True)
class FakeGPU:
    """Describes fake CUDA devices, for `fake_mode(fake_cuda=...)`.

    Args:
        name: A known model (`A100-40GB`, `A100-80GB`, `H100-80GB`, `H200-141GB`, `B200-180GB`, `L4-24GB`,
            `RTX-4090-24GB`; the memory may be left out where it is clear, and upper and lower case do not matter), or
            any name for a device of which `memory` is given.
        count: How many there are, at most 64.
        memory: The memory of each in bytes, as `torch.cuda.get_device_properties().total_memory` reports it. By default
            that of the model.
        capability: The compute capability, such as `(9, 0)`. By default that of the model; (9, 0) for unknown models.
        multiprocessors: The number of streaming multiprocessors. By default that of the model; 132 for unknown ones.
        context: The bytes that a process cannot allocate because its CUDA context and libraries take them. They differ
            between drivers, and are not known to PyTorch; by default 0.

    Raises:
        ValueError: The model is unknown and `memory` is not given, or a number is impossible.

    Example:
        >>> FakeGPU("H100-80GB", count=8).memory
        85044756480
    """

    name: str
    count: int = 1
    memory: int = 0
    capability: tuple[int, int] = (0, 0)
    multiprocessors: int = 0
    context: int = 0
    max_threads_per_multiprocessor: int = field(default=0, repr=False)
    shared_memory_per_block_optin: int = field(default=0, repr=False)
    l2_cache: int = field(default=0, repr=False)

    def __post_init__(self) -> None:
        model = BY_KEY.get(_key(self.name))
        if model is None and not self.memory:
            raise ValueError(
                f"The GPU {self.name!r} is unknown. Known are {', '.join(MODELS)}; for another one give its `memory` "
                f"in bytes, and its `capability`."
            )
        model = model or _Model(self.name, self.memory, (9, 0), 132, 50 * MIB, 232448)
        if model.name != self.name:
            object.__setattr__(self, "name", model.name)
        for attribute in (
            *("memory", "capability", "multiprocessors", "l2_cache"),
            *("max_threads_per_multiprocessor", "shared_memory_per_block_optin"),
        ):
            if not any(_numbers(getattr(self, attribute))):
                object.__setattr__(self, attribute, getattr(model, attribute))
        self._check()

    def _check(self) -> None:
        if not 1 <= self.count <= 64:
            raise ValueError(f"`count` was expected to be from 1 to 64, but is {self.count!r}.")
        for attribute in ("memory", "multiprocessors", "context"):
            value = getattr(self, attribute)
            if not isinstance(value, int) or value < 0:
                raise ValueError(f"`{attribute}` was expected to be a number that is not negative, but is {value!r}.")
        if self.context >= self.memory:
            raise ValueError(f"`context` ({self.context} bytes) leaves nothing of the memory ({self.memory} bytes).")
        if len(self.capability) != 2:
            raise ValueError(f"`capability` was expected to be a pair such as (9, 0), but is {self.capability!r}.")


def _numbers(value: int | tuple[int, ...]) -> tuple[int, ...]:
    return value if isinstance(value, tuple) else (value,)
