"""Time of the first calls on fake tensors in a fresh process, compared with later calls and with FakeTensorMode.

The first call with a new signature runs PyTorch's Meta kernel, which is often Python, and may import modules. Prints
CPU seconds for each model: of `torch.randn(2)` as the first call of a process; of the first and of a later forward
pass, backward pass and optimizer step; the first over the later ones; and the first ones under FakeTensorMode over ours
(- if it cannot run the model).

    python benchmarks/cold_calls.py [--repeats N] [--only MODEL ...]
    python benchmarks/cold_calls.py --profile MODEL

Needs `transformers`. Each measurement has its own process; the columns are medians. `--profile` prints the functions in
which the first calls of a model spend their time.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).parents[1]
MODELS = (
    "Llama-8B",
    *("albert", "bart", "bert", "bloom", "deberta-v2", "deit", "distilbert", "electra", "falcon", "gemma2", "gpt2"),
    *("gpt_neox", "llama", "mistral", "mixtral", "opt", "phi", "qwen2", "resnet", "roberta", "t5", "vit"),
)
PHASES = ("randn", "forward", "backward", "step")


def model_of(name: str) -> Any:
    """Return a model of transformers: a small one, or the shape of Llama-3-8B."""
    import transformers

    transformers.logging.set_verbosity_error()
    if name == "Llama-8B":
        config: Any = transformers.LlamaConfig(
            vocab_size=128256,
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
        )
        return transformers.LlamaForCausalLM(config)
    sys.path.append(str(ROOT / "test"))
    from architectures import small_config

    return transformers.AutoModel.from_config(small_config(name))


def inputs_of(model: Any) -> dict[str, Tensor]:
    """Return a batch for a model."""
    if model.main_input_name == "pixel_values":
        size = getattr(model.config, "image_size", 224)
        sizes = tuple(size) if isinstance(size, list | tuple) else (size, size)
        return {"pixel_values": torch.randn(2, getattr(model.config, "num_channels", 3), *sizes)}
    tokens = torch.ones(2, 16, dtype=torch.int64)
    return {"input_ids": tokens, **({"decoder_input_ids": tokens} if model.config.is_encoder_decoder else {})}


def loss_of(outputs: Any) -> Tensor:
    """Return a loss that depends on the first output."""
    loss: Tensor = next(iter(outputs.values())).float().square().mean()
    return loss


def measure(name: str, how: str, profile: bool = False) -> dict[str, Any]:
    """Return CPU seconds of the phases, the first time and later."""
    if how == "torchext":
        from torchext.fake import fake_mode

        mode: Any = fake_mode()
    else:
        from torch._subclasses.fake_tensor import FakeTensorMode

        mode = FakeTensorMode()
    with mode:
        first = timed("randn", lambda: torch.randn(2))
        later = timed("randn", lambda: torch.randn(2))
        model = model_of(name)
        batch = inputs_of(model)
        profiler = cProfile.Profile()
        if profile:
            profiler.enable()
        first |= step_of(model, batch)
        profiler.disable()
        steps = [step_of(model, batch) for _ in range(3)]
        later |= {phase: statistics.median(one[phase] for one in steps) for phase in PHASES[1:]}
    if profile:
        pstats.Stats(profiler).sort_stats("cumulative").print_stats(60).sort_stats("tottime").print_stats(30)
    return {"first": first, "later": later}


def timed(phase: str, function: Callable[[], Any]) -> dict[str, float]:
    """Return the CPU seconds of a call by the name of the phase."""
    start = time.process_time()
    function()
    return {phase: time.process_time() - start}


def step_of(model: Any, batch: dict[str, Tensor]) -> dict[str, float]:
    """Run a step with its own optimizer, and return the CPU seconds of each phase."""
    losses: list[Tensor] = []
    times = timed("forward", lambda: losses.append(loss_of(model(**batch))))
    times |= timed("backward", losses[0].backward)
    optimizer = torch.optim.AdamW(model.parameters())  # imports Dynamo, which is not a call
    return times | timed("step", optimizer.step)


def in_process(*arguments: object) -> dict[str, Any] | None:
    """Return the result of a measurement in a new process, or None if it fails."""
    command = [sys.executable, __file__, "--one", json.dumps(arguments)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    return json.loads(ended.stdout.splitlines()[-1]) if ended.returncode == 0 else None


def print_row(name: str, repeats: int) -> None:
    """Print the row of a model."""
    found: dict[str, list[dict[str, Any]]] = {"torchext": [], "FakeTensorMode": []}
    for _ in range(repeats):
        for how, results in found.items():
            results += filter(None, [in_process(name, how)])

    def medians(how: str, when: str) -> list[float]:
        return [float(statistics.median(one[when][phase] for one in found[how])) for phase in PHASES]

    first, later = medians("torchext", "first"), medians("torchext", "later")
    cells = [name, f"{first[0]:.2f}", *(f"{a:.3f} / {b:.3f}" for a, b in zip(first[1:], later[1:], strict=True))]
    cells.append(f"{sum(first[1:]) / sum(later[1:]):.1f}")
    has_peer = bool(found["FakeTensorMode"])
    cells.append(f"{sum(medians('FakeTensorMode', 'first')[1:]) / sum(first[1:]):.1f}" if has_peer else "-")
    print(f"| {' | '.join(cells)} |", flush=True)


def main() -> None:
    """Print the table, or a profile."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="+", default=MODELS)
    parser.add_argument("--profile", metavar="MODEL")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.profile:
        measure(options.profile, "torchext", profile=True)
    elif options.one:
        print(json.dumps(measure(*json.loads(options.one))))
    else:
        heads = ["first call, s", *(f"{phase}, first / later, s" for phase in PHASES[1:])]
        print(f"| model | {' | '.join(heads)} | first over later | FakeTensorMode over ours |")
        print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
        for name in options.only:
            print_row(name, options.repeats)


if __name__ == "__main__":
    main()
