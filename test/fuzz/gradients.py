"""Actions that need autograd: backward passes, in-place operators, hooks, checkpoints, forward AD, optimizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from fuzz.machine import Machine
    from fuzz.vocabulary import Action

__all__ = ["ACTIONS"]

Differentiable = Callable[[Tensor, Tensor, int], Tensor]

FUNCTIONS: tuple[Differentiable, ...] = (
    lambda x, y, n: x * y,
    lambda x, y, n: x.exp() - y,
    lambda x, y, n: x.softmax(-1).log(),
    lambda x, y, n: functional.layer_norm(x, x.shape[-1:], y),
    lambda x, y, n: functional.linear(x, y),
    lambda x, y, n: x[:64] @ x[:64].t(),
    lambda x, y, n: x.cumsum(0) / (1 + n),
    lambda x, y, n: x[..., ::2].sum(-1),
    lambda x, y, n: x.max(0).values,
    lambda x, y, n: x.var(-1),
    lambda x, y, n: torch.cat([x, y, x]),
    lambda x, y, n: functional.gelu(x),
    lambda x, y, n: functional.dropout(x, 0.5),
    lambda x, y, n: x.norm(),
    lambda x, y, n: x.where(x > 0, y),
    lambda x, y, n: functional.mse_loss(x, y).clone(),  # the storage of its result is larger than the written part
    lambda x, y, n: functional.embedding(torch.arange(len(x)), x),
    lambda x, y, n: x.index_select(0, torch.tensor([0, 0])),
    lambda x, y, n: functional.conv1d(x, y),
    lambda x, y, n: functional.avg_pool1d(x, 2),
    lambda x, y, n: functional.max_pool1d(x, 2),
    lambda x, y, n: x.pow(n % 4).t(),
    lambda x, y, n: functional.batch_norm(x, None, None, training=True),
    lambda x, y, n: x.float().unsqueeze(0).expand(3, *x.shape).tanh(),
)

# `vmap` expands unmapped arguments.
LARGEST_PRODUCT = 2**22

# In-place operators that overwrite tensors which autograd saves.
IN_PLACE: tuple[Differentiable, ...] = (
    lambda x, y, n: functional.relu6(x.clone(), inplace=True),
    lambda x, y, n: x.clone().mul_(y),
    lambda x, y, n: x.clone().abs_(),
    lambda x, y, n: x.clone().pow_(n % 4),
    lambda x, y, n: x.exp().mul_(2),
    lambda x, y, n: functional.leaky_relu(x * 2, inplace=True),
    lambda x, y, n: x.clone().clamp_(-1, 1),
    lambda x, y, n: x.clone().index_fill_(0, torch.tensor([0]), n),
    lambda x, y, n: x.clone().copy_(y) * x,
    lambda x, y, n: x.clone().sigmoid_(),
)


def leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_()


def gradient_of(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad


def differentiate(function: Differentiable, a: Tensor, b: Tensor, n: int) -> list[Tensor]:
    with torch.enable_grad():
        x = leaf(a)
        y = function(x, b.detach(), n)
        y.sum().backward()
    return [gradient_of(x), y.detach()]


def backward(machine: Machine, a: Tensor, b: Tensor, n: int) -> list[Tensor]:
    return differentiate(FUNCTIONS[n % len(FUNCTIONS)], a, b, n)


def backward_in_place(machine: Machine, a: Tensor, b: Tensor, n: int) -> list[Tensor]:
    return differentiate(IN_PLACE[n % len(IN_PLACE)], a, b, n)


def backward_with_checkpoint(machine: Machine, a: Tensor, b: Tensor, n: int) -> list[Tensor]:
    function = FUNCTIONS[n % len(FUNCTIONS)]
    return differentiate(lambda x, y, n: checkpoint(function, x, y, n, use_reentrant=False), a, b, n)


def backward_with_pack_hooks(machine: Machine, a: Tensor, b: Tensor, n: int) -> list[Tensor]:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 1, lambda t: t + 0):
        return differentiate(FUNCTIONS[n % len(FUNCTIONS)], a, b, n)


def second_derivative(machine: Machine, a: Tensor, b: Tensor, n: int) -> list[Tensor]:
    with torch.enable_grad():
        x = leaf(a)
        y = FUNCTIONS[n % len(FUNCTIONS)](x, b.detach(), n)
        (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
    return [first.detach(), second]


def tangents(machine: Machine, a: Tensor, b: Tensor, n: int) -> list[Tensor]:
    function = FUNCTIONS[n % len(FUNCTIONS)]
    value, tangent = torch.func.jvp(lambda x: function(x, b, n), (a.clone(),), (a.clone(),))
    return [value, tangent]


def duals(machine: Machine, a: Tensor, b: Tensor, n: int) -> list[Tensor]:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(a.clone(), a * 2)
        value, tangent = forward_ad.unpack_dual(FUNCTIONS[n % len(FUNCTIONS)](dual, b, n))
    return [value.detach(), tangent.detach()]


def each_gradient(machine: Machine, a: Tensor, b: Tensor, n: int) -> Tensor:
    if a.numel() == 0:
        raise ValueError("PyTorch crashes where a concatenation for no samples is wrong")
    if a.numel() * b.numel() > LARGEST_PRODUCT:
        raise ValueError("takes minutes")
    function = FUNCTIONS[n % len(FUNCTIONS)]
    return torch.vmap(torch.func.grad(lambda x: function(x, b, n).sum()))(a.clone())


def steps_of_optimizer(machine: Machine, a: Tensor, b: Tensor, n: int) -> list[Tensor]:
    parameter = nn.Parameter(a.detach().clone())
    optimizers = (torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop)
    optimizer = optimizers[n % len(optimizers)]([parameter], lr=0.1)
    for _ in range(1 + n % 2):
        optimizer.zero_grad()
        with torch.enable_grad():
            FUNCTIONS[n % len(FUNCTIONS)](parameter, b.detach(), n).sum().backward()
        optimizer.step()
    return [parameter.detach(), gradient_of(parameter)]


def accumulate(machine: Machine, a: Tensor, b: Tensor, n: int) -> list[Tensor]:
    with torch.enable_grad():
        x = leaf(a)
        (x * b.detach()).sum().backward()
        (x + n).sum().backward()
    return [x, gradient_of(x)]


ACTIONS: dict[str, Action] = {
    "backward": backward,
    "backward_in_place": backward_in_place,
    "backward_with_checkpoint": backward_with_checkpoint,
    "backward_with_pack_hooks": backward_with_pack_hooks,
    "second_derivative": second_derivative,
    "tangents": tangents,
    "duals": duals,
    "each_gradient": each_gradient,
    "steps_of_optimizer": steps_of_optimizer,
    "accumulate": accumulate,
}
