"""Fakes refuse invalid calls like real tensors, and results of valid calls in other layouts are laid out alike.

The table has the exceptions.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from refusals import Call, Difference, call_of, compare, enlarged, error_calls_of, layouts, mutations
from sweeps.operators import Visit, check, full_name, same_storage_copy

VALUES = "reads values before it checks the rest, or its kernel expects values that no stand-in has"
LOOSE = "the real kernel does not check what the Meta kernel does"
OPTIONS = "has the options of a factory, so that it may ask for any amount of memory: not tried out"
META = "a number on the meta device counts as one that mixes with any device"
TRUSTS = "kernels of gradients trust what the forward has made, so they are not tried out"
FALLBACK = "PyTorch's autograd function checks its input with another kernel"

# The remaining differences by operator: their kinds, and the reason.
DIFFERENCES: dict[str, tuple[set[str], str]] = {
    "linalg.lu_factor": ({"accepted"}, VALUES),
    "__getitem__": ({"accepted"}, VALUES),
    "index_put": ({"accepted"}, VALUES),
    "gather": ({"accepted"}, VALUES),
    "scatter": ({"accepted"}, VALUES),
    "scatter_add": ({"accepted"}, VALUES),
    "scatter_reduce.sum": ({"accepted"}, VALUES),
    "scatter_reduce.prod": ({"accepted"}, VALUES),
    "scatter_reduce.mean": ({"accepted"}, VALUES),
    "scatter_reduce.amin": ({"accepted"}, VALUES),
    "scatter_reduce.amax": ({"accepted"}, VALUES),
    "multinomial": ({"accepted"}, VALUES),
    "narrow": ({"another class"}, VALUES),
    "tensor_split": ({"another class"}, VALUES),
    "to_sparse": ({"another class"}, VALUES),
    "nn.functional.ctc_loss": ({"another class"}, VALUES),
    "nn.functional.gaussian_nll_loss": ({"another class"}, VALUES),
    "nn.functional.embedding_bag": ({"accepted"}, VALUES),
    "_segment_reduce.lengths": ({"accepted", "another class", "other words"}, VALUES),
    "_segment_reduce.offsets": ({"accepted", "another class", "other words"}, VALUES),
    "nn.functional.linear_cross_entropy": ({"accepted"}, VALUES),
    "nn.functional.multilabel_margin_loss": ({"accepted", "other words"}, VALUES),
    "native_dropout_backward": ({"another result", "other words"}, TRUSTS),
    "_softmax_backward_data": ({"accepted", "other words"}, TRUSTS),
    "max_pool2d_with_indices_backward": ({"accepted"}, TRUSTS),
    "native_group_norm": ({"another result"}, LOOSE),
    "native_batch_norm": ({"another result"}, LOOSE),
    "_native_batch_norm_legit": ({"another result"}, LOOSE),
    "_batch_norm_with_update": ({"another result"}, LOOSE),
    "linspace": ({"other words"}, OPTIONS),
    "logspace": ({"other words"}, OPTIONS),
    "zeros": ({"other words"}, OPTIONS),
    "linspace.tensor_overload": ({"accepted", "other words"}, OPTIONS),
    "logspace.tensor_overload": ({"accepted", "other words"}, OPTIONS),
    "empty_strided": ({"accepted"}, OPTIONS),
    "nn.functional.linear_cross_entropy.chunked": ({"accepted"}, FALLBACK),
    "nn.functional.linear_cross_entropy.chunked_none": ({"accepted"}, FALLBACK),
    "as_strided_scatter": ({"accepted"}, META),
    "copysign": ({"accepted"}, META),
    "div.floor_rounding": ({"accepted"}, META),
    "floor_divide": ({"accepted"}, META),
    "corrcoef": ({"accepted"}, META),
    "cov": ({"accepted"}, META),
    "nn.functional.multi_margin_loss": ({"accepted"}, META),
    "index_fill": ({"accepted"}, META),
    "index_copy": ({"accepted"}, META),
    "index_add": ({"accepted"}, META),
}


# Operators with more than linear time or memory, or tens of thousands of results, and one whose kernel crashes.
SLOW_WHEN_LARGE = {"matrix_exp", "cdist", "chunk", "split", "tensor_split", "unbind", "unsafe_chunk", "unsafe_split"}
SLOW_WHEN_LARGE |= {"expand_copy", "nn.functional.pdist", "max_pool2d_with_indices_backward", "lu_unpack"}


def unchanged(visit: Visit) -> Call:
    """Return the call of a sample, without gradients."""
    return call_of(visit.op, *visit.arguments(lambda tensor: same_storage_copy(tensor.detach())))


def differences(calls: Iterable[Call]) -> list[Difference]:
    return [difference for call in calls if (difference := compare(call)) is not None]


def allowed(visit: Visit) -> set[str]:
    return DIFFERENCES.get(visit.name, (set(), ""))[0]


@check(samples=(1, 3, 3), release=(2, 13))
def results_are_laid_out_as_real_ones(visit: Visit) -> None:
    if visit.is_strided:
        assert differences(layouts(unchanged(visit))) == []


@check(samples=(0, 0, 1), release=(2, 13))
def calls_that_pytorchs_tests_expect_to_raise_do(visit: Visit) -> None:
    found = differences(error_calls_of(visit.op))
    assert [one for one in found if one.kind not in allowed(visit)] == []


# PyTorch crashes when there are too few pivots.
@check(samples=(0, 0, 2), concerns=lambda op: op.name != "lu_unpack", release=(2, 13))
def samples_with_one_argument_changed_are_refused_as_real_ones(visit: Visit) -> None:
    if visit.is_strided:
        found = differences(mutations(unchanged(visit)))
        assert {one.kind for one in found} <= allowed(visit), found


@check(samples=(0, 0, 2), concerns=lambda op: full_name(op) not in SLOW_WHEN_LARGE, release=(2, 13))
def large_samples_are_refused_and_laid_out_as_real_ones(visit: Visit) -> None:
    if visit.is_strided:
        for large in enlarged(unchanged(visit)):
            found = differences([large, *layouts(large), *itertools.islice(mutations(large), 6)])
            assert {one.kind for one in found} <= allowed(visit) | {"other words"}, found
