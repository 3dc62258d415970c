"""Trials on real tensors of other sizes: errors, dtypes and strides are those of the call itself."""

from __future__ import annotations

import itertools
import subprocess
import sys
import warnings
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

import pytest
import torch
from common import assert_same_tensor, build_both, kept_threads
from comparisons import PROPERTIES, copy_with_same_strides, metadata
from refusals import Call, Difference, call_of, compare
from torch import Tensor, nn
from torch.nn import functional
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, UnaryUfuncInfo

from torchext.deferred_init import deferred_init, materialize_tensor
from torchext.fake import DataDependentError, cache_clear, cache_info, fake_like, fake_mode
from torchext.internals.patching import TORCH_RELEASE

# More elements than a trial may have, and no sizes divisible by a power of two.
SIZES = [(33, 33, 33), (41, 41, 41), (32771,), (40009, 1), (1, 40009), (181, 183), (3, 5, 7, 11, 31), (1, 301, 400)]
UNARY = [op for op in op_db if isinstance(op, UnaryUfuncInfo)]
ELEMENTWISE = [torch.add, torch.div, torch.floor_divide, torch.pow, torch.atan2, torch.bitwise_and, torch.hypot]
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64)


def tensor_of(sizes: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.ones(sizes, dtype=dtype)


def difference(function: Callable[..., Any], *arguments: Any, **kwargs: Any) -> Difference | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about complex half precision
        return compare(call_of(function, arguments, kwargs))


@pytest.mark.cases(20)
@pytest.mark.parametrize("op", UNARY, ids=lambda op: op.name)
def test_dtypes_are_checked_at_odd_sizes(op: OpInfo) -> None:
    pairs = zip(itertools.cycle(SIZES), DTYPES, strict=False)
    for sizes, dtype in pairs:
        transposed = tensor_of(sizes, dtype).transpose(0, -1)
        assert difference(op, transposed) is None, (sizes, dtype)


@pytest.mark.cases(4)
@pytest.mark.parametrize("op", ELEMENTWISE, ids=lambda op: op.__name__)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_operands_are_promoted_and_laid_out_at_odd_sizes(op: Any, sizes: tuple[int, ...]) -> None:
    small = tuple(1 if i % 2 else size for i, size in enumerate(sizes))
    for dtype, other in itertools.combinations(DTYPES[:5], 2):
        for one, two in ((sizes, sizes), (sizes, small), (small, sizes)):
            assert (
                difference(op, tensor_of(one, dtype).transpose(0, -1), tensor_of(two, other).transpose(0, -1)) is None
            )


# Arguments with equal strides: the sizes determine which dimension is the inner one.
WINDOWS = [((301, 400), (1, 1)), ((400, 301), (1, 1)), ((301, 400, 2), (2, 2, 1)), ((2, 301, 400), (700, 1, 1)),
           ((64, 301, 3), (3, 3, 3)), ((300, 200, 100), (1, 1, 0)), ((181, 17, 97), (7, 1, 1))]  # fmt: skip


@pytest.mark.parametrize(("sizes", "strides"), WINDOWS, ids=str)
def test_ties_of_strides_are_decided_by_the_sizes_of_the_call(sizes: Any, strides: Any) -> None:
    memory = torch.arange(1.0, 2001)
    for operator in (
        torch.exp,
        torch.clone,
        torch.neg,
        lambda x: x + 1,
        lambda x: x.to(torch.float64),
        torch.zeros_like,
    ):
        call = Call(lambda x, operator=operator: operator(x.as_strided(sizes, strides)), [memory], *spec_of_one(memory))
        assert compare(call) is None


def spec_of_one(tensor: Tensor) -> tuple[Any, str]:
    call = call_of(torch.neg, (tensor,), {})
    return call.spec, call.change


def test_memory_of_results_with_ties_is_laid_out_as_eagerly() -> None:
    def program() -> Tensor:
        windows = torch.arange(1000.0).as_strided((301, 400), (1, 1))
        return windows.exp2().as_strided((301 * 400,), (1,)).clone()

    eager, deferred = build_both(program)
    assert_same_tensor(materialize_tensor(deferred), eager)


# Relations of a smaller call that are accidental.
ACCIDENTS: dict[str, Callable[[], Any]] = {
    "antialiasing to half": lambda: functional.interpolate(
        torch.ones(1, 1, 128, 256, dtype=torch.int64), size=(64, 128), mode="bilinear", antialias=True
    ),
    "antialiasing to a quarter": lambda: functional.interpolate(
        torch.ones(1, 3, 256, 256, dtype=torch.int32), size=(64, 64), mode="bicubic", antialias=True
    ),
    "output padding": lambda: functional.conv_transpose2d(
        torch.ones(1, 3, 128, 128), torch.ones(3, 3, 3, 3), stride=100, output_padding=128
    ),
    "size beside a kept one": lambda: torch.ones(100, 17, 33).mul(torch.ones(100, 17, 33, dtype=torch.bool)).erfinv(),
    "diagonal that is too short": lambda: torch.diagonal_scatter(torch.ones(211, 211), torch.ones(183), 2),
    "mask of integers": lambda: torch.ones(183, 183).masked_select(torch.ones(183, 183, dtype=torch.int64)),
    "not a multiple": lambda: functional.pixel_shuffle(torch.ones(1, 906, 33, 33), 2),
}


@pytest.mark.parametrize("name", ACCIDENTS)
def test_call_does_not_pass_because_a_smaller_one_does(name: str) -> None:
    call = Call(lambda _: ACCIDENTS[name](), [torch.ones(1)], *spec_of_one(torch.ones(1)))
    assert compare(call) is None


def gradient(loss: Callable[..., Tensor], x: Tensor, *others: Any, **kwargs: Any) -> Tensor:
    x = x.detach().requires_grad_()
    return torch.autograd.grad(loss(x, *others, **kwargs).sum(), x)[0]


LOSSES = [functional.mse_loss, functional.l1_loss, functional.smooth_l1_loss, functional.huber_loss,
          functional.binary_cross_entropy, functional.soft_margin_loss, functional.kl_div]  # fmt: skip
PADDINGS = [("reflect", (1, 2, 1, 1)), ("replicate", (1, 2, 1, 1)), ("constant", (1, 2)), ("circular", (1, 1, 1, 1))]


@pytest.mark.cases(2)
@pytest.mark.parametrize("sizes", [(3, 4), (181, 183)], ids=str)
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_gradients_of_losses_are_those_of_real_kernels(loss: Any, sizes: tuple[int, int]) -> None:
    x, target = torch.full(sizes, 0.5), torch.full(sizes[::-1], 0.5).t()
    for one, two in ((x, target), (target, x), (x, target.double()), (x.double(), target), (x.bfloat16(), target)):
        for reduction in ("mean", "none"):
            assert (
                difference(lambda x, *rest, **kwargs: gradient(loss, x, *rest, **kwargs), one, two, reduction=reduction)
                is None
            )


@pytest.mark.cases(3)
@pytest.mark.parametrize(("mode", "padding"), PADDINGS, ids=str)
@pytest.mark.parametrize("sizes", [(2, 3, 5, 4), (3, 7, 41, 43)], ids=str)
def test_gradients_of_paddings_are_those_of_real_kernels(mode: str, padding: Any, sizes: tuple[int, ...]) -> None:
    x = torch.rand(sizes)
    for one in (x, x.transpose(2, 3), x.to(memory_format=torch.channels_last), x.double()):
        assert difference(lambda x: gradient(lambda x: functional.pad(x, padding, mode), x), one) is None


# Structured operators of any size, and other operators that are small.
WITHOUT_PYTHON = {
    "three operands": lambda x: torch.addcmul(x, x, x[:1]).sub(2),
    "in place": lambda x: x.mul_(2).lerp_(x, 0.5),
    "product": lambda x: torch.mm(x, x.t()),
    "reduction": lambda x: x.softmax(-1).sum(0),
    "normalization": lambda x: functional.layer_norm(x[:17], (211,)),
    "mean": lambda x: x[:17].mean(),
    "number": lambda x: torch.mul(x[:17], 2),
}
PYTHON_KERNELS = ("torch/_meta_registrations.py", "torch/_refs/", "torch/_prims/", "torch/_decomp/")


@pytest.mark.parametrize("name", WITHOUT_PYTHON)
def test_first_call_does_not_run_a_slow_meta_kernel(name: str) -> None:
    files: set[str] = set()
    cache_clear()
    with fake_mode():
        x = torch.empty(509, 211)
        sys.setprofile(lambda frame, event, argument: files.add(frame.f_code.co_filename))
        try:
            WITHOUT_PYTHON[name](x)
        finally:
            sys.setprofile(None)
    assert [file for file in files if any(kernel in file for kernel in PYTHON_KERNELS)] == []


@pytest.mark.parametrize("size", [3, 40009])
def test_meta_kernel_that_a_program_registers_is_called(size: int) -> None:
    called: list[int] = []

    def rsqrt(x: Tensor) -> Tensor:
        called.append(x.numel())
        return torch.empty_like(x)

    library = torch.library.Library("aten", "IMPL")
    library.impl("rsqrt", rsqrt, "Meta")
    library.impl("mean", lambda x, dtype=None: rsqrt(x.sum()), "Meta")
    try:
        with fake_mode():
            torch.empty(size).rsqrt()
            torch.empty(size).mean()
    finally:
        library._destroy()
    assert called == [size, 1]


@pytest.mark.parametrize("device", ["cpu", "mps"])
@pytest.mark.parametrize("function", [torch.xlogy, torch.copysign, torch.special.xlog1py, torch.pow])
def test_elementwise_results_on_mps_are_those_on_the_cpu(function: Any, device: str) -> None:
    arguments: list[Any] = [torch.ones(4, 3, 2).permute(2, 0, 1), torch.ones(2, 1, 3)]
    if function is torch.pow:
        arguments = [arguments[0].bool(), True]
    real = function(*arguments)
    with fake_mode():
        fakes = [fake_like(each, device=device) if isinstance(each, Tensor) else each for each in arguments]
        fake = function(*fakes)
    assert metadata(fake, PROPERTIES - {"device"}) == metadata(real, PROPERTIES - {"device"})


def test_results_of_a_trial_that_are_views_share_memory_with_the_argument() -> None:
    with fake_mode():
        x = torch.empty(3, 5)
        y = torch.ops.aten._unsafe_view(x, [15])
    assert y.untyped_storage()._cdata == x.untyped_storage()._cdata


def operands(random: Random) -> Any:
    """Return tensors that broadcast, with random dtypes and orders of dimensions, gaps and expanded dimensions."""
    sizes = random.choice([(2, 3, 4), (5, 1, 7), (6,), (), (0, 3), (37, 41, 43), (211, 307), (40009,), (13, 1, 59, 61)])
    dtypes = random.choices(DTYPES, (5, 2, 2, 3, 2, 1), k=3)

    def operand(dtype: torch.dtype) -> Any:
        kept = [size if random.random() < 0.8 else 1 for size in sizes][random.choice((0, 0, 0, 1)) :]
        order = random.sample(range(len(kept)), len(kept))
        made = torch.ones([kept[dim] for dim in order], dtype=dtype)
        if random.random() < 0.2:
            made = torch.stack([made, made], -1)[..., 0]
        made = made.permute([order.index(dim) for dim in range(len(kept))])
        if random.random() < 0.2:
            made = made.expand(
                [sizes[len(sizes) - len(kept) + dim] if one == 1 else one for dim, one in enumerate(kept)]
            )
        return made

    return [operand(dtype) for dtype in dtypes]


def number(random: Random) -> Any:
    return random.choice([2, 0.5, True, 1j])


UNARY_CALLS: list[Any] = [torch.sqrt, torch.neg, torch.sigmoid, functional.gelu, functional.silu]
UNARY_CALLS += [torch.zeros_like, torch.mean, torch.sum, torch.empty_like, torch.log_softmax, torch.cumsum, torch.amax]
BINARY_CALLS: list[Any] = [*ELEMENTWISE, torch.mul, torch.sub, torch.copysign, torch.xlogy, torch.eq]
BINARY_CALLS += [torch.maximum, torch.remainder, Tensor.add_, Tensor.mul_, Tensor.div_, Tensor.pow_, Tensor.copy_]
BINARY_CALLS += [functional.mse_loss, functional.l1_loss, torch.matmul, torch.where]
TERNARY_CALLS: list[Any] = [torch.addcmul, torch.addcdiv, torch.lerp, torch.where, torch.clamp]
TERNARY_CALLS += [Tensor.addcmul_, Tensor.addcdiv_, Tensor.lerp_, torch.addmm, torch.baddbmm, functional.layer_norm]


def random_call(random: Random) -> tuple[Callable[..., Any], list[Any]]:
    tensors = operands(random)
    function = random.choice(random.choice((UNARY_CALLS, BINARY_CALLS, BINARY_CALLS, TERNARY_CALLS)))
    count = 1 if function in UNARY_CALLS else 2 if function in BINARY_CALLS else 3
    arguments = [
        number(random) if i > 0 and random.random() < 0.2 and function not in (Tensor.copy_, torch.clamp) else tensor
        for i, tensor in enumerate(tensors[:count])
    ]
    if function in (torch.log_softmax, torch.cumsum):
        arguments.append(random.choice((0, -1)))
    if function is functional.layer_norm:
        arguments = [tensors[0], tensors[0].shape[-1:]]
    return function, arguments


@pytest.mark.cases(1)
@pytest.mark.parametrize("seed", range(8))
def test_random_calls_have_the_results_and_errors_of_real_ones(seed: int) -> None:
    random = Random(seed)
    for _ in range(100):
        function, arguments = random_call(random)
        call = call_of(partial(in_place, function), tuple(arguments), {})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert compare(call) is None, function


def in_place(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function, which may write to its first argument, and return its result and that argument."""
    first = arguments[0]
    if getattr(function, "__name__", "").endswith("_"):
        first = copy_with_same_strides(first)
    return function(first, *arguments[1:]), first


def lstm(size: int, input_dtype: torch.dtype, *state_dtypes: torch.dtype) -> Any:
    state = tuple(torch.zeros(1, 3, size, dtype=dtype) for dtype in state_dtypes)
    return nn.LSTM(size, size)(torch.ones(5, 3, size, dtype=input_dtype), state)


MIXED: dict[str, Callable[[], Any]] = {
    "hidden state of another dtype": lambda: lstm(2, torch.float32, torch.float64, torch.float32),
    "cell of another dtype": lambda: lstm(2, torch.float32, torch.float32, torch.bfloat16),
    "large hidden state of another dtype": lambda: lstm(301, torch.float32, torch.float64, torch.float64),
    "integer weights of bags": lambda: functional.embedding_bag(
        torch.zeros(4, dtype=torch.long), torch.ones(5, 3, dtype=torch.int32), torch.tensor([0, 2])
    ),
    "product in another dtype": lambda: torch.mm(
        torch.ones(3, 3, dtype=torch.bfloat16), torch.ones(3, 3, dtype=torch.bfloat16), out_dtype=torch.float32
    ),
    "products in another dtype": lambda: torch.bmm(
        torch.ones(2, 3, 3, dtype=torch.bfloat16), torch.ones(2, 3, 3, dtype=torch.bfloat16), out_dtype=torch.float32
    ),
    "kernel for CUDA": lambda: torch.ops.aten._fused_dropout(torch.ones(3), 0.5),
}


@pytest.mark.parametrize("name", MIXED)
def test_trusting_kernels_raise_eager_errors(name: str) -> None:
    with pytest.raises((RuntimeError, NotImplementedError)) as eager:
        MIXED[name]()
    with fake_mode(), pytest.raises(eager.type) as fake:
        MIXED[name]()
    assert str(fake.value).splitlines()[0] == str(eager.value).splitlines()[0]


# Operators with names that suggest that an earlier call has computed some of their arguments. Each was reviewed: its
# trusted arguments are in the table of csrc/extensions/trials/trials.cpp, or it has none.
REVIEWED = """
_adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward _backward _batch_norm_impl_index_backward _cdist_backward
_convert_weight_to_int4pack_for_cpu _convolution_double_backward _ctc_loss_backward _cudnn_rnn _cudnn_rnn_backward
_cudnn_rnn_flatten_weight _dyn_quant_pack_4bit_weight _embedding_bag_backward _embedding_bag_dense_backward
_embedding_bag_per_sample_weights_backward _embedding_bag_sparse_backward
_fake_quantize_learnable_per_channel_affine_backward _fake_quantize_learnable_per_tensor_affine_backward
_gather_sparse_backward _grid_sampler_2d_cpu_fallback_backward _log_softmax_backward_data _masked_softmax_backward
_nnpack_available _nnpack_spatial_convolution _pack_padded_sequence _pack_padded_sequence_backward
_pad_packed_sequence _pdist_backward _prelu_kernel_backward _scaled_dot_product_flash_attention_for_cpu_backward
_scaled_dot_product_fused_attention_overrideable_backward _segment_reduce_backward _slow_conv2d_backward
_softmax_backward_data _sparse_log_softmax_backward_data _sparse_softmax_backward_data _sparse_sum_backward
_thnn_differentiable_gru_cell_backward _thnn_differentiable_lstm_cell_backward _thnn_fused_gru_cell_backward
_thnn_fused_lstm_cell_backward _thnn_fused_lstm_cell_backward_impl _unpack_dual _upsample_bicubic2d_aa_backward
_upsample_bilinear2d_aa_backward _upsample_lanczos2d_aa_backward _upsample_nearest_exact1d_backward
_upsample_nearest_exact2d_backward _upsample_nearest_exact3d_backward _use_cudnn_rnn_flatten_weight
_weight_int4pack_mm_for_cpu _weight_int8pack_mm _weight_norm_differentiable_backward _weight_norm_interface_backward
_wrapped_linear_prepack _wrapped_quantized_linear_prepacked adaptive_avg_pool3d_backward adaptive_max_pool2d_backward
adaptive_max_pool3d_backward affine_grid_generator_backward avg_pool2d_backward avg_pool3d_backward
batch_norm_backward batch_norm_backward_elemt batch_norm_backward_reduce binary_cross_entropy_backward
conv_tbc_backward convolution_backward convolution_backward_overrideable cudnn_affine_grid_generator_backward
cudnn_batch_norm_backward cudnn_grid_sampler_backward cummaxmin_backward cumprod_backward diagonal_backward
elu_backward embedding_backward embedding_dense_backward embedding_sparse_backward
fake_quantize_per_channel_affine_cachemask_backward fake_quantize_per_tensor_affine_cachemask_backward
fbgemm_pack_gemm_matrix_fp16 fbgemm_pack_quantized_matrix fractional_max_pool2d_backward
fractional_max_pool3d_backward gather_backward gelu_backward glu_backward glu_backward_jvp grid_sampler_2d_backward
grid_sampler_3d_backward hardshrink_backward hardsigmoid_backward hardswish_backward hardtanh_backward
huber_loss_backward index_select_backward infinitely_differentiable_gelu_backward leaky_relu_backward linear_backward
log_sigmoid_backward logit_backward lstm_mps_backward lu_unpack masked_scatter_backward masked_select_backward
matmul_backward matrix_exp_backward max_pool2d_backward max_pool2d_with_indices_backward
max_pool3d_with_indices_backward miopen_batch_norm_backward miopen_rnn miopen_rnn_backward mish_backward
mkldnn_adaptive_avg_pool2d_backward mkldnn_linear_backward mkldnn_linear_backward_input mkldnn_linear_backward_weights
mkldnn_max_pool2d_backward mkldnn_max_pool3d_backward mkldnn_rnn_layer mkldnn_rnn_layer_backward
mps_convolution_backward mps_convolution_transpose_backward mse_loss_backward multi_margin_loss_backward
multilabel_margin_loss_backward native_batch_norm_backward native_dropout_backward native_group_norm_backward
native_layer_norm_backward nll_loss2d_backward nll_loss_backward quantized_rnn_relu_cell quantized_rnn_tanh_cell
reflection_pad1d_backward reflection_pad2d_backward reflection_pad3d_backward replication_pad1d_backward
replication_pad2d_backward replication_pad3d_backward rnn_relu rnn_relu_cell rnn_tanh rnn_tanh_cell
rrelu_with_noise_backward select_backward sigmoid_backward silu_backward slice_backward smooth_l1_loss_backward
soft_margin_loss_backward softplus_backward softshrink_backward tanh_backward threshold_backward to_dense_backward
to_mkldnn_backward trace_backward unfold_backward upsample_bicubic2d_backward upsample_bilinear2d_backward
upsample_linear1d_backward upsample_nearest1d_backward upsample_nearest2d_backward upsample_nearest3d_backward
upsample_trilinear3d_backward value_selecting_reduction_backward
"""


def operators_that_may_trust() -> set[str]:
    found = set()
    for name in torch._C._dispatch_get_all_op_names():
        operator = name.removeprefix("aten::").partition(".")[0]
        may_trust = name.startswith("aten::") and any(part in operator for part in ("_backward", "rnn", "pack"))
        if may_trust and torch._C._dispatch_has_computed_kernel_for_dispatch_key(name, "CPU"):
            found.add(operator)
    return found


@pytest.mark.skipif(TORCH_RELEASE != (2, 13), reason="the list is that of one release")
def test_operators_that_may_trust_their_arguments_were_reviewed() -> None:
    assert operators_that_may_trust() == {*REVIEWED.split()}


def test_large_call_that_needs_values_is_refused_for_that() -> None:
    with fake_mode(), pytest.raises(DataDependentError, match="nonzero"):
        torch.empty(183, 181, dtype=torch.complex64).nonzero()


@pytest.mark.parametrize("size", [3, 65536, 65537])
def test_overlapping_tensor_may_be_copied_to_itself(size: int) -> None:
    with fake_mode():
        row = torch.empty(size).expand(2, size)
        row[None] = row
        row.detach().copy_(row)
        with pytest.raises(RuntimeError, match="more than one element of the written-to tensor"):
            row.copy_(torch.empty(2, size))


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_complex_view_may_be_written_to_its_base() -> None:
    wanted = torch.tensor([3.0, 4.0, 6.0, 8.0])
    torch.abs(torch.view_as_complex(wanted.view(2, 2)), out=wanted)
    with fake_mode():
        found = torch.tensor([3.0, 4.0, 6.0, 8.0])
        torch.abs(torch.view_as_complex(found.view(2, 2)), out=found)
        assert found.shape == wanted.shape
        large = torch.empty(2**17)
        torch.abs(torch.view_as_complex(large.view(-1, 2)), out=large)
        assert large.shape == (2**16,)


def test_errors_are_cached() -> None:
    a = fake_like(torch.ones(400, 400))
    b = fake_like(torch.ones(400, 400, dtype=torch.float64))
    for hits in (0, 1, 1):
        before = cache_info()
        with pytest.raises(RuntimeError, match="expected m1 and m2 to have the same dtype, but got: float != double"):
            a @ b
        assert cache_info().hits - before.hits == hits


def test_cached_error_does_not_keep_the_recorder_from_running_the_operator() -> None:
    def program() -> Tensor:
        return torch.view_copy(torch.arange(30.0).view(5, 6).t(), (2, 15))

    with fake_mode():
        program()
    assert_same_tensor(materialize_tensor(deferred_init(program)), program())


@pytest.fixture
def doubling() -> Any:
    """A custom operator with factory options that reads the values of its argument."""
    options = "*, ScalarType? dtype=None, Layout? layout=None, Device? device=None, bool? pin_memory=None"
    library = torch.library.Library("torchext_test_trials", "DEF")
    library.define(f"scaled_like(Tensor x, {options}) -> Tensor")
    library.impl("scaled_like", lambda x, **_: x * 2, "CPU")
    library.impl("scaled_like", lambda x, **_: torch.empty_like(x), "Meta")
    yield torch.ops.torchext_test_trials.scaled_like
    library._destroy()


def test_operator_of_another_library_with_the_name_of_a_factory(doubling: Any) -> None:
    def program() -> Tensor:
        x = torch.arange(5.0)
        y = doubling(x)
        x.zero_()
        return y

    assert_same_tensor(materialize_tensor(deferred_init(program)), program())


@pytest.mark.parametrize("function", [functional.mish, functional.silu], ids=lambda function: function.__name__)
def test_gradient_with_a_kernel_and_a_composite_has_the_bits_of_the_kernel(function: Any) -> None:
    def program() -> Tensor:
        return gradient(lambda x: function(x) * 3, torch.randn(1000))

    eager, deferred = build_both(program)
    assert_same_tensor(materialize_tensor(deferred), eager)


@pytest.mark.parametrize("sizes", [(2, 4, 6, 6), (3, 4, 61, 60)], ids=str)
@pytest.mark.parametrize("is_training", [True, False])
def test_gradients_of_batch_norm_are_laid_out_as_real_ones(sizes: tuple[int, ...], is_training: bool) -> None:
    x = torch.rand(sizes)
    for one in (x, x.transpose(2, 3), x.to(memory_format=torch.channels_last), x.double().transpose(2, 3)):
        statistics = [torch.zeros(4, dtype=one.dtype), torch.ones(4, dtype=one.dtype)]
        norm = partial(functional.batch_norm, training=is_training)
        assert difference(partial(gradient, norm), one, *statistics) is None


def test_large_convolutions_and_normalizations_by_groups_check_dtypes() -> None:
    with fake_mode():
        x = torch.ones(8, 4096, 99, 99)
        with pytest.raises(RuntimeError, match="should be the same|expected scalar type"):
            functional.conv2d(x, torch.ones(4096, 4, 3, 3, dtype=torch.float64), groups=1024)
        with pytest.raises(RuntimeError, match="mixed dtype"):
            functional.group_norm(x, 32, torch.ones(4096, dtype=torch.float64), torch.ones(4096, dtype=torch.float64))
        assert functional.conv2d(x, torch.ones(4096, 4, 3, 3), groups=1024).shape == (8, 4096, 97, 97)
        assert functional.group_norm(x, 32).shape == x.shape


@pytest.mark.filterwarnings("ignore:Sparse CS. tensor support")
def test_results_of_sparse_products_are_cached() -> None:
    dense = torch.ones(5, 5)
    coo = torch.eye(5).to_sparse()
    for sparse in (coo, torch.eye(5).to_sparse_csr(), torch.eye(5).to_sparse_csc(), torch.eye(5).double().to_sparse()):
        for program in (lambda sparse, dense: sparse @ dense.to(sparse.dtype), lambda sparse, _: sparse.to_dense()):
            fakes = fake_like(sparse), fake_like(dense)
            wanted = program(sparse, dense)
            for _ in range(2):
                before = cache_info()
                found = program(*fakes)
                assert metadata(found) == metadata(wanted)
            if sparse.layout is torch.sparse_coo:
                assert cache_info().misses == before.misses


FORKS = """
import os, signal, torch
from torch.nn import functional
from torchext.fake import cache_clear, fake_mode
torch.set_num_threads(2)  # also for MKL
torch.ones(1 << 20).sqrt()  # starts OpenMP's threads
torch.ones(200, 200) @ torch.ones(200, 200)

def run():
    cache_clear()
    with fake_mode():
        y = PROGRAM
    return y if isinstance(y, (int, float)) else (y.shape, y.stride(), y.dtype)

wanted = run()
process = os.fork()
if process == 0:
    signal.alarm(60)
    os._exit(7 if run() == wanted and torch.get_num_threads() == 2 else 8)
print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
"""


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "program",
    [
        "functional.layer_norm(torch.empty(16, 64) @ torch.empty(64, 128), (128,)).softmax(-1).sqrt()",
        "torch.empty(96, 128) @ torch.empty(128, 96)",
        "functional.group_norm(torch.empty(16, 64, 64, 60), 8)",
        "torch.nn.LSTM(64, 64)(torch.empty(20, 8, 64))[0]",
        "functional.conv2d(torch.empty(8, 16, 32, 32), torch.empty(32, 16, 3, 3))",
        "functional.conv2d(torch.empty(1, 4, 5, 5).to(memory_format=torch.channels_last), torch.empty(4, 4, 1, 1))",
        "torch.histogram(torch.empty(100000), 10).hist",
        "(torch.ones(100000) + torch.arange(100000)).flip(0)[0].item()",
        "(torch.ones(200, 200) @ torch.ones(200, 200))[0, 0].item()",
        "torch.zeros(100000, dtype=torch.int64).bincount(minlength=5)",
        "torch.tensor(list(range(100000))).add_(1).sum().item()",
        "torch.ones(100000).nonzero()",
        "torch.empty(100000)[torch.ones(100000, dtype=torch.bool)]",
        "torch.empty(100000).masked_select(torch.arange(100000) > 7)",
    ],
    ids=[
        *("small", "product", "group-norm", "lstm", "convolution", "small-convolution", "zeros"),
        *("values", "product-of-values", "counts", "constant", "positions", "mask", "selection"),
    ],
)
def test_calls_in_a_fork_do_not_wait_for_threads_that_are_gone(program: str) -> None:
    code = [sys.executable, "-c", FORKS.replace("PROGRAM", program)]
    ended = subprocess.run(code, capture_output=True, text=True, check=False)
    assert ended.stdout == "7\n", ended.stderr


def test_process_that_was_forked_before_the_import_may_fork() -> None:
    program = """
import os, signal, torch
torch.set_num_threads(2)
torch.ones(1 << 20).sqrt()  # starts OpenMP's threads, which the child lacks
signal.alarm(60)
child = os.fork()
if child == 0:
    import torchext.fake
    grandchild = os.fork()
    os._exit(3 if grandchild == 0 else os.waitstatus_to_exitcode(os.waitpid(grandchild, 0)[1]))
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert ended.stdout == "3\n", ended.stderr


@pytest.mark.ci
def test_calls_are_remembered_in_a_fork() -> None:
    program = "repeated()"
    code = FORKS.replace("PROGRAM", program).replace(
        "def run():",
        """
def repeated():
    detached = torch.empty(4).detach()
    torch.add(detached, detached)
    before = cache_info().misses
    torch.add(detached, detached)
    return cache_info().misses - before

def run():""",
    )
    code = code.replace("import cache_clear", "import cache_clear, cache_info")
    ended = subprocess.run(
        [sys.executable, "-c", code + "\nprint(wanted)"], capture_output=True, text=True, check=False
    )
    assert ended.stdout == "7\n0\n", ended.stderr


def test_results_do_not_depend_on_the_number_of_threads_which_stays() -> None:
    def layouts() -> Any:
        cache_clear()
        with fake_mode():
            x = torch.empty(16, 3, 24, 24, requires_grad=True)
            y = functional.conv2d(x.to(memory_format=torch.channels_last), torch.empty(8, 3, 3, 3)).flatten(1)
            z = functional.layer_norm(y @ torch.empty(y.shape[1], 64), (64,)).softmax(-1)
            (gradient,) = torch.autograd.grad(z.square().mean(), x)
            return metadata([y, z, gradient])

    found = []
    with kept_threads():
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(layouts())
            assert torch.get_num_threads() == threads
    assert found[0] == found[1]


def test_refusals_of_convolutions_do_not_depend_on_other_trials() -> None:
    """The number of threads decides whether oneDNN runs a 1 x 1 convolution, and so which error is raised."""

    def error_of(new: Callable[..., torch.Tensor]) -> str:
        with pytest.raises(RuntimeError) as error:
            torch.ops.aten.convolution(new(15, 4, 5, 5), new(4, 0, 1, 1), None, [1, 1], [0, 0], [1, 1], True, [0, 0], 1)
        return str(error.value)

    with kept_threads():
        for threads in (1, 2):
            torch.set_num_threads(threads)
            wanted = error_of(torch.ones)
            with fake_mode():
                assert error_of(torch.empty) == wanted
