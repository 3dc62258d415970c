"""The command line: writes the initial checkpoint of a model that need not fit into memory."""

from __future__ import annotations

import argparse
import ast
import errno
import importlib
import importlib.util
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn import Module

from .. import _C
from ..deferred_init import deferred_init, is_deferred
from ..tools.sizes import bytes_of, readable
from .contents import SUFFIX
from .saving import Plan, plan_checkpoint, save_safetensors

__all__ = ["main"]

FAILED, MISUSED, DOES_NOT_FIT, INTERRUPTED = 1, 2, 3, 130
EXIT_CODES = """\
exit codes:
  0   the checkpoint is complete, or could be written (--plan)
  1   constructing, computing or writing it has failed
  2   an argument is wrong
  3   there is too little space on the disk, or too little memory by --max-memory
  130 interrupted; --resume goes on
"""
PROBE = 64 << 20
"""How much is written to find out how fast the disk is, in bytes."""


class MisuseError(Exception):
    """What is wrong with the arguments, for the user."""


class _Model(NamedTuple):
    """What is constructed."""

    construct: Callable[[], Any]
    config: Any
    """Of transformers, if it is a model of theirs."""


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns its exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        return _run(options)
    except MisuseError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return MISUSED
    except MemoryError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return DOES_NOT_FIT
    except OSError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return DOES_NOT_FIT if error.errno in (errno.ENOSPC, errno.EDQUOT) else FAILED
    except (ImportError, RuntimeError, TypeError, ValueError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print(f"\n{parser.prog}: interrupted. What is complete is kept; --resume goes on.", file=sys.stderr)
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m torchext.checkpoint",
        description="Writes the checkpoint that a model has after its construction, without constructing it in memory.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("function", nargs="?", metavar="MODULE:FUNCTION", help="what returns the model, or its class")
    parser.add_argument("--hf", metavar="FOLDER", help="construct a model of transformers from the config.json there")
    parser.add_argument(
        "--args", nargs="*", default=[], metavar="VALUE", help="arguments of the function: values, or NAME=VALUE"
    )
    parser.add_argument("--out", required=True, type=Path, help="a folder, or a file that ends in .safetensors")
    parser.add_argument("--seed", type=int, default=0, help="for torch.manual_seed() before the construction")
    parser.add_argument("--dtype", metavar="DTYPE", help="what to convert floating point to, such as bfloat16")
    parser.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="how large a file may be (5GB)")
    parser.add_argument("--max-memory", default="1GiB", metavar="SIZE", help="how much memory to compute in (1GiB)")
    parser.add_argument("--workers", type=int, metavar="N", help="how many processors to compute on (all)")
    parser.add_argument("--resume", action="store_true", help="go on with what an interrupted call has left")
    parser.add_argument("--plan", action="store_true", help="tell what would be written, and do nothing")
    parser.add_argument("--quiet", action="store_true", help="show no bar")
    return parser


def _run(options: argparse.Namespace) -> int:
    if (options.function is None) == (options.hf is None):
        raise MisuseError("either MODULE:FUNCTION or --hf FOLDER says what to construct")
    if options.workers is not None:
        if options.workers < 1:
            raise MisuseError(f"--workers was expected to be at least 1, but it is {options.workers}")
        torch.set_num_threads(options.workers)
    dtype = _dtype(options.dtype)
    max_shard_size, max_memory = _size(options, "max_shard_size"), _size(options, "max_memory")
    model = _model_of_transformers(options.hf) if options.hf else _function(options.function, options.args)
    source = _construct(model, options)
    if options.plan:
        plan = plan_checkpoint(source, options.out, max_shard_size=max_shard_size, max_memory=max_memory, dtype=dtype)
        _show(plan, options.out)
        return 0
    shows_bar = not options.quiet and importlib.util.find_spec("tqdm") is not None
    save_safetensors(
        source,
        options.out,
        max_shard_size=max_shard_size,
        max_memory=max_memory,
        dtype=dtype,
        progress=shows_bar,
        resume=options.resume,
    )
    if model.config is not None:
        _save_config(source, options.out)
    return 0


def _dtype(name: str | None) -> torch.dtype | None:
    if name is None:
        return None
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise MisuseError(f"--dtype {name} is not a dtype of PyTorch; bfloat16, float16 or float32 are")
    return dtype


def _size(options: argparse.Namespace, name: str) -> int:
    try:
        return bytes_of(getattr(options, name), f"--{name.replace('_', '-')}")
    except ValueError as error:
        raise MisuseError(str(error)) from error


# ---- What to construct ----


def _function(name: str, arguments: Sequence[str]) -> _Model:
    module_name, _, path = name.partition(":")
    if not module_name or not path:
        raise MisuseError(f"{name!r} was expected to be MODULE:FUNCTION, as in my_models.llama:build")
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise MisuseError(f"there is no module {error.name!r} (of {name!r})") from error
    for part in path.split("."):
        if not hasattr(found, part):
            raise MisuseError(f"there is no {part!r} in {getattr(found, '__name__', module_name)!r} (of {name!r})")
        found = getattr(found, part)
    if not callable(found):
        raise MisuseError(f"{name!r} was expected to be a function or a class, but it is a {type(found).__name__}")
    positional, named = _values(arguments)
    return _Model(lambda: found(*positional, **named), None)


def _values(arguments: Sequence[str]) -> tuple[list[Any], dict[str, Any]]:
    positional: list[Any] = []
    named: dict[str, Any] = {}
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if equals and name.isidentifier():
            named[name] = _value(value)
        elif named:
            raise MisuseError(f"--args has {argument!r} after one with a name")
        else:
            positional.append(_value(argument))
    return positional, named


def _value(text: str) -> Any:
    """What Python would read, or the text itself."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _model_of_transformers(folder: str) -> _Model:
    if not (Path(folder) / "config.json").is_file():
        raise MisuseError(f"there is no config.json in {folder!r}")
    try:
        import transformers
    except ImportError as error:
        raise MisuseError("--hf needs transformers. Install it: pip install transformers") from error
    config = transformers.AutoConfig.from_pretrained(folder)
    names = getattr(config, "architectures", None) or []
    kind = getattr(transformers, names[0], None) if names else None
    if kind is None:
        return _Model(lambda: transformers.AutoModel.from_config(config), config)
    return _Model(lambda: kind(config), config)


def _construct(model: _Model, options: argparse.Namespace) -> Any:
    torch.manual_seed(options.seed)
    source = deferred_init(model.construct)
    what = options.function or options.hf
    if isinstance(source, Module):
        has_deferred = is_deferred(source)
    elif isinstance(source, dict):
        has_deferred = any(isinstance(value, torch.Tensor) and _C.is_deferred(value) for value in source.values())
    else:
        raise MisuseError(
            f"{what!r} was expected to return a module or a state dict, but returned a {type(source).__name__}"
        )
    if not has_deferred:
        raise MisuseError(
            f"nothing that {what!r} returned is deferred: it was constructed before it was called, or in other threads"
        )
    return source


def _save_config(source: Any, out: Path) -> None:
    """Beside the weights, so that `from_pretrained()` finds it."""
    folder = out.parent if out.suffix == SUFFIX else out
    if (folder / "config.json").exists():
        return  # somebody's own
    source.config.save_pretrained(folder)
    if source.can_generate() and source.generation_config is not None:
        source.generation_config.save_pretrained(folder)


# ---- The plan ----


def _show(plan: Plan, out: Path) -> None:
    for file in plan.files.files:
        print(f"{file.name}  {len(file.header.places)} tensors  {readable(file.header.file_size)}")
    if plan.files.index_file is not None:
        print(plan.files.index_file[0])
    name, pieces = max(plan.pieces.items(), key=lambda item: item[1].needs, default=("nothing", None))
    needs = plan.budget.beside_computing + (0 if pieces is None else pieces.needs)
    computing, writing = _seconds_to_compute(plan), _seconds_to_write(plan, out)
    print(f"in all     {readable(plan.nbytes)} in {plan.place}")
    print(f"memory     {readable(needs)}, most of it for {name}")
    print(f"computing  {computing:.1f} s")
    print("writing    " + ("not known, the folder is not there" if writing is None else f"{writing:.1f} s"))
    if writing is not None:
        print(f"predicted  {max(computing, writing):.1f} s, because one is done while the other is")


def _seconds_to_compute(plan: Plan) -> float:
    deferred = [tensor for tensor in plan.contents.tensors.values() if _C.is_deferred(tensor)]
    by_storage = {tensor.untyped_storage()._cdata: tensor for tensor in deferred}
    return sum(operator[3] for operator in _C.time_operators(list(by_storage.values()), False))


def _seconds_to_write(plan: Plan, out: Path) -> float | None:
    """By writing a little to where it would be."""
    folder = next((one for one in (plan.place, *plan.place.parents) if one.is_dir()), None)
    if folder is None:
        return None
    with tempfile.TemporaryFile(dir=folder) as file:
        content = bytes(1 << 20)
        start = time.perf_counter()
        for _ in range(PROBE // len(content)):
            file.write(content)
        file.flush()
        os.fsync(file.fileno())
        return (time.perf_counter() - start) / PROBE * plan.nbytes
