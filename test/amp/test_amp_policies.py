"""How autocast treats operators: PyTorch's policies, registered policies, and equal behavior on fakes."""

from __future__ import annotations

import itertools
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing._internal.autocast_test_lists import AutocastCPUTestLists, AutocastTestLists
from torch.utils import _pytree as pytree

from torchext import amp
from torchext.fake import fake_mode

ROOT = Path(__file__).parents[2]
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64

count = itertools.count()


def define(schema: str = "(Tensor x, Tensor y) -> Tensor") -> tuple[str, list[Any]]:
    """Define an operator. Return its name, and a list to which each call adds the dtypes of its tensors."""
    name = f"torchext_test_amp::op{next(count)}"
    seen: list[Any] = []
    torch.library.define(name, schema)

    def kernel(*args: Any) -> Any:
        tensors = [a for a in pytree.tree_leaves(args) if isinstance(a, Tensor)]
        seen.append([t.dtype for t in tensors])
        return tensors[0].clone()

    torch.library.impl(name, "CompositeExplicitAutograd", kernel)
    return name, seen


def call(name: str, *args: Any) -> Any:
    namespace, op = name.split("::")
    return getattr(getattr(torch.ops, namespace), op)(*args)


class TestRegister:
    @pytest.mark.parametrize(
        ("policy", "given", "wanted"),
        [
            ("lower_precision", (FP32, FP16), [BF16, BF16]),
            ("float32", (BF16, FP16), [FP32, FP32]),
            ("promote", (BF16, FP32), [FP32, FP32]),
            ("promote", (BF16, BF16), [BF16, BF16]),
            ("promote", (BF16, FP16), [FP32, FP32]),
            ("promote", (FP64, BF16), [FP64, BF16]),
            ("fallthrough", (FP32, BF16), [FP32, BF16]),
            ("lower_precision", (torch.int64, FP32), [torch.int64, BF16]),
        ],
        ids=str,
    )
    def test_casts(self, policy: str, given: tuple[torch.dtype, ...], wanted: list[torch.dtype]) -> None:
        name, seen = define()
        amp.register_policy(name, policy)
        assert amp.policy(name, "cpu") == amp.policy(name, "cuda") == policy
        args = [torch.ones(2, dtype=dtype) for dtype in given]
        with amp.autocast("cpu"):
            call(name, *args)
        call(name, *args)
        assert seen == [wanted, list(given)]

    def test_casts_lists_and_optional_tensors(self) -> None:
        name, seen = define("(Tensor[] x, Tensor? y, Tensor? z, int n, float[] w) -> Tensor")
        amp.register_policy(name, "promote")
        with amp.autocast("cpu"):
            call(name, [torch.ones(1, dtype=BF16), torch.ones(1)], torch.ones(1, dtype=BF16), None, 3, [1.0])
        assert seen == [[FP32, FP32, FP32]]

    def test_casts_only_for_the_device_types(self) -> None:
        name, seen = define()
        amp.register_policy(name, "lower_precision", device_types="cuda")
        with amp.autocast("cpu"):
            call(name, torch.ones(1), torch.ones(1))
        with fake_mode(gpu=True), amp.autocast("cuda"):
            torch.library.register_fake(name, lambda x, y: x.clone())
            assert call(name, torch.ones(1, device="cuda"), torch.ones(1, device="cuda")).dtype is FP16
        assert seen == [[FP32, FP32]]
        assert amp.policy(name, "cpu") == "fallthrough"

    def test_gradients_flow_through_the_casts_and_weights_are_cast_once(self) -> None:
        casts = []

        @torch.library.custom_op(f"torchext_test_amp::op{next(count)}", mutates_args=())
        def double(x: Tensor) -> Tensor:
            casts.append(x.data_ptr())
            return x * 2

        double.register_autograd(lambda ctx, grad: grad * 2)
        amp.register_policy(double, "lower_precision")
        assert amp.policy(double, "cpu") == "lower_precision"
        w = torch.ones(2, requires_grad=True)
        with amp.autocast("cpu"):
            results = [double(w), double(w)]
        assert casts[0] == casts[1]
        sum(results).float().sum().backward()
        assert (w.grad.dtype, w.grad.tolist()) == (FP32, [4.0, 4.0])

    def test_works_with_identity_and_composite_operators(self) -> None:
        name = f"torchext_test_amp::op{next(count)}"
        torch.library.define(name, "(Tensor x) -> Tensor")
        torch.library.impl(name, "CompositeImplicitAutograd", lambda x: x + 1)
        amp.register_policy(name, "lower_precision")
        assert call(name, amp.to_amp(torch.ones(1))).dtype is BF16
        assert call(name, torch.ones(1)).dtype is FP32

    def test_operators_of_cpp_libraries(self) -> None:
        op = torch.ops.quantized.batch_norm  # any that PyTorch defines with TORCH_LIBRARY outside of aten
        amp.register_policy(op, "fallthrough")
        assert amp.policy(op, "cpu") == "fallthrough"
        with pytest.raises(ValueError, match="quantized::batch_norm` has a policy for 'cpu' already"):
            amp.register_policy("quantized::batch_norm", "float32")

    @pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="PyTorch is built without oneDNN")
    def test_operators_of_cpp_libraries_cast(self) -> None:
        amp.register_policy("mkldnn::_linear_pointwise", "float32", device_types=["cpu"])
        x, w = torch.ones(2, 4, dtype=BF16), torch.ones(3, 4)
        with amp.autocast("cpu"):
            result = torch.ops.mkldnn._linear_pointwise(x, w, None, "none", [], "")
        assert result.dtype is FP32
        assert result.tolist() == [[4.0] * 3] * 2

    def test_registers_all_overloads_or_nothing(self) -> None:
        name, _ = define()
        torch.library.define(f"{name}.out", "(Tensor x, *, Tensor(a!) out) -> Tensor(a!)")
        with pytest.raises(ValueError, match=f"{name}.out` writes into its argument `out`"):
            amp.register_policy(name, "float32")
        assert amp.policy(f"{name}.default", "cpu") == "fallthrough"
        amp.register_policy(f"{name}.default", "float32")

    @pytest.mark.parametrize(
        ("op", "policy", "devices", "error", "message"),
        [
            ("nowhere::nothing", "float32", "cpu", ValueError, "no operator `nowhere::nothing`. Define it first"),
            ("aten::mm.nothing", "float32", "cpu", ValueError, "no operator `aten::mm.nothing`"),
            ("nothing", "float32", "cpu", ValueError, "no operator `nothing`"),
            (3, "float32", "cpu", TypeError, "such as torch.ops.aten.mm, or a name"),
            ("aten::mm.default", "lower", "cpu", ValueError, "no policy 'lower'. Choose one of lower_precision"),
            ("aten::mm.default", "banned", "cpu", ValueError, "no policy 'banned'"),
            ("aten::mm.default", "float32", "meta", ValueError, r"\('cpu', 'cuda'\), but 'meta' was given"),
            ("aten::mm.default", "float32", None, TypeError, "`device_types` names devices, .* but it is a NoneType"),
            ("aten::mm.default", "float32", "cpu", ValueError, "`aten::mm` has an autocast kernel for 'cpu' already"),
            ("aten::view", "float32", "cpu", ValueError, "`aten::view` returns a view of its argument `self`"),
        ],
        ids=str,
    )
    def test_refuses(self, op: Any, policy: str, devices: Any, error: type[Exception], message: str) -> None:
        with pytest.raises(error, match=message):
            amp.register_policy(op, policy, device_types=devices)

    def test_refuses_to_register_twice(self) -> None:
        name, _ = define()
        amp.register_policy(name, "float32", device_types=["cpu", "cpu"])
        with pytest.raises(ValueError, match=f"`{name}` has a policy for 'cpu' already"):
            amp.register_policy(name, "promote")
        assert amp.policy(name, "cuda") == "fallthrough"
        amp.register_policy(name, "promote", device_types=["cuda"])

    def test_includes_operators_of_torch_library(self) -> None:
        name, _ = define()
        torch.library.register_autocast(name, "cpu", BF16)
        with pytest.raises(ValueError, match="or torch.library.register_autocast"):
            amp.register_policy(name, "promote")


POLICIES = {
    ("aten::mm.default", "cpu"): "lower_precision",
    ("aten::mm.default", "cuda"): "lower_precision",
    ("aten::layer_norm.default", "cpu"): "fallthrough",
    ("aten::layer_norm.default", "cuda"): "float32",
    ("aten::softmax.int", "cuda"): "float32",
    ("aten::norm.Scalar", "cuda"): "float32",
    ("aten::cat.default", "cpu"): "promote",
    ("aten::index_put.default", "cuda"): "promote",
    ("aten::binary_cross_entropy.default", "cuda"): "banned",
    ("aten::binary_cross_entropy.default", "cpu"): "float32",
    ("aten::add.Tensor", "cuda"): "fallthrough",
}


class TestPolicy:
    @pytest.mark.parametrize(("op", "device_type"), POLICIES)
    def test_returns_the_policy_of_pytorch(self, op: str, device_type: str) -> None:
        assert amp.policy(op, device_type) == POLICIES[op, device_type]

    def test_does_not_depend_on_the_caller(self) -> None:
        with (
            fake_mode(gpu=True),
            amp.autocast("cuda", dtype=BF16, self_cleaning=True),
            amp.autocast("cpu", enabled=False),
            torch.inference_mode(),
        ):
            for (op, device_type), wanted in POLICIES.items():
                assert amp.policy(op, device_type) == wanted

    @pytest.mark.parametrize("device_type", ["cpu", "cuda"], ids="on_{}".format)
    def test_every_kernel_responds(self, device_type: str) -> None:
        names = torch._C._dispatch_get_registrations_for_dispatch_key(f"Autocast{device_type.upper()}")
        for name in names:
            if name.startswith("aten::"):
                found = amp.policy(name if "." in name else f"{name}.default", device_type)
                assert found in {"lower_precision", "float32", "promote"} or name == "aten::binary_cross_entropy"

    def test_overloads_that_differ_must_be_named(self) -> None:
        with pytest.raises(ValueError, match="differently on 'cuda': .*int: float32.* Name one"):
            amp.policy(torch.ops.aten.softmax, "cuda")
        assert amp.policy(torch.ops.aten.mm, "cpu") == "lower_precision"

    @pytest.mark.ci
    def test_page_with_the_table_is_up_to_date(self) -> None:
        script = ROOT / "docs" / "reference" / "autocast_policies.py"
        done = subprocess.run(
            [sys.executable, script, "--check"], capture_output=True, text=True, check=False, cwd=ROOT
        )
        assert done.returncode == 0, done.stdout + done.stderr


LISTS = {
    "cpu": (
        *("torch_16", "torch_fp32", "torch_need_autocast_promote", "torch_expect_builtin_promote", "nn_16", "nn_fp32"),
        "methods_expect_builtin_promote",
    ),
    "cuda": (
        *("torch_fp16", "torch_fp32", "torch_need_autocast_promote", "torch_expect_builtin_promote", "nn_fp16"),
        *("nn_fp32", "linalg_fp16", "methods_fp16", "methods_fp32", "methods_expect_builtin_promote", "banned"),
    ),
}


def sweep(device_type: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield the calls in PyTorch's lists, on new tensors."""
    lists: Any = (AutocastCPUTestLists if device_type == "cpu" else AutocastTestLists)(torch.device(device_type))
    for name in LISTS[device_type]:
        for op, args, *more in getattr(lists, name):
            function = _find(op, args, name)
            if function is not None:
                kwargs = more[0] if more and isinstance(more[0], dict) else {}
                yield f"{name}.{op}", lambda function=function, args=args, kwargs=kwargs: function(*args, **kwargs)


def _find(op: str, args: Any, name: str) -> Callable[..., Any] | None:
    if name.startswith("methods"):
        return getattr(Tensor, op)
    if name.startswith("linalg"):
        return getattr(torch._C._linalg, op)
    if name.startswith(("nn", "banned")):
        return getattr(torch._C._nn, op, None) or getattr(torch.nn.functional, op, None)
    return getattr(torch, op, None) or getattr(torch._VF, op, None) or getattr(torch.Tensor, op, None)


def dtypes(run: Callable[[], Any], region: AbstractContextManager[object]) -> Any:
    """Return the dtypes of the results of a call, or the class of its error."""
    torch.manual_seed(0)
    try:
        with warnings.catch_warnings(), region:
            warnings.simplefilter("ignore")
            result = run()
    except Exception as error:  # any type: both must raise
        return type(error).__name__
    return [leaf.dtype if isinstance(leaf, Tensor) else type(leaf) for leaf in pytree.tree_leaves(result)]


# Operators that convolutions call on CUDA. They have no Meta kernels.
CUDNN_ALONE = {"torch_fp16.cudnn_convolution", "torch_fp16.cudnn_convolution_transpose"}


class TestSweep:
    @pytest.mark.cases(1)
    @pytest.mark.parametrize("dtype", [BF16, FP16])
    @pytest.mark.parametrize("self_cleaning", [False, True])
    def test_dtypes_on_the_cpu_are_torch_autocasts(self, dtype: torch.dtype, self_cleaning: bool) -> None:
        tried = 0
        for name, run in sweep("cpu"):
            wanted = dtypes(run, torch.autocast("cpu", dtype=dtype))
            found = dtypes(run, amp.autocast("cpu", dtype=dtype, self_cleaning=self_cleaning))
            assert found == wanted, name
            tried += not isinstance(wanted, str)
        assert tried > 50

    @pytest.mark.cases(1)
    @pytest.mark.parametrize("dtype", [BF16, FP16])
    def test_fakes_on_the_cpu_are_as_real_tensors(self, dtype: torch.dtype) -> None:
        wanted = {name: dtypes(run, amp.autocast("cpu", dtype=dtype)) for name, run in sweep("cpu")}
        with fake_mode():
            for name, run in sweep("cpu"):
                if not isinstance(wanted[name], str):
                    assert dtypes(run, amp.autocast("cpu", dtype=dtype)) == wanted[name], name

    @pytest.mark.parametrize("dtype", [BF16, FP16])
    def test_dtypes_on_fake_cuda_are_torch_autocasts(self, dtype: torch.dtype) -> None:
        tried = 0
        with fake_mode(gpu=True):
            for name, run in sweep("cuda"):
                wanted = dtypes(run, torch.autocast("cuda", dtype=dtype))
                assert dtypes(run, amp.autocast("cuda", dtype=dtype)) == wanted, name
                tried += not isinstance(wanted, str)
        assert tried > 80

    @pytest.mark.parametrize("dtype", [BF16, FP16])
    def test_dtypes_on_fake_cuda_follow_pytorchs_lists(self, dtype: torch.dtype) -> None:
        with fake_mode(gpu=True):
            for name, run in sweep("cuda"):
                found = dtypes(run, amp.autocast("cuda", dtype=dtype))
                if not isinstance(found, str) and ("_fp16." in name or "_fp32." in name):
                    assert found[0] is (dtype if "_fp16." in name else FP32), name

    @pytest.mark.cuda
    @pytest.mark.parametrize("dtype", [BF16, FP16])
    def test_fake_cuda_is_as_real_cuda(self, dtype: torch.dtype) -> None:
        wanted = {name: dtypes(run, torch.autocast("cuda", dtype=dtype)) for name, run in sweep("cuda")}
        assert {name: dtypes(run, amp.autocast("cuda", dtype=dtype)) for name, run in sweep("cuda")} == wanted
        with fake_mode():
            found = {name: dtypes(run, amp.autocast("cuda", dtype=dtype)) for name, run in sweep("cuda")}
        refused = {
            name for name, result in found.items() if result in ("DataDependentError", "UnsupportedOperatorError")
        }
        assert refused <= {"torch_expect_builtin_promote.equal", *CUDNN_ALONE}
        compared = {name for name, result in wanted.items() if not isinstance(result, str)} - refused
        assert {name: found[name] for name in compared} == {name: wanted[name] for name in compared}
