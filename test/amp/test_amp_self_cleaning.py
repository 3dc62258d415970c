"""Self-cleaning regions: tensors made in them, and operators on those tensors afterwards."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import bindings
import pytest
import torch
from common import feed_forward, gradients
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from torchext import amp, inference
from torchext.deferred_init import deferred_init, materialize_module
from torchext.fake import fake_mode
from torchext.inference import inference_mode, origin
from torchext.inspect import route

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def made_inside() -> Tensor:
    """Return a bfloat16 matrix that needs cleaning."""
    with amp.autocast("cpu", self_cleaning=True):
        return torch.ones(2, 2) @ torch.ones(2, 2)


def mixed_program(region: Any) -> Tensor:
    """Compute, after the region, with tensors from it and with float32 tensors."""
    x, w = torch.ones(2, 2), torch.ones(2, 2)
    with region:
        y = x @ w
    return torch.mm(y, w)


# Contexts that may be open between a self-cleaning region and compiled code.
COMPILED_IN: dict[str, Any] = {
    "nothing": nullcontext(),
    "PyTorch's": torch.autocast("cpu"),
    "ours": amp.autocast("cpu"),
    "another device's": torch.autocast("cuda", enabled=False),
}


class TestSelfCleaning:
    def test_program_that_fails_after_other_regions(self) -> None:
        with pytest.raises(RuntimeError, match="same dtype"):
            mixed_program(amp.autocast("cpu"))
        result = mixed_program(amp.autocast("cpu", self_cleaning=True))
        assert result.dtype is FP32
        assert not amp.is_amp(result)

    def test_tensors_made_inside_carry_the_identity(self) -> None:
        before = torch.ones(2, 2)
        with amp.autocast("cpu", self_cleaning=True):
            made = [before @ before, torch.ones(2), before.clone(), before.to(BF16), before.half(), before + 1]
            kept = [before.view(-1), before.add_(1), torch.dropout(before, 0.5, False), before.detach(), before.float()]
        assert [amp.is_amp(t) for t in made] == [True] * len(made)
        assert [amp.is_amp(t) for t in kept] == [False] * len(kept)
        assert not amp.is_amp(before)

    def test_results_inside_are_those_of_other_regions(self) -> None:
        net, x = feed_forward(), torch.ones(3, 4)
        with amp.autocast("cpu"):
            wanted = net(x)
        with amp.autocast("cpu", self_cleaning=True):
            found = net(x)
        assert found.dtype is wanted.dtype
        assert torch.equal(found, wanted)

    def test_views_stay_views_and_lower(self) -> None:
        y = made_inside()
        y[0] = 5
        assert y.tolist() == [[5.0, 5.0], [2.0, 2.0]]
        for view in (y.t(), y.view(-1), y[0], y.t().contiguous(), y.t().reshape(-1), copy.deepcopy(y)):
            assert view.dtype is BF16
            assert amp.is_amp(view)
        y.t().fill_(3)
        assert y.tolist() == [[3.0, 3.0], [3.0, 3.0]]
        assert y.to(FP32).dtype is FP32
        assert not amp.is_amp(y.float())
        assert not amp.is_amp(y.to(FP16))

    def test_written_arguments_keep_dtype_and_identity(self) -> None:
        with amp.autocast("cpu", self_cleaning=True):
            y = torch.ones(2, 2) @ torch.ones(2, 2)
            out = torch.ones(1, dtype=BF16)
        plain = torch.full((2, 2), 3.0)
        assert y.addmm_(plain, plain) is y
        assert y.tolist() == [[20.0, 20.0], [20.0, 20.0]]
        assert (y.dtype, amp.is_amp(y)) == (BF16, True)
        with pytest.warns(UserWarning, match="resized"):
            assert torch.mm(plain, plain, out=out) is out
        assert (out.dtype, out.tolist()) == (BF16, [[18.0, 18.0], [18.0, 18.0]])
        y.requires_grad_().retain_grad()

    @pytest.mark.parametrize("view", [lambda y: y.t(), lambda y: y[:], lambda y: y.data, lambda y: y.view(2, 2)])
    def test_views_are_cleaned(self, view: Callable[[Tensor], Tensor]) -> None:
        with amp.autocast("cpu", self_cleaning=True):
            y = torch.ones(2, 2) @ torch.ones(2, 2)
            inside = view(y)
        for x in (inside, view(y)):
            result = torch.mm(x, torch.ones(2, 2))
            assert result.dtype is FP32
            assert not amp.is_amp(result)

    def test_other_lower_precision_arguments_are_also_cast(self) -> None:
        y = made_inside()
        lower = torch.ones(2, 2, dtype=BF16)
        assert torch.mm(y, lower).dtype is FP32
        assert lower.addmm_(y, torch.ones(2, 2)) is lower
        assert (lower.dtype, lower.tolist(), amp.is_amp(lower)) == (BF16, [[5.0, 5.0], [5.0, 5.0]], False)
        assert torch.view_as_complex(y).dtype is torch.complex64

    def test_float32_tensors_need_no_cast(self) -> None:
        with amp.autocast("cpu", self_cleaning=True):
            lower = torch.ones(2, 2) @ torch.ones(2, 2)
            full = lower.float()
        assert amp.is_amp(full)
        result = torch.mm(full, torch.ones(2, 2))
        assert (result.dtype, amp.is_amp(result)) == (FP32, False)
        assert torch.mm(lower, full).dtype is torch.mm(full, lower).dtype is FP32
        full.add_(lower)
        assert amp.is_amp(full)

    def test_views_of_other_tensors_are_as_those_are(self) -> None:
        y, plain = made_inside(), torch.ones(2, 2, dtype=BF16)
        assert not amp.is_amp(plain.view_as(y))
        assert amp.is_amp(y.view_as(plain))

    @pytest.mark.parametrize("is_written", [False, True])
    def test_operators_that_return_nothing_are_cleaned(self, is_written: bool) -> None:
        @torch.library.custom_op(f"torchext_test::accumulate_{is_written}", mutates_args={"total"})
        def accumulate(total: Tensor, x: Tensor) -> None:
            assert total.dtype is x.dtype is FP32
            total.add_(x)

        y, plain = made_inside(), torch.ones(2, 2)
        accumulate(*((y, plain) if is_written else (plain, y)))
        assert (y if is_written else plain).tolist() == [[3.0, 3.0], [3.0, 3.0]]
        assert y.dtype is BF16

    @pytest.mark.parametrize("module", [nn.RNN, nn.LSTM, nn.GRU])
    def test_recurrent_modules_clean(self, module: Callable[..., nn.Module]) -> None:
        assert module(2, 3)(made_inside())[0].dtype is FP32

    def test_constructors_run_inside(self) -> None:
        with amp.autocast("cpu", self_cleaning=True):
            weight = nn.init.trunc_normal_(torch.empty(2, 2))  # needs a tensor like it
            batch = torch.utils.data.default_collate([torch.ones(2), torch.ones(2)])
            assert (weight.new_tensor([1.0]).dtype, batch.dtype) == (FP32, FP32)
        assert amp.is_amp(made_inside().new_tensor([1.0]))

    def test_lists_are_cleaned(self) -> None:
        y = made_inside()
        joined = torch.cat([y, torch.ones(2, 2)])
        assert joined.dtype is FP32
        assert not amp.is_amp(joined)

    def test_tensor_twice_in_a_list_is_written_twice(self) -> None:
        y = made_inside()
        torch._foreach_add_([y, y], [torch.ones(2, 2), torch.ones(2, 2)])
        assert y.tolist() == [[4.0, 4.0], [4.0, 4.0]]

    def test_writes_of_two_views_are_kept(self) -> None:
        y = made_inside().view(-1)
        torch._foreach_add_([y[:3], y[1:]], 1)
        assert y.tolist() == [3.0, 4.0, 4.0, 3.0]
        assert amp.is_amp(y)

    def test_gradients_flow_through_the_cast(self) -> None:
        net, plain, x = feed_forward(), feed_forward(), torch.ones(3, 4)
        with amp.autocast("cpu", self_cleaning=True):
            y = net(x)
        nn.functional.mse_loss(y, x).backward()
        with amp.autocast("cpu"):
            y = plain(x)
        nn.functional.mse_loss(y.float(), x).backward()
        assert all(map(torch.equal, gradients(net), gradients(plain)))
        assert not any(map(amp.is_amp, gradients(net)))

    @pytest.mark.parametrize("use_reentrant", [True, False])
    def test_checkpoint_inside_and_after(self, use_reentrant: bool) -> None:
        net, x = feed_forward(), torch.ones(3, 4, requires_grad=True)
        with amp.autocast("cpu", self_cleaning=True):
            y = checkpoint(net, x, use_reentrant=use_reentrant)
        z = checkpoint(net, y, use_reentrant=use_reentrant)
        assert (y.dtype, z.dtype) == (BF16, FP32)
        z.sum().backward()
        assert x.grad.dtype is FP32

    @pytest.mark.parametrize("use_reentrant", [True, False])
    def test_disabled_region_in_recomputed_code_cleans(self, use_reentrant: bool) -> None:
        def function(x: Tensor) -> Tensor:
            y = x @ w
            with amp.autocast("cpu", enabled=False):
                return torch.mm(y, w)

        x, w = torch.ones(2, 2, requires_grad=True), torch.ones(2, 2, requires_grad=True)
        with amp.autocast("cpu", self_cleaning=True):
            y = checkpoint(function, x, use_reentrant=use_reentrant)
        y.sum().backward()
        assert x.grad.tolist() == [[4.0, 4.0], [4.0, 4.0]]

    def test_transforms_hand_it_on(self) -> None:
        with amp.autocast("cpu", self_cleaning=True):
            y = torch.vmap(lambda row: torch.mm(row, torch.ones(2, 2)))(torch.ones(3, 2, 2))
        assert torch.mm(y[0], torch.ones(2, 2)).dtype is FP32

    def test_functions_in_vmap_hand_it_on(self) -> None:
        class Product(torch.autograd.Function):
            generate_vmap_rule = True

            @staticmethod
            def forward(x: Tensor) -> Tensor:
                return x @ torch.ones(2, 2)

            @staticmethod
            def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
                pass

        with amp.autocast("cpu", self_cleaning=True):
            y = torch.vmap(Product.apply)(torch.ones(3, 2, 2))
        assert torch.mm(y[0], torch.ones(2, 2)).dtype is FP32

    @pytest.mark.parametrize("use_reentrant", [True, False])
    def test_checkpoint_in_a_disabled_region_inside(self, use_reentrant: bool) -> None:
        def function(x: Tensor) -> Tensor:
            with amp.autocast("cpu"):
                y = x @ w
            return torch.mm(y, w)

        x, w = torch.ones(2, 2, requires_grad=True), torch.ones(2, 2, requires_grad=True)
        with amp.autocast("cpu", self_cleaning=True), amp.autocast("cpu", enabled=False):
            y = checkpoint(function, x, use_reentrant=use_reentrant)
        y.sum().backward()
        assert x.grad.tolist() == [[4.0, 4.0], [4.0, 4.0]]

    @pytest.mark.parametrize("inner", COMPILED_IN)
    def test_compiled_code_runs_inside(self, inner: str) -> None:
        net = nn.Sequential(nn.LayerNorm(2), nn.Linear(2, 2))
        compiled, x = torch.compile(net, backend="aot_eager"), torch.eye(2)
        with torch.autocast("cpu"):
            wanted = compiled(x @ x)
        with amp.autocast("cpu", self_cleaning=True), COMPILED_IN[inner]:
            found = compiled(x @ x)
        assert found.dtype is wanted.dtype is BF16
        assert torch.equal(found, wanted)
        assert torch.mm(found, torch.ones(2, 2)).dtype is FP32

    def test_no_mark_outlives_compiled_code(self) -> None:
        compiled = torch.compile(nn.Linear(2, 2), backend="aot_eager")
        with amp.autocast("cpu", self_cleaning=True):
            compiled(torch.eye(2))
        torch._dynamo.reset()
        gc.collect()
        assert bindings.live_marks() == 0

    def test_first_mark_may_be_made_in_compiled_code(self) -> None:
        with torch._C._DisableAutocast():  # like AOTAutograd
            y = made_inside()
        assert torch.mm(y, torch.ones(2, 2)).dtype is FP32

    def test_last_mark_may_die_in_compiled_code(self) -> None:
        marked = [made_inside()]
        with torch.autocast("cpu"), torch._C._DisableAutocast():
            marked.clear()
        assert torch.mm(made_inside(), torch.ones(2, 2)).dtype is FP32

    def test_compiled_code_nests_and_may_raise(self) -> None:
        def run() -> None:
            with torch._C._DisableAutocast(), torch._C._DisableAutocast():
                raise ValueError

        marked = made_inside()
        with pytest.raises(ValueError), torch.autocast("cpu"):  # noqa: PT011
            run()
        assert torch.mm(made_inside(), torch.ones(2, 2)).dtype is FP32
        assert torch.mm(marked, torch.ones(2, 2)).dtype is FP32

    def test_regions_may_outlive_the_mode_that_they_were_entered_in(self) -> None:
        inference.trace_origins(True)
        try:
            mode, region = torch.inference_mode(), amp.autocast("cpu", self_cleaning=True)
            mode.__enter__()
            region.__enter__()
            mode.__exit__(None, None, None)
            region.__exit__(None, None, None)
        finally:
            inference.trace_origins(False)
        assert not torch._C._dispatch_tls_is_dispatch_key_included("TESTING_ONLY_GenericMode")

    def test_manually_disabled_autocast_cleans(self) -> None:
        with amp.autocast("cpu", self_cleaning=True):
            y = torch.ones(2, 2) @ torch.ones(2, 2)
            torch.set_autocast_enabled("cpu", False)
            assert torch.mm(y, torch.ones(2, 2)).dtype is FP32

    def test_later_regions_do_not_convert_the_results(self) -> None:
        y = made_inside()
        with amp.autocast("cpu"):
            assert torch.relu(y).dtype is BF16
        with amp.autocast("cpu", enabled=False):
            assert torch.relu(y).dtype is FP32

    def test_disabled_inside_cleans(self) -> None:
        x = torch.ones(2, 2)
        with amp.autocast("cpu", self_cleaning=True):
            y = x @ x
            with amp.autocast("cpu", enabled=False):
                z = torch.mm(y, x)
            assert (y.dtype, z.dtype, amp.is_amp(z)) == (BF16, FP32, False)

    def test_float64_and_integers_are_left_alone(self) -> None:
        with amp.autocast("cpu", self_cleaning=True):
            double, count = torch.ones(2, dtype=FP64) * 2, torch.ones(2, dtype=torch.int64) * 2
        assert not amp.is_amp(count)
        assert (double * 2).dtype is FP64
        assert not amp.is_amp(double * 2)

    def test_wrapped_tensors_stay_wrapped(self) -> None:
        net, x = amp.to_amp(feed_forward()), torch.ones(1, 4)
        with amp.autocast("cpu", self_cleaning=True):
            y = net(x)
        assert net(y).dtype is BF16

    def test_ends_with_its_region_and_is_the_threads_own(self) -> None:
        found = []
        with amp.autocast("cpu", self_cleaning=True), amp.autocast("cpu", self_cleaning=True):
            thread = threading.Thread(target=lambda: found.append(amp.is_amp(torch.ones(1))))
            thread.start()
            thread.join()
        assert found == [False]
        assert not amp.is_amp(torch.ones(1))

    def test_is_kept_by_a_wrap_of_the_users(self) -> None:
        y = made_inside()
        amp.to_amp(y)
        assert torch.mm(y, torch.ones(2, 2)).dtype is BF16

    def test_on_fakes_and_in_deferred_init(self) -> None:
        with fake_mode(gpu=True):
            x = torch.ones(2, 2, device="cuda")
            with amp.autocast("cuda", self_cleaning=True):
                y = x @ x
            z = torch.mm(y, x)
        assert (y.dtype, z.dtype) == (FP16, FP32)

        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                with amp.autocast("cpu", self_cleaning=True):
                    y = torch.ones(2, 2) @ torch.full((2, 2), 1 / 3)
                self.weight = nn.Parameter(torch.mm(y, torch.ones(2, 2)))

        net = deferred_init(Net)
        materialize_module(net)
        assert torch.equal(net.weight, Net().weight)

    def test_decorator_returns_float32(self) -> None:
        @amp.autocast("cpu", self_cleaning=True)
        def function(x: Tensor, kept: list[Tensor]) -> Tensor:
            kept.append(x @ x)
            return x @ x

        kept: list[Tensor] = []
        assert function(torch.ones(2, 2), kept).dtype is FP32
        assert torch.mm(kept[0], torch.ones(2, 2)).dtype is FP32


class TestBackwardOfUsers:
    """Custom backward formulas, whose saved tensors have not been cleaned."""

    @pytest.mark.parametrize("kind", ["to be cleaned", "wrapped"])
    def test_autograd_functions_get_no_mixture(self, kind: str) -> None:
        class Product(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
                ctx.save_for_backward(x, w)
                return x @ w

            @staticmethod
            def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
                x, w = ctx.saved_tensors
                return grad @ w.t(), x.t() @ grad

        w = torch.full((2, 2), 3.0, requires_grad=True)
        if kind == "wrapped":
            x = amp.to_amp(torch.full((2, 2), 2.0, dtype=BF16, requires_grad=True))
        else:
            x = made_inside().requires_grad_()
        Product.apply(x, w).sum().backward()
        assert (x.grad.dtype, w.grad.dtype) == (BF16, FP32)
        assert x.grad.tolist() == [[6.0, 6.0], [6.0, 6.0]]
        assert w.grad.tolist() == [[4.0, 4.0], [4.0, 4.0]]

    def test_formulas_of_pytorch_are_left_alone(self) -> None:
        x, norm = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)), nn.LayerNorm(4)
        results = []
        for self_cleaning in (False, True):
            leaf = x.clone().requires_grad_()
            with amp.autocast("cpu", self_cleaning=self_cleaning):
                y = norm(leaf @ torch.ones(4, 4))  # the kernel accepts float32 weights with a bfloat16 argument
            results.append(torch.autograd.grad(y.float().square().sum(), [leaf, norm.weight]))
        assert all(map(torch.equal, *results))


class TestLeaves:
    """Parameters made of tensors from a region."""

    @pytest.mark.parametrize("foreach", [False, True], ids=["one by one", "foreach"])
    @pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad", "NAdam", "RMSprop", "Rprop", "Adafactor"])
    def test_are_optimized(self, name: str, foreach: bool) -> None:
        parameter = nn.Parameter(made_inside().detach())
        options: dict[str, Any] = {"momentum": 0.9} if name == "SGD" else {}
        optimizer = getattr(torch.optim, name)([parameter], lr=0.1, foreach=foreach, **options)
        for _ in range(3):
            optimizer.zero_grad()
            (parameter @ torch.ones(2, 2)).sum().backward()
            optimizer.step()
        assert parameter.dtype is parameter.grad.dtype is BF16
        assert bool((parameter < 2).all())

    @pytest.mark.parametrize("make", [torch.zeros_like, torch.empty_like, lambda y: y.new_ones(2, 2)])
    def test_tensors_like_them_are_also_cleaned(self, make: Callable[[Tensor], Tensor]) -> None:
        like = make(made_inside())
        assert like.dtype is BF16
        assert torch.mm(like, torch.ones(2, 2)).dtype is FP32
        assert not amp.is_amp(torch.zeros_like(like, dtype=FP32))


def is_met(x: Tensor) -> bool:
    """Return true if calls on `x`, a tensor without marks, reach the key of marked tensors."""
    return "TESTING_ONLY_GenericMode" in str(route("aten::relu", x))


@pytest.mark.parametrize("trace", [False, True], ids=["not traced", "traced"])
def test_region_and_block_of_inference_mode_are_left_in_any_order(trace: bool) -> None:
    x = torch.ones(2, 2)
    region, inference = amp.autocast("cpu", self_cleaning=True), inference_mode(trace=trace)
    for first, second in ((region, inference), (inference, region)):
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        assert is_met(x) == (trace or first is inference)
        assert amp.is_amp(x @ x) == (first is inference)
        assert (origin(x @ x) is not None) == (trace and first is region)
        second.__exit__(None, None, None)
        assert (x @ x).dtype is FP32
        assert not is_met(x)


def fail_inside(x: Tensor) -> None:
    with amp.autocast("cpu", self_cleaning=True):
        assert is_met(x)
        raise ValueError("inside")


def test_nothing_is_left_of_the_key_on_the_thread() -> None:
    x = torch.ones(1)
    with pytest.raises(ValueError, match="inside"):
        fail_inside(x)
    assert not is_met(x)
