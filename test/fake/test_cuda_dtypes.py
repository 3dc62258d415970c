"""Fake CUDA devices reject the dtypes that CUDA kernels reject: NOTE [Dtypes that CUDA kernels refuse]."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from cuda_dtypes import Call, facts, name_of, refusal_in

from torchext.deferred_init import deferred_init
from torchext.fake import fake_mode

REFUSED, ACCEPTED = 0, 1
# One of this many dtypes is tested for each call, each time another one.
STEP = 7


def error_of(call: Call, dtype: torch.dtype) -> Exception | None:
    try:
        call.run(dtype)
    except Exception as error:
        return error
    return None


def outcomes(column: int, step: int) -> list[tuple[Call, torch.dtype, Exception | None]]:
    """Make the calls with the dtypes of a column of the facts on a fake device."""
    found = []
    with fake_mode(gpu=True):
        for row, (call, *columns) in enumerate(facts()):
            dtypes = columns[column]
            found += [
                (call, dtype, error_of(call, dtype)) for dtype in dtypes[row % min(step, len(dtypes) or 1) :: step]
            ]
    return found


def check(step: int) -> None:
    refused = outcomes(REFUSED, step)
    assert [case[:2] for case in refused if case[2] is None] == []
    # Meta kernels that are Python formulas may reject a dtype earlier, with another message.
    in_same_words = [
        case for case in refused if case[2] is not None and (refusal_in(case[2]) or "?")[-1] == name_of(case[1])
    ]
    assert len(in_same_words) > 0.9 * len(refused) > 300

    accepted = outcomes(ACCEPTED, step)
    assert len(accepted) > 300
    assert [case for case in accepted if case[2] is not None and refusal_in(case[2])] == []


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_dtypes_are_refused_and_accepted_as_by_pytorchs_host_code() -> None:
    check(STEP)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_all_dtypes_are_refused_and_accepted_as_by_pytorchs_host_code() -> None:
    check(1)


def of(dtype: torch.dtype, *size: int) -> torch.Tensor:
    return torch.ones(size, dtype=dtype, device="cuda")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: of(torch.int64, 2, 3) @ of(torch.int64, 3, 2), "\"addmm_cuda\" not implemented for 'Long'"),
        (lambda: torch.softmax(of(torch.int64, 3), 0), "\"host_softmax\" not implemented for 'Long'"),
        (lambda: of(torch.int64, 3).uniform_(), "\"check_uniform_bounds\" not implemented for 'Long'"),
        (  # has an empty result on CUDA for all dtypes
            lambda: torch.nn.functional.logsigmoid(of(torch.complex64, 3)),
            "\"log_sigmoid_forward_cuda\" not implemented for 'ComplexFloat'",
        ),
        (lambda: of(torch.uint16, 3) + of(torch.uint16, 3), "\"ufunc_add_CUDA\" not implemented for 'UInt16'"),
    ],
)
def test_refusal_has_the_words_of_cuda(call: Callable[[], object], words: str) -> None:
    for _ in range(2):  # the second time from the cache
        with fake_mode(gpu=True), pytest.raises(NotImplementedError, match=words):
            call()


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda: of(torch.int64, 0, 3) @ of(torch.int64, 3, 0), id="empty tensors"),
        pytest.param(lambda: of(torch.float32, 3) * of(torch.uint16, 3), id="promoted"),
        pytest.param(lambda: of(torch.complex32).cumprod(0), id="no dimensions"),
        pytest.param(lambda: of(torch.int64, 2, 3).cpu() @ of(torch.int64, 3, 2).cpu(), id="on the CPU"),
        pytest.param(lambda: torch.softmax(of(torch.int64, 3), 0, dtype=torch.float32), id="another dtype requested"),
    ],
)
def test_other_calls_that_cuda_accepts_are_accepted(call: Callable[[], object]) -> None:
    with fake_mode(gpu=True):
        call()


def test_recording_raises_the_errors_of_cuda() -> None:
    with (
        fake_mode(gpu=True),
        pytest.raises(NotImplementedError, match="\"check_uniform_bounds\" not implemented for 'Long'"),
    ):
        deferred_init(lambda: torch.empty(3, dtype=torch.int64, device="cuda").uniform_())
