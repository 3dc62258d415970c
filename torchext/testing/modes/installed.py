"""Every feature of torchext has been used once, so that all patches are declared. Nothing else is changed."""

from __future__ import annotations

import copy
import os
import warnings

import torch
from torch import nn

from torchext import amp, inspect
from torchext.deferred_init import (
    defer_again,
    deferred_init,
    explain,
    export_graph,
    materialize_module,
    materialize_tensor,
    summary,
    tracing,
)
from torchext.fake import cache_clear, cache_info, fake_like, fake_mode, meta_like
from torchext.inference import inference_mode, normal_tensors, origin, to_normal, trace_origins

__all__ = ["enter"]


def enter(is_control: bool) -> None:
    """Enter the mode."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for use in (_use_fakes, _use_deferred, _use_inference_mode, _use_autocast, _use_inspection):
            use()


def _use_fakes() -> None:
    for fake_cuda in (0, 2):
        with fake_mode(gpu=fake_cuda):
            model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.LSTM(2, 2))
            optimizer = torch.optim.AdamW(model.parameters())
            model(torch.randn(3, 2))[0].sum().backward()
            optimizer.step()
            repr(model[0].weight)
            if fake_cuda and not torch.cuda.is_initialized():
                torch.ones(2, device="cuda").sum()
    copy.deepcopy(fake_like(model))
    meta_like(fake_like(torch.ones(2)))
    torch.ones(2).to_sparse(), fake_like(torch.ones(2).to_sparse())
    cache_info()
    cache_clear()


def _use_deferred() -> None:
    with deferred_init(trace=True):
        model = nn.Transformer(8, 2, 1, 1, 8)
    with tracing():
        nn.init.trunc_normal_(model.encoder.layers[0].linear1.weight)
    parameter = next(model.parameters())
    explain(parameter), summary(model)
    export_graph(model, os.devnull)
    copy.deepcopy(deferred_init(nn.Linear, 2, 2)).weight.tolist()
    materialize_module(model, retain_graph=True)
    defer_again(model)
    materialize_module(model, device="cpu", dtype=torch.float64)
    materialize_tensor(deferred_init(torch.nn.UninitializedParameter))


def _use_inference_mode() -> None:
    trace_origins(True)
    trace_origins(False)
    with inference_mode(trace=True):
        tensor = torch.ones(2)
        with normal_tensors():
            torch.ones(2)
    origin(tensor), to_normal(tensor)
    inference_mode(lambda: None)()


def _use_autocast() -> None:
    tensor = torch.ones(2, 2)
    with amp.autocast("cpu"):
        tensor @ tensor
    with amp.autocast("cpu", self_cleaning=True):
        (tensor @ tensor).sum()
    amp.autocast("cpu")(lambda: tensor @ tensor)()
    amp.float(amp.half(torch.mm))(tensor, tensor)
    model = amp.wrap(nn.Linear(2, 2))
    model(amp.wrap(torch.ones(2, 2, requires_grad=True))).sum().backward()
    amp.unwrap(model)
    amp.policy("aten::mm", "cpu")


def _use_inspection() -> None:
    inspect.route("aten::mm", torch.ones(2, 2), torch.ones(2, 2))
    inspect.tensor_state(torch.ones(2))
