"""Texts of recorded calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from .. import _C

__all__ = ["text_of_call", "text_of_parts", "text_of_tensor"]


def text_of_call(operator: _C.RecordedOperator, show: Callable[[_C.RecordedTensor], str]) -> str:
    """Return a call without its outputs, given a text for each tensor: `aten::uniform_(%0, -0.5, 0.5)`.

    Arguments that have their default values are omitted. Those after an omitted one are written by name.
    """
    texts: list[str] = []
    by_name = False
    for name, kwarg_only, value, default in operator.arguments:
        text = _text(value, show)
        # Python passes `pin_memory=False` to every factory.
        is_noise = name == "pin_memory" and text == "False"
        if is_noise or (default is not ... and text == _text(default, show)):
            by_name = True
        else:
            by_name = by_name or kwarg_only
            texts.append(f"{name}={text}" if by_name else text)
    overload = operator.overload and f".{operator.overload}"
    return f"{operator.name}{overload}({', '.join(texts)})"


def text_of_tensor(tensor: _C.RecordedTensor) -> str:
    """Return the dtype and the shape, such as `float32[2, 3]`."""
    return f"{str(tensor.dtype).removeprefix('torch.')}[{', '.join(map(str, tensor.sizes))}]"


def text_of_parts(parts: Iterable[Sequence[slice | None]]) -> str:
    """Return indices such as `[96:128, :8], [200:232]`, or an empty text if one of the parts is all of the tensor."""
    texts = [_text_of_part(part) for part in parts]
    return "" if "[]" in texts else ", ".join(texts)


def _text_of_part(part: Sequence[slice | None]) -> str:
    needed = max((i for i, of in enumerate(part, 1) if of is not None), default=0)
    return f"[{', '.join(map(_text_of_slice, part[:needed]))}]"


def _text_of_slice(of: slice | None) -> str:
    if of is None:
        return ":"
    return f"{of.start}:{of.stop}" if of.step == 1 else f"{of.start}:{of.stop}:{of.step}"


def _text(value: object, show: Callable[[_C.RecordedTensor], str]) -> str:
    match value:
        case _C.RecordedTensor():
            return show(value)
        case list() | tuple():
            items = ", ".join(_text(item, show) for item in value)
            return f"[{items}]" if isinstance(value, list) else f"({items})"
        case float():
            return _text_of_float(value)
        case complex():
            return f"complex({_text_of_float(value.real)}, {_text_of_float(value.imag)})"
        case str():
            return f"'{value}'"
        case torch.dtype():
            return str(value).removeprefix("torch.")
        case torch.layout() | torch.memory_format():
            words = str(value).removeprefix("torch.").removesuffix("_coo").removesuffix("_format").split("_")
            return "".join(map(str.capitalize, words))
        case torch.Generator():
            return f"generator on {value.device}"
        case None | int() | torch.device():
            return str(value)
    return "<Object>"


def _text_of_float(number: float) -> str:
    """Return the shortest decimal that equals `number` and reads as a floating-point number."""
    texts = [f"{number:.{digits}g}" for digits in (6, 15, 16, 17)]
    text = next((text for text in texts if float(text) == number), texts[-1])
    return text if text.strip("-0123456789") else f"{text}.0"
