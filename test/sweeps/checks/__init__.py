"""The checks that `test_operators.py` runs on every operator of `op_db`. An import of this package registers them."""

from sweeps.checks import (
    autocast,
    deferred,
    devices,
    fakes,
    forward_ad,
    inference,
    known_values,
    outputs,
    refusals,
    storages,
)

__all__ = [
    "autocast",
    "deferred",
    "devices",
    "fakes",
    "forward_ad",
    "inference",
    "known_values",
    "outputs",
    "refusals",
    "storages",
]
