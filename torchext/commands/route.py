"""The report of the command `torchext route`: the dispatch keys that a call of an operator visits."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch

from .. import _C
from ..fake import fake_mode
from ..inference import inference_mode
from ..inspect import route
from ..internals import terminal

__all__ = ["run"]

MISUSED = 2


def run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Print the route, and return the exit code."""
    try:
        with ExitStack() as block:
            if options.inference_mode:
                block.enter_context(inference_mode())
            if options.fake:
                block.enter_context(fake_mode(gpu=True))
            with torch.device(options.device):
                given, named = _evaluate(options.arguments)
                given += [] if named else _missing_tensors(options, given)
            found = route(options.operator, *given, **named)
    except Exception as error:  # an expression may raise anything
        print(f"{parser.prog}: {_message(error, options)}", file=sys.stderr)
        return MISUSED
    if not options.quiet and options.json != terminal.STDOUT:
        print(found)
    terminal.write_json(options.json, "route", found.to_dict())
    return 0


def _message(error: Exception, options: argparse.Namespace) -> str:
    names = {str(name) for name in torch._C._dispatch_get_all_op_names()}
    if "::" not in options.operator:
        full, base_names = f"aten::{options.operator}", {name.partition(".")[0] for name in names}
        near = terminal.suggestion(full, names | base_names, most=1)
        return f"the operator {options.operator!r} has no namespace{near or '.'}"
    text = str(error).rstrip(".")
    if "CUDA" in text and options.device.startswith("cuda") and not options.fake and not torch.cuda.is_available():
        return f"--device {options.device}: {text}. Add --fake to use fake CUDA devices."
    near = terminal.suggestion(options.operator, names) if options.operator not in names else ""
    return f"{text}{near or '.'}"


def _evaluate(expressions: Iterable[str]) -> tuple[list[Any], dict[str, Any]]:
    given: list[Any] = []
    named: dict[str, Any] = {}
    for text in expressions:
        name, equals, value = text.partition("=")
        if equals and name.isidentifier() and not value.startswith("="):
            named[name] = _value(value)
        else:
            given.append(_value(text))
    return given, named


def _value(text: str) -> Any:
    try:
        return eval(text, {"torch": torch})
    except Exception as error:
        raise ValueError(f"{text!r} cannot be evaluated: {type(error).__name__}: {error}") from error


def _missing_tensors(options: argparse.Namespace, given: list[Any]) -> list[Any]:
    """Return example tensors for the positional arguments without a default that follow `given`."""
    name, _, overload = options.operator.partition(".")
    schemas = torch._C._jit_get_schemas_for_operator(name)
    if not overload and not given and schemas:
        options.operator = name + (f".{schemas[0].overload_name}" if schemas[0].overload_name else "")
        overload = schemas[0].overload_name
    schema = next((schema for schema in schemas if schema.overload_name == overload.replace("default", "")), None)
    if schema is None or not _C.has_operator(name, schema.overload_name):
        return []
    found: list[Any] = []
    for argument in schema.arguments[len(given) :]:
        if argument.kwarg_only or argument.has_default_value():
            break
        found.append(_example(str(argument.type), argument.name, options, str(schema)))
    return found


def _example(kind: str, name: str, options: argparse.Namespace, schema: str) -> Any:
    if kind in ("Tensor", "Optional[Tensor]"):
        return torch.ones(options.shape, requires_grad=options.requires_grad)
    if kind in ("number", "int", "float"):
        return 1
    raise ValueError(f"the argument `{name}` is missing: {schema}")
