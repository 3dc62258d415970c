"""Prints how far each call of philox_calls.py moves the generator of the GPU, by PyTorch's own host code.

`make philox-facts` runs it under the null driver for three GPUs, and writes test/fake/philox_facts.tsv: on each line
the GPU, the call, the dtype, and for each size how far.
"""

from __future__ import annotations

import sys
from itertools import groupby

import torch
from philox_calls import cases, offset_of


def main(gpu: str) -> None:
    torch.backends.cudnn.enabled = False
    torch.zeros(1, device="cuda")
    generator = torch.cuda.default_generators[0]
    for (call, dtype), group in groupby(cases(), lambda case: (case.call, case.dtype)):
        facts = []
        for case in group:
            try:
                facts.append(f"{case.size}:{offset_of(case, generator)}")
            except torch.OutOfMemoryError:
                continue
            except RuntimeError as error:  # in 2.11 it depends on values, which nothing computes here
                if "normal expects all elements of std" not in str(error):
                    raise
        print(gpu, call, str(dtype).removeprefix("torch."), " ".join(facts), sep="\t")


if __name__ == "__main__":
    main(sys.argv[1])
