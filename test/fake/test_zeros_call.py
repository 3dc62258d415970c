"""Operators without a Meta kernel run on zeros for their metadata: NOTE [Running the CPU kernel]."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from common import assert_same_tensor
from torch import Tensor
from torch.ao.nn.quantized import dynamic
from torch.distributions import Dirichlet

from torchext.deferred_init import deferred_init, materialize_tensor
from torchext.fake import DataDependentError, UnsupportedOperatorError, fake_mode, is_fake
from torchext.internals.patching import TORCH_RELEASE

# All PyTorch operators with a CPU kernel, without a Meta kernel, and without a tag for dependence on values. Each was
# reviewed. Either the shapes of its results follow from shapes and numbers; or `needsValues()` lists it (the last
# line); or it returns tensors that cannot be fake (sparse, nested and quantized tensors, packed weights), which
# `tryRunOnZeros()` declines.
GONE_THROUGH = """
aten::_add_relu aten::_aminmax aten::_batch_norm_with_update aten::_compute_linear_combination
aten::_ctc_loss_backward aten::_dirichlet_grad aten::_empty_affine_quantized aten::_empty_per_channel_affine_quantized
aten::_fake_quantize_learnable_per_channel_affine aten::_fake_quantize_learnable_per_channel_affine_backward
aten::_fake_quantize_learnable_per_tensor_affine aten::_fake_quantize_learnable_per_tensor_affine_backward
aten::_fake_quantize_per_tensor_affine_cachemask_tensor_qparams aten::_foobar aten::_histogramdd_bin_edges
aten::_histogramdd_from_bin_cts aten::_histogramdd_from_bin_tensors aten::_logcumsumexp
aten::_make_per_channel_quantized_tensor aten::_make_per_tensor_quantized_tensor aten::_masked_softmax
aten::_masked_softmax_backward aten::_native_batch_norm_legit aten::_nested_compute_contiguous_strides_offsets
aten::_nested_from_padded aten::_nested_tensor_from_mask aten::_nested_view_from_buffer aten::_scaled_mm
aten::_scaled_mm_v2 aten::_slow_conv2d_backward aten::_slow_conv2d_forward aten::_spdiags aten::_standard_gamma_grad
aten::_test_functorch_fallback aten::_test_optional_filled_intlist aten::_test_optional_floatlist
aten::_test_optional_intlist aten::_to_sparse aten::_to_sparse_bsc aten::_to_sparse_bsr aten::_to_sparse_csc
aten::_to_sparse_csr aten::_transform_bias_rescale_qkv aten::adaptive_avg_pool2d aten::adaptive_avg_pool3d
aten::adaptive_avg_pool3d_backward aten::batch_norm_update_stats aten::dequantize
aten::fake_quantize_per_channel_affine_cachemask aten::fake_quantize_per_tensor_affine_cachemask
aten::fractional_max_pool3d_backward aten::from_file aten::geqrf aten::glu_backward_jvp aten::glu_jvp aten::histogram
aten::multi_margin_loss_backward aten::multilabel_margin_loss_backward aten::quantize_per_channel
aten::quantize_per_tensor_dynamic aten::slow_conv3d_forward aten::slow_conv_dilated2d aten::slow_conv_dilated3d
aten::slow_conv_transpose3d aten::sspaddmm aten::to_mkldnn
quantized::conv1d_dynamic quantized::conv2d_dynamic quantized::conv3d_dynamic quantized::conv_transpose1d_dynamic
quantized::conv_transpose2d_dynamic quantized::conv_transpose3d_dynamic quantized::embedding_4bit
quantized::embedding_bag_2bit_prepack quantized::embedding_bag_2bit_prepack_with_rowwise_min_max
quantized::embedding_bag_2bit_rowwise_offsets quantized::embedding_bag_2bit_unpack quantized::embedding_bag_4bit
quantized::embedding_bag_4bit_prepack quantized::embedding_bag_4bit_prepack_with_rowwise_min_max
quantized::embedding_bag_4bit_rowwise_offsets quantized::embedding_bag_4bit_unpack quantized::embedding_bag_byte
quantized::embedding_bag_byte_prepack_with_rowwise_min_max quantized::embedding_byte quantized::linear_dynamic
quantized::linear_dynamic_fp16 quantized::linear_prepack_fp16_legacy quantized::linear_relu_dynamic
quantized::linear_relu_dynamic_fp16 quantized::linear_unpack quantized::linear_unpack_fp16
quantized::linear_with_input_q_dq_qweight_dq_output_fp32 quantized::linear_with_input_q_dq_qweight_dq_relu_output_fp32
quantized::quantized_gru_cell_dynamic quantized::quantized_lstm_cell_dynamic
quantized::quantized_rnn_relu_cell_dynamic quantized::quantized_rnn_tanh_cell_dynamic
aten::_sample_dirichlet aten::binomial
aten::_pack_padded_sequence aten::_padded_dense_to_jagged_forward aten::quantized_gru aten::quantized_lstm
"""

# A kernel for one of these keys counts as one for the meta device.
KEYS_FOR_META = (
    "Meta",
    "CompositeImplicitAutograd",
    "CompositeExplicitAutograd",
    "CompositeExplicitAutogradNonFunctional",
)
ABOUT_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


def operators_without_meta_kernel() -> Iterator[str]:
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = name.partition("::")
        operator, _, overload = rest.partition(".")
        if namespace not in ("aten", "prims", "quantized") or not has_kernel(name, "CPU"):
            continue
        if any(has_kernel(name, key) for key in KEYS_FOR_META):
            continue
        found = getattr(getattr(getattr(torch.ops, namespace), operator), overload or "default")
        if any("Tensor" in str(result.type) for result in found._schema.returns) and not ABOUT_VALUES & {*found.tags}:
            yield f"{namespace}::{operator}"


@pytest.mark.skipif(TORCH_RELEASE < (2, 13), reason="fewer operators had Meta kernels before 2.13")
def test_operators_without_a_meta_kernel_were_reviewed() -> None:
    new = {*operators_without_meta_kernel()} - {*GONE_THROUGH.split()}
    assert not new, "does the shape of their results depend on values?"


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.parametrize("is_lstm", [True, False], ids=["lstm", "gru"])
def test_lengths_of_packed_sequences_are_not_zeros(is_lstm: bool) -> None:
    """Three sequences of the lengths 2, 1 and 1: all three have a first step, and one has a second."""
    layer: Any = dynamic.LSTM(5, 2) if is_lstm else dynamic.GRU(5, 2)
    parameters = [weights.param for weights in layer._all_weight_values]
    run = torch.ops.aten.quantized_lstm.data if is_lstm else torch.ops.aten.quantized_gru.data
    with fake_mode():
        data, batch_sizes, state = torch.rand(4, 5), torch.tensor([3, 1]), torch.zeros(1, 3, 2)
        states = [state, state] if is_lstm else state
        with pytest.raises(DataDependentError, match="needs the values"):
            run(data, batch_sizes, states, parameters, True, 1, 0.0, False, False)


def test_error_for_zeros_is_ignored() -> None:
    # With zeros as offsets, the two diagonals would coincide.
    with fake_mode(), pytest.raises(UnsupportedOperatorError, match="_spdiags"):
        torch.sparse.spdiags(torch.rand(2, 3), torch.tensor([0, 1]), (3, 3))


DRAWS: dict[str, Callable[[torch.Generator | None], Tensor]] = {
    "binomial": lambda generator: torch.binomial(torch.full((3, 2), 5.0), torch.rand(3, 2), generator=generator),
    "dirichlet": lambda generator: torch._sample_dirichlet(torch.rand(3, 2), generator=generator),
}


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("is_given", [False, True], ids=["default generator", "own generator"])
def test_draw_on_zeros_moves_no_generator(name: str, is_given: bool) -> None:
    generator = torch.Generator().manual_seed(3) if is_given else None
    before = (generator or torch.default_generator).get_state()
    with fake_mode():
        for _ in range(2):  # the second result comes from the cache
            found = DRAWS[name](generator)
            assert is_fake(found)
            assert (found.shape, found.dtype) == ((3, 2), torch.float32)
    assert torch.equal((generator or torch.default_generator).get_state(), before)


def test_distribution_without_a_meta_kernel_is_sampled_on_fake_cuda() -> None:
    with fake_mode(gpu=True):
        concentration = torch.rand(3, 2, device="cuda")
        sample = Dirichlet(concentration, validate_args=False).sample((4,))
    assert (sample.shape, sample.device.type) == ((4, 3, 2), "cuda")


@pytest.mark.parametrize("name", DRAWS)
def test_random_operator_without_a_meta_kernel_draws_in_a_constructor(name: str) -> None:
    torch.manual_seed(4)
    wanted = DRAWS[name](None)
    torch.manual_seed(4)
    assert_same_tensor(materialize_tensor(deferred_init(lambda: DRAWS[name](None))), wanted)


def test_calls_that_only_a_meta_kernel_rejects_run_on_zeros() -> None:
    with fake_mode():
        found = torch.view_copy(torch.rand(5, 6).t(), (2, 15))  # a view could not have this shape
    assert is_fake(found)
    assert found.stride() == torch.view_copy(torch.rand(5, 6).t(), (2, 15)).stride()


def test_call_that_would_take_memory_is_not_tried_out() -> None:
    with fake_mode(), pytest.raises(DataDependentError, match="bincount"):
        torch.bincount(torch.empty(5, dtype=torch.int64), minlength=2**45)  # too large for any machine
