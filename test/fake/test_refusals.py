"""Invalid calls raise the same class of error with the same message on real, fake and deferred tensors."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import forked
import pytest
import torch
from comparisons import error_of, metadata
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from torchext.deferred_init import deferred_init, is_deferred, materialize_module, materialize_tensor
from torchext.fake import cache_clear, cache_info, fake_like, fake_mode
from torchext.internals.patching import TORCH_RELEASE

BF16 = torch.bfloat16


def assign(value: Tensor, rows: int = 3) -> Tensor:
    x = torch.ones(rows, 3)
    x[torch.zeros(2, dtype=torch.int64)] = value
    return x


# Each raises in eager PyTorch.
PROGRAMS: dict[str, Callable[[], Any]] = {
    "bfloat16 linear": lambda: nn.Linear(8, 8, dtype=BF16)(torch.ones(2, 8)),
    "large bfloat16 linear": lambda: nn.Linear(2048, 4096, dtype=BF16)(torch.ones(1, 128, 2048)),
    "mm of two dtypes": lambda: torch.ones(3, 3) @ torch.ones(3, 3).double(),
    "mm of two shapes": lambda: torch.ones(3, 4) @ torch.ones(3, 4),
    "bmm of two dtypes": lambda: torch.ones(2, 3, 3) @ torch.ones(2, 3, 3).double(),
    "bfloat16 LayerNorm": lambda: nn.LayerNorm(8, dtype=BF16)(torch.ones(2, 8)),
    "LayerNorm with weights of another shape": lambda: nn.functional.layer_norm(
        torch.ones(3, 4), (4,), torch.ones(3, 4)
    ),
    "large bfloat16 LayerNorm": lambda: nn.LayerNorm(4096, dtype=BF16)(torch.ones(2, 128, 4096)),
    "bfloat16 GroupNorm": lambda: nn.GroupNorm(2, 4, dtype=BF16)(torch.ones(4, 4)),
    "bfloat16 BatchNorm": lambda: nn.BatchNorm1d(4, dtype=BF16)(torch.ones(4, 4)),
    "BatchNorm of other channels": lambda: nn.BatchNorm1d(4)(torch.ones(4, 5)),
    "bfloat16 convolution": lambda: nn.functional.conv2d(torch.ones(1, 3, 8, 8), torch.ones(4, 3, 3, 3, dtype=BF16)),
    "transposed convolution": lambda: nn.functional.conv_transpose2d(torch.ones(1, 3, 8, 8), torch.ones(4, 3, 3, 3)),
    "convolution of a vector": lambda: torch.convolution(
        torch.ones(2), torch.ones(2), None, [1], [0], [1], False, [0], groups=1
    ),
    "convolution with a wrong bias into an out": lambda: torch.ops.aten.convolution.out(
        torch.ones(2, 3, 200, 200),
        torch.ones(4, 3, 3, 3),
        torch.ones(5),
        [1, 1],
        [0, 0],
        [1, 1],
        False,
        [0, 0],
        1,
        out=torch.ones(0),
    ),
    "large transposed convolution": lambda: nn.functional.conv_transpose2d(
        torch.ones(1, 64, 128, 128), torch.ones(80, 64, 3, 3)
    ),
    "int32 targets": lambda: nn.functional.cross_entropy(torch.ones(3, 3), torch.zeros(3, dtype=torch.int32)),
    "many int32 targets": lambda: nn.functional.cross_entropy(
        torch.ones(300, 3200), torch.zeros(300, dtype=torch.int32)
    ),
    "float indices of an embedding": lambda: nn.Embedding(4, 4)(torch.ones(4)),
    "assignment of another shape": lambda: assign(torch.ones(7)),
    "large assignment of another shape": lambda: assign(torch.ones(7), 2_000_000),
    "indices of two dimensions": lambda: torch.ones(3, 3).index_select(0, torch.zeros(2, 2, dtype=torch.int64)),
    "weights of samples of another dtype": lambda: nn.functional.embedding_bag(
        torch.zeros(1, 2, dtype=torch.int64),
        torch.ones(3, 3),
        per_sample_weights=torch.ones(1, 2, dtype=torch.int32),
        mode="sum",
    ),
    "lengths of another dtype": lambda: torch._pack_padded_sequence(
        torch.ones(4, 2, 3), torch.tensor([4, 2], dtype=torch.int32), False
    ),
    "trunc_normal_ in vmap": lambda: torch.vmap(
        lambda x: nn.init.trunc_normal_(torch.empty(3)) + x, randomness="different"
    )(torch.ones(2, 3)),
    "trunc_normal_ in vmap without randomness": lambda: torch.vmap(
        lambda x: nn.init.trunc_normal_(torch.empty(3)) + x
    )(torch.ones(2, 3)),
    "one_hot of nothing": lambda: nn.functional.one_hot(torch.ones(0, 2, dtype=torch.int64)),
    "one_hot without classes": lambda: nn.functional.one_hot(torch.ones(3, dtype=torch.int64), 0),
    "max of nothing": lambda: torch.ones(0).max(),
    "argmax of nothing": lambda: torch.ones(0, 3).argmax(0),
    "full argmax of nothing": lambda: torch.ones(0).argmax(),
    "complex of two dtypes": lambda: torch.complex(torch.ones(2), torch.ones(2).double()),
    "softmax beyond the dimensions": lambda: torch.ones(3).softmax(3),
    "softmax of integers": lambda: torch.ones(3, dtype=torch.int64).softmax(0),
    "stack of nothing": lambda: torch.stack([]),
    "cat of other shapes": lambda: torch.cat([torch.ones(3, 3), torch.ones(4, 4)]),
    "grid of three coordinates": lambda: nn.functional.grid_sample(
        torch.ones(1, 3, 8, 8), torch.ones(1, 4, 4, 3), align_corners=False
    ),
    "attention of two dtypes": lambda: nn.functional.scaled_dot_product_attention(
        torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4, dtype=BF16), torch.ones(1, 2, 3, 4)
    ),
    "negative power of integers": lambda: torch.ones(3, dtype=torch.int64) ** -1,
    "dropout of integers": lambda: nn.functional.dropout(torch.ones(3, dtype=torch.int64)),
    "normal_ of integers": lambda: torch.ones(3, dtype=torch.int64).normal_(),
    "orthogonal_ of bfloat16": lambda: nn.init.orthogonal_(torch.ones(4, 4, dtype=BF16)),
    "float mask": lambda: torch.ones(3).masked_fill(torch.ones(3), 1.0),
    "float index": lambda: torch.ones(3)[torch.ones(3)],
    "pooling of too little": lambda: nn.functional.max_pool2d(torch.ones(1, 1, 2, 2), 5),
    "foreach of two shapes": lambda: torch._foreach_add_([torch.ones(3)], [torch.ones(4)]),
    "integers summed in place with floats": lambda: torch.ones(3, dtype=torch.int64).add_(1.5),
    "fused Adam of two dtypes": lambda: torch._fused_adamw_(
        *([torch.ones(3)], [torch.ones(3)], [torch.ones(3)], [torch.ones(3, dtype=BF16)], [], [torch.tensor(1.0)]),
        lr=0.1, beta1=0.9, beta2=0.9, weight_decay=0.1, eps=0.1, amsgrad=False, maximize=False,
    ),
}  # fmt: skip


NAN = float("nan")

# Factories, which cannot have invalid tensor arguments.
FACTORIES: dict[str, Callable[[], Any]] = {
    "arange to nan": lambda: torch.arange(0, NAN),
    "arange from nan": lambda: torch.arange(NAN, 1, dtype=torch.int8),
    "arange to infinity": lambda: torch.arange(0, float("inf")),
    "arange away from its end": lambda: torch.arange(0, 5, -1),
    "arange in steps of nothing": lambda: torch.arange(0, 5, 0),
    "arange of bool": lambda: torch.arange(0, 5, dtype=torch.bool),
    "arange of complex numbers": lambda: torch.arange(0, 5, dtype=torch.complex64),
    "linspace of negative length": lambda: torch.linspace(0, 1, -1),
    "eye of negative size": lambda: torch.eye(2, -1),
    "empty of negative size": lambda: torch.empty(3, -1),
    "negative strides": lambda: torch.empty_strided((2,), (-1,)),
    "full of negative size": lambda: torch.full((-1,), 1.0),
    "nan in integers": lambda: torch.full((2,), NAN, dtype=torch.int8),
    "nan in many integers": lambda: torch.full((2**22, 3), NAN, dtype=torch.int8),
    "nan in integers like others": lambda: torch.full_like(torch.ones(2, dtype=torch.int8), NAN),
    "nan in new integers": lambda: torch.ones(2, dtype=torch.int8).new_full((2,), NAN),
    "imaginary number in real ones": lambda: torch.full((2,), 1j, dtype=torch.float32),
    "number beyond the dtype": lambda: torch.full((2,), 300, dtype=torch.uint8),
    "randint of an empty range": lambda: torch.randint(5, 5, (2,)),
    "randint beyond the dtype": lambda: torch.randint(0, 300, (2,), dtype=torch.uint8),
    "rand of integers": lambda: torch.rand(2, dtype=torch.int32),
    "randn of integers": lambda: torch.randn(2, dtype=torch.int64),
    "randperm of negative length": lambda: torch.randperm(-1),
    "randperm beyond the dtype": lambda: torch.randperm(300, dtype=torch.uint8),
    "normal of negative deviation": lambda: torch.normal(0.0, -1.0, (2,)),
    "tril_indices of negative size": lambda: torch.tril_indices(-1, 2),
    "triu_indices of floats": lambda: torch.triu_indices(2, 2, dtype=torch.float32),
    "window of negative length": lambda: torch.hann_window(-1),
    "window of integers": lambda: torch.hann_window(3, dtype=torch.int64),
    "pinned memory without an accelerator": lambda: torch.full((2,), 1.0, pin_memory=True),
}
if torch.accelerator.is_available():
    del FACTORIES["pinned memory without an accelerator"]


@pytest.mark.parametrize("name", PROGRAMS)
def test_fakes_raise_the_errors_of_real_tensors(name: str) -> None:
    wanted = error_of(PROGRAMS[name])
    for _ in range(2):
        with fake_mode():
            assert error_of(PROGRAMS[name]) == wanted


@pytest.mark.parametrize("name", PROGRAMS)
def test_deferred_tensors_raise_the_errors_of_real_ones(name: str) -> None:
    wanted = error_of(PROGRAMS[name])
    assert error_of(lambda: deferred_init(PROGRAMS[name])) == wanted


@pytest.mark.parametrize("name", FACTORIES)
def test_factories_raise_eager_errors(name: str) -> None:
    wanted, state = error_of(FACTORIES[name]), torch.random.get_rng_state()
    with fake_mode():
        assert error_of(FACTORIES[name]) == wanted
    torch.manual_seed(0)
    assert error_of(lambda: deferred_init(FACTORIES[name])) == wanted
    assert torch.equal(torch.random.get_rng_state(), state)


def test_factories_make_tensors_larger_than_memory() -> None:
    with fake_mode():
        assert torch.full((2**40,), 1, dtype=torch.int8).numel() == 2**40
        assert torch.eye(2**20).numel() == 2**40
        assert torch.arange(2**40).numel() == 2**40


class Orthogonal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 4, dtype=BF16))
        try:
            nn.init.orthogonal_(self.weight)
        except RuntimeError:
            nn.init.xavier_uniform_(self.weight)


def test_a_constructor_takes_the_branch_that_it_takes_eagerly() -> None:
    torch.manual_seed(0)
    eager, state = Orthogonal(), torch.random.get_rng_state()
    torch.manual_seed(0)
    deferred = deferred_init(Orthogonal)
    assert torch.equal(torch.random.get_rng_state(), state)
    materialize_module(deferred)
    assert torch.equal(deferred.weight, eager.weight)


def refused_calls(x: Tensor) -> list[int]:
    """Write invalid values to `x`, of shape (3, 3), and return the versions of `x` afterwards."""
    calls: list[Callable[[], object]] = [
        lambda: x.add_(torch.ones(4)),
        lambda: x.mul_(1j),
        lambda: x.addmm_(torch.ones(3, 3), torch.ones(3, 3).double()),
        lambda: x.copy_(torch.ones(4)),
        lambda: x.normal_(std=-1.0),
        lambda: x.index_add_(0, torch.zeros(2, 2, dtype=torch.int64), torch.ones(2, 3)),
        lambda: torch.mm(torch.ones(3, 3), torch.ones(3, 3).double(), out=x),
        lambda: torch._foreach_add_([x, x], [torch.ones(4), torch.ones(4)]),
    ]
    versions = []
    for call in calls:
        with pytest.raises((RuntimeError, IndexError)):
            call()
        versions.append(x._version)
    return versions


def test_a_refused_call_leaves_nothing_behind() -> None:
    torch.manual_seed(0)
    real = torch.ones(3, 3)
    wanted, state = refused_calls(real), torch.random.get_rng_state()
    torch.manual_seed(0)
    with fake_mode():
        fake = torch.ones(3, 3)
        found = refused_calls(fake)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert found == wanted
    assert metadata(fake) == metadata(real)


def test_a_refused_call_is_not_recorded() -> None:
    def program() -> Tensor:
        x = torch.ones(3, 3)
        refused_calls(x)
        return x + torch.rand(3, 3)

    torch.manual_seed(0)
    wanted, state = program(), torch.random.get_rng_state()
    torch.manual_seed(0)
    deferred = deferred_init(program)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(materialize_tensor(deferred), wanted)


def unknown(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a fake with unknown values."""
    return torch.empty(sizes, dtype=dtype)


# Calls that a kernel may reject, depending on values.
ACCEPTED: dict[str, Callable[[], Any]] = {
    "integers divided": lambda: torch.ones(3).long() // unknown(3, dtype=torch.int64),
    "singular matrix": lambda: torch.linalg.inv(unknown(3, 3)),
    "index that is too large": lambda: torch.ones(3)[unknown(3, dtype=torch.int64)],
    "target that is too large": lambda: nn.functional.nll_loss(torch.ones(3, 3), unknown(3, dtype=torch.int64)),
    "negative probabilities": lambda: torch.bernoulli(unknown(3)),
    "no probabilities": lambda: torch.multinomial(unknown(3), 1),
    "pivots": lambda: torch.linalg.lu_solve(*torch.linalg.lu_factor(unknown(3, 3)), torch.ones(3, 1)),
    "unpacked pivots": lambda: torch.lu_unpack(torch.ones(3, 3), unknown(3, dtype=torch.int32)),
    "lengths": lambda: torch.segment_reduce(torch.ones(6), "sum", lengths=unknown(2, dtype=torch.int64)),
    "much memory": lambda: torch.ones(2**20, 2**20).sum(1).expand(2**20, -1).contiguous(),
    "much work": lambda: torch.ones(2**20, 2**20) @ torch.ones(2**20, 2**20),
    "depthwise convolution": lambda: nn.Conv2d(4096, 4096, 3, groups=1024)(torch.ones(8, 4096, 999, 999)),
    "large recurrent network": lambda: nn.LSTM(1024, 1024)(torch.ones(512, 8, 1024)),
    "large heads": lambda: nn.MultiheadAttention(4096, 32)(*[torch.ones(512, 8, 4096)] * 3),
    "large pooling": lambda: nn.functional.max_pool2d(torch.ones(8, 512, 512, 512), 100),
    "large window": lambda: nn.functional.unfold(torch.ones(8, 64, 512, 512), 33),
    "large Fourier transform": lambda: torch.fft.irfft(torch.ones(1000, 4097, dtype=torch.complex64), 8192),
}


# Calls that are wrong for all lengths.
WRONG_SEGMENTS: dict[str, Callable[[Callable[..., Tensor]], object]] = {
    "reduction": lambda lengths: torch.segment_reduce(torch.ones(6), "foo", lengths=lengths()),
    "dtype of lengths": lambda lengths: torch.segment_reduce(torch.ones(6), "sum", lengths=lengths().float()),
    "dtype of data": lambda lengths: torch.segment_reduce(torch.ones(6).long(), "sum", lengths=lengths()),
    "rows": lambda lengths: torch.segment_reduce(torch.ones(6, 3), "sum", lengths=lengths().view(1, 2), axis=1),
    "no elements": lambda lengths: torch.segment_reduce(torch.ones(6), "sum", lengths=lengths()[:0]),
    "no lengths": lambda _lengths: torch.segment_reduce(torch.ones(6), "sum"),
}


@pytest.mark.parametrize("name", WRONG_SEGMENTS)
def test_wrong_segments_are_refused_whether_their_lengths_are_known(name: str) -> None:
    wanted = error_of(lambda: WRONG_SEGMENTS[name](lambda: torch.tensor([4, 2])))
    with fake_mode():
        assert error_of(lambda: WRONG_SEGMENTS[name](lambda: torch.tensor([4, 2]))) == wanted
        assert error_of(lambda: WRONG_SEGMENTS[name](lambda: unknown(2, dtype=torch.int64))) == wanted


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", ACCEPTED)
def test_fakes_accept_calls_that_depend_on_values_or_are_large(name: str) -> None:
    with fake_mode():
        assert ACCEPTED[name]() is not None


# Calls that Meta kernels reject and real kernels accept.
REFUSED_BY_META_KERNELS: dict[str, Callable[[], Tensor]] = {
    **{
        f"one target in a separate batch, {reduction}": partial(
            lambda reduction: nn.functional.cross_entropy(
                torch.ones(3), torch.zeros(1, dtype=torch.long), reduction=reduction
            ),
            reduction,
        )
        for reduction in ("none", "mean", "sum")
    },
    "condition of bytes": lambda: torch.where(torch.ones(2, dtype=torch.uint8), torch.ones(2), torch.zeros(2)),
    "large condition of bytes": lambda: torch.where(
        torch.ones(3000, 1, dtype=torch.uint8), torch.ones(1, 3000), torch.zeros(3000, 3000).t()
    ),
}


@pytest.mark.filterwarnings("ignore:where received a uint8 condition tensor")
@pytest.mark.parametrize("name", REFUSED_BY_META_KERNELS)
def test_fakes_and_deferred_tensors_accept_the_calls_of_real_tensors(name: str) -> None:
    real = REFUSED_BY_META_KERNELS[name]()
    with fake_mode():
        fake = REFUSED_BY_META_KERNELS[name]()
    assert metadata(fake) == metadata(real)
    deferred = deferred_init(REFUSED_BY_META_KERNELS[name])
    assert is_deferred(deferred)
    assert torch.equal(materialize_tensor(deferred), real)


def test_passed_trials_are_not_repeated() -> None:
    x = fake_like(torch.ones(5, 7))
    x.mul(2)
    before = cache_info()
    x.mul(2)
    after = cache_info()
    assert (after.hits, after.misses) == (before.hits + 1, before.misses)


def test_kernels_of_the_users_are_not_run() -> None:
    seen = []
    library = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about overriding a kernel
            library.impl("erfinv", lambda x: seen.append(x), "CPU")
        fake_like(torch.ones(3)).erfinv()
    finally:
        library._destroy()
    assert seen == []


def concatenate_into_own_memory() -> None:
    x = torch.empty(10)
    torch.cat([x[:3], x[3:6]], out=x[2:8])


# Calls that CPU and CUDA kernels reject, each with its own message; the CUDA messages come from the null driver.
REFUSED_ON_BOTH: dict[str, tuple[Callable[[], object], str]] = {
    "uniform_": (
        lambda: torch.empty(3).uniform_(3, -1),
        r"uniform_ expects to return a \[from, to\) range, but found from=3 > to=-1",
    ),
    "normal_": (lambda: torch.empty(3).normal_(0, -1), r"normal expects std >= 0.0, but found std -1"),
    "bernoulli_": (lambda: torch.empty(3).bernoulli_(2.0), r"bernoulli_ expects p to be in \[0, 1\], but got p=2"),
    "index_add": (
        lambda: torch.empty(3, 4).index_add(0, torch.empty(2, dtype=torch.int64), torch.empty(2, 5)),
        r"source tensor shape must match self tensor shape, excluding the specified dimension",
    ),
    "masked_scatter": (
        lambda: torch.empty(3).masked_scatter(torch.empty(3, dtype=torch.uint8), torch.empty(3)),
        r"masked_scatter_ only supports boolean masks, but got mask with dtype unsigned char",
    ),
    "layer_norm": (
        lambda: nn.functional.layer_norm(torch.empty(3, 4), (4,), torch.empty(3, 4)),
        "Expected weight to be of same shape as normalized_shape",
    ),
    "cat": (concatenate_into_own_memory, r"some elements of the input tensor and the written-to tensor refer to"),
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="real CUDA devices are not faked")
@pytest.mark.parametrize("name", REFUSED_ON_BOTH)
def test_fakes_on_cuda_reject_calls_that_both_kernels_reject(name: str) -> None:
    call, message = REFUSED_ON_BOTH[name]
    with fake_mode(gpu=1), torch.device("cuda"), pytest.raises(RuntimeError, match=message):
        call()


# Calls on fake CUDA devices that CUDA kernels reject. The messages are copied from PyTorch's sources.
REFUSED_ON_CUDA = {
    "bfloat16 linear": (RuntimeError, "mat1 and mat2 must have the same dtype, but got Float and BFloat16"),
    "mm of two dtypes": (RuntimeError, "expected mat1 and mat2 to have the same dtype, but got: float != double"),
    "bmm of two dtypes": (RuntimeError, "expected scalar type Float but found Double"),
    "bfloat16 LayerNorm": (RuntimeError, "expected scalar type Float but found BFloat16"),
    "weights of samples of another dtype": (RuntimeError, "expected scalar type Float but found Int"),
    "lengths of another dtype": (
        RuntimeError,
        "'lengths' argument should be a 1D CPU int64 tensor, but got 1D cuda:0 Int tensor",
    ),
    "bfloat16 convolution": (
        RuntimeError,
        "Input type (torch.cuda.FloatTensor) and weight type (torch.cuda.BFloat16Tensor) should be the same",
    ),
    "transposed convolution": (
        RuntimeError,
        (
            "Given transposed=1, weight of size [4, 3, 3, 3], expected input[1, 3, 8, 8] to have 4 channels, "
            "but got 3 channels instead"
        ),
    ),
    "int32 targets": (RuntimeError, "expected target dtype to be Long or Byte, but got Int"),
    "softmax beyond the dimensions": (
        IndexError,
        "Dimension out of range (expected to be in range of [-1, 0], but got 3)",
    ),
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="real CUDA devices are not faked")
@pytest.mark.parametrize("name", REFUSED_ON_CUDA)
def test_fakes_on_cuda_reject_calls_that_cuda_kernels_reject(name: str) -> None:
    if name == "int32 targets" and TORCH_RELEASE < (2, 13):
        pytest.skip("the message differs before 2.13")
    with fake_mode(gpu=1), torch.device("cuda"):
        assert error_of(PROGRAMS[name]) == REFUSED_ON_CUDA[name]


def repeated(*shape: int) -> Tensor:
    return torch.empty(1, *shape[1:]).expand(shape)


SHARED_CHECKS: dict[str, Callable[[], object]] = {
    "multinomial of more than there are": lambda: torch.multinomial(torch.rand(3), 4),
    "multinomial of nothing": lambda: torch.multinomial(torch.rand(3), 0),
    "multinomial of integers": lambda: torch.multinomial(torch.ones(3).long(), 1),
    "reduction of segments": lambda: torch.segment_reduce(torch.ones(5), "foo", lengths=torch.tensor([5])),
    "dtype of an output": lambda: torch.tril(torch.ones(3, 4), out=torch.empty(3, 4).double()),
    "dtype of an output of softmax": lambda: torch.softmax(torch.ones(3, 4), 0, out=torch.empty(3, 4).double()),
    "repeated output of where": lambda: torch.where(torch.ones(3, 4) > 0, 1.0, torch.ones(3, 4), out=repeated(3, 4)),
    "repeated output of gelu": lambda: torch._C._nn.gelu(torch.ones(3, 4), out=repeated(3, 4)),
    "repeated output of mean": lambda: torch.mean(torch.ones(2, 3, 4), 0, out=repeated(3, 4)),
    "repeated output of cat": lambda: torch.cat([torch.ones(3, 4)], out=repeated(3, 4)),
    "repeated output of normal": lambda: torch.normal(0.0, 1.0, (3, 4), out=repeated(3, 4)),
    "mask of another shape": lambda: torch.ones(3)[torch.tensor([True, False])],
    "indices of int16": lambda: torch.ones(3)[torch.ones(2).short()],
    "indices of a floating-point dtype": lambda: torch.ones(3)[torch.ones(2)],
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="real CUDA devices are not faked")
@pytest.mark.parametrize("name", SHARED_CHECKS)
def test_fake_cuda_makes_the_checks_shared_with_the_cpu(name: str) -> None:
    wanted = error_of(SHARED_CHECKS[name])
    with fake_mode(gpu=1), torch.device("cuda"):
        assert error_of(SHARED_CHECKS[name]) == wanted


def svd_into(driver: str) -> Tensor:
    out = torch.empty(3, 3), torch.empty(3), torch.empty(3, 3)
    return torch.linalg.svd(torch.ones(3, 3), driver=driver, out=out)[1]


# Loops and options of the CPU are not shared.
OF_THE_CPU: dict[str, Callable[[], Tensor]] = {
    "division by 0": lambda: torch.ones(3).long() // 0,
    "division by 0, in place": lambda: torch.ones(3).long().floor_divide_(0),
    "division by 0 into an output": lambda: torch.div(
        torch.ones(3).long(), 0, rounding_mode="floor", out=torch.ones(3).long()
    ),
    "driver": lambda: torch.linalg.svd(torch.ones(3, 3), driver="gesvd")[1],
    "driver with an output": lambda: svd_into("gesvd"),
    "driver of singular values": lambda: torch.linalg.svdvals(torch.ones(3, 3), driver="gesvd", out=torch.empty(3)),
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="real CUDA devices are not faked")
@pytest.mark.parametrize("name", OF_THE_CPU)
def test_fake_cuda_accepts_what_only_code_of_the_cpu_refuses(name: str) -> None:
    with fake_mode(gpu=1), torch.device("cuda"):
        assert OF_THE_CPU[name]().shape == (3,)


@pytest.mark.skipif(torch.cuda.is_available(), reason="real CUDA devices are not faked")
@pytest.mark.parametrize("dtype", [torch.int32, torch.bool], ids=str)
def test_spatial_targets_on_cuda_must_be_long(dtype: torch.dtype) -> None:
    with fake_mode(gpu=1), torch.device("cuda"), pytest.raises(RuntimeError, match="expected scalar type Long but"):
        nn.functional.cross_entropy(torch.ones(3, 5, 2), torch.ones(3, 2, dtype=dtype))


PAIRS: dict[str, Callable[[], object]] = {
    "other dtypes": lambda: torch.lobpcg(torch.eye(20) * torch.rand(()), k=2, B=torch.eye(20).double()),
    "complex numbers": lambda: torch.lobpcg(torch.rand(20, 20).to(torch.complex64), k=2),
    "integers": lambda: torch.lobpcg((torch.rand(20, 20) * 9).long(), k=2),
    "no pairs": lambda: torch.lobpcg(torch.rand(20, 20), k=0),
    "many pairs": lambda: torch.lobpcg(torch.rand(20, 20), k=9),
}


@pytest.mark.parametrize("name", PAIRS)
def test_eigenpairs_are_refused_as_those_of_real_matrices(name: str) -> None:
    kind, text = error_of(PAIRS[name])
    with fake_mode():
        found, other_text = error_of(PAIRS[name])
    # The CPU kernel calls the matrices m1 and m2, the Meta kernel mat1 and mat2.
    assert (found, other_text.replace("mat1 and mat2", "m1 and m2")) == (kind, text)


def test_fakes_on_cuda_accept_calls_that_only_cpu_kernels_reject() -> None:
    with fake_mode(gpu=1):
        x = torch.ones(4, 4, dtype=torch.float16, device="cuda")
        assert torch.linalg.vector_norm(x).shape == ()
        assert x.half().erfinv().shape == (4, 4)
        assert nn.BatchNorm1d(4, device="cuda")(x).dtype is torch.float16


def test_known_quantiles_are_checked() -> None:
    with fake_mode(), pytest.raises(RuntimeError, match=r"q values must be in the range \[0, 1\]"):
        torch.rand(5).quantile(torch.tensor([0.5, 1.5]))


TOO_LARGE_TO_COMPUTE = {
    "index that is no vector": lambda: torch.ones(37, 1200).index_select(0, torch.ones(37, 1200, dtype=torch.int64)),
    "points of other dimensions": lambda: torch.cdist(torch.ones(40009, 3), torch.ones(40013, 2)),
    "blocks that do not add up": lambda: nn.functional.fold(torch.ones(1, 1, 694 * 693), 70001, 1, stride=101),
}


@pytest.mark.parametrize("call", TOO_LARGE_TO_COMPUTE.values(), ids=TOO_LARGE_TO_COMPUTE)
def test_calls_with_large_results_are_refused(call: Callable[[], Tensor]) -> None:
    """The trial runs until the result is allocated."""
    with pytest.raises((RuntimeError, IndexError)) as wanted:
        call()
    with fake_mode(), pytest.raises(type(wanted.value), match=re.escape(str(wanted.value))):
        call()


@pytest.mark.parametrize("is_profiled", [False, True])
def test_large_calls_are_tried_out_without_their_results(is_profiled: bool) -> None:
    """The smaller call raises because its sizes no longer match. The result would take 20 GB."""
    cache_clear()
    profiler = profile(activities=[ProfilerActivity.CPU]) if is_profiled else nullcontext()
    with profiler, fake_mode():
        image = nn.functional.fold(torch.ones(1, 1, 694 * 694), 70001, 1, stride=101)
    assert image.shape == (1, 1, 70001, 70001)


@pytest.mark.ci
def test_buffers_of_kernels_are_not_made_up() -> None:
    """The backward pass of a recurrent layer writes to a workspace whose size only its forward pass determines."""
    code = """
import torch
from torchext.fake import cache_clear, fake_mode
for _ in range(3):
    with fake_mode():
        layer = torch.nn.LSTM(2, 2)
        layer(torch.randn(3, 2))[0].sum().backward()
    cache_clear()
"""
    result = forked.run([sys.executable, "-c", code])
    assert result.returncode == 0, result.stderr
