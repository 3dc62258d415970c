"""Predicted routes are those that the dispatcher takes; reading the state of a tensor does not change it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torchext import _C, amp
from torchext.deferred_init import deferred_init, materialize_tensor
from torchext.fake import fake_like, fake_mode
from torchext.inference import inference_mode
from torchext.inspect import Route, route, tensor_state

aten = torch.ops.aten


def normal() -> torch.Tensor:
    return torch.ones(2, 2)


def inference() -> torch.Tensor:
    with torch.inference_mode():
        return torch.ones(2, 2)


def deferred() -> torch.Tensor:
    return deferred_init(torch.ones, 2, 2)


def conjugated() -> torch.Tensor:
    return torch.ones(2, 2, dtype=torch.complex64).conj()


class PassingMode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextmanager
def no_autograd_keys() -> Iterator[None]:
    with torch._C._AutoDispatchBelowAutograd():
        yield


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "normal": nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
}


# The kernels that operators of each kind call.
@pytest.mark.parametrize(
    ("mode", "kind", "make", "keys"),
    [
        ("normal", "functional", normal, ("AutogradCPU", "CPU")),
        ("normal", "view", normal, ("AutogradCPU", "ADInplaceOrView", "CPU")),
        ("normal", "in-place", normal, ("AutogradCPU", "ADInplaceOrView", "CPU")),
        ("no_grad", "functional", normal, ("AutogradCPU", "CPU")),
        ("no_grad", "view", normal, ("AutogradCPU", "ADInplaceOrView", "CPU")),
        ("no_grad", "in-place", normal, ("AutogradCPU", "ADInplaceOrView", "CPU")),
        ("inference_mode", "functional", normal, ("CPU",)),
        ("inference_mode", "view", normal, ("ADInplaceOrView", "CPU")),
        ("inference_mode", "in-place", normal, ("ADInplaceOrView", "CPU")),
        ("inference_mode", "functional", inference, ("CPU",)),
        ("inference_mode", "view", inference, ("CPU",)),
        ("inference_mode", "in-place", inference, ("CPU",)),
        # Outside of inference mode the thread includes `ADInplaceOrView`, which detects writes to inference tensors.
        ("normal", "functional", inference, ("CPU",)),
        ("normal", "view", inference, ("ADInplaceOrView", "CPU")),
        ("normal", "in-place", inference, ("ADInplaceOrView", "CPU")),
    ],
)
def test_route_of_each_kind_of_operator(
    mode: str, kind: str, make: Callable[[], torch.Tensor], keys: tuple[str, ...]
) -> None:
    tensor = make()
    calls = {"functional": (aten.neg, tensor), "view": (aten.view, tensor, [-1]), "in-place": (aten.neg_, tensor)}
    with MODES[mode]():
        assert route(*calls[kind]).keys == keys


# Keys for which Python may register kernels. `Meta` is excluded: after replacing and restoring a PyTorch kernel there,
# PyTorch 2.11's FakeTensorMode no longer finds it.
RUNTIME_KEYS = (
    "PythonTLSSnapshot",
    "AutocastCPU",
    "AutogradCPU",
    "AutogradMeta",
    "ADInplaceOrView",
    "ZeroTensor",
    "Negative",
    "Conjugate",
    "Python",
    "BackendSelect",
    "SparseCsrCPU",
    "SparseCPU",
    "QuantizedCPU",
    "CPU",
)


@contextmanager
def kernels_that_report(op: torch._ops.OpOverload[..., Any]) -> Iterator[list[str]]:
    """Replace each kernel of `op` by one that adds its key to the list and calls the original."""
    visited: list[str] = []
    name = op._schema.name + (f".{op._schema.overload_name}" if op._schema.overload_name else "")
    table = torch._C._dispatch_dump_table(name).splitlines()
    kernels = {
        key: torch.library.get_kernel(name, key)
        for key in RUNTIME_KEYS
        for line in table
        if line.startswith(f"{key}: ") and "fallthrough" not in line
    }

    def reporting(key: str) -> Callable[..., Any]:
        def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
            visited.append(key)
            return kernels[key].call_boxed(keys, *args, **kwargs)

        return kernel

    with torch.library._scoped_library(op.namespace, "IMPL") as library:
        for key in kernels:
            library.impl(name.partition("::")[2], reporting(key), key, with_keyset=True, allow_override=True)
        yield visited


CALLS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "functional": lambda: (aten.add.Tensor, normal(), normal()),
    "number": lambda: (aten.mul.Tensor, normal(), 2),
    "in-place": lambda: (aten.add_.Tensor, normal(), 1),
    "in-place-inference": lambda: (aten.neg_.default, inference()),
    "view": lambda: (aten.view.default, normal(), [-1]),
    "view-requires-grad": lambda: (aten.t.default, normal().requires_grad_()),
    "detach": lambda: (aten.detach.default, normal().requires_grad_()),
    "resize": lambda: (aten.resize_.default, normal(), [3]),
    "resize-fake": lambda: (aten.resize_.default, fake_like(normal()), [3]),
    "resize-to-same-size-fake": lambda: (aten.resize_.default, fake_like(normal()), [2, 2]),
    "copy": lambda: (aten.copy_.default, normal(), normal()),
    "out": lambda: (aten.add.out, normal(), normal()),
    "composite": lambda: (aten.linear.default, normal(), normal()),
    "list": lambda: (aten.cat.default, [normal(), normal()]),
    "optional-list": lambda: (aten.index.Tensor, normal(), [None, torch.zeros(2, dtype=torch.int64)]),
    "optional": lambda: (aten.clamp.Tensor, normal(), None, normal()),
    "undefined": lambda: (aten.layer_norm.default, normal(), [2], None, normal()[0]),
    "factory": lambda: (aten.empty.memory_format, [2]),
    "factory-composite": lambda: (aten.zeros.default, [2]),
    "random": lambda: (aten.rand.default, [2]),
    "like": lambda: (aten.zeros_like.default, normal()),
    "meta": lambda: (aten.neg.default, normal().to("meta")),
    "sparse": lambda: (aten.mm.default, normal().to_sparse(), normal()),
    "csr": lambda: (aten.neg.default, normal().to_sparse_csr()),
    "sparse-factory": lambda: (
        aten._sparse_coo_tensor_with_dims.default, 1, 1, [2, 2],
    ),
    "quantized": lambda: (aten.relu.default, torch.quantize_per_tensor(normal(), 0.1, 0, torch.qint8)),
    "conjugated": lambda: (aten.add.Tensor, conjugated(), conjugated()),
    "conjugated-view": lambda: (aten.view.default, conjugated(), [-1]),
    "negative": lambda: (aten.mul.Tensor, conjugated().imag, 2),
    "zero-tensor": lambda: (aten.mul.Tensor, torch._efficientzerotensor(2, 2), normal()),
    "fake": lambda: (aten.mm.default, fake_like(normal()), fake_like(normal())),
    "fake-in-place": lambda: (aten.neg_.default, fake_like(normal())),
    "fake-view": lambda: (aten.view.default, fake_like(normal()), [-1]),
    "fake-composite": lambda: (aten.linear.default, fake_like(normal()), fake_like(normal())),
    "fake-allocating": lambda: (aten.linalg_norm.default, fake_like(normal())),
    "deferred": lambda: (aten.mm.default, deferred(), deferred()),
    "deferred-in-place": lambda: (aten.neg_.default, deferred()),
    "deferred-view": lambda: (aten.view.default, deferred(), [-1]),
    "deferred-composite": lambda: (aten.linear.default, deferred(), deferred()),
    "bit-of-everything": lambda: (aten.addmm.default, normal(), normal(), normal().requires_grad_()),
}  # fmt: skip
STATES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    **MODES,
    "autocast": lambda: torch.autocast("cpu"),
    "dispatch-mode": PassingMode,
    "dispatch-mode-and-autocast": lambda: _both(PassingMode(), torch.autocast("cpu")),
    "fake_mode": fake_mode,
    "below-autograd": no_autograd_keys,
}


@contextmanager
def _both(first: AbstractContextManager[Any], second: AbstractContextManager[Any]) -> Iterator[None]:
    with first, second:
        yield


@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
# All pairs of two parameters are their product.
@pytest.mark.cases(60)
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("call", CALLS)
def test_route_is_the_one_that_the_call_takes(call: str, state: str) -> None:
    op, *args = CALLS[call]()
    kwargs = {"out": torch.empty(0)} if call == "out" else {}
    if call == "sparse-factory":
        kwargs = {"dtype": torch.float32, "layout": torch.sparse_coo, "device": torch.device("cpu")}
    with STATES[state]():
        foreseen = route(op, *args, **kwargs)
        with kernels_that_report(op) as visited:
            try:
                op(*args, **kwargs)
            except (RuntimeError, TypeError):
                assert visited  # the route to the error counts
    expected = [key for key in foreseen.keys if key in RUNTIME_KEYS]
    assert visited[: len(expected)] == expected, foreseen  # the rest are operators that the last kernel calls


def test_route_ends_where_a_subclass_or_a_mode_takes_the_call() -> None:
    with PassingMode():
        assert route(aten.neg, normal())[-1].turn == "calls Python"
    assert route(aten.neg, torch.nn.Parameter(normal()))[-1].turn == "computes"


def test_route_under_transforms_begins_with_their_layer() -> None:
    routes: list[Route] = []

    def look(tensor: torch.Tensor) -> torch.Tensor:
        routes.append(route(aten.neg, tensor))
        return tensor.sum()

    torch.func.vmap(look)(normal())
    torch.func.grad(look)(normal())
    assert [found.keys for found in routes] == [("FuncTorchDynamicLayerFrontMode",)] * 2


def test_autocast_begins_again_and_marks_operators_without_a_policy() -> None:
    with torch.autocast("cpu"):
        cast, uncast = route(aten.mm, normal(), normal()), route(aten.neg, normal())
    assert (cast[0].key, cast[0].turn) == ("AutocastCPU", "starts over")
    assert (uncast[0].key, uncast[0].is_fallthrough, uncast[0].runs) == ("AutocastCPU", True, False)
    assert "AutocastCPU" not in [step.key for step in route(aten.mm, normal(), normal())]
    with torch.autocast("cpu"), PassingMode():
        assert route(aten.mm, normal(), normal()).keys == (
            "PythonTLSSnapshot",
            "AutocastCPU",
            "PythonTLSSnapshot",
            "AutogradCPU",
            "Python",
        )


@pytest.mark.parametrize(
    ("op", "args", "key", "origin"),
    [
        (aten.linear, lambda: [normal(), normal()], "AutogradCPU", "CompositeImplicitAutograd"),
        (aten.add.Tensor, lambda: [normal(), normal()], "AutogradCPU", "Autograd"),
        (aten.add.Tensor, lambda: [normal(), normal()], "BackendSelect", "fallback"),
        (aten.add.Tensor, lambda: [normal(), normal()], "CPU", "CPU"),
        (aten.zeros, lambda: [[2]], "CPU", "CompositeExplicitAutograd"),
        (aten.cat, lambda: [[]], "Undefined", "CompositeExplicitAutogradNonFunctional"),
        (aten.view, lambda: [normal().to_sparse(), [-1]], "SparseCPU", "none"),
    ],
)
def test_origin_of_kernels_is_that_of_the_dispatch_table(
    op: Any, args: Callable[[], list[Any]], key: str, origin: str
) -> None:
    steps = {step.key: step for step in route(op, *args())}
    assert steps[key].origin == origin
    table = torch._C._dispatch_dump_table(route(op, *args()).operator)
    line = next((line for line in table.splitlines() if line.startswith(f"{key}: ")), "")
    assert steps[key].source in line


def test_missing_kernel_is_reported_with_the_error() -> None:
    sparse = normal().to_sparse()
    with pytest.raises(NotImplementedError) as error:
        aten.view(sparse, [-1])
    last = route(aten.view, sparse, [-1])[-1]
    assert (last.turn, last.runs) == ("raises", False)
    assert str(error.value).startswith(last.comment)
    assert "SparseCPU" not in route(aten.view, sparse, [-1]).keys


def quantized() -> torch.Tensor:
    return torch.quantize_per_tensor(normal(), 0.1, 0, torch.qint8)


REFUSED_CALLS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "value": lambda: (aten._local_scalar_dense.default, fake_like(normal()).uniform_()),
    "writes-real": lambda: (aten.add_.Tensor, normal(), fake_like(normal())),
    "overlap": lambda: (aten.add_.Tensor, fake_like(normal()[:1]).expand(2, 2), fake_like(normal())),
    "devices": lambda: (aten.add.Tensor, fake_like(normal()), fake_like(normal().to("meta"))),
    "makes-quantized": lambda: (aten.quantize_per_tensor.default, fake_like(normal()), 0.1, 0, torch.qint8),
    "takes-quantized": lambda: (aten.add.Tensor, fake_like(normal()), quantized()),
    "makes-mkldnn": lambda: (aten.to_mkldnn.default, fake_like(normal())),
    "counts-elements": lambda: (aten._to_sparse.default, fake_like(normal())),
    "no-sparse-kernel": lambda: (aten._local_scalar_dense.default, fake_like(normal().to_sparse())),
    "sparse-writes-real": lambda: (aten.add_.Tensor, normal(), fake_like(normal().to_sparse())),
}


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("call", REFUSED_CALLS)
def test_call_that_fakes_reject_is_reported_with_the_error(call: str) -> None:
    op, *args = REFUSED_CALLS[call]()
    last = route(op, *args)[-1]
    assert (last.key, last.turn) == ("Fake", "raises")
    with pytest.raises(RuntimeError) as error:
        op(*args)
    assert str(error.value).startswith(last.comment)


def test_missing_meta_kernel_is_reported() -> None:
    """PyTorch's fallback for the meta device is registered for each operator, but only raises an error."""
    with torch.library._scoped_library("torchext_test_inspect", "FRAGMENT") as library:
        library.define("cpu_only(Tensor x) -> Tensor")
        library.impl("cpu_only", torch.clone, "CPU")
        op = torch.ops.torchext_test_inspect.cpu_only
        last = route(op, fake_like(normal()))[-1]
        assert (last.key, last.turn, last.comment) == ("Fake", "raises", "the operator has no Meta kernel")
        with pytest.raises(NotImplementedError, match="cannot be run on fake tensors"):
            op(fake_like(normal()))
    geqrf = route(aten.geqrf.default, fake_like(normal()))[-1]
    assert (geqrf.key, geqrf.turn) == ("Fake", "decomposes")
    assert "the CPU kernel" in geqrf.comment


@pytest.mark.parametrize(
    ("op", "args", "turn", "comment"),
    [
        # PyTorch's Python reference is the Meta kernel of both, but is not called.
        (aten.full.default, lambda: [[2], 3.0], "decomposes", "calls the composite kernel"),
    ],
)
def test_kernel_that_computes_the_metadata_is_on_the_route(
    op: Any, args: Callable[[], list[Any]], turn: str, comment: str
) -> None:
    with fake_mode():
        last = route(op, *args())[-1]
    assert (last.key, last.turn) == ("Fake", turn)
    assert comment in last.comment


def test_deferred_tensors_that_a_handler_reads_are_handed_to_deferred_init() -> None:
    """`__torch_dispatch__` hides the keys above `Python`, and `DeferredInit` is one of them."""
    found: list[Route] = []

    class Looking(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found.append(route(func, *args))
            return func(*args, **(kwargs or {}))

    number = deferred_init(torch.full, (), 3.0)
    with Looking():
        assert aten._local_scalar_dense(number) == 3.0
    comments = [step.comment for step in found[-1] if step.key == "Fake"]  # before 2.13 `Fake` is also hidden
    assert all("deferred_init makes the call now" in comment for comment in comments)


def test_recorded_call_that_cannot_be_faked_runs_for_real() -> None:
    last = route(aten.to_mkldnn, deferred())[-1]
    assert (last.key, last.turn) == ("Fake", "decomposes")
    assert "deferred_init runs it for real" in last.comment


def test_fallbacks_describe_their_effect() -> None:
    def comment(key: str, *call: Any) -> str:
        return next(step.comment for step in route(*call) if step.key == key)

    real = normal()
    with fake_mode():
        assert "does not involve fake tensors" in comment("Fake", aten.neg, real)
        known = torch.tensor(3.0)
        assert "values, which are known" in comment("Fake", aten._local_scalar_dense, known)
        assert "composite" in comment("Fake", aten.rand, [2])
    assert "this size already" in comment("Fake", aten.resize_, fake_like(normal()), [2, 2])
    with torch.inference_mode():
        assert "composite" in comment("Fake", aten.linear, fake_like(normal()), fake_like(normal()))
    assert "records" in comment("DeferredInit", aten.neg_, deferred())
    assert "now" in comment("Fake", aten._local_scalar_dense, deferred())
    real = deferred()
    materialize_tensor(real)
    assert route(aten.neg_, real).keys == ("AutogradCPU", "ADInplaceOrView", "CPU")


def test_factories_are_caught_by_what_the_thread_includes() -> None:
    found: list[Route] = []

    def construct() -> torch.Tensor:
        found.append(route(aten.empty, [2]))
        return torch.empty(2)

    deferred_init(construct)
    with fake_mode():
        found.append(route(aten.empty, [2]))
    assert [one.keys for one in found] == [("DeferredInit", "Fake", "Meta"), ("Fake", "Meta")]


def test_kernels_from_python_are_marked() -> None:
    @torch.library.custom_op("torchext_test_inspect::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    found = route(twice, normal())
    assert found == route(torch.ops.torchext_test_inspect.twice, normal())
    assert found == route("torchext_test_inspect::twice", normal())
    assert found[-1].is_python
    assert "test_inspect.py" in found[-1].source or "custom_ops.py" in found[-1].source
    assert not route(aten.neg, normal())[-1].is_python


def test_route_that_falls_through_everything_ends_in_an_error() -> None:
    with torch.library._scoped_library("torchext_test_inspect", "FRAGMENT") as library:
        library.define("through(int x) -> Tensor")
        library.impl("through", torch.library.fallthrough_kernel, "CompositeImplicitAutograd")
        op = torch.ops.torchext_test_inspect.through
        assert (route(op, 1)[-1].key, route(op, 1)[-1].turn) == ("Undefined", "raises")
        with pytest.raises(RuntimeError, match="fallthrough_kernel was executed"):
            op(1)


def test_inspecting_calls_no_operator() -> None:
    class Refusing(TorchDispatchMode):
        def __torch_dispatch__(self, *args: Any, **kwargs: Any) -> Any:
            raise AssertionError

    tensor = normal()
    with Refusing():
        route(aten.add, tensor, 2)
        route("aten::add.Tensor", tensor, 2)
        tensor_state(tensor)


def test_overload_is_the_one_that_pytorch_chooses() -> None:
    tensor = normal()
    assert route(aten.add, tensor, tensor).operator == "aten::add.Tensor"
    assert route("aten::add", tensor, tensor, out=tensor).operator == "aten::add.out"
    assert route("aten::neg.default", tensor).operator == route(aten.neg.default, tensor).operator == "aten::neg"


def test_nothing_runs_and_nothing_changes() -> None:
    tensor = normal()
    states = tensor_state(tensor)
    route(aten.add_, tensor, 1)
    route(aten.resize_, tensor, [8])
    route(aten.requires_grad_, tensor)
    assert tensor_state(tensor) == states
    assert tensor.tolist() == [[1.0, 1.0], [1.0, 1.0]]
    lazy = deferred()
    route(aten.zero_, lazy)
    route(aten._local_scalar_dense, lazy)
    assert materialize_tensor(lazy).tolist() == tensor.tolist()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (("aten::nix",), ValueError, "no operator `aten::nix`"),
        (("aten::add.Nix", 1), ValueError, "no operator `aten::add.Nix`"),
        (("add",), ValueError, "with a namespace"),
        ((torch.add, 1), TypeError, "takes an operator of the dispatcher, such as torch.ops.aten.add"),
        ((aten.add.Tensor, "x"), TypeError, "`aten::add.Tensor` does not take: .*Expected a value of type 'Tensor'"),
        ((aten.add.Tensor,), TypeError, "missing value for argument 'self'"),
        ((aten.neg.default, torch.ones(1), 2), TypeError, "at most 1 argument"),
        ((aten.add, "x"), TypeError, "no overload of `aten::add` takes:\n  aten::add.Tensor\\(Tensor self"),
        ((aten.add.int, 1, 2), ValueError, "TorchScript"),
    ],
)
def test_errors_of_wrong_calls_list_the_arguments(call: tuple[Any, ...], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        route(*call)


def test_unknown_keyword_is_an_error() -> None:
    with pytest.raises(TypeError, match="`aten::sum` does not take: .*axis"):
        route(aten.sum.default, torch.ones(1), axis=2)


def test_route_prints_as_a_table() -> None:
    lines = str(route(aten.neg_, normal())).splitlines()
    assert lines[0].split() == ["aten::neg_", "kernel", "turn", "comment"]
    assert [line.split()[0] for line in lines[2:]] == ["AutogradCPU", "ADInplaceOrView", "BackendSelect", "CPU"]
    assert [line.split()[2] for line in lines[2:]] == ["passes", "passes", "skipped", "computes"]
    assert len({line.index("passes") for line in lines[2:4]}) == 1


def test_route_is_a_sequence_of_steps() -> None:
    found = route(aten.neg_, normal())
    assert len(found) == 4
    assert [step.key for step in found[:2]] == [found[0].key, found[1].key]
    assert hash(found) == hash(route(aten.neg_, normal()))
    assert found != route(aten.abs_, normal())


def sparse_fake() -> torch.Tensor:
    with fake_mode():
        return torch.sparse_coo_tensor(torch.zeros(2, 1, dtype=torch.int64), torch.ones(1), (2, 2))


def parameter() -> torch.Tensor:
    return torch.nn.Parameter(normal())


def view_in(mode: AbstractContextManager[Any]) -> torch.Tensor:
    base = parameter()
    with mode:
        return base[0]


TENSORS: dict[str, Callable[[], torch.Tensor]] = {
    "real": normal,
    "empty": lambda: torch.empty(0),
    "parameter": parameter,
    "result": lambda: parameter() * 2,
    "view": lambda: parameter()[0],
    "one-of-several-views": lambda: parameter().unbind()[0],
    "view-of-no_grad": lambda: view_in(torch.no_grad()),
    "view-of-inference_mode": lambda: view_in(torch.inference_mode()),
    "inference": inference,
    "inference-view": lambda: inference()[0],
    "fake": lambda: fake_like(parameter()),
    "fake-view": lambda: fake_like(parameter())[0],
    "deferred": deferred,
    "deferred-view": lambda: deferred()[0],
    "sparse": lambda: normal().to_sparse(),
    "sparse-fake": sparse_fake,
    "meta": lambda: torch.ones(2, device="meta"),
    "conjugated": conjugated,
    "zero": lambda: torch._efficientzerotensor(2),
}


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("name", TENSORS)
def test_state_matches_the_tensor_and_reading_does_not_change_it(name: str) -> None:
    tensor = TENSORS[name]()
    state = tensor_state(tensor)
    assert tensor_state(tensor) == state
    assert set(state.keys) == set(str(torch._C._dispatch_keys(tensor))[len("DispatchKeySet(") : -1].split(", "))
    assert state.version == (None if tensor.is_inference() else tensor._version)
    assert state.inference == tensor.is_inference()
    assert state.requires_grad == tensor.requires_grad
    assert state.is_leaf == tensor.is_leaf
    assert state.is_view == tensor._is_view()
    if state.is_view:
        assert state.creation_metadata == str(torch._C._autograd._get_creation_meta(tensor)).split(".")[-1]
    else:
        assert state.creation_metadata is None
    assert state.fake == ("fake" in name or "deferred" in name)
    assert state.deferred == ("deferred" in name)
    assert tensor_state(tensor) == state


def test_keys_are_in_the_order_of_a_call() -> None:
    assert tensor_state(deferred()).keys[1:] == (
        "DeferredInit",
        "AutocastCPU",
        "AutogradCPU",
        "ADInplaceOrView",
        "Fake",
        "CPU",
    )


@pytest.mark.parametrize("make", [normal, deferred, inference, lambda: fake_like(normal())])
def test_storage_is_the_same_for_aliases(make: Callable[[], torch.Tensor]) -> None:
    tensor = make()
    storage = tensor_state(tensor).storage
    aliases = [tensor[0], tensor.detach(), tensor.data, tensor.view(-1)]
    assert isinstance(storage, int)
    assert {tensor_state(alias).storage for alias in aliases} == {storage}
    assert tensor_state(make()).storage != storage
    if not tensor_state(tensor).fake:
        assert storage != tensor.data_ptr()


def test_layouts_without_storage_have_none() -> None:
    assert tensor_state(normal().to_sparse()).storage is None


def test_autograd_metadata_are_not_made_by_looking() -> None:
    tensor = normal()
    assert not tensor_state(tensor).has_autograd_metadata
    assert (tensor.requires_grad, tensor.is_leaf, tensor._is_view(), tensor.grad_fn) == (False, True, False, None)
    assert not tensor_state(tensor).has_autograd_metadata
    tensor.requires_grad_()
    assert tensor_state(tensor).has_autograd_metadata


def test_state_under_transforms_is_that_of_the_wrapper() -> None:
    states: dict[str, Any] = {}

    def look(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
        def function(tensor: torch.Tensor) -> torch.Tensor:
            states[name] = tensor_state(tensor)
            return tensor.sum()

        return function

    torch.func.vmap(look("vmap"))(normal())
    torch.func.grad(look("grad"))(normal())
    torch.func.functionalize(look("functionalize"))(normal())
    assert "FuncTorchBatched" in states["vmap"].keys
    assert "FuncTorchGradWrapper" in states["grad"].keys
    assert states["grad"].requires_grad
    assert "Functionalize" in states["functionalize"].keys


def test_state_of_a_subclass_does_not_call_it() -> None:
    class Refusing(torch.Tensor):
        @classmethod
        def __torch_function__(cls, *args: Any, **kwargs: Any) -> Any:
            raise AssertionError

        @classmethod
        def __torch_dispatch__(cls, *args: Any, **kwargs: Any) -> Any:
            raise AssertionError

        @property
        def requires_grad(self) -> Any:
            raise AssertionError

    tensor = torch.Tensor._make_wrapper_subclass(Refusing, (2,), dispatch_sizes_strides_policy="sizes")
    assert "Python" in tensor_state(tensor).keys
    assert not tensor_state(tensor).requires_grad
    assert route(aten.neg, tensor)[-1].turn == "calls Python"


def test_state_prints_as_a_table() -> None:
    lines = str(tensor_state(normal())).splitlines()
    assert lines[0] == "tensor state"
    assert lines[2].split() == ["keys", "AutocastCPU,", "AutogradCPU,", "ADInplaceOrView,", "CPU"]
    assert lines[3].split() == ["version", "0"]
    assert lines[-1].split() == ["creation_metadata", "None"]


def test_results_are_plain_values_and_html_tables_too() -> None:
    state, found = tensor_state(normal()), route(aten.neg_, normal())
    assert json.loads(json.dumps(state.to_dict())) == {**dataclasses.asdict(state), "keys": list(state.keys)}
    assert "<td>AutocastCPU, AutogradCPU, ADInplaceOrView, CPU</td>" in state._repr_html_()
    steps = json.loads(json.dumps(found.to_dict()))
    assert (steps["operator"], [step["key"] for step in steps["steps"]]) == (found.operator, [s.key for s in found])
    assert found._repr_html_().startswith("<table><thead><tr><th>aten::neg_</th>")


def test_what_is_no_tensor_is_an_error() -> None:
    with pytest.raises(TypeError, match="takes a tensor, but `tensor` is a int"):
        tensor_state(3)


def test_bindings_list_all_operators() -> None:
    assert _C.has_operator("aten::add", "Tensor")
    assert not _C.has_operator("aten::add", "int")


class TestMarkedTensors:
    def test_amp_tensor_makes_a_call_autocast(self) -> None:
        x, w = torch.ones(2, 2), amp.to_amp(torch.ones(2, 2))
        found = route(torch.ops.aten.mm.default, x, w)
        assert found.keys == ("TESTING_ONLY_GenericMode", "AutocastCPU", "AutogradCPU", "CPU")
        assert "because an argument is an AmpTensor" in str(found)
        with amp.autocast("cpu", enabled=False):
            assert "AutocastCPU" not in route(torch.ops.aten.mm.default, x, w).keys
        assert "AutocastCPU" not in route(torch.ops.aten.neg.default, w).keys

    def test_results_of_a_self_cleaning_region_are_cast(self) -> None:
        with amp.autocast("cpu", self_cleaning=True):
            y = torch.ones(2, 2).mm(torch.ones(2, 2))
            inside = route(torch.ops.aten.mm.default, y, y)
        outside = route(torch.ops.aten.mm.default, y, y)
        assert inside.keys == ("TESTING_ONLY_GenericMode", "AutocastCPU", "AutogradCPU", "CPU")
        assert outside.keys == ("TESTING_ONLY_GenericMode", "AutogradCPU", "CPU")
        assert "self-cleaning region to float32" in str(outside)

    def test_traced_inference_tensors_are_met(self) -> None:
        with inference_mode(trace=True):
            z = torch.ones(2)
            assert route(torch.ops.aten.neg.default, z).keys == ("TESTING_ONLY_GenericMode", "CPU")


@pytest.mark.cuda
def test_route_of_real_cuda_tensors_ends_in_their_kernel() -> None:
    x = torch.ones(3, device="cuda", requires_grad=True)
    taken = str(route(aten.mul, x, x))
    assert "AutogradCUDA" in taken
    assert "computes" in taken.splitlines()[-1]
    with torch.autocast("cuda"):
        assert "AutocastCUDA" in str(route(aten.linear, x[None], x[None]))
