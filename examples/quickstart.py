"""The example of README.md: build a model that does not fit, and materialize the needed parts."""

import torch
from torch import nn

from torchext.deferred_init import deferred_init, is_deferred, materialize_module

torch.manual_seed(0)
model = deferred_init(lambda: nn.Transformer(d_model=8192, nhead=64, dim_feedforward=32768, batch_first=True))

size = sum(p.numel() * p.element_size() for p in model.parameters())
print(f"{size / 2**30:.0f} GiB of parameters, none in memory:")
print(model.encoder.layers[0].linear1.bias)

materialize_module(model.encoder.layers[0].norm1)
print(model.encoder.layers[0].norm1.weight[:4], is_deferred(model))

small = deferred_init(nn.Linear, 2, 2)
materialize_module(small)
print(small.weight)
