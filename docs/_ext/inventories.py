"""Names of PyTorch and Python that the API reference mentions, as inventories for intersphinx without a network."""

from __future__ import annotations

import zlib
from pathlib import Path

__all__ = ["LOCAL", "write_inventories"]

LOCAL = {"torch": "https://docs.pytorch.org/docs/stable/", "python": "https://docs.python.org/3/"}

# For each page of a project, the kind of its names and the names. `$` is a name; a page with `$` has one name.
_TORCH = {
    "generated/$.html": ("class", "torch.Generator torch.nn.Module torch.nn.Parameter torch.no_grad"),
    "amp.html": ("class", "torch.autocast"),
    "distributed.html": ("class", "torch.distributed.ProcessGroup"),
    "distributed.tensor.html": ("class", "torch.distributed.tensor.DTensor"),
    "fx.html": ("class", "torch.fx.Graph torch.fx.GraphModule"),
    "optim.html": ("class", "torch.optim.Optimizer"),
    "size.html": ("class", "torch.Size"),
    "tensor_attributes.html": ("class", "torch.device torch.dtype torch.layout"),
    "tensors.html": ("class", "torch.Tensor"),
}
_PYTHON = {
    "library/collections.abc.html": (
        "class",
        """collections.abc.Callable collections.abc.Iterable collections.abc.Iterator collections.abc.Mapping
        collections.abc.Sequence""",
    ),
    "library/contextlib.html": ("class", "contextlib.AbstractContextManager"),
    "library/enum.html": ("class", "enum.Enum"),
    "library/exceptions.html": (
        "exception",
        """AssertionError AttributeError DeprecationWarning Exception FutureWarning ImportError IndexError KeyError
        NotImplementedError OSError RuntimeError TypeError UserWarning ValueError Warning""",
    ),
    "library/functions.html": ("class", "bool dict float frozenset int list object set tuple type"),
    "library/pathlib.html": ("class", "pathlib.Path"),
    "library/stdtypes.html": ("class", "bytes str"),
    "library/typing.html": ("class", "typing.NamedTuple"),
    "library/typing.html#": ("data", "typing.Any"),
}

# Names by which signatures refer to names above.
_ALIASES = {
    "torch._C.Generator": "torch.Generator",
    "torch.distributed.distributed_c10d.ProcessGroup": "torch.distributed.ProcessGroup",
    "torch.nn.modules.module.Module": "torch.nn.Module",
    "torch.nn.parameter.Parameter": "torch.nn.Parameter",
    "torch.optim.optimizer.Optimizer": "torch.optim.Optimizer",
}


def write_inventories(folder: Path) -> dict[str, Path]:
    """Write the inventories in Sphinx's format, version 2, and return their files by project."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = {}
    for project, pages in {"torch": _TORCH, "python": _PYTHON}.items():
        entries = {
            name: f"py:{kind} 1 {page.rstrip('#').replace('$', name)}#{name} -\n"
            for page, (kind, names) in pages.items()
            for name in names.split()
        }
        entries |= {alias: entries[name] for alias, name in _ALIASES.items() if name in entries}
        text = "".join(f"{name} {entry}" for name, entry in entries.items())
        header = f"# Sphinx inventory version 2\n# Project: {project}\n# Version:\n# The rest is compressed by zlib.\n"
        paths[project] = folder / f"{project}.inv"
        paths[project].write_bytes(header.encode() + zlib.compress(text.encode()))
    return paths
