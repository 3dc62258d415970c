"""Remedies: changes of a program that may lower its peak memory, and the code that its author would write.

A remedy is applied to the unmodified program for one simulated run: `applying.py` calls its methods where the program
would contain the change. To add a remedy, define a subclass of `Remedy` and list it in `remedies_for()`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

__all__ = [
    "KINDS",
    "Accumulate",
    "Arguments",
    "Block",
    "Checkpoint",
    "Findings",
    "Numerics",
    "Remedy",
    "blocks_of",
    "is_checkpointed_by_transformers",
    "remedies_for",
]


# ---- The repeated blocks of a model, such as the layers of a transformer


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


def _checkpoint_block(block: nn.Module) -> None:
    """Checkpoint the activations of `block`, as `_snippet_of()` does."""
    if _is_of_transformers(block):
        setattr(block, FLAG, True)
        setattr(block, FUNCTION, partial(checkpoint, use_reentrant=False))
    else:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def is_checkpointed_by_transformers(block: nn.Module) -> bool:
    """Return true if the flag of transformers is set."""
    is_set = _is_of_transformers(block) and bool(getattr(block, FLAG))
    return is_set and torch.is_grad_enabled() and block.training


def _snippet_of(blocks: Iterable[Block]) -> str:
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


# ---- Remedies


MIB = 2**20
SMALLEST_LOGITS = 16 * MIB  # bytes; chunks of smaller ones save nothing
CHUNKS = 8
MICRO_BATCHES = (2, 4, 8, 16)


class Numerics(IntEnum):
    """The effect of a remedy on the values that the program computes."""

    EXACT = 0
    """None."""
    ROUNDING = 1
    """The same formula, with differences of rounding."""
    ARGUMENTS = 2
    """That of the arguments that the user offers."""
    CHANGED = 3
    """Other values, for example of lower precision."""


@dataclass
class Findings:
    """The properties of a program that decide which remedies may help.

    Attributes:
        blocks: The repeated blocks that run with gradients, are not checkpointed and update no buffers.
        options: The options among `foreach` and `fused` that the constructed optimizers have.
        keeps_gradients: Whether gradients are set to zero instead of None.
        logits: The largest number of bytes of the logits of a cross entropy, in float32.
        is_sharded: Whether FSDP2 shards a module.
        allocator: The settings of the allocator.
    """

    blocks: tuple[Block, ...] = ()
    options: set[str] = field(default_factory=set)
    keeps_gradients: bool = False
    logits: int = 0
    is_sharded: bool = False
    allocator: str = ""


@dataclass(frozen=True)
class Remedy:
    """A change of a program that may lower its peak memory.

    Attributes:
        kind: The name of its kind; a combination has at most one remedy of each.
        name: Its own name, unless that depends on an instance (`str()`).
        code: The change that the author of the program makes, unless that depends on an instance (`snippet`).
        numerics: The effect on the computed values.
        is_cheap: Whether it neither recomputes nor copies, so that it is tried before those that do.
        keeps_operations: Whether the counted operations of a step stay the same: matrix products, convolutions and
            attention.
    """

    kind: ClassVar[str] = ""
    name: ClassVar[str] = ""
    code: ClassVar[str] = ""
    numerics: ClassVar[Numerics] = Numerics.EXACT
    is_cheap: ClassVar[bool] = False
    keeps_operations: ClassVar[bool] = False

    def __str__(self) -> str:
        return self.name

    @property
    def snippet(self) -> str:
        """The change that the author of the program makes."""
        return self.code

    def block(self) -> AbstractContextManager[object]:
        """Return a block in which the program runs."""
        return nullcontext()

    def adapt_module(self, root: nn.Module) -> None:
        """Change a module that the program calls, before it runs for the first time."""

    def around_forward(self) -> AbstractContextManager[object]:
        """Return a block in which each forward pass of a module runs that the program calls."""
        return nullcontext()

    def adapt_optimizer(self, arguments: MutableMapping[str, Any]) -> None:
        """Change the keyword arguments of an optimizer."""

    def to_dict(self) -> dict[str, Any]:
        """Return the kind, the name, the effect on the values and the snippet, for JSON."""
        return {"kind": self.kind, "name": str(self), "numerics": self.numerics.name.lower(), "snippet": self.snippet}


@dataclass(frozen=True)
class Checkpoint(Remedy):
    """Recompute the activations of some blocks in the backward pass."""

    blocks: tuple[Block, ...]
    count: int
    kind: ClassVar[str] = "checkpointing"

    def __str__(self) -> str:
        return f"checkpoint {len(self.blocks)} of {self.count} blocks"

    @property
    def is_full(self) -> bool:
        """Whether all blocks are checkpointed."""
        return len(self.blocks) == self.count

    @property
    def snippet(self) -> str:
        """The change that the author of the program makes."""
        return _snippet_of(self.blocks)

    def adapt_module(self, root: nn.Module) -> None:
        """Checkpoint the blocks of `root`."""
        paths = {block.path for block in self.blocks if block.root == type(root).__name__}
        for block, module in list(blocks_of(root)) if paths else ():
            if block.path in paths:
                _checkpoint_block(module)


@dataclass(frozen=True)
class ExpandableSegments(Remedy):
    """Let the caching allocator grow its segments."""

    kind: ClassVar[str] = "allocator"
    name: ClassVar[str] = "expandable_segments:True"
    is_cheap: ClassVar[bool] = True
    keeps_operations: ClassVar[bool] = True

    @property
    def snippet(self) -> str:
        settings = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
        return f"export PYTORCH_ALLOC_CONF={_extended(settings)}"

    @contextmanager
    def block(self) -> Iterator[None]:
        before = torch._C._accelerator_getAllocatorSettings()
        torch._C._accelerator_setAllocatorSettings(_extended(before))
        try:
            yield
        finally:
            torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
            torch._C._accelerator_setAllocatorSettings(before)


def _extended(settings: str) -> str:
    return ",".join(part for part in (settings, "expandable_segments:True") if part)


@dataclass(frozen=True)
class OptimizerOption(Remedy):
    """Construct optimizers with `foreach=False`, which needs no lists of temporaries, or with `fused=True`."""

    option: str
    kind: ClassVar[str] = "optimizer"
    numerics: ClassVar[Numerics] = Numerics.ROUNDING
    is_cheap: ClassVar[bool] = True
    keeps_operations: ClassVar[bool] = True

    def __str__(self) -> str:
        return f"optimizer with {self.option}={self.option == 'fused'}"

    @property
    def snippet(self) -> str:
        """The change that the author of the program makes."""
        return f"optimizer = torch.optim.AdamW(..., {self.option}={self.option == 'fused'})  # or another class"

    def adapt_optimizer(self, arguments: MutableMapping[str, Any]) -> None:
        if self.option == "fused" and "fused" in arguments:
            arguments.update(fused=True, foreach=None)
        elif self.option == "foreach" and "foreach" in arguments:
            arguments.update({"foreach": False} | ({"fused": None} if "fused" in arguments else {}))


@dataclass(frozen=True)
class NoGradients(Remedy):
    """Free gradients between steps. The values are the same if each parameter gets a gradient in each step."""

    kind: ClassVar[str] = "gradients"
    name: ClassVar[str] = "zero_grad(set_to_none=True)"
    code: ClassVar[str] = "optimizer.zero_grad(set_to_none=True)  # if each parameter gets a gradient in each step"
    is_cheap: ClassVar[bool] = True
    keeps_operations: ClassVar[bool] = True


def cross_entropy_in_chunks(
    cross_entropy: Callable[..., Tensor], logits: Tensor, target: Tensor, ignore_index: int, reduction: str
) -> Tensor:
    """Return the cross entropy of `logits` (N, C), computed in chunks that are recomputed in the backward pass."""
    parts = zip(logits.chunk(CHUNKS), target.chunk(CHUNKS), strict=True)
    total: Any = sum(
        checkpoint(cross_entropy, one, labels, ignore_index=ignore_index, reduction="sum", use_reentrant=False)
        for one, labels in parts
    )
    loss: Tensor = total if reduction == "sum" else total / (target != ignore_index).sum()
    return loss


SNIPPET_OF_CHUNKS = f"""\
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
def cross_entropy_in_chunks(logits, target, ignore_index=-100, reduction="mean"):  # instead of F.cross_entropy
    parts = zip(logits.chunk({CHUNKS}), target.chunk({CHUNKS}))
    total = sum(
        checkpoint(F.cross_entropy, one, labels, ignore_index=ignore_index, reduction="sum", use_reentrant=False)
        for one, labels in parts
    )
    return total if reduction == "sum" else total / (target != ignore_index).sum()"""


@dataclass(frozen=True)
class ChunkedLoss(Remedy):
    """Compute the cross entropy in chunks of tokens, and recompute them in the backward pass."""

    kind: ClassVar[str] = "loss"
    name: ClassVar[str] = f"cross entropy in {CHUNKS} chunks"
    code: ClassVar[str] = SNIPPET_OF_CHUNKS
    numerics: ClassVar[Numerics] = Numerics.ROUNDING
    is_cheap: ClassVar[bool] = True


@dataclass(frozen=True)
class Reshard(Remedy):
    """Free the parameters that FSDP2 has gathered after the forward pass, also those of the root."""

    kind: ClassVar[str] = "resharding"
    name: ClassVar[str] = "reshard_after_forward=True"
    code: ClassVar[str] = "model.set_reshard_after_forward(True)  # after fully_shard(model)"
    is_cheap: ClassVar[bool] = True
    keeps_operations: ClassVar[bool] = True

    def adapt_module(self, root: nn.Module) -> None:
        for module in sharded_modules(root):
            module.set_reshard_after_forward(True, recurse=False)


def sharded_modules(root: nn.Module) -> list[Any]:
    """Return the modules in `root` that FSDP2 shards."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return [] if fsdp is None else [module for module in root.modules() if isinstance(module, fsdp.FSDPModule)]


@dataclass(frozen=True)
class Offload(Remedy):
    """Keep the tensors that the forward pass saves for the backward pass in pinned memory of the host."""

    kind: ClassVar[str] = "offload"
    name: ClassVar[str] = "offload saved tensors"
    code: ClassVar[str] = "with torch.autograd.graph.save_on_cpu(pin_memory=True):\n    output = model(...)"
    keeps_operations: ClassVar[bool] = True

    def around_forward(self) -> AbstractContextManager[object]:
        return torch.autograd.graph.save_on_cpu(pin_memory=True)


@dataclass(frozen=True)
class Accumulate(Remedy):
    """Load micro-batches instead of batches, and accumulate their gradients. Losses are assumed to be means."""

    count: int
    batch: int
    kind: ClassVar[str] = "micro-batches"
    numerics: ClassVar[Numerics] = Numerics.ROUNDING

    def __str__(self) -> str:
        return f"{self.count} micro-batches of {self.batch}"

    @property
    def snippet(self) -> str:
        """The change that the author of the program makes."""
        return (
            f"for i, micro_batch in enumerate(loader):  # batches of {self.batch}; {self.count} of them make a step\n"
            f"    loss = ...\n    (loss / {self.count}).backward()\n"
            f"    if (i + 1) % {self.count} == 0:\n        optimizer.step()\n        optimizer.zero_grad()"
        )


@dataclass(frozen=True)
class HalfPrecision(Remedy):
    """Make parameters, gradients and the state of optimizers in bfloat16."""

    kind: ClassVar[str] = "bfloat16"
    name: ClassVar[str] = "bfloat16 as the default dtype"
    code: ClassVar[str] = "torch.set_default_dtype(torch.bfloat16)  # before the model is constructed"
    numerics: ClassVar[Numerics] = Numerics.CHANGED

    @contextmanager
    def block(self) -> Iterator[None]:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


@dataclass(frozen=True)
class Arguments(Remedy):
    """Run the program with further arguments."""

    arguments: tuple[str, ...]
    kind: ClassVar[str] = "arguments"
    numerics: ClassVar[Numerics] = Numerics.ARGUMENTS

    def __str__(self) -> str:
        return " ".join(self.arguments)

    @property
    def snippet(self) -> str:
        """The change that the author of the program makes."""
        return f"train.py ... {self}"


KINDS = {
    one.kind: one
    for one in (
        *(Checkpoint, ExpandableSegments, OptimizerOption, NoGradients, ChunkedLoss, Reshard, Offload, Accumulate),
        *(HalfPrecision, Arguments),
    )
}
"""The kinds of remedies by their names."""


def remedies_for(found: Findings, batch: int | None, *, allow_numerics: bool) -> list[Remedy]:
    """Return the remedies without checkpointing that may help a program.

    Args:
        found: The properties of the program.
        batch: The size of the batch, if it can be split.
        allow_numerics: Whether to include those that change the computed values.
    """
    counts = [count for count in MICRO_BATCHES if batch is not None and batch % count == 0]
    return [
        *([ExpandableSegments()] if "expandable_segments" not in found.allocator else []),
        *(OptimizerOption(option) for option in sorted(found.options)),
        *([NoGradients()] if found.keeps_gradients else []),
        *([ChunkedLoss()] if found.logits >= SMALLEST_LOGITS else []),
        *([Reshard()] if found.is_sharded else []),
        Offload(),
        *(Accumulate(count, (batch or 0) // count) for count in counts),
        *([HalfPrecision()] if allow_numerics else []),
    ]
