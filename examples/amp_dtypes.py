"""Report the dtype of each layer of a model on a GPU that you do not have.

    python examples/amp_dtypes.py

Builds a model on a fake CUDA device, calls it in a region, and prints the dtypes of the inputs, parameters and outputs
of each layer. Nothing is computed, so this works for a model of any size on any machine.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torchext import amp
from torchext.fake import fake_mode


class Net(nn.Module):
    """An image classifier with attention."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 1024, 16, 16)
        self.block = nn.TransformerEncoderLayer(1024, 16, 4096, batch_first=True)
        self.norm = nn.LayerNorm(1024)
        self.classes = nn.Linear(1024, 1000)
        self.scores = nn.Softmax(-1)

    def forward(self, images: Tensor) -> Tensor:
        """Take (batch, 3, height, width), returns (batch, 1000) scores."""
        x = self.patches(images).flatten(2).transpose(1, 2)
        result: Tensor = self.scores(self.classes(self.norm(self.block(x)).mean(1)))
        return result


def dtypes(values: Any) -> str:
    """Return the dtypes of the tensors among `values`, each once."""
    found = {str(v.dtype).removeprefix("torch.") for v in pytree.tree_leaves(values) if isinstance(v, Tensor)}
    return ", ".join(sorted(found))


def report(model: nn.Module, *args: Tensor, dtype: torch.dtype) -> dict[str, tuple[str, str, str]]:
    """Return the dtypes of the inputs, parameters and outputs of each layer of `model` in a region, by name."""
    rows: dict[str, tuple[str, str, str]] = {}

    def note(name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            rows[name] = dtypes(inputs), dtypes(list(module.parameters(recurse=False))), dtypes(output)

        return hook

    hooks = [module.register_forward_hook(note(name)) for name, module in model.named_modules() if name]
    with amp.autocast(dtype=dtype):
        model(*args)
    for hook in hooks:
        hook.remove()
    return rows


def main() -> None:
    """Print the report for both dtypes."""
    with fake_mode(gpu=True):
        model = Net().cuda()
        images = torch.ones(32, 3, 224, 224, device="cuda")
        for dtype in (torch.float16, torch.bfloat16):
            print(f"{dtype!s:26} {'takes':18} {'keeps':10} returns")
            for name, row in report(model, images, dtype=dtype).items():
                print(f"{name:26} {row[0]:18} {row[1]:10} {row[2]}")
            print()


if __name__ == "__main__":
    main()
