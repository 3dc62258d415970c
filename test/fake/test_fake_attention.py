"""The backend of attention on fake CUDA devices, by device, dtype, shape and settings."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from torchext.fake import FakeGPU, fake_like, fake_mode
from torchext.internals.patching import TORCH_RELEASE

CUDNN, FLASH, EFFICIENT = "Cudnn", "Flash", "Efficient"
MATH = None

HALF, SINGLE, DOUBLE = torch.bfloat16, torch.float32, torch.float64


def backend(
    gpu: str | FakeGPU,
    dtype: torch.dtype,
    *,
    head: int = 64,
    heads: tuple[int, int] = (4, 4),
    length: int = 128,
    keys: int | None = None,
    mask: torch.Size | None = None,
    dropout: float = 0.0,
    is_causal: bool = False,
    enable_gqa: bool = False,
) -> str | None:
    """Return the backend of attention with gradients, by the name of its node in the graph."""
    with fake_mode(gpu=gpu if isinstance(gpu, FakeGPU) else FakeGPU(gpu)):
        query = torch.empty(2, heads[0], length, head, dtype=dtype, device="cuda", requires_grad=True)
        key, value = (
            torch.empty(2, heads[1], keys or length, head, dtype=dtype, device="cuda", requires_grad=True)
            for _ in range(2)
        )
        attn_mask = None if mask is None else torch.ones(mask, dtype=torch.bool, device="cuda")
        output = scaled_dot_product_attention(query, key, value, attn_mask, dropout, is_causal, enable_gqa=enable_gqa)
        output.sum().backward()
        assert query.grad is not None
        assert query.grad.shape == query.shape
        node = output.grad_fn
        while node is not None:
            name = type(node).__name__
            if name.startswith("ScaledDotProduct"):
                return name.removeprefix("ScaledDotProduct").removesuffix("AttentionBackward0")
            node = node.next_functions[0][0] if node.next_functions else None
        return MATH


# The choices of PyTorch 2.15 on such devices (`torch._fused_sdp_choice()` with the null driver of `make oracle`).
@pytest.mark.parametrize(
    ("gpu", "dtype", "expected"),
    [
        ("H100", HALF, CUDNN),
        ("H100", torch.float16, CUDNN),
        ("H100", SINGLE, EFFICIENT),
        ("H100", DOUBLE, MATH),
        ("B200", HALF, CUDNN),
        ("A100-80GB", HALF, FLASH),
        ("A100-80GB", SINGLE, EFFICIENT),
        ("L4", HALF, FLASH),
        ("RTX-4090", torch.float16, FLASH),
        (FakeGPU("T4", memory=2**34, capability=(7, 5)), torch.float16, EFFICIENT),
        (FakeGPU("T4", memory=2**34, capability=(7, 5)), HALF, MATH),
    ],
    ids=lambda value: getattr(value, "name", str(value)).removeprefix("torch."),
)
def test_is_chosen_by_device_and_dtype(gpu: str | FakeGPU, dtype: torch.dtype, expected: str | None) -> None:
    assert backend(gpu, dtype) == expected


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"head": 4}, FLASH),  # padded to 8
        ({"head": 65}, FLASH),
        ({"head": 264}, EFFICIENT),
        ({"head": 300}, MATH),
        ({"dropout": 0.1}, FLASH),
        ({"is_causal": True}, FLASH),
        ({"is_causal": True, "keys": 64}, EFFICIENT),
        ({"mask": torch.Size([128, 128])}, EFFICIENT),
        ({"mask": torch.Size([2, 1, 128, 128])}, EFFICIENT),
        ({"heads": (8, 2), "enable_gqa": True}, FLASH),
        ({"length": 1}, FLASH),
    ],
    ids=lambda value: str(value),
)
def test_is_chosen_by_arguments(arguments: dict[str, object], expected: str | None) -> None:
    assert backend("A100-80GB", HALF, **arguments) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize("gpu", ["H100-80GB", "A100-80GB"])
@pytest.mark.parametrize("dtype", [HALF, SINGLE, DOUBLE], ids=str)
def test_is_returned_by_fused_sdp_choice(gpu: str, dtype: torch.dtype) -> None:
    numbers = {MATH: 0, FLASH: 1, EFFICIENT: 2, CUDNN: 3}
    with fake_mode(gpu=FakeGPU(gpu)):
        query = torch.empty(2, 8, 128, 64, device="cuda", dtype=dtype)
        found = torch._fused_sdp_choice(query, query, query)
    assert found == numbers[backend(gpu, dtype)]


@pytest.mark.parametrize("arguments", [{}, {"is_causal": True}, {"dropout_p": 0.5}], ids=str)
def test_is_returned_on_the_cpu_as_for_real_tensors(arguments: dict[str, Any]) -> None:
    query = torch.ones(2, 8, 128, 64)
    fake = fake_like(query)
    assert torch._fused_sdp_choice(fake, fake, fake, **arguments) == torch._fused_sdp_choice(
        query, query, query, **arguments
    )


def test_cannot_train_large_heads_with_flash_on_small_devices() -> None:
    assert backend("L4", HALF, head=200) == EFFICIENT
    assert backend("A100-80GB", HALF, head=200) == FLASH


class TestSettings:
    def test_of_the_user_are_followed(self) -> None:
        with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION]):
            assert backend("H100", HALF) == EFFICIENT
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
            assert backend("H100", HALF) == FLASH
        with sdpa_kernel([SDPBackend.MATH]):
            assert backend("H100", HALF) == MATH

    def test_may_set_the_order(self) -> None:
        order = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION]
        with sdpa_kernel(order, set_priority=True):
            assert backend("A100-80GB", HALF) == EFFICIENT

    def test_without_cudnn_leave_flash(self) -> None:
        before = torch.backends.cuda.cudnn_sdp_enabled()
        torch.backends.cuda.enable_cudnn_sdp(False)
        try:
            assert backend("H100", HALF) == FLASH
        finally:
            torch.backends.cuda.enable_cudnn_sdp(before)

    def test_that_allow_no_backend_are_refused_with_the_reasons(self) -> None:
        with warnings.catch_warnings(record=True) as reasons, sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
            warnings.simplefilter("always")
            with pytest.raises(RuntimeError, match="No available kernel. Aborting execution."):
                backend("H100", SINGLE)
        assert any("Flash attention kernel not used because" in str(reason.message) for reason in reasons)


class TestResults:
    def test_have_the_layout_of_their_kernels(self) -> None:
        with fake_mode(gpu=FakeGPU("A100")), torch.no_grad():
            half = torch.empty(2, 4, 128, 64, dtype=HALF, device="cuda")
            assert scaled_dot_product_attention(half, half, half).stride() == (32768, 8192, 64, 1)
            single = half.float()
            assert scaled_dot_product_attention(single, single, single).stride() == (32768, 64, 256, 1)
            heads_last = torch.empty(2, 128, 4, 64, dtype=HALF, device="cuda").transpose(1, 2)
            assert scaled_dot_product_attention(heads_last, heads_last, heads_last).stride() == (32768, 64, 256, 1)

    @pytest.mark.ci
    @pytest.mark.usefixtures("empty_devices")
    def test_do_not_keep_the_scores(self) -> None:
        with fake_mode(gpu=FakeGPU("A100")):
            query = torch.empty(1, 1, 8192, 64, dtype=HALF, device="cuda", requires_grad=True)
            scaled_dot_product_attention(query, query, query).sum().backward()
            assert torch.cuda.max_memory_allocated() < 8192 * 8192

    def test_on_the_cpu_are_those_of_the_cpu(self) -> None:
        with fake_mode(gpu=FakeGPU("A100")):
            query = torch.empty(2, 4, 128, 64, requires_grad=True)
            output = scaled_dot_product_attention(query, query, query)
        assert "ForCpu" in type(output.grad_fn).__name__


@pytest.mark.skipif(TORCH_RELEASE < (2, 15), reason="cuDNN takes heads of 256 since 2.15")
def test_takes_cudnn_for_large_heads_on_large_devices() -> None:
    assert backend("H100", HALF, head=256) == CUDNN
    assert backend("H100", HALF, head=200) == FLASH  # other head sizes than 256 have no backward pass


@pytest.mark.parametrize(("dropout", "device"), [(0.0, "cuda" if TORCH_RELEASE >= (2, 14) else "cpu"), (0.1, "cpu")])
def test_efficient_attention_returns_the_state_of_dropout_on_the_cpu(dropout: float, device: str) -> None:
    with fake_mode(gpu=FakeGPU("H100-80GB")):
        q = torch.zeros(2, 4, 32, 64, device="cuda")
        results = torch.ops.aten._scaled_dot_product_efficient_attention(q, q, q, None, True, dropout)
        assert [result.device.type for result in results] == ["cuda", "cuda", device, device]
        assert [result.shape for result in results[2:]] == [(), ()]


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("bias", [None, 7, 32])
def test_gradients_of_efficient_attention_have_the_layout_of_the_kernel(is_shared: bool, bias: int | None) -> None:
    forward, backward = torch.ops.aten._efficient_attention_forward, torch.ops.aten._efficient_attention_backward
    with fake_mode(gpu=FakeGPU("H100-80GB")):
        q, k, v = (torch.zeros(2, 8, 4, 16, device="cuda") for _ in range(3))
        added = None if bias is None else torch.zeros(2, 4, 8, bias, device="cuda")
        out, logsumexp, seed, offset, *_ = forward(q, k, v, added, None, None, None, None, 0.0, 0, True, scale=0.3)
        state = logsumexp, 0.0, seed, offset, 0, True
        gradients = backward(
            out, q, k, v, added, out, None, None, 8, 8, *state, scale=0.3, shared_storage_dqdkdv=is_shared
        )
        assert [one.shape for one in gradients[:3]] == [q.shape] * 3
        assert {one.stride() for one in gradients[:3]} == {(1536, 192, 16, 1) if is_shared else q.stride()}
        assert len({one.untyped_storage()._cdata for one in gradients[:3]}) == (1 if is_shared else 3)
        if bias is None:
            assert gradients[3] is None
        else:
            assert (gradients[3].shape, gradients[3].stride(-2)) == (added.shape, 16 if bias == 7 else 32)


@pytest.mark.parametrize("shape", [(8,), (2, 8, 16)])
def test_gradients_of_efficient_attention_of_other_shapes_are_refused(shape: tuple[int, ...]) -> None:
    with fake_mode(gpu=FakeGPU("H100-80GB")):
        q, number = torch.zeros(shape, device="cuda"), torch.zeros((), dtype=torch.int64)
        with pytest.raises(RuntimeError, match="four dimensions"):
            torch.ops.aten._efficient_attention_backward(
                q, q, q, q, None, q, None, None, 8, 8, q, 0.0, number, number, 0, False, shared_storage_dqdkdv=True
            )
