"""Write and load a checkpoint of a model that is larger than memory.

    python examples/larger_than_memory.py --layers 64 --width 8192 --max-memory 256MiB

writes 16 GiB with a quarter of a GiB of memory.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

from torchext.checkpoint import load_checkpoint, save_safetensors
from torchext.deferred_init import deferred_init, is_deferred


class Model(nn.Module):
    """Linear layers, without any code for checkpoints."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        linear = [nn.Linear(width, width) for _ in range(layers)]
        for layer in linear:
            nn.init.normal_(layer.weight, std=0.02)
        self.layers = nn.Sequential(*linear)


def peak() -> float:
    """Return the peak of this process's memory, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1024 if sys.platform == "linux" else 1024**2)


def main() -> None:
    """Save and load."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--max-memory", default="32MiB")
    options = parser.parse_args()

    def construct() -> Model:
        torch.manual_seed(0)
        return Model(options.layers, options.width)

    model = deferred_init(construct)
    size = sum(parameter.nbytes for parameter in model.parameters()) / 2**20
    with tempfile.TemporaryDirectory() as folder:
        before, start = peak(), time.perf_counter()
        save_safetensors(model, folder, max_memory=options.max_memory)
        seconds = time.perf_counter() - start
        print(f"{size:,.0f} MiB saved in {seconds:.1f} s; memory grew by {max(0, peak() - before):.0f} MiB at most")
        print(sorted(path.name for path in Path(folder).iterdir()), is_deferred(model))

        other = deferred_init(lambda: Model(options.layers, options.width))
        before = peak()
        load_checkpoint(other, folder)
        print(f"loaded; memory grew by {max(0, peak() - before):.0f} MiB at most")
        print(all(torch.equal(a, b) for a, b in zip(other.parameters(), construct().parameters(), strict=True)))


if __name__ == "__main__":
    main()
