"""The repeated blocks of a model, such as the layers of a transformer, and the code that checkpoints some of them."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

__all__ = ["Block", "blocks_of", "checkpoint_block", "is_checkpointed_by_transformers", "snippet_of"]

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)

# Checkpointing layers of transformers check these attributes, and then do not pass caches of keys and values on. Its
# models, such as the stacks of T5, also have them, but only layers use them.
FLAG, FUNCTION = "gradient_checkpointing", "_gradient_checkpointing_func"


@dataclass(frozen=True)
class Block:
    """A repeated block.

    Attributes:
        root: The class of the module that the program calls.
        path: The name of the block in that module.
        kind: A number that blocks of one class with parameters of the same shapes share.
        is_of_transformers: Whether it has transformers' own flag for checkpointing.
    """

    root: str
    path: str
    kind: int
    is_of_transformers: bool = False

    @property
    def group(self) -> tuple[str, int]:
        """A key that interchangeable blocks share: numbers of kinds begin at 0 for each root."""
        return self.root, self.kind


def blocks_of(root: nn.Module) -> Iterator[tuple[Block, nn.Module]]:
    """Return the outermost repeated blocks of `root`, in order.

    A block is a child whose class occurs several times among the children of one module, and that itself has children
    and parameters. `nn.Sequential` and other containers are not blocks, but may contain some. The checkpointing layers
    of transformers are blocks, and modules that contain some are not.
    """
    kinds: dict[tuple[object, ...], int] = {}
    for path, module in _repeated(root, ""):
        signature = (type(module), *((tuple(p.shape), p.dtype) for p in module.parameters()))
        kind = kinds.setdefault(signature, len(kinds))
        yield Block(type(root).__name__, path, kind, _is_of_transformers(module)), module


def _repeated(parent: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    children = dict(parent.named_children())  # a module with several names is listed once
    classes = [type(child) for child in children.values()]
    for name, child in children.items():
        has_parts = any(True for _ in child.children()) and any(True for _ in child.parameters())
        is_repeated = classes.count(type(child)) > 1 and not isinstance(child, CONTAINERS)
        if has_parts and (
            _is_of_transformers(child) or (is_repeated and not any(map(_is_of_transformers, child.modules())))
        ):
            yield prefix + name, child
        else:
            yield from _repeated(child, f"{prefix}{name}.")


def _is_of_transformers(module: nn.Module) -> bool:
    """Return true if a module is a checkpointing layer of transformers; releases before 4.53 have none."""
    layers = getattr(sys.modules.get("transformers.modeling_layers"), "GradientCheckpointingLayer", None)
    return layers is not None and isinstance(module, layers)


def checkpoint_block(block: nn.Module) -> None:
    """Checkpoint the activations of `block`, as `snippet_of()` does."""
    if _is_of_transformers(block):
        setattr(block, FLAG, True)
        setattr(block, FUNCTION, partial(checkpoint, use_reentrant=False))
    else:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def is_checkpointed_by_transformers(block: nn.Module) -> bool:
    """Return true if the flag of transformers is set."""
    is_set = _is_of_transformers(block) and bool(getattr(block, FLAG))
    return is_set and torch.is_grad_enabled() and block.training


def snippet_of(blocks: Iterable[Block]) -> str:
    """Return the code that checkpoints `blocks` of the module `model`, to run before training."""
    names: dict[tuple[str, str, bool], list[str]] = {}
    for block in blocks:
        container, _, name = block.path.rpartition(".")
        names.setdefault((block.root, container, block.is_of_transformers), []).append(name)
    lines = ["from functools import partial", "from torch.utils.checkpoint import checkpoint"]
    for (root, container, is_of_transformers), parts in names.items():
        prefix = f"{container}." if container else ""
        lines.append(f"for name in {_as_code(parts)}:  # `model` is the {root} that the program calls")
        lines.append(f'    block = model.get_submodule(f"{prefix}{{name}}")')
        if is_of_transformers:
            lines.append(f"    block.{FLAG} = True")
            lines.append(f"    block.{FUNCTION} = partial(checkpoint, use_reentrant=False)")
        else:
            lines.append("    block.forward = partial(checkpoint, block.forward, use_reentrant=False)")
    return "\n".join(lines)


def _as_code(names: list[str]) -> str:
    if not all(name.isdecimal() for name in names):
        return f"[{', '.join(map(repr, names))}]"
    numbers = list(map(int, names))
    if numbers == list(range(numbers[0], numbers[0] + len(numbers))) and len(numbers) > 1:
        return f"range({numbers[0]}, {numbers[-1] + 1})"
    return f"[{', '.join(names)}]"
