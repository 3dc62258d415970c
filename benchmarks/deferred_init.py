"""Compares deferred initialization with the other ways to construct a model.

Prints tables of medians, all measured in one run. Construction: eager, `torch.device("meta")`, PyTorch's FakeTensorMode
and torchext, on transformers' Llama-2-7B shape (eager with two of its layers, scaled). Materialization: against eager
construction on about 1 B parameters.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import transformers
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from torchext.deferred_init import deferred_init, materialize_module

LAYERS = 32


def llama(layers: int, hidden_size: int = 4096) -> nn.Module:
    """A Llama with the proportions of Llama-2-7B."""
    config = transformers.LlamaConfig(
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 43 // 16,
        num_hidden_layers=layers,
        num_attention_heads=32,
        vocab_size=32000,
    )
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return model


def median_seconds(run: Callable[[], object], repeats: int) -> float:
    """The median duration of `run`, after one call that is not counted."""
    run()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def construct_under(context: Callable[[], object]) -> None:
    """Constructs the 7 B shape inside a context manager of PyTorch's."""
    with context():  # type: ignore[attr-defined]
        llama(LAYERS)


def construction(repeats: int) -> None:
    """Prints the table of construction times."""
    eager = (median_seconds(lambda: llama(2), 1) - median_seconds(lambda: llama(1), 1)) * LAYERS
    rows = {
        "torchext": median_seconds(lambda: deferred_init(llama, LAYERS), repeats),
        "meta device": median_seconds(lambda: construct_under(lambda: torch.device("meta")), repeats),
        "FakeTensorMode": median_seconds(lambda: construct_under(FakeTensorMode), repeats),
        "eager (decoder layers, scaled)": eager,
    }
    print(f"\nConstruction of the Llama-2-7B shape, medians of {repeats}\n")
    print(f"{'':32}{'seconds':>9}{'ratio':>9}")
    for name, seconds in rows.items():
        print(f"{name:32}{seconds:9.3f}{seconds / rows['torchext']:9.2f}")


def materialization(repeats: int) -> None:
    """Prints the table of materialization times."""

    def build() -> nn.Module:
        return llama(16, 2048)

    numel = sum(parameter.numel() for parameter in deferred_init(build).parameters())
    eager = median_seconds(build, repeats)
    deferred = median_seconds(lambda: materialize_module(deferred_init(build)), repeats)
    print(f"\nA Llama of {numel / 1e9:.2f} B parameters, medians of {repeats}\n")
    print(f"{'':32}{'seconds':>9}{'ratio':>9}")
    print(f"{'eager construction':32}{eager:9.3f}{eager / eager:9.2f}")
    print(f"{'deferred and materialized':32}{deferred:9.3f}{deferred / eager:9.2f}")


def main() -> None:
    """Runs both comparisons."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    transformers.logging.set_verbosity_error()
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {torch.get_num_threads()} threads")
    construction(repeats)
    materialization(max(3, repeats // 2))


if __name__ == "__main__":
    main()
