"""The command `torchext checkpoint`: write the initial checkpoint of a model that may be larger than memory."""

from __future__ import annotations

import argparse
import ast
import errno
import importlib.util
import inspect
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn import Module

from .. import _C
from ..checkpoint.contents import SUFFIX
from ..checkpoint.saving import LEAST_MEMORY, Plan, check_target, planned, save_safetensors
from ..deferred_init import deferred_init, is_deferred
from ..deferred_init.summaries import timed_operators
from ..internals import terminal
from ..internals.text import bytes_of, in_units
from .flags import FAILED, MisuseError, ProgramError, find_function, report_error

__all__ = ["run"]

DOES_NOT_FIT = 3
PROBE = 64 << 20
"""The number of bytes that --plan writes to measure the disk."""


# The flags for arguments of `save_safetensors()`, as errors name them.
FLAGS = {
    "`max_memory`": "--max-memory",
    "`max_shard_size`": "--max-shard-size",
    "`path`": "--out",
    "`dtype`": "--dtype",
    "`resume=True`": "--resume",
}


class _Model(NamedTuple):
    """The model to construct."""

    construct: Callable[[], Any]
    config: Any
    """The configuration of a model of transformers; None for other models."""


def run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Write or plan the checkpoint, and return the exit code."""
    try:
        return _run_checked(options)
    except (MisuseError, ProgramError) as error:
        return report_error(parser, error)
    except MemoryError as error:
        print(f"{parser.prog}: {_with_flags(str(error))}", file=sys.stderr)
        return DOES_NOT_FIT
    except BrokenPipeError:
        raise
    except OSError as error:
        text = f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)
        print(f"{parser.prog}: {_with_flags(text)}", file=sys.stderr)
        return DOES_NOT_FIT if error.errno in (errno.ENOSPC, errno.EDQUOT) else FAILED
    except (ImportError, RuntimeError, TypeError, ValueError) as error:
        print(f"{parser.prog}: {_with_flags(str(error))}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print(f"\n{parser.prog}: interrupted. Complete tensors are kept; --resume continues.", file=sys.stderr)
        return terminal.INTERRUPTED


def _with_flags(message: str) -> str:
    """Return an error of `save_safetensors()` with the flags instead of its arguments."""
    for argument, flag in FLAGS.items():
        message = message.replace(argument, flag)
    return message


def _check(options: argparse.Namespace) -> None:
    if (options.function is None) == (options.hf is None):
        taken = next((value for value in options.args if re.fullmatch(r"[\w.]+:[\w.]+", value)), None)
        if options.function is None and taken is not None:
            raise MisuseError(f"--args takes all values after it, also {taken!r}: give MODULE:FUNCTION before --args")
        raise MisuseError("give the model to construct: either MODULE:FUNCTION or --hf FOLDER")
    if options.out is None and not options.plan:
        raise MisuseError("--out is missing: give a folder, or a file that ends in .safetensors")
    if options.out is not None:
        try:
            check_target(options.out)
        except ValueError as error:
            raise MisuseError(_with_flags(str(error))) from error


def _run_checked(options: argparse.Namespace) -> int:
    # With `--json -`, the output of the program must not mix with the JSON.
    with redirect_stdout(sys.stderr) if options.json == terminal.STDOUT else nullcontext():
        results = _results(options)
    terminal.write_json(options.json, "checkpoint", results)
    return 0


def _results(options: argparse.Namespace) -> dict[str, Any]:
    """Write the checkpoint, or print the plan, and return the content of the JSON."""
    _check(options)
    if options.workers is not None:
        torch.set_num_threads(options.workers)
    out = Path("checkpoint") if options.out is None else options.out
    dtype = _dtype(options.dtype)
    max_shard_size, max_memory = _size(options, "max_shard_size"), _size(options, "max_memory")
    if max_memory < LEAST_MEMORY:
        raise MemoryError(f"--max-memory: expected at least {in_units(LEAST_MEMORY)}, got {options.max_memory}")
    model = _model_of_transformers(options.hf) if options.hf else _function(options.function, options.args)
    source = _construct(model, options)
    if options.plan:
        plan = planned(source, out, max_shard_size, max_memory, dtype)
        found = _describe(plan)
        if options.json != terminal.STDOUT:
            print(plan.summary, end="\n\n")
            _print(found, has_place=options.out is not None)
        return {"plan": found}
    shows_bar = not options.quiet and importlib.util.find_spec("tqdm") is not None
    save_safetensors(
        source,
        out,
        max_shard_size=max_shard_size,
        max_memory=max_memory,
        dtype=dtype,
        progress=shows_bar,
        resume=options.resume,
    )
    if model.config is not None:
        _save_config(source, out)
    folder = out.parent if out.suffix == SUFFIX else out
    files = [out] if out.suffix == SUFFIX else sorted(folder.glob(f"*{SUFFIX}*"))
    written = [{"name": file.name, "bytes": file.stat().st_size} for file in files]
    return {"folder": str(folder), "files": written}


def _dtype(name: str | None) -> torch.dtype | None:
    if name is None:
        return None
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        known = [name for name, value in vars(torch).items() if isinstance(value, torch.dtype)]
        near = terminal.suggestion(name.removeprefix("torch."), known)
        raise MisuseError(f"--dtype: expected a dtype of PyTorch such as bfloat16, got {name!r}{near}")
    return dtype


def _size(options: argparse.Namespace, name: str) -> int:
    try:
        return bytes_of(getattr(options, name), f"--{name.replace('_', '-')}")
    except ValueError as error:
        raise MisuseError(str(error)) from error


# ---- The model


def _function(name: str, arguments: Sequence[str]) -> _Model:
    found = find_function(name)
    positional, named = _values(arguments)
    _check_call(found, positional, named)
    return _Model(lambda: found(*positional, **named), None)


def _check_call(function: Callable[..., Any], positional: list[Any], named: dict[str, Any]) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # functions in C may have none
        return
    try:
        signature.bind(*positional, **named)
    except TypeError as error:
        unknown = next((name for name in named if name not in signature.parameters), "")
        raise MisuseError(f"--args: {error}{terminal.suggestion(unknown, signature.parameters)}") from error


def _values(arguments: Sequence[str]) -> tuple[list[Any], dict[str, Any]]:
    positional: list[Any] = []
    named: dict[str, Any] = {}
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if equals and name.isidentifier():
            named[name] = _value(value)
        elif named:
            raise MisuseError(f"--args: the positional value {argument!r} follows a NAME=VALUE; give it first")
        else:
            positional.append(_value(argument))
    return positional, named


def _value(text: str) -> Any:
    """Return the Python literal that `text` is, or `text` itself."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _model_of_transformers(folder: str) -> _Model:
    if not (Path(folder) / "config.json").is_file():
        raise MisuseError(f"--hf: {folder!r} has no config.json")
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
    try:
        source = deferred_init(model.construct)
    except MemoryError:
        raise
    except (Exception, SystemExit) as error:
        raise ProgramError("constructing the model failed") from error
    name = options.function or options.hf
    if isinstance(source, Module):
        has_deferred = is_deferred(source)
    elif isinstance(source, dict):
        has_deferred = any(isinstance(value, torch.Tensor) and _C.is_deferred(value) for value in source.values())
    else:
        raise MisuseError(
            f"{name!r}: expected a module or a state dict as the result, got an object of type {type(source).__name__}"
        )
    if not has_deferred:
        raise MisuseError(
            f"{name!r} returned no deferred tensor: the model was constructed before the call, or in other threads"
        )
    return source


def _save_config(source: Any, out: Path) -> None:
    """Write the configuration beside the weights, where `from_pretrained()` finds it."""
    folder = out.parent if out.suffix == SUFFIX else out
    if (folder / "config.json").exists():
        return
    source.config.save_pretrained(folder)
    if source.can_generate() and source.generation_config is not None:
        source.generation_config.save_pretrained(folder)


# ---- The plan


def _describe(plan: Plan) -> dict[str, Any]:
    """Return the plan as builtin types: sizes in bytes, times in seconds."""
    name, pieces = max(plan.pieces.items(), key=lambda item: item[1].needs, default=("", None))
    computing, writing = _seconds_to_compute(plan), _seconds_to_write(plan)
    return {
        "folder": str(plan.place),
        "files": [
            {"name": file.name, "tensors": len(file.header.places), "bytes": file.header.file_size}
            for file in plan.files.files
        ],
        "index": None if plan.files.index_file is None else plan.files.index_file[0],
        "bytes": plan.nbytes,
        "memory": plan.budget.beside_computing + (0 if pieces is None else pieces.needs),
        "largest_tensor": name,
        "seconds_computing": computing,
        "seconds_writing": writing,
        "seconds": None if writing is None else max(computing, writing),
    }


def _print(plan: dict[str, Any], *, has_place: bool) -> None:
    if plan["index"] is not None:
        print(f"index      {plan['index']}")
    print(f"total      {in_units(plan['bytes'])}{' in ' + plan['folder'] if has_place else ''}")
    print(f"memory     {in_units(plan['memory'])}, most of it for {plan['largest_tensor'] or 'no tensor'}")
    print(f"computing  {plan['seconds_computing']:.1f} s")
    if plan["seconds_writing"] is None:
        print("writing    unknown: the folder does not exist")
        return
    print(f"writing    {plan['seconds_writing']:.1f} s")
    print(f"predicted  {plan['seconds']:.1f} s: computing and writing overlap")


def _seconds_to_compute(plan: Plan) -> float:
    return sum(one.predicted for one in timed_operators(plan.contents.tensors.values(), measured=False))


def _seconds_to_write(plan: Plan) -> float | None:
    """Return the seconds that writing takes, from the time of a small write to the disk; None without a folder."""
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
