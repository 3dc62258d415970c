"""Names of PyTorch and Python that the API reference mentions, as inventories for intersphinx without a network."""

from __future__ import annotations

import zlib
from pathlib import Path

__all__ = ["LOCAL", "write_inventories"]

LOCAL = {"torch": "https://docs.pytorch.org/docs/stable/", "python": "https://docs.python.org/3/"}

_GENERATED = "generated/$.html#$"  # where PyTorch documents a name in a page of its own
_TORCH = {
    "torch.Generator": ("class", _GENERATED),
    "torch.Tensor": ("class", "tensors.html#$"),
    "torch.Size": ("class", "size.html#$"),
    "torch.autocast": ("class", "amp.html#$"),
    "torch.device": ("class", "tensor_attributes.html#$"),
    "torch.distributed.ProcessGroup": ("class", "distributed.html#$"),
    "torch.distributed.init_process_group": ("function", "distributed.html#$"),
    "torch.distributed.tensor.DTensor": ("class", "distributed.tensor.html#$"),
    "torch.dtype": ("class", "tensor_attributes.html#$"),
    "torch.fx.Graph": ("class", "fx.html#$"),
    "torch.fx.GraphModule": ("class", "fx.html#$"),
    "torch.inference_mode": ("class", "generated/torch.autograd.grad_mode.inference_mode.html#torch.autograd.grad_mode.inference_mode"),
    "torch.layout": ("class", "tensor_attributes.html#$"),
    "torch.no_grad": ("class", _GENERATED),
    "torch.nn.Module": ("class", _GENERATED),
    "torch.nn.Parameter": ("class", "generated/torch.nn.parameter.Parameter.html#torch.nn.parameter.Parameter"),
    "torch.optim.Optimizer": ("class", "optim.html#$"),
}
_PYTHON = {
    **{
        name: ("class", "library/functions.html#$")
        for name in ("bool", "bytes", "dict", "float", "frozenset", "int", "list", "object", "set", "str", "tuple", "type")
    },
    **{
        f"collections.abc.{name}": ("class", "library/collections.abc.html#$")
        for name in ("Callable", "Iterable", "Iterator", "Mapping", "Sequence")
    },
    **{
        name: ("exception", "library/exceptions.html#$")
        for name in (
            *("AssertionError", "AttributeError", "DeprecationWarning", "Exception", "FutureWarning", "ImportError"),
            *("IndexError", "KeyError", "NotImplementedError", "OSError", "RuntimeError", "TypeError", "UserWarning"),
            *("ValueError", "Warning"),
        )
    },
    "contextlib.AbstractContextManager": ("class", "library/contextlib.html#$"),
    "enum.Enum": ("class", "library/enum.html#$"),
    "pathlib.Path": ("class", "library/pathlib.html#$"),
    "typing.Any": ("data", "library/typing.html#$"),
    "typing.NamedTuple": ("class", "library/typing.html#$"),
}


def write_inventories(folder: Path) -> dict[str, Path]:
    """Write the inventories in Sphinx's format, version 2, and return their files by project."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = {}
    for project, names in {"torch": _TORCH, "python": _PYTHON}.items():
        lines = "".join(f"{name} py:{kind} 1 {place} -\n" for name, (kind, place) in names.items())
        header = f"# Sphinx inventory version 2\n# Project: {project}\n# Version: \n# The rest is compressed with zlib.\n"
        paths[project] = folder / f"{project}.inv"
        paths[project].write_bytes(header.encode() + zlib.compress(lines.encode()))
    return paths
