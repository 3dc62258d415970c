"""Fake tensors: their properties, operators on them, and errors."""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
from collections.abc import AsyncIterator, Callable, Iterator

import pytest
import torch
from common import assert_same_tensor, build_both
from comparisons import metadata
from expecttest import assert_expected_inline
from torch import nn

from torchext.deferred_init import materialize_tensor
from torchext.fake import DataDependentError, fake_like, fake_mode, is_fake, meta_like

# Lives as long as the process, because PyTorch's tables of operators fail for unregistered ones.
LIBRARY = torch.library.Library("torchext_test_fake", "DEF")
LIBRARY.define("of_dict(Dict(str, Tensor) tensors) -> Tensor")
LIBRARY.define("of_tuple((Tensor, int) pair) -> Tensor")
LIBRARY.impl("of_dict", lambda tensors: tensors["a"] + tensors["b"], "CompositeExplicitAutograd")
LIBRARY.impl("of_tuple", lambda pair: pair[0] * pair[1], "CompositeExplicitAutograd")


def generate() -> Iterator[torch.Tensor]:
    yield torch.ones(1)


async def wait() -> torch.Tensor:
    return torch.ones(1)


async def generate_while_waiting() -> AsyncIterator[torch.Tensor]:
    yield torch.ones(1)


@pytest.fixture
def fake() -> torch.Tensor:
    with fake_mode():
        return torch.empty(4, 4)


class TestMode:
    def test_factories_make_fakes_inside_only(self) -> None:
        with fake_mode():
            inside = torch.ones(3)
        assert is_fake(inside)
        assert not is_fake(torch.ones(3))

    def test_constants_are_fake(self) -> None:
        with fake_mode():
            assert is_fake(torch.tensor([1.0, 2.0]))

    def test_operators_on_real_tensors_stay_real(self) -> None:
        real = torch.arange(4.0)
        with fake_mode():
            doubled = real * 2
        assert doubled.tolist() == [0.0, 2.0, 4.0, 6.0]

    def test_like_factories_of_real_tensors_are_fake(self) -> None:
        real = torch.arange(4.0)
        with fake_mode():
            assert is_fake(torch.empty_like(real))
            assert is_fake(real.new_zeros(10**12))

    def test_decorated_function_makes_fakes(self) -> None:
        @fake_mode(gpu=True)
        def make() -> torch.Tensor:
            return torch.ones(2, device="cuda")

        assert is_fake(make())
        assert make().device.type == "cuda"
        assert not is_fake(torch.ones(1))

    @pytest.mark.parametrize("function", [generate, wait, generate_while_waiting, functools.partial(generate)])
    def test_generators_and_coroutines_are_not_decorated(self, function: Callable[[], object]) -> None:
        with pytest.raises(
            TypeError, match=r"does not decorate generators .* `with fake_mode\(\):` inside the function"
        ):
            fake_mode()(function)

    def test_classes_are_not_decorated(self) -> None:
        with pytest.raises(TypeError, match=r"`Linear` is a class\. Construct it in `with fake_mode\(\):` instead"):
            fake_mode()(nn.Linear)

    def test_a_block_is_entered_again_but_not_while_it_is_open(self) -> None:
        block = fake_mode()
        for _ in range(2):
            with block:
                assert is_fake(torch.ones(1))
                with pytest.raises(RuntimeError, match=r"fake_mode\(\) is already open"):
                    block.__enter__()

    def test_block_that_cannot_be_entered_stays_closed(self) -> None:
        block = fake_mode(gpu="X9")
        for _ in range(2):
            with pytest.raises(ValueError, match="Unknown GPU 'X9'"), block:
                pass
        assert not is_fake(torch.ones(1))

    def test_nests(self) -> None:
        with fake_mode():
            with fake_mode():
                assert is_fake(torch.ones(1))
            assert is_fake(torch.ones(1))
        assert not is_fake(torch.ones(1))

    def test_is_left_when_the_block_raises(self) -> None:
        with pytest.raises(ZeroDivisionError), fake_mode():
            1 / 0  # noqa: B018
        assert not is_fake(torch.ones(1))

    def test_failing_operator_leaves_the_mode_as_it_was(self) -> None:
        with fake_mode():
            with pytest.raises(
                RuntimeError, match="mat1 and mat2 shapes cannot be multiplied|size mismatch|a and b must"
            ):
                torch.ones(2, 3) @ torch.ones(2, 3)
            assert is_fake(torch.ones(1))
        assert not is_fake(torch.ones(1))

    def test_belongs_to_its_thread(self) -> None:
        found: list[bool] = []
        with fake_mode():
            thread = threading.Thread(target=lambda: found.append(is_fake(torch.ones(1))))
            thread.start()
            thread.join()
        assert found == [False]

    def test_large_tensors_cost_no_memory(self) -> None:
        with fake_mode():
            tensor = torch.empty(2**40, 2)
        assert tensor.untyped_storage().nbytes() == 2**43

    def test_leaving_without_entering_raises(self) -> None:
        from torchext import _C

        with pytest.raises(RuntimeError, match=r"fake_mode\(\) was left on a thread where it is not open"):
            _C.leave_fake_mode()


class TestMetadata:
    @pytest.mark.parametrize(
        "dtype", [torch.float32, torch.int64, torch.complex64, torch.bool, torch.bfloat16], ids=str
    )
    def test_claims_its_dtype_and_device(self, dtype: torch.dtype) -> None:
        with fake_mode():
            tensor = torch.zeros(2, 3, dtype=dtype)
        assert (tensor.shape, tensor.dtype, tensor.device) == ((2, 3), dtype, torch.device("cpu"))
        assert tensor.is_cpu
        assert not tensor.is_meta

    def test_operators_compute_metadata(self, fake: torch.Tensor) -> None:
        result = (fake @ fake.t()).to(torch.float64)[:, 1:].sum(0)
        assert is_fake(result)
        assert (result.shape, result.dtype) == ((3,), torch.float64)

    def test_python_numbers_promote_as_on_real_tensors(self) -> None:
        with fake_mode():
            integers = torch.ones(2, dtype=torch.int64)
            halves = torch.ones(2, dtype=torch.float16)
        assert (integers + 1.5).dtype == torch.float32
        assert (halves * 2.0).dtype == torch.float16

    def test_in_place_operators_keep_identity(self, fake: torch.Tensor) -> None:
        assert fake.add_(1) is fake
        assert torch.add(fake, 1, out=fake) is fake

    def test_metadata_changes_in_place(self, fake: torch.Tensor) -> None:
        fake.t_()
        assert fake.stride() == (1, 4)
        fake.resize_(8, 8)
        assert fake.shape == (8, 8)
        assert fake.untyped_storage().nbytes() == 8 * 8 * 4
        fake.unsqueeze_(0)
        assert fake.shape == (1, 8, 8)

    def test_set_adopts_the_storage(self, fake: torch.Tensor) -> None:
        with fake_mode():
            other = torch.empty(2)
        other.set_(fake)
        assert other.shape == (4, 4)
        assert other.untyped_storage()._cdata == fake.untyped_storage()._cdata

    def test_views_share_a_storage_and_a_base(self, fake: torch.Tensor) -> None:
        row = fake[1]
        assert row.untyped_storage()._cdata == fake.untyped_storage()._cdata
        assert (row.shape, row.storage_offset()) == ((4,), 4)
        assert row._is_view()
        assert row._base is fake

    def test_conjugate_and_negative_bits_are_lazy(self) -> None:
        with fake_mode():
            tensor = torch.ones(2, dtype=torch.complex64)
        assert tensor.conj().is_conj()
        assert tensor.conj().imag.is_neg()
        assert not tensor.conj().resolve_conj().is_conj()

    def test_real_arguments_count_by_their_metadata(self, fake: torch.Tensor) -> None:
        result = fake + torch.ones(4, 1, dtype=torch.float64)
        assert is_fake(result)
        assert result.dtype == torch.float64

    def test_a_dtype_view_keeps_the_bytes(self, fake: torch.Tensor) -> None:
        assert fake.view(torch.int16).shape == (4, 8)

    @pytest.mark.parametrize(
        "kernel", [nn.Linear(4, 3), nn.LSTM(4, 3), nn.MultiheadAttention(4, 2)], ids=lambda m: type(m).__name__
    )
    def test_real_modules_run_on_fakes(self, kernel: nn.Module, fake: torch.Tensor) -> None:
        arguments = (fake, fake, fake) if isinstance(kernel, nn.MultiheadAttention) else (fake,)
        real = kernel(*(torch.ones(4, 4) for _ in arguments))
        outputs = kernel(*arguments)
        real_tensors, tensors = (torch.utils._pytree.tree_leaves(result) for result in (real, outputs))
        assert [t.shape for t in tensors] == [t.shape for t in real_tensors]
        assert all(is_fake(t) for t in tensors)


class TestKeys:
    def test_fakes_carry_the_real_keys(self, fake: torch.Tensor) -> None:
        keys = str(torch._C._dispatch_keys(fake))
        for key in ("CPU", "Fake", "ADInplaceOrView", "AutogradCPU", "AutocastCPU"):
            assert key in keys

    def test_autograd_builds_its_graph(self, fake: torch.Tensor) -> None:
        weight = nn.Parameter(fake.clone())
        loss = (weight * 3).relu().sum()
        assert loss.grad_fn is not None
        loss.backward()
        assert weight.grad is not None
        assert is_fake(weight.grad)
        assert weight.grad.shape == weight.shape

    def test_gradients_accumulate(self, fake: torch.Tensor) -> None:
        weight = nn.Parameter(fake.clone())
        for _ in range(2):
            (weight * weight).sum().backward()
        assert weight.grad is not None
        assert is_fake(weight.grad)

    def test_version_counters_count(self, fake: torch.Tensor) -> None:
        view = fake.view(-1)
        fake.add_(1)
        assert (fake._version, view._version) == (1, 1)
        fake.data.add_(1)
        assert fake._version == 1

    def test_writes_to_saved_tensors_are_detected(self, fake: torch.Tensor) -> None:
        weight = nn.Parameter(fake.clone())
        hidden = weight * 1
        loss = (hidden * hidden).sum()
        hidden.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    def test_autocast_casts(self, fake: torch.Tensor) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert (fake @ fake).dtype == torch.bfloat16

    def test_inference_mode_makes_inference_tensors(self, fake: torch.Tensor) -> None:
        with torch.inference_mode():
            new = fake * 2
            view = fake[0]
            composite = torch.nn.functional.linear(fake, fake)
        assert is_fake(new)
        assert new.is_inference()
        assert not view.is_inference()
        assert is_fake(composite)

    def test_foreach_operators_count_versions(self, fake: torch.Tensor) -> None:
        for tensor in (fake, torch.ones(2)):
            before = tensor._version
            torch._foreach_add_([tensor], 1)
            torch._foreach_mul_([tensor, tensor], 2)
            assert tensor._version == before + 3

    def test_detach_and_data_share_storage(self, fake: torch.Tensor) -> None:
        for alias in (fake.detach(), fake.data):
            assert is_fake(alias)
            assert alias.untyped_storage()._cdata == fake.untyped_storage()._cdata

    def test_data_can_be_set(self, fake: torch.Tensor) -> None:
        weight = nn.Parameter(fake.clone())
        weight.data = torch.zeros(2)
        assert not is_fake(weight)
        assert weight.tolist() == [0.0, 0.0]
        weight.data = fake
        assert is_fake(weight)

    def test_real_tensor_takes_fake_data(self, fake: torch.Tensor) -> None:
        real = torch.zeros(2)
        real.data = fake
        assert is_fake(real)
        assert is_fake(real * 2)
        assert real.shape == (4, 4)


class TestDevices:
    """The device rules. They are the same on builds with and without CUDA."""

    def test_cuda_is_an_error_outside(self) -> None:
        if torch.cuda.is_available():
            pytest.skip("this machine has CUDA")
        with fake_mode(gpu=True):
            torch.ones(1, device="cuda")
        with pytest.raises((RuntimeError, AssertionError), match="CUDA|NVIDIA"):
            torch.ones(1, device="cuda")

    def test_factory_makes_outputs_on_the_device_argument(self) -> None:
        with fake_mode(gpu=True):
            tensor = torch.ones(2, device="cuda")
        assert (tensor.device, tensor.is_cuda) == (torch.device("cuda:0"), True)

    def test_tensor_options_decide_before_arguments(self) -> None:
        with fake_mode(gpu=2):
            tensor = torch.ones(2, device="cuda")
            assert torch.empty_like(tensor, device="cpu").device.type == "cpu"
            assert torch.zeros_like(tensor).device.type == "cuda"
            assert tensor.cpu().device.type == "cpu"
            assert tensor.to("cuda:1").device == torch.device("cuda:1")

    def test_first_tensor_decides_otherwise(self) -> None:
        with fake_mode(gpu=True):
            tensor = torch.ones(2, device="cuda")
            assert (tensor + 1).device.type == "cuda"
            assert torch.stack([tensor, tensor]).device.type == "cuda"

    def test_cpu_scalars_mix(self) -> None:
        with fake_mode(gpu=True):
            scalar, tensor = torch.tensor(2.0), torch.ones(2, device="cuda")
            assert (scalar * tensor).device.type == "cuda"

    def test_devices_do_not_mix_otherwise(self) -> None:
        with fake_mode(gpu=True):
            a, b = torch.ones(2), torch.ones(2, device="cuda")
            with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
                a + b

    def test_copies_cross_devices(self) -> None:
        with fake_mode(gpu=True):
            a, b = torch.ones(2), torch.ones(2, device="cuda")
            assert a.copy_(b).device.type == "cpu"

    def test_cpu_indices_index_cuda_tensors(self) -> None:
        with fake_mode(gpu=True):
            tensor, index = torch.ones(4, device="cuda"), torch.zeros(2, dtype=torch.int64)
            assert tensor[index].device.type == "cuda"

    def test_device_dependent_code_gets_the_device(self) -> None:
        def value(device: str) -> torch.Tensor:
            tensor = torch.ones(1, device=device)
            return tensor if tensor.is_cuda else tensor.double()

        with fake_mode(gpu=True):
            assert value("cuda").dtype == torch.float32
            assert value("cpu").dtype == torch.float64

    def test_modules_are_built_and_run_on_fake_cuda(self) -> None:
        with fake_mode(gpu=True):
            model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).cuda()
            output = model(torch.ones(3, 4, device="cuda"))
        assert output.device == torch.device("cuda:0")
        assert output.shape == (3, 2)

    def test_nested_fake_cuda_is_counted(self) -> None:
        with fake_mode(gpu=True):
            with fake_mode(gpu=True):
                pass
            assert torch.ones(1, device="cuda").is_cuda


class TestRefusals:
    def test_values_cannot_be_read(self, fake: torch.Tensor) -> None:
        with pytest.raises(RuntimeError, match="needs the values of its arguments"):
            fake.sum().item()
        with pytest.raises(RuntimeError, match="needs the values of its arguments"):
            fake.nonzero()
        with pytest.raises(RuntimeError, match="needs the values of its arguments"):
            bool(fake.sum() > 0)

    def test_data_cannot_be_reached(self, fake: torch.Tensor) -> None:
        for read in (fake.data_ptr, fake.numpy, fake.tolist):
            with pytest.raises(RuntimeError, match="[Tt]his tensor is fake"):
                read()

    def test_masks_are_values_and_integer_indices_are_not(self, fake: torch.Tensor) -> None:
        with fake_mode():
            index, mask = torch.zeros(3, dtype=torch.int64), torch.empty(4, dtype=torch.bool)
        assert fake[index].shape == (3, 4)
        with pytest.raises(RuntimeError, match=r"aten::index.Tensor.*needs the values"):
            fake[mask]

    def test_real_tensors_are_not_written(self, fake: torch.Tensor) -> None:
        real = torch.zeros(4, 4)
        with pytest.raises(RuntimeError, match="into the real tensor `self` of shape"):
            real.copy_(fake)
        with pytest.raises(RuntimeError, match="into the real tensor `out`"):
            torch.add(fake, fake, out=real)
        assert torch.equal(real, torch.zeros(4, 4))

    def test_running_statistics_of_real_modules_are_not_written(self, fake: torch.Tensor) -> None:
        norm = nn.BatchNorm1d(4)
        with pytest.raises(RuntimeError, match="into the real tensor `running_mean`"):
            norm(fake)
        assert torch.equal(norm.running_mean, torch.zeros(4))
        assert is_fake(norm.eval()(fake))

    def test_lengths_of_packed_sequences_are_values(self) -> None:
        with fake_mode(), pytest.raises(DataDependentError, match="_pack_padded_sequence"):
            nn.utils.rnn.pack_padded_sequence(
                torch.ones(2, 7, 3), torch.empty(2, dtype=torch.int64), batch_first=True, enforce_sorted=True
            )

    def test_composites_that_read_memory_name_the_requirement(self, fake: torch.Tensor) -> None:
        with pytest.raises(DataDependentError, match="tensor_split.*`tensor_indices_or_sections`"):
            torch.tensor_split(fake, fake_like(torch.tensor([1, 3])).random_())
        with pytest.raises(DataDependentError, match="ctc_loss.*`input_lengths`"):
            nn.functional.ctc_loss(
                fake_like(torch.ones(5, 2, 4)),
                fake_like(torch.ones(2, 3, dtype=torch.int64)),
                fake_like(torch.tensor([5, 5])).random_(),
                fake_like(torch.tensor([3, 3])),
            )
        assert [t.shape[0] for t in torch.tensor_split(fake, torch.tensor([1, 3]))] == [1, 2, 1]

    @pytest.mark.parametrize("compute", [torch.linalg.norm, torch.linalg.matrix_rank, torch.linalg.cond])
    def test_composites_allocate_fakes_outside_of_the_mode(
        self, compute: Callable[[torch.Tensor], torch.Tensor], fake: torch.Tensor
    ) -> None:
        assert is_fake(compute(fake))

    @pytest.mark.parametrize(
        "fill",
        [
            lambda out: torch.arange(9, out=out),
            lambda out: torch.arange(0, 9, 1, out=out),
            lambda out: torch.linspace(0, 1, 9, out=out),
            lambda out: torch.linspace(torch.tensor(0.0), torch.tensor(1.0), 9, out=out),
            lambda out: torch.logspace(0, 1, 9, out=out),
            lambda out: torch.fft.fftfreq(9, out=out),
        ],
        ids=["arange", "arange with a step", "linspace", "linspace between tensors", "logspace", "fftfreq"],
    )
    @pytest.mark.parametrize(
        "make",
        [
            lambda: torch.empty(3, 3),
            lambda: torch.empty(3, 3).t(),
            lambda: torch.empty(6, 6)[::2, ::2],
            lambda: torch.empty(9),
            lambda: torch.empty(0),
        ],
        ids=["matrix", "transposed", "strided", "vector", "empty"],
    )
    def test_range_fills_an_out_of_any_shape(
        self, fill: Callable[[torch.Tensor], torch.Tensor], make: Callable[[], torch.Tensor]
    ) -> None:
        def build() -> list[torch.Tensor]:
            return [fill(make())]

        with fake_mode():
            [faked] = build()
        [eager], [deferred] = build_both(build)
        assert (faked.shape, faked.stride()) == (eager.shape, eager.stride())
        assert_same_tensor(materialize_tensor(deferred), eager)

    def test_other_layouts_are_named(self, fake: torch.Tensor) -> None:
        other = torch.eye(4).to_mkldnn()
        with pytest.raises(NotImplementedError, match="strided or sparse, but `aten::mm` takes.*layout Mkldnn"):
            torch.mm(other, fake)

    def test_operator_without_meta_kernel_is_named(self, fake: torch.Tensor) -> None:
        with torch.library._scoped_library("torchext_test", "DEF") as library:
            library.define("no_meta(Tensor x) -> Tensor")
            library.impl("no_meta", lambda x: x.clone(), "CPU")
            with pytest.raises(NotImplementedError, match="torchext_test::no_meta.*Meta kernel"):
                torch.ops.torchext_test.no_meta(fake)

    @pytest.mark.parametrize("kind", ["bool?", "int"])
    def test_custom_operators_may_name_their_arguments_as_they_like(self, kind: str) -> None:
        with torch.library._scoped_library("torchext_test", "DEF") as library:
            library.define(f"trains(Tensor x, {kind} training) -> Tensor")
            library.impl("trains", lambda x, training: torch.empty_like(x), "Meta")
            with fake_mode():
                training = None if kind == "bool?" else 7
                assert torch.ops.torchext_test.trains(torch.ones(3), training).shape == (3,)

    def test_wrong_types_are_named(self) -> None:
        with pytest.raises(TypeError, match="takes a tensor, but `tensor` is a int"):
            is_fake(1)  # type: ignore[arg-type]


class TestConversions:
    def test_operator_that_reads_lengths_without_saying_so_is_refused(self) -> None:
        to_jagged = torch.ops.aten._padded_dense_to_jagged_forward
        with fake_mode():
            padded, offsets = torch.ones(2, 3, 4), [torch.empty(3, dtype=torch.int64)]
            with pytest.raises(DataDependentError, match="_padded_dense_to_jagged_forward` needs the values"):
                to_jagged(padded, offsets)

    def test_products_and_padding_of_jagged_tensors_have_the_shapes_of_real_ones(self) -> None:
        def run() -> list[object]:
            values, offsets = torch.ones(8, 4), torch.tensor([0, 3, 8])
            nested = torch.nested.nested_tensor_from_jagged(values, offsets)
            product = torch.bmm(nested, torch.ones(2, 4, 6))
            back = torch.ops.aten._padded_dense_to_jagged_forward(torch.ones(2, 5, 4, 3), [offsets], 8)
            return [product.values().shape, product.to_padded_tensor(0.0, (2, 9, 6)).shape, back.shape, back.stride()]

        wanted = run()
        with fake_mode():
            assert run() == wanted

    def test_meta_like_keeps_metadata(self, fake: torch.Tensor) -> None:
        meta = meta_like(fake.t()[1:])
        assert meta.is_meta
        assert (meta.shape, meta.stride(), meta.storage_offset(), meta.dtype) == ((3, 4), (1, 4), 1, torch.float32)

    @pytest.mark.parametrize(
        "copy",
        [
            lambda meta: meta.cpu(),
            lambda meta: meta.to("cpu", torch.float64),
            lambda meta: torch.ops.aten._to_copy(meta, device="cpu"),
            lambda meta: torch.empty(2, 3).copy_(meta),
            lambda meta: torch._foreach_copy_([torch.empty(2, 3)], [meta]),
            lambda meta: torch.empty(2, 3).__setitem__(0, meta[0]),
            lambda meta: torch.as_strided_scatter(torch.empty(2, 3), meta, (2, 3), (3, 1)),
            lambda meta: nn.Linear(3, 2, device="meta").to("cpu"),
        ],
    )
    def test_nothing_is_copied_out_of_meta_tensors(self, copy: Callable[[torch.Tensor], object]) -> None:
        for mode in (contextlib.nullcontext(), fake_mode()):
            with mode, pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor; no data!"):
                copy(torch.empty(2, 3, device="meta"))

    def test_meta_tensors_are_copied_to_meta_tensors(self) -> None:
        with fake_mode():
            meta = torch.empty(2, 3, device="meta")
            assert meta.to(torch.float64).is_meta
            assert meta.copy_(torch.empty(2, 3)).is_meta
            assert torch.empty_like(meta, device="cpu").device == torch.device("cpu")

    def test_meta_like_of_a_real_tensor_raises(self) -> None:
        with pytest.raises(ValueError, match="expected a fake tensor, got a real one"):
            meta_like(torch.ones(1))

    def test_fake_like_keeps_metadata(self) -> None:
        real = torch.ones(3, 4, requires_grad=True)
        fake = fake_like(real)
        assert is_fake(fake)
        assert (fake.shape, fake.dtype, fake.requires_grad) == (real.shape, real.dtype, True)
        assert not is_fake(real)

    @pytest.mark.parametrize("view", [torch.clone, torch.t, lambda t: t[:1]], ids=["whole", "transposed", "part"])
    def test_fake_like_of_zeros_without_memory(self, view: Callable[[torch.Tensor], torch.Tensor]) -> None:
        real, other = view(torch._efficientzerotensor((2, 3))), torch.ones(2, 1)
        fake = fake_like(real)
        assert metadata(fake) == metadata(real)
        assert fake._is_zerotensor() == real._is_zerotensor()
        assert metadata(fake * fake_like(other)[0]) == metadata(real * other[0])

    def test_deepcopy_gives_fakes_that_share_as_the_originals_do(self, fake: torch.Tensor) -> None:
        pair = copy.deepcopy([fake, fake[1]])
        assert all(is_fake(t) for t in pair)
        assert pair[0] is not fake
        assert pair[0].untyped_storage()._cdata == pair[1].untyped_storage()._cdata
        assert pair[1].storage_offset() == 4

    @pytest.mark.parametrize("read", [torch.conj, lambda t: t.conj().imag], ids=["conjugate", "negative"])
    def test_deepcopy_of_a_tensor_that_is_read_elsewhere_has_separate_memory(
        self, read: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        def bits_and_sharing(tensor: torch.Tensor) -> tuple[bool, ...]:
            first, second = copy.deepcopy([read(tensor), read(tensor)[1]])
            shares = first.untyped_storage()._cdata == second.untyped_storage()._cdata
            return first.is_conj(), second.is_conj(), first.is_neg(), second.is_neg(), shares

        real = torch.ones(2, 3, dtype=torch.complex64)
        assert bits_and_sharing(fake_like(real)) == bits_and_sharing(real)

    def test_deepcopy_of_a_module_keeps_ties(self) -> None:
        with fake_mode():
            module = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        module[1].weight = module[0].weight
        clone = copy.deepcopy(module)
        assert clone[1].weight is clone[0].weight
        assert isinstance(clone[0].weight, nn.Parameter)

    def test_prints_as_fake(self, fake: torch.Tensor) -> None:
        assert_expected_inline(repr(fake), """tensor(..., size=(4, 4), dtype=torch.float32, device='cpu', fake=True)""")
        assert_expected_inline(
            repr(nn.Parameter(fake)),
            """\
Parameter containing:
tensor(..., size=(4, 4), dtype=torch.float32, device='cpu', requires_grad=True, fake=True)""",
        )


@pytest.mark.parametrize("train", [True, False, None])
def test_results_are_new_tensors_if_the_operator_declares_that(train: bool | None) -> None:
    with fake_mode():
        given = torch.rand(4)
        result, _ = torch.native_dropout(given, 0.3, train)  # the Meta kernel returns `given` outside of training
    result.add_(1)
    assert given._version == 0
    assert result.untyped_storage()._cdata != given.untyped_storage()._cdata


def test_operators_may_take_tensors_in_dictionaries_and_tuples() -> None:
    operators = torch.ops.torchext_test_fake

    def build() -> list[torch.Tensor]:
        return [operators.of_dict({"a": torch.ones(2), "b": torch.rand(2)}), operators.of_tuple((torch.rand(3), 2))]

    eager, deferred = build_both(build)
    with fake_mode():
        assert [(is_fake(tensor), tensor.shape) for tensor in build()] == [(True, (2,)), (True, (3,))]
    for tensor, wanted in zip(deferred, eager, strict=True):
        assert_same_tensor(materialize_tensor(tensor), wanted)


@pytest.mark.parametrize(
    "arguments",
    [(5,), (2, None, 4), (0,), (2, 0), (2, 1, 0, 0)],
    ids=["kernel too large", "padding too large", "no kernel", "no stride", "no dilation"],
)
def test_pooling_without_gradients_is_refused_in_pytorchs_words(arguments: tuple[int | None, ...]) -> None:
    def message(tensor: torch.Tensor) -> str:
        with torch.no_grad(), pytest.raises(RuntimeError, match="max_pool1d") as raised:
            nn.functional.max_pool1d(tensor, *arguments)  # type: ignore[arg-type]
        return str(raised.value)

    real = torch.rand(1, 3)
    assert message(fake_like(real)) == message(real)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool])
def test_pooling_of_integers_is_refused_as_where_its_kernel_reads_memory(dtype: torch.dtype) -> None:
    for tensor in (torch.ones(1, 8).to(dtype), fake_like(torch.ones(1, 8).to(dtype))):
        with pytest.raises(NotImplementedError, match='"max_pool1d_impl" not implemented for'):
            nn.functional.max_pool1d(tensor, 2)


@pytest.mark.parametrize("split", [torch.unsafe_split, torch.unsafe_chunk])
def test_results_are_views_where_the_operator_makes_some_without_declaring_it(split: Callable[..., object]) -> None:
    with fake_mode():
        given = torch.rand(4)
        assert {part.untyped_storage()._cdata for part in split(given, 2)} == {given.untyped_storage()._cdata}  # type: ignore[attr-defined]
