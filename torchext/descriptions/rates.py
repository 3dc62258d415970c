"""The highest rates of GPUs: operations, memory traffic and communication per second, from vendors' data sheets."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

__all__ = ["RATES", "PeakRates"]

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
