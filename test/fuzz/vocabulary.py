"""The vocabulary of random programs: factories, and actions on existing tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch.nn import functional

if TYPE_CHECKING:
    from fuzz.machine import Machine

__all__ = ["ACTIONS", "DTYPES", "FACTORIES", "SHAPES", "Action", "filled", "float_of", "index_of"]

SHAPES = ((), (1,), (3,), (17,), (32,), (4, 5), (5, 4), (2, 3, 4), (16, 3), (0, 2))
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool)
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

Action = Callable[["Machine", Tensor, Tensor, int], Any]


def float_of(n: int) -> torch.dtype:
    return FLOATS[n % len(FLOATS)]


# Factories of tensors of a shape. `n` and `m` are any numbers.
FACTORIES: dict[str, Callable[[tuple[int, ...], int, int], Tensor]] = {
    "zeros": lambda shape, n, m: torch.zeros(shape, dtype=DTYPES[n % len(DTYPES)]),
    "ones": lambda shape, n, m: torch.ones(shape, dtype=DTYPES[n % len(DTYPES)]),
    "full": lambda shape, n, m: torch.full(shape, n % 7 - 3.5),
    "rand": lambda shape, n, m: torch.rand(shape, dtype=float_of(n)),
    "randn": lambda shape, n, m: torch.randn(shape, dtype=float_of(n)),
    "randint": lambda shape, n, m: torch.randint(n % 5, n % 5 + 1 + m % 9, shape),
    "randperm": lambda shape, n, m: torch.randperm(n % 40),
    "arange": lambda shape, n, m: torch.arange(n % 20, dtype=torch.float32),
    "linspace": lambda shape, n, m: torch.linspace(0, n % 3 + 1, m % 20 + 1),
    "eye": lambda shape, n, m: torch.eye(n % 6, m % 6),
    "constant": lambda shape, n, m: torch.tensor([[n % 5, 1.5], [-2.0, m % 3]]),
    "number": lambda shape, n, m: torch.tensor(float(n % 11)),
    "from_numpy": lambda shape, n, m: torch.from_numpy(np.arange(n % 12, dtype=np.float32)),
    "empty-normal": lambda shape, n, m: torch.empty(shape, dtype=float_of(n)).normal_(m % 3, 1 + n % 2),
    "bernoulli": lambda shape, n, m: torch.bernoulli(torch.full(shape, 0.3)),
    "parameter": lambda shape, n, m: nn.Parameter(torch.rand(shape), requires_grad=False),
    "complex": lambda shape, n, m: torch.randn(shape, dtype=torch.complex64),
    "transposed": lambda shape, n, m: torch.rand((n % 5 + 1, m % 7 + 1)).t(),
}


def index_of(tensor: Tensor, n: int) -> Any:
    """Return an index into the first existing dimension."""
    kinds = (0, slice(None, None, 2), slice(1, None), None, Ellipsis, [0], torch.tensor([0, 0]), slice(0, 0))
    return kinds[n % len(kinds)]


def place_of(tensor: Tensor, n: int) -> Any:
    """Return an index to write to. For large tensors it has no duplicates: threads write these in any order."""
    index = index_of(tensor, n)
    return [0] if isinstance(index, Tensor) and tensor.numel() >= 2**15 else index


def weight_of(tensor: Tensor) -> Tensor:
    """Return a matrix, for initializers that need one."""
    return tensor if tensor.dim() >= 2 and tensor.is_floating_point() else torch.ones(4, 6)


def filled(tensor: Tensor) -> Tensor:
    """Return `tensor` if it has elements. Kernels accept any dtype for an empty one."""
    if tensor.numel() == 0:
        raise ValueError("has no elements")
    return tensor


def read_number(machine: Machine, a: Tensor, b: Tensor, n: int) -> Tensor:
    value = float(a.double().nan_to_num().clamp(-5, 5).sum().item()) if a.numel() else 0.0
    return b.new_full((3,), 1 if value > n % 3 else 0)


def branch_on_value(machine: Machine, a: Tensor, b: Tensor, n: int) -> Tensor | None:
    if bool((a == a).all()) and a.numel() > n % 4:
        return b.clone()
    return None


def share_numpy(machine: Machine, a: Tensor, b: Tensor, n: int) -> Tensor:
    a.detach().numpy()  # materializes it
    return a.detach() * 2


def add_to_each(machine: Machine, a: Tensor, b: Tensor, n: int) -> None:
    if a.device != b.device:
        raise ValueError("is refused when deferred")
    if a.is_cuda and a.untyped_storage()._cdata == b.untyped_storage()._cdata:
        raise ValueError("the result of one launch for both would be ambiguous")
    torch._foreach_add_([a, b], 1.0)


def with_own_seed(machine: Machine, a: Tensor, b: Tensor, n: int) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(n)
        return torch.rand_like(a.float())


def source_of(machine: Machine, n: int) -> Tensor:
    place = n % len(machine.sources)
    machine.has_read_large = machine.has_read_large or place == len(machine.sources) - 1
    return machine.sources[place]


def ask_for_collective(machine: Machine, a: Tensor, b: Tensor, n: int) -> None:
    """Call a collective of a group of one process, which materializes a deferred tensor."""
    collectives = (
        lambda: dist.all_reduce(a),
        lambda: dist.broadcast(a, 0),
        lambda: dist.all_gather([torch.empty_like(a)], a),
        lambda: funcol.all_reduce(a, "sum", dist.group.WORLD),
    )
    collectives[n % len(collectives)]()


def write_source(machine: Machine, a: Tensor, b: Tensor, n: int) -> None:
    """Write a deferred tensor, or a number, to a real one."""
    source = source_of(machine, n)
    source.copy_(a) if n % 2 else source.data.mul_(2)


def set_data(machine: Machine, a: Tensor, b: Tensor, n: int) -> None:
    if a.dtype == b.dtype or not a.requires_grad:
        a.data = b.data


def write_out(machine: Machine, a: Tensor, b: Tensor, n: int) -> Tensor | None:
    # Meta kernels and CPU kernels give resized outputs different strides.
    return torch.add(a, 1, out=b) if a.shape == b.shape else None


def tie(machine: Machine, a: Tensor, b: Tensor, n: int) -> Tensor:
    return nn.Parameter(a, requires_grad=False) if a.is_floating_point() and n % 2 else a


ACTIONS: dict[str, Action] = {
    # random fills
    "normal_": lambda m, a, b, n: filled(a).normal_(n % 3, 2),
    "uniform_": lambda m, a, b, n: filled(a).uniform_(-1, n % 3),
    "bernoulli_": lambda m, a, b, n: filled(a).bernoulli_(0.5),
    "random_": lambda m, a, b, n: filled(a).random_(0, 1 + n % 100),
    "exponential_": lambda m, a, b, n: filled(a).exponential_(),
    "geometric_": lambda m, a, b, n: filled(a).geometric_(0.5),
    "log_normal_": lambda m, a, b, n: filled(a).log_normal_(),
    "cauchy_": lambda m, a, b, n: filled(a).cauchy_(),
    "generator": lambda m, a, b, n: filled(a).uniform_(generator=m.generator),
    "multinomial": lambda m, a, b, n: torch.multinomial(torch.ones(5), 1 + n % 4),
    "dropout": lambda m, a, b, n: torch.dropout(a.float(), 0.5, train=True),
    "seed": lambda m, a, b, n: torch.manual_seed(n) and None,
    "own-seed": with_own_seed,
    "trunc_normal_": lambda m, a, b, n: nn.init.trunc_normal_(a, std=1, a=-0.5 - n % 3, b=0.5 + n % 9),
    "kaiming_uniform_": lambda m, a, b, n: nn.init.kaiming_uniform_(weight_of(a)),
    "xavier_normal_": lambda m, a, b, n: nn.init.xavier_normal_(weight_of(a)),
    "orthogonal_": lambda m, a, b, n: nn.init.orthogonal_(weight_of(a).float()),
    "sparse_": lambda m, a, b, n: nn.init.sparse_(torch.ones(5, 6), 0.4),
    # views
    "t": lambda m, a, b, n: a.t(),
    "transpose": lambda m, a, b, n: a.transpose(0, -1),
    "flatten": lambda m, a, b, n: a.view(-1),
    "reshape": lambda m, a, b, n: a.reshape(-1),
    "index": lambda m, a, b, n: a[index_of(a, n)],
    "narrow": lambda m, a, b, n: a.narrow(0, 1, 1 + n % 2),
    "unsqueeze": lambda m, a, b, n: a.unsqueeze(n % (a.dim() + 1)),
    "expand": lambda m, a, b, n: a.expand(2, *a.shape),
    "chunk": lambda m, a, b, n: list(a.chunk(2)),
    "diagonal": lambda m, a, b, n: a.diagonal(),
    "detach": lambda m, a, b, n: a.detach(),
    "data": lambda m, a, b, n: a.data,
    "as_strided": lambda m, a, b, n: a.as_strided((2,), (1,), n % 3),
    "bytes": lambda m, a, b, n: a.view(torch.uint8),
    "real": lambda m, a, b, n: torch.view_as_real(a)[..., n % 2],
    "conj": lambda m, a, b, n: a.conj(),
    # writes
    "add_": lambda m, a, b, n: a.add_(n % 5),
    "add_other_": lambda m, a, b, n: a.add_(b),
    "mul_": lambda m, a, b, n: a.mul_(n % 4),
    "copy_": lambda m, a, b, n: a.copy_(b),
    "zero_row": lambda m, a, b, n: a[n % 3].zero_(),
    "set_item": lambda m, a, b, n: a.__setitem__(index_of(a, n), n % 9),
    "set_mask": lambda m, a, b, n: a.__setitem__(a > 0, n % 9),
    "masked_fill_": lambda m, a, b, n: a.masked_fill_(a > 0, n % 9),
    "index_put_": lambda m, a, b, n: a.index_put_((torch.tensor([0, 0]),), a.new_ones(()), accumulate=True),
    "clamp_": lambda m, a, b, n: a.clamp_(-1, n % 3),
    "out": write_out,
    "resize_": lambda m, a, b, n: a.resize_(a.shape).fill_(1),
    "foreach": add_to_each,
    # real tensors from outside
    "read_source": lambda m, a, b, n: a.copy_(source_of(m, n)),
    "add_source": lambda m, a, b, n: a + source_of(m, n),
    "source_item": lambda m, a, b, n: a.__setitem__(place_of(a, n), source_of(m, n)),
    "scatter_source": lambda m, a, b, n: a.index_add_(0, m.sources[1][:1, :1].view(-1), source_of(m, n)),
    "write_source": write_source,
    "collective": ask_for_collective,
    # operators whose arguments often have a wrong dtype or shape
    "mm": lambda m, a, b, n: a.mm(b),
    "linear": lambda m, a, b, n: functional.linear(a, b),
    "layer_norm": lambda m, a, b, n: functional.layer_norm(a, a.shape[-1:], b),
    # With a 0-dimensional target, PyTorch compares a size out of bounds, which is arbitrary memory.
    "cross_entropy": lambda m, a, b, n: functional.cross_entropy(a, b if b.dim() > 0 else b.view(1)),
    "embedding": lambda m, a, b, n: functional.embedding(a, b),
    "conv": lambda m, a, b, n: functional.conv1d(a, b),
    "index_select": lambda m, a, b, n: a.index_select(n % 3, b),
    "gather": lambda m, a, b, n: a.gather(n % 3, b),
    "set_items": lambda m, a, b, n: a.__setitem__(place_of(a, n), b),
    "softmax_of": lambda m, a, b, n: a.softmax(n % 5),
    "argmax": lambda m, a, b, n: a.argmax(n % 4),
    "max_of_all": lambda m, a, b, n: a.max(),
    "join": lambda m, a, b, n: torch.stack([a, b]),
    "complex_of": lambda m, a, b, n: torch.complex(a, b),
    "where": lambda m, a, b, n: torch.where(a, b, a),
    "bmm": lambda m, a, b, n: a.bmm(b),
    "lerp": lambda m, a, b, n: torch.lerp(a, b, 0.5),
    # identity
    "tie": tie,
    "set_data": set_data,
    "set_": lambda m, a, b, n: torch.empty(0, dtype=a.dtype).set_(a),
    "forget": lambda m, a, b, n: m.forget(a),
    "deepcopy": lambda m, a, b, n: __import__("copy").deepcopy([a.detach(), a.detach().view(-1)]),
    # computations
    "half": lambda m, a, b, n: a.half(),
    "to": lambda m, a, b, n: a.to(DTYPES[n % len(DTYPES)]),
    "add": lambda m, a, b, n: a + b,
    "matmul": lambda m, a, b, n: a.float() @ b.float(),
    "cat": lambda m, a, b, n: torch.cat([a, b]),
    "stack": lambda m, a, b, n: torch.stack([a, a]),
    "softmax": lambda m, a, b, n: a.float().softmax(-1),
    "sum": lambda m, a, b, n: a.sum(),
    "max": lambda m, a, b, n: list(a.max(0)),
    "contiguous": lambda m, a, b, n: a.contiguous(),
    "zeros_like": lambda m, a, b, n: torch.zeros_like(a),
    "rand_like": lambda m, a, b, n: torch.rand_like(a),
    "qr": lambda m, a, b, n: list(torch.linalg.qr(weight_of(a).float())) if a.dim() == 2 else None,
    # reads
    "item": read_number,
    "branch": branch_on_value,
    "tolist": lambda m, a, b, n: torch.tensor(a.tolist()),
    "numpy": lambda m, a, b, n: torch.from_numpy(a.detach().numpy().copy()),
    "share_numpy": share_numpy,
    "nonzero": lambda m, a, b, n: a.nonzero(),
    "unique": lambda m, a, b, n: a.unique(),
    "masked_select": lambda m, a, b, n: a[a > 0],
    "equal": lambda m, a, b, n: torch.tensor(torch.equal(a, b)),
}
