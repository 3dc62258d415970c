"""Defer transformers models and compare them, bit for bit, with eager construction.

Needs transformers, but no network: the models are made from configurations. Exits with 1 if a parameter or buffer
differs.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil
import torch
import transformers
from torch import Tensor, nn

from torchext.deferred_init import deferred_init, is_deferred, materialize_module

MIB = 2**20
LLAMA_100M = transformers.LlamaConfig(
    hidden_size=768, intermediate_size=2048, num_hidden_layers=8, num_attention_heads=12, vocab_size=32000
)
LLAMA_2_7B = transformers.LlamaConfig(
    hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32, vocab_size=32000
)


def give_back_freed_memory() -> None:
    """Collect garbage, and return free memory to the system, so that reuse is measured as growth."""
    gc.collect()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):  # glibc
        libc.malloc_trim(0)


class Meter:
    """Measures the duration of a block and the growth of resident memory."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.peak_bytes = 0

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Measure the block. A thread samples the memory every 2 ms."""
        give_back_freed_memory()
        process = psutil.Process()
        start_bytes = process.memory_info().rss
        done = threading.Event()

        def watch() -> None:
            while not done.wait(0.002):
                self.peak_bytes = max(self.peak_bytes, process.memory_info().rss - start_bytes)

        watcher = threading.Thread(target=watch)
        watcher.start()
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds = time.perf_counter() - start
            done.set()
            watcher.join()
            self.peak_bytes = max(self.peak_bytes, process.memory_info().rss - start_bytes)

    def __str__(self) -> str:
        return f"{self.seconds:7.2f} s {self.peak_bytes / MIB:9.0f} MiB"


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return all parameters and buffers, including the non-persistent ones."""
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))


def bits(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor, for a comparison of bits."""
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def differences(actual: nn.Module, expected: nn.Module) -> list[str]:
    """Return the names of the tensors that differ in any way."""
    found, wanted = tensors_of(actual), tensors_of(expected)
    if found.keys() != wanted.keys():
        return sorted(found.keys() ^ wanted.keys())
    return [
        name
        for name, tensor in wanted.items()
        if (tensor.shape, tensor.dtype, tensor.stride()) != (found[name].shape, found[name].dtype, found[name].stride())
        or not torch.equal(bits(tensor), bits(found[name]))
    ]


def compare(name: str, build: Callable[[], nn.Module]) -> bool:
    """Build a model both ways from one seed, print time and memory, and return true if the results are equal."""
    with torch.device("meta"):
        build()  # the first model of an architecture imports its code
    eager_meter, defer_meter, materialize_meter = Meter(), Meter(), Meter()
    torch.manual_seed(0)
    with defer_meter.measure():
        model = deferred_init(build)
    deferred_state = torch.get_rng_state()
    with materialize_meter.measure():
        materialize_module(model)
    torch.manual_seed(0)
    with eager_meter.measure():
        eager = build()

    wrong = differences(model, eager)
    if not torch.equal(torch.get_rng_state(), deferred_state):
        wrong.append("(the state of the random generator)")
    numel = sum(parameter.numel() for parameter in eager.parameters())
    print(f"{name}: {numel / 1e6:.1f} M parameters, {len(tensors_of(eager))} parameters and buffers")
    print(f"  eager construction    {eager_meter}")
    print(f"  deferred construction {defer_meter}")
    print(f"  materialization       {materialize_meter}")
    print(f"  {'DIFFERENT: ' + ', '.join(wrong) if wrong else 'identical, bit for bit'}\n", flush=True)
    return not wrong


def show_large_model() -> bool:
    """Defer a model that may not fit in memory, and materialize one layer of it."""
    meter, layer_meter = Meter(), Meter()
    with meter.measure():
        model = deferred_init(transformers.AutoModelForCausalLM.from_config, LLAMA_2_7B)
    numel = sum(parameter.numel() for parameter in model.parameters())
    print(f"Llama-2-7B shape: {numel / 1e9:.2f} B parameters, {4 * numel / 1e9:.0f} GB if they were real")
    print(f"  deferred construction {meter}")

    last = model.model.layers[-1]
    with layer_meter.measure():
        materialize_module(last)
    real = sum(parameter.numel() * 4 for parameter in last.parameters())
    print(f"  last decoder layer    {layer_meter}, for weights of {real / MIB:.0f} MiB")
    print(f"  {last.self_attn.q_proj.weight[0, :4]}")

    others = [parameter for name, parameter in model.named_parameters() if not name.startswith("model.layers.31.")]
    still_deferred = all(is_deferred(parameter) for parameter in others)
    print(f"  the other {len(others)} parameters are {'still deferred' if still_deferred else 'NOT DEFERRED'}")
    return still_deferred and not is_deferred(last)


def main() -> int:
    """Run both parts and returns the exit status."""
    transformers.logging.set_verbosity_error()
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {os.cpu_count()} processors\n")
    print(f"{'':24}   time      peak memory added")
    results = [
        compare("Llama", lambda: transformers.AutoModelForCausalLM.from_config(LLAMA_100M)),
        compare("BERT", lambda: transformers.AutoModelForMaskedLM.from_config(transformers.BertConfig())),
        compare("ViT", lambda: transformers.AutoModelForImageClassification.from_config(transformers.ViTConfig())),
        show_large_model(),
    ]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
