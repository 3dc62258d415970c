"""Compares reading the metadata of fake and real tensors in C++. The ratio should be 1.0.

Prints a table in nanoseconds. The loops are in C++ and are compiled for this script (metadata_getters.cpp), which needs
`ninja` and a compiler.

    python benchmarks/metadata_getters.py [--calls N] [--repeats N]

The columns of a row are measured alternately, so that noise affects all of them.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from types import ModuleType

import torch
from torch.utils import cpp_extension

from torchext.deferred_init import deferred_init
from torchext.fake import fake_like

# The getters listed in the proposal to make those of TensorImpl non-virtual, and further frequent ones.
GETTERS = {
    "dim()": "dim",
    "numel()": "numel",
    "size(0)": "size",
    "sizes()": "sizes",
    "strides()": "strides",
    "scalar_type()": "dtype",
    "device()": "device",
    "is_contiguous()": "is_contiguous",
    "requires_grad()": "requires_grad",
    "resize_(sizes())": "resize_",
}
SHAPES = ((0,), (64, 2048))


def compile_loops() -> ModuleType:
    """Return the compiled loops of metadata_getters.cpp."""
    source = Path(__file__).with_suffix(".cpp")
    loops: ModuleType = cpp_extension.load(name=source.stem, sources=[str(source)], extra_cflags=["-O3"])
    return loops


def measure(loops: ModuleType, getter: str, shape: tuple[int, ...], calls: int, repeats: int) -> list[float]:
    """Return the median nanoseconds of a call on a real, a fake and a deferred tensor."""
    real = torch.ones(shape)
    tensors = (real, fake_like(real), deferred_init(torch.ones, shape))
    loop = getattr(loops, getter)
    samples: list[list[float]] = [[] for _ in tensors]
    for _ in range(repeats):
        for tensor, times in zip(tensors, samples, strict=True):
            loop(tensor, calls // 100)
            times.append(loop(tensor, calls))
    return [statistics.median(times) for times in samples]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=200_000, help="calls per measurement")
    parser.add_argument("--repeats", type=int, default=15, help="number of measurements for the median")
    options = parser.parse_args()
    torch.set_num_threads(1)
    loops = compile_loops()
    print("One call from C++, nanoseconds (medians)\n")
    print(
        "call".ljust(18)
        + "shape".ljust(12)
        + "".join(name.rjust(12) for name in ("real", "fake", "deferred", "fake/real"))
    )
    for name, getter in GETTERS.items():
        for shape in SHAPES:
            calls = options.calls // 100 if getter == "resize_" else options.calls
            real, fake, deferred = measure(loops, getter, shape, calls, options.repeats)
            print(
                name.ljust(18)
                + str(list(shape)).ljust(12)
                + f"{real:12.2f}{fake:12.2f}{deferred:12.2f}{fake / real:12.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
