"""A GPU rejects and accepts the dtypes that the facts list: NOTE [Dtypes that CUDA kernels refuse]."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from common import COMPUTES_ON_CUDA
from cuda_dtypes import Call, facts, name_of, refusal_in

from torchext.internals.patching import TORCH_RELEASE

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not COMPUTES_ON_CUDA, reason="this is how the facts were made: make dtype-facts"),
]

REFUSED, ACCEPTED, FAILED = "refused", "accepted", "failed"
LOST = "device-side assert"


def outcome(call: Call, dtype: torch.dtype) -> str:
    try:
        call.run(dtype, torch.zeros)
        torch.cuda.synchronize()
    except Exception as error:
        return REFUSED if (refusal_in(error) or "?")[-1] == name_of(dtype) else f"{FAILED}: {error}"[:200]
    return ACCEPTED


def print_outcomes(first: int) -> None:
    """Make the calls of the facts from `first` on, until one loses the device, as assertions there do."""
    for number, (call, refused, accepted) in enumerate(facts()):
        for dtype in [*refused, *accepted] if number >= first else ():
            found = outcome(call, dtype)
            print(json.dumps((number, name_of(dtype), found)), flush=True)
            if LOST in found:
                os._exit(1)


def outcomes() -> list[tuple[int, str, str]]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    found: list[tuple[int, str, str]] = []
    first, last = 0, len(facts())
    while first < last:
        arguments = [sys.executable, str(Path(__file__)), str(first)]
        done = subprocess.run(arguments, capture_output=True, text=True, check=False, env=environment)
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        found += lines
        if done.returncode == 0:
            break
        assert lines, done.stderr
        first = lines[-1][0] + 1
    return found


def test_gpu_refuses_and_accepts_the_dtypes_of_the_facts() -> None:
    rows = facts()
    wrong, tried = [], 0
    for number, dtype, found in outcomes():
        call, refused, _ = rows[number]
        expected = REFUSED if dtype in map(name_of, refused) else ACCEPTED
        # The values, all zeros, may be invalid.
        tried += not found.startswith(FAILED)
        if found != expected and not found.startswith(FAILED):
            wrong.append((call.op, dtype, expected))
    assert tried > 5000
    assert [row for row in wrong if row[2] == REFUSED] == []
    # The facts are from 2.15; earlier releases have fewer dtypes.
    assert [row for row in wrong if row[2] == ACCEPTED] == [] or TORCH_RELEASE < (2, 15)


if __name__ == "__main__":
    print_outcomes(int(sys.argv[1]))
