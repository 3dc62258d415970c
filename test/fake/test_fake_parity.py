"""Our fakes support everything that `FakeTensorMode` does: exceptions of its suite, shortcuts, forward AD, devices."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from common import assert_same_tensor
from comparisons import LOOSE_PROPERTIES, PROPERTIES, Raised, metadata, outcome
from sweeps import operators
from sweeps.checks import fakes
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.testing._internal.common_methods_invocations import (
    foreach_binary_op_db,
    foreach_other_op_db,
    foreach_pointwise_op_db,
    foreach_reduce_op_db,
    foreach_unary_op_db,
    op_db,
)
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils._pytree import tree_leaves, tree_map_only

from torchext.deferred_init import deferred_init, is_deferred, materialize_tensor
from torchext.fake import DataDependentError, UnsupportedOperatorError, fake_like, fake_mode, is_fake
from torchext.internals.patching import TORCH_RELEASE

only_2_13 = pytest.mark.skipif(TORCH_RELEASE != (2, 13), reason="Meta kernels differ between releases")

Program = Callable[[], Any]


# The tensors of `FakeTensorMode` have another class.
COMPARED = LOOSE_PROPERTIES - {"class"}


def are_fake(value: object) -> bool:
    return all(map(is_fake, operators.tensors_in(value)))


#
# The exceptions of the suite against PyTorch's fakes.


def forward(op: OpInfo, args: Any, kwargs: Any) -> Any:
    return op(*args, **kwargs)


def backward(op: OpInfo, args: Any, kwargs: Any) -> Any:
    return operators.gradients(op(*args, **kwargs), operators.Arguments(args, kwargs))


def samples(op: OpInfo, dtype: torch.dtype, requires_grad: bool) -> Iterator[tuple[Any, Any]]:
    for sample in op.sample_inputs("cpu", dtype, requires_grad=requires_grad):
        arguments = (sample.input, *sample.args), sample.kwargs
        if all(tensor.layout is torch.strided for tensor in operators.tensors_in(arguments)):
            yield arguments


def ours(how: Callable[..., Any], op: OpInfo, arguments: tuple[Any, Any]) -> Any:
    copies: dict[int, Tensor] = {}
    args, kwargs = tree_map_only(Tensor, lambda t: copies.setdefault(id(t), fake_like(t)), arguments)
    with fake_mode():
        return outcome(lambda: metadata(how(op, args, kwargs), COMPARED))


def theirs(how: Callable[..., Any], op: OpInfo, arguments: tuple[Any, Any]) -> Any:
    mode = FakeTensorMode(allow_non_fake_inputs=False)
    args, kwargs = tree_map_only(Tensor, mode.from_tensor, arguments)
    with mode:
        return outcome(lambda: metadata(how(op, args, kwargs), COMPARED))


def named(*tables: set[str]) -> list[OpInfo]:
    return [op for op in op_db if operators.full_name(op) in set().union(*tables)]


EXCEPTIONS = [(op, forward) for op in named(fakes.NEEDS_VALUES, fakes.UNSUPPORTED)] + [
    (op, backward) for op in named(fakes.GRADIENT_NEEDS_VALUES, fakes.GRADIENT_UNSUPPORTED)
]

# Operators that `FakeTensorMode` supports and ours does not.
GAPS = {
    ("linalg.eig", "backward"): "checks what it has computed from its arguments, which no alias is handed to",
}


@pytest.mark.cases(7)
@only_2_13
@pytest.mark.parametrize(
    ("op", "how"),
    EXCEPTIONS,
    ids=lambda value: operators.full_name(value) if isinstance(value, OpInfo) else value.__name__,
)
def test_exception_of_the_suite_is_also_pytorchs(op: OpInfo, how: Callable[..., Any]) -> None:
    gaps = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of samples that provoke them
        for arguments in samples(op, torch.float32, requires_grad=how is backward):
            wanted = outcome(lambda arguments=arguments: metadata(how(op, *arguments), COMPARED))
            if isinstance(wanted, Raised) or ours(how, op, arguments) == wanted:
                continue
            if theirs(how, op, arguments) == wanted:
                gaps.append(arguments)
    assert bool(gaps) == ((operators.full_name(op), how.__name__) in GAPS)


# Forward AD.


def number_programs() -> dict[str, Callable[[Tensor], Tensor]]:
    return {
        "2 * d": lambda d: 2 * d,
        "d + 1": lambda d: d + 1,
        "1 - d": lambda d: 1 - d,
        "2.5 / d": lambda d: 2.5 / d,
        "d ** 2": lambda d: d**2,
        "2 ** d": lambda d: 2**d,
        "where": lambda d: torch.where(d > 0, d, 0.0),
        "clamp": lambda d: d.clamp(0.1, 0.9),
        "add_": lambda d: d.mul(2).add_(1, alpha=3),
    }


@pytest.mark.parametrize("name", number_programs())
def test_dual_numbers_with_python_numbers(name: str) -> None:
    def run() -> list[Tensor]:
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(torch.rand(3), torch.rand(3))
            return list(forward_ad.unpack_dual(number_programs()[name](dual)))

    wanted = metadata(run())
    with fake_mode():
        for _ in range(2):  # the second result comes from the cache
            assert metadata(run()) == wanted


def test_pooling_without_requires_grad_keeps_tangents() -> None:
    def run(primal: Tensor, tangent: Tensor) -> list[Tensor]:
        with forward_ad.dual_level():
            return list(forward_ad.unpack_dual(functional.max_pool1d(forward_ad.make_dual(primal, tangent), 2)))

    real = torch.rand(2, 3, 8)
    assert metadata(run(fake_like(real), fake_like(real))) == metadata(run(real, real))


def test_scalar_products_of_zero_tangents_have_the_dtype_of_real_ones() -> None:
    def run(x: Tensor, y: Tensor) -> list[Tensor]:
        with forward_ad.dual_level():
            return list(forward_ad.unpack_dual(torch.ldexp(forward_ad.make_dual(x, x), y)))

    wanted = metadata(run(torch.ones(()), torch.ones(())))
    with fake_mode():
        assert metadata(run(torch.ones(()), torch.ones(()))) == wanted


# Shortcuts that read values.


def gradient(function: Callable[..., Tensor], *shape: int) -> Tensor:
    x = torch.rand(shape, requires_grad=True)
    [found] = torch.autograd.grad(function(x).sum(), x)
    return found


def with_hook(call: Callable[[], Tensor]) -> Tensor:
    result = call()
    result.register_hook(lambda gradient: gradient * torch.rand(2).sum().item())
    return result


def with_unpacking(call: Callable[[], Tensor]) -> Tensor:
    # A saved result would hold its own graph.
    with torch.autograd.graph.saved_tensors_hooks(Tensor.detach, lambda saved: saved * saved.sum().item()):
        return call()


def with_packing(call: Callable[[], Tensor]) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved * int(saved.any()), Tensor.detach):
        return call()


@pytest.mark.parametrize("name", ["prod", "cumprod", "max", "min", "median", "nanmedian"])
@pytest.mark.parametrize("reading", [with_hook, with_packing, with_unpacking])
def test_reads_of_programs_in_shortcuts_are_refused(
    reading: Callable[[Callable[[], Tensor]], Tensor], name: str
) -> None:
    dim = [0] if name == "cumprod" else []
    with fake_mode(), pytest.raises(DataDependentError, match="_local_scalar_dense"):
        gradient(lambda x: reading(lambda: getattr(x * 2, name)(*dim)), 3, 4)


SHORTCUTS: dict[str, Program] = {
    "prod": lambda: gradient(torch.prod, 3, 4),
    "prod of a dimension": lambda: gradient(lambda x: x.prod(1), 3, 4),
    "prod of a view": lambda: gradient(lambda x: x.t()[1:].prod(), 3, 4),
    "cumprod": lambda: gradient(lambda x: x.cumprod(1), 3, 4),
    "cumprod_": lambda: gradient(lambda x: x.clone().cumprod_(1), 3, 4),
    "max": lambda: gradient(torch.max, 3, 4),
    "min": lambda: gradient(torch.min, 3, 4),
    "median": lambda: gradient(torch.median, 3, 4),
    "nanmedian": lambda: gradient(torch.nanmedian, 3, 4),
    "masked_fill": lambda: gradient(lambda x: torch.ones(3, 4).masked_fill(torch.rand(3, 4) > 0.5, x)),
    "masked_fill_": lambda: gradient(lambda x: torch.ones(3, 4).masked_fill_(torch.rand(3, 4) > 0.5, x)),
    "multi_margin_loss": lambda: gradient(lambda x: functional.multi_margin_loss(x, torch.randint(0, 4, (3,))), 3, 4),
    "multilabel_margin_loss": lambda: gradient(
        lambda x: functional.multilabel_margin_loss(x, torch.randint(0, 4, (3, 4))), 3, 4
    ),
    "cross_entropy": lambda: functional.cross_entropy(
        torch.rand(3, 4), torch.randint(0, 4, (3,)), weight=torch.rand(4), label_smoothing=0.1
    ),
    "cross_entropy, known weight": lambda: functional.cross_entropy(
        torch.rand(3, 4), torch.randint(0, 4, (3,)), weight=torch.ones(4), label_smoothing=0.1
    ),
    "gradient of cross_entropy": lambda: gradient(
        lambda x: functional.cross_entropy(x, torch.randint(0, 4, (3,)), weight=torch.rand(4), label_smoothing=0.1),
        3,
        4,
    ),
    "one_hot": lambda: functional.one_hot(torch.randint(0, 4, (3, 2)), 4),
    "quantile": lambda: torch.quantile(torch.rand(3, 4), torch.rand(2), dim=1),
    "nanquantile": lambda: torch.nanquantile(torch.rand(3, 4), torch.rand(2), dim=1),
    "quantile, known": lambda: torch.quantile(torch.rand(3, 4), torch.tensor([0.25, 0.5]), dim=1),
    "masked_fill, known": lambda: gradient(lambda x: torch.ones(3, 4).masked_fill(torch.tensor([True, False] * 2), x)),
    "repeat_interleave": lambda: torch.repeat_interleave(
        torch.rand(3, 4), torch.tensor([1, 2, 3]), dim=0, output_size=6
    ),
    "repeat_interleave of counts": lambda: torch.repeat_interleave(torch.tensor([1, 2, 3]), output_size=6),
    "fake_quantize": lambda: torch.fake_quantize_per_tensor_affine(torch.rand(3, 4), 0.1, 0, 0, 255),
    "fake_quantize by tensors": lambda: torch.fake_quantize_per_tensor_affine(
        torch.rand(3, 4), torch.rand(1), torch.zeros(1, dtype=torch.int32), 0, 255
    ),
    "gradient of fake_quantize": lambda: gradient(
        lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 0, 0, 255), 3, 4
    ),
    "geqrf": lambda: torch.geqrf(torch.rand(3, 4)),
    "histogram": lambda: torch.histogram(torch.rand(3, 4), 5),
    "histogramdd": lambda: torch.histogramdd(torch.rand(3, 2), [5, 4]),
}


@only_2_13
@pytest.mark.parametrize("name", SHORTCUTS)
def test_shortcut_that_reads_values_is_skipped(name: str) -> None:
    run = SHORTCUTS[name]
    wanted = metadata(run())
    with fake_mode():
        for _ in range(2):  # the second result comes from the cache
            found = run()
            assert are_fake(found)
            assert metadata(found) == wanted


@only_2_13
@pytest.mark.parametrize("name", SHORTCUTS)
def test_shortcut_is_skipped_on_fake_devices(name: str) -> None:
    compared = PROPERTIES - {"device"}
    wanted = metadata(SHORTCUTS[name](), compared)
    with fake_mode(gpu=True), torch.device("cuda"):
        found = SHORTCUTS[name]()
    assert all(leaf.is_cuda for leaf in tree_leaves(found))
    assert metadata(found, compared) == wanted


@only_2_13
@pytest.mark.parametrize("name", SHORTCUTS)
def test_deferred_tensors_take_the_shortcut(name: str) -> None:
    def run() -> list[Tensor]:
        torch.manual_seed(0)
        return tree_leaves(SHORTCUTS[name]())

    wanted = run()
    for found, real in zip(deferred_init(run), wanted, strict=True):
        if is_deferred(found):
            materialize_tensor(found)
        assert_same_tensor(found, real, strictly=False)


def test_shortcuts_do_not_change_the_graph() -> None:
    def run() -> tuple[Tensor, Tensor]:
        x = torch.rand(3, 4, requires_grad=True)
        return x, (x * 2).reshape(4, 3).prod()

    def nodes(result: Tensor) -> list[str]:
        found, node = [], result.grad_fn
        while node is not None:
            found.append(type(node).__name__)
            node = node.next_functions[0][0] if node.next_functions else None
        return found

    with fake_mode():
        x, fake = run()
        assert nodes(fake) == nodes(run()[1])
    assert nodes(fake) == nodes(run()[1])
    with fake_mode():
        [first] = torch.autograd.grad(fake, x, create_graph=True)
        [second] = torch.autograd.grad(first.sum(), x)
    assert (second.shape, first.requires_grad) == (x.shape, True)


def test_version_of_a_tensor_saved_by_a_shortcut_is_checked() -> None:
    with fake_mode():
        x = torch.rand(3, requires_grad=True).clone()
        product = x.prod()
        x.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()


def test_large_arguments_are_not_computed() -> None:
    with fake_mode(), pytest.raises(UnsupportedOperatorError, match="histogram"):
        torch.histogram(torch.empty(2**30), 5)


# Devices.

DEVICES: dict[str, Program] = {
    "resize_as_": lambda: torch.empty(2).resize_as_(torch.empty(3, 4, device="cuda")),
    "slice_scatter": lambda: torch.zeros(4, 4).slice_scatter(torch.ones(2, 4, device="cuda"), end=2),
    "select_scatter": lambda: torch.zeros(4, 4).select_scatter(torch.ones(4, device="cuda"), 0, 1),
    "diagonal_scatter": lambda: torch.zeros(4, 4).diagonal_scatter(torch.ones(4, device="cuda")),
    "as_strided_scatter": lambda: torch.zeros(4, 4).as_strided_scatter(torch.ones(2, device="cuda"), (2,), (1,)),
}


@pytest.mark.parametrize("name", DEVICES)
def test_result_is_where_the_first_argument_is(name: str) -> None:
    with fake_mode(gpu=True):
        assert DEVICES[name]().device == torch.device("cpu")


def test_foreach_copy_moves_between_devices() -> None:
    with fake_mode(gpu=True):
        to = [torch.zeros(2), torch.zeros(3)]
        torch._foreach_copy_(to, [torch.ones(2, device="cuda"), torch.ones(3, device="cuda")])
    assert [tensor.device.type for tensor in to] == ["cpu", "cpu"]


FOREACH = [
    *foreach_unary_op_db,
    *foreach_binary_op_db,
    *foreach_pointwise_op_db,
    *foreach_reduce_op_db,
    *foreach_other_op_db,
]
PLACES = ("cuda:0", "cuda:1", "cpu")


def on_places(value: Any) -> Any:
    """Return fakes of a list of tensors on several devices in turn."""
    if not (isinstance(value, list | tuple) and value and all(isinstance(one, Tensor) for one in value)):
        return value
    return [fake_like(one.detach().clone(), device=place) for one, place in zip(value, itertools.cycle(PLACES))]


def copied(value: Any) -> Any:
    return tree_map_only(Tensor, lambda one: one.detach().clone(), value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="real CUDA devices are not faked")
@pytest.mark.parametrize("op", FOREACH, ids=lambda op: op.name)
def test_foreach_operators_take_tensors_on_several_devices(op: OpInfo) -> None:
    """Under the stubbed driver, a CUDA build of PyTorch 2.14 returns the same devices and versions."""

    def run(variant: Any, sample: SampleInput, change: Callable[[Any], Any]) -> Any:
        arguments = [change(value) for value in (sample.input, *sample.args)]
        return variant(*arguments, **sample.kwargs), arguments[0]

    compared = PROPERTIES - {"device"} | {"version"}
    for sample in itertools.islice(op.sample_inputs("cpu", torch.float32), 3):
        for variant in filter(None, (op.method_variant, op.inplace_variant)):
            wanted = outcome(partial(run, variant, sample, copied))
            with fake_mode(gpu=2):
                found = outcome(partial(run, variant, sample, on_places))
            assert metadata(found, compared) == metadata(wanted, compared)
            if not isinstance(found, Raised):
                results = [tensor.device for tensor in found[0] or found[1]]
                assert results == [torch.device(place) for place, _ in zip(itertools.cycle(PLACES), results)]


def test_weights_on_the_meta_device_are_looked_up_with_indices_on_the_cpu() -> None:
    def run() -> Tensor:
        bag = torch.nn.EmbeddingBag(10, 4, device="meta")
        found: Tensor = bag(torch.tensor([1, 2, 3]), torch.tensor([0, 2]))
        return found

    wanted = metadata(run())
    with fake_mode():
        assert metadata(run()) == wanted


#
# Other features.


@pytest.mark.parametrize("name", ["add", "sub", "mul", "div"])
def test_operator_on_two_numbers_makes_a_fake_with_a_value(name: str) -> None:
    run = getattr(torch, name)
    with fake_mode():
        found = run(3, 2)
        assert is_fake(found)
        assert found.item() == run(torch.tensor(3), torch.tensor(2)).item()
    assert (found.dtype, found.shape) == (run(3, 2).dtype, ())


def test_typed_storage_is_shown() -> None:
    with fake_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # typed storages are deprecated
        shown = str(torch.empty(3).storage())
    assert shown == "...\n[torch.storage.TypedStorage(dtype=torch.float32, device=cpu) of size 3, fake]"


def test_profiler_does_not_read_the_memory_of_fakes(capfd: pytest.CaptureFixture[str]) -> None:
    with (
        fake_mode(),
        pytest.warns(UserWarning, match="cannot record shapes or FLOPs"),
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile,
    ):
        torch.ones(3) + torch.ones(3)
    assert "aten::add" in {event.key for event in profile.key_averages()}
    assert "ASSERT FAILED" not in capfd.readouterr().err


def test_fake_like_copies_tensors_of_transforms() -> None:
    def fake_shape(x: Tensor) -> Tensor:
        fake = fake_like(x)
        assert fake.shape == x.shape
        return fake * 2

    batched = torch.func.vmap(fake_shape, in_dims=1)(torch.ones(2, 3))
    assert is_fake(batched)
    assert batched.shape == (3, 2)
    derivative = torch.func.grad(lambda x: (x * fake_like(x).sum()).sum())(torch.ones(2))
    assert is_fake(derivative)


@torch.library.custom_op("torchext_parity::nonzero", mutates_args=())
def custom_nonzero(x: Tensor) -> Tensor:
    return torch.nonzero(x)


@custom_nonzero.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty([torch.library.get_ctx().new_dynamic_size(), x.dim()], dtype=torch.long)


def test_operator_whose_shape_depends_on_values_is_named() -> None:
    with fake_mode(), pytest.raises(DataDependentError, match="`torchext_parity::nonzero` returns a tensor whose"):
        custom_nonzero(torch.ones(3))


def test_operator_whose_shape_depends_on_values_is_run_in_constructors() -> None:
    found = deferred_init(lambda: custom_nonzero(torch.tensor([0.0, 1.0, 1.0])))
    assert materialize_tensor(found).tolist() == [[1], [2]]


def grouped(dtype: torch.dtype) -> list[Tensor]:
    rows = torch.rand(6, 8, dtype=dtype, requires_grad=True)
    weights = torch.rand(2, 16, 8, dtype=dtype, requires_grad=True)
    offsets = torch.tensor([2, 6], dtype=torch.int32)
    result = torch._grouped_mm(rows, weights.mT, offs=offsets)
    return [result, *torch.autograd.grad((result * result).sum(), (rows, weights))]


@only_2_13
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_matrices_of_groups_are_multiplied_in_the_dtypes_of_the_cpu(dtype: torch.dtype) -> None:
    with fake_mode():
        found = grouped(dtype)
    assert metadata(found) == metadata(grouped(dtype))


@only_2_13
@pytest.mark.parametrize(
    ("shape", "dtype", "match"),
    [
        ((2, 8, 5), torch.float32, "16 bytes"),
        ((2, 7, 8), torch.float32, "contraction"),
        ((2, 8, 8), torch.int32, "Float32"),
    ],
    ids=["strides", "shape", "dtype"],
)
def test_matrices_of_groups_are_checked(shape: tuple[int, ...], dtype: torch.dtype, match: str) -> None:
    offsets = torch.tensor([2, 6], dtype=torch.int32)
    with fake_mode(), pytest.raises(RuntimeError, match=match):
        torch._grouped_mm(torch.zeros(6, 8, dtype=dtype), torch.zeros(shape, dtype=dtype), offs=offsets)


#
# Features of real tensors that fakes did not have.


def trained(module: nn.Module, *inputs: Tensor) -> Any:
    """Return the output of a training step, and the gradients of the parameters."""
    outputs = module(*inputs)
    sum(tensor.sum() for tensor in operators.tensors_in(outputs) if tensor.requires_grad).backward()
    return outputs, [parameter.grad for parameter in module.parameters()]


REDUCTIONS = ("none", "mean", "sum")


def ctc_loss(device: str, dtype: torch.dtype = torch.int64) -> Any:
    """Return the losses of targets in both forms, and the gradients."""
    results = []
    for targets, reduction in itertools.product(
        (torch.ones(2, 3, dtype=dtype), torch.ones(5, dtype=dtype)), REDUCTIONS
    ):
        x = torch.zeros(6, 2, 4, device=device, requires_grad=True)
        loss = functional.ctc_loss(x.log_softmax(2), targets.to(device), (6, 5), (3, 2), reduction=reduction)
        loss.sum().backward()
        results += [loss, x.grad]
    return results


def margin_loss(device: str, dtype: torch.dtype, loss: Callable[..., Tensor], target: tuple[int, ...]) -> Any:
    x = torch.zeros(3, 4, device=device, dtype=dtype, requires_grad=True)
    result = loss(x, torch.zeros(target, dtype=torch.int64, device=device))
    result.backward()
    return result, x.grad


def phases(function: Callable[[Tensor], Any]) -> Any:
    """Return gradients of a complex decomposition, whose formula checks the loss."""
    x = torch.diag(torch.arange(1.0, 4.0)).to(torch.complex64).requires_grad_()
    values, vectors = function(x)
    (values.abs().sum() + vectors.abs().sum()).backward()
    return x.grad


def encoded(is_left_aligned: bool) -> Any:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2).eval()
    mask = torch.tensor([[False, not is_left_aligned, is_left_aligned], [False, True, True]])
    with torch.no_grad():
        return encoder(torch.ones(2, 3, 8), src_key_padding_mask=mask)


def mutated_after_it_was_saved() -> Any:
    x = torch.ones(3, requires_grad=True)
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        y = x * 2
        z = y.sin()
        y.mul_(3)
        z.sum().backward()
    return z, x.grad


def eigenpairs(method: str, **arguments: Any) -> Any:
    """Return the eigenvalues and eigenvectors of a matrix, and its gradient."""
    factor = torch.rand(12, 12, dtype=torch.float64)
    matrix = (factor @ factor.mT + torch.eye(12)).detach().requires_grad_()
    values, vectors = torch.lobpcg(matrix, method=method, **arguments)
    (values.sum() + vectors.sum()).backward()
    return values, vectors, matrix.grad


PROGRAMS: dict[str, Program] = {
    "lobpcg": lambda: eigenpairs("ortho", k=2),
    "lobpcg of given vectors": lambda: eigenpairs("ortho", X=torch.rand(12, 3, dtype=torch.float64), largest=False),
    "lobpcg of several matrices": lambda: [
        pair.detach() for pair in torch.lobpcg(torch.eye(12).expand(2, 12, 12) * torch.rand(()), k=2)
    ],
    "lobpcg of pairs of matrices": lambda: torch.lobpcg(torch.eye(12) * torch.rand(()), 3, 2 * torch.eye(12)),
    "lobpcg, basic": lambda: eigenpairs("basic", k=3),
    "ctc_loss": lambda: ctc_loss("cpu"),
    "eigh": lambda: phases(torch.linalg.eigh),
    "eig": lambda: phases(torch.linalg.eig),
    "svd": lambda: phases(lambda x: torch.linalg.svd(x)[1:]),
    "mutation": mutated_after_it_was_saved,
    "encoder": lambda: encoded(True),
    "encoder of a mask with holes": lambda: encoded(False),
    "t_": lambda: torch.ones(2, 3).t_(),
    "squeeze_": lambda: torch.ones(2, 1).squeeze_(),
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
def test_program_returns_the_eager_results(name: str) -> None:
    expected = metadata(PROGRAMS[name]())
    with fake_mode():
        found = PROGRAMS[name]()
    assert are_fake(found)
    assert metadata(found) == expected


def on_cuda(expected: Any) -> Any:
    return tree_map_only(Tensor, lambda tensor: torch.empty_like(tensor, device="cuda"), expected)


PROGRAMS_FOR_DEVICES: dict[str, Callable[[str], Any]] = {
    "GRU": lambda device: trained(
        nn.GRU(3, 4, 2, bidirectional=True, device=device), torch.ones(5, 2, 3, device=device)
    ),
    "GRU without bias": lambda device: trained(
        nn.GRU(3, 4, bias=False, device=device), torch.ones(5, 3, device=device)
    ),
    "LSTM without biases": lambda device: trained(
        nn.LSTM(3, 4, bias=False, device=device), torch.ones(5, 3, device=device)
    ),
    "LogSigmoid of a known value": lambda device: trained(
        nn.LogSigmoid(), fake_like(torch.ones(())).to(device).detach().requires_grad_()
    ),
    "GRUCell": lambda device: trained(nn.GRUCell(3, 4, device=device), torch.ones(5, 3, device=device)),
    "LSTMCell": lambda device: trained(nn.LSTMCell(3, 4, device=device), torch.ones(5, 3, device=device)),
    "ctc_loss": ctc_loss,
    "ctc_loss of int32": lambda device: ctc_loss(device, torch.int32),
}


@pytest.mark.parametrize("name", PROGRAMS_FOR_DEVICES)
def test_program_has_the_same_results_on_fake_cuda_and_on_the_cpu(name: str) -> None:
    expected = PROGRAMS_FOR_DEVICES[name]("cpu")
    with fake_mode(gpu=True):
        found = PROGRAMS_FOR_DEVICES[name]("cuda")
        compared = {"shape", "dtype", "requires_grad"}
        assert metadata(found, compared) == metadata(expected, compared)
        assert all(tensor.is_cuda for tensor in operators.tensors_in(found))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("loss", "target"), [(functional.multi_margin_loss, (3,)), (functional.multilabel_margin_loss, (3, 4))]
)
def test_losses_without_meta_kernels_have_gradients_of_16_bits(
    loss: Callable[..., Tensor], target: tuple[int, ...], dtype: torch.dtype
) -> None:
    with fake_mode(gpu=True):
        _, gradient = margin_loss("cuda", dtype, loss, target)
    assert gradient.dtype == dtype
    assert gradient.shape == (3, 4)
    assert gradient.untyped_storage().nbytes() == 24


def test_replicas_run_on_two_fake_devices() -> None:
    with fake_mode(gpu=2):
        module = nn.DataParallel(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).cuda())
        output = module(torch.ones(5, 3, device="cuda"))
        assert output.shape == (5, 4)
        assert output.device == torch.device("cuda", 0)
        assert output.requires_grad
        output.sum().backward()  # along nodes that were made while other devices were current
        weight = module.module[0].weight
        assert weight.grad is not None
        assert weight.grad.device == torch.device("cuda", 0)


@pytest.mark.parametrize("device", [0, 1])
def test_backward_passes_leave_the_device_that_is_current(device: int) -> None:
    seen = []
    with fake_mode(gpu=2):
        x = torch.ones(3, device="cuda:0", requires_grad=True)
        with torch.cuda.device(1):
            y = x.cuda() * 2
        y.register_hook(lambda grad: seen.append(torch.cuda.current_device()))
        torch.cuda.set_device(device)
        y.sum().backward()
        assert torch.cuda.current_device() == device
    assert seen == [device]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_modules_with_counters_compile(backend: str) -> None:
    module, x = fake_like(nn.BatchNorm1d(4)), fake_like(torch.ones(3, 4))
    output, gradients = trained(torch.compile(module, backend=backend), x)
    assert are_fake(output)
    assert are_fake(gradients)


def test_types_of_tensors_are_those_of_real_tensors() -> None:
    x, index = fake_like(torch.ones(3)), fake_like(torch.ones(3, dtype=torch.int64))
    assert isinstance(x, torch.FloatTensor)
    assert not isinstance(x, torch.LongTensor)
    assert isinstance(index, torch.LongTensor)
    assert isinstance(nn.Parameter(x), torch.FloatTensor)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.t_(),
        lambda x: x.transpose_(0, 5),
        lambda x: x.unsqueeze_(7),
        lambda x: torch.segment_reduce(x, "sum"),
    ],
)
def test_refusals_have_the_words_of_real_tensors(call: Callable[[Tensor], object]) -> None:
    with pytest.raises((RuntimeError, IndexError), match=r".") as eager:
        call(torch.ones(2, 3, 4))
    with pytest.raises(eager.type, match=r".") as found:
        call(fake_like(torch.ones(2, 3, 4)))
    assert str(found.value) == str(eager.value)


def test_grids_of_matrices_are_refused_without_their_values() -> None:
    with pytest.raises(RuntimeError, match=r"Expected 0D or 1D tensor in .* got: \[ torch.FloatTensor"):
        torch.meshgrid(fake_like(torch.ones(3, 4)), indexing="ij")
