"""CUDA without CUDA: fakes on fake CUDA devices, and the functions of torch.cuda for these."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from comparisons import PROPERTIES, metadata
from torch import nn
from torch.utils.checkpoint import checkpoint

from torchext.fake import fake_like, fake_mode, is_fake, threads_inherit_blocks

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA, where nothing is replaced")


class ConvolutionNet(nn.Module):
    """A small residual network."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 8, 7, 2, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(3, 2)
        )
        self.block = nn.Sequential(nn.Conv2d(8, 8, 3, 1, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, 1, 1))
        self.head = nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        x = nn.functional.relu(x + self.block(x))
        return self.head(nn.functional.adaptive_avg_pool2d(x, 1).flatten(1))


class LSTMNet(nn.Module):
    """A recurrent network with an embedding and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.lstm = nn.LSTM(8, 16, 2, dropout=0.1, bidirectional=True, batch_first=True)
        self.head = nn.Linear(32, 20)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.embedding(x))[0])


def images() -> torch.Tensor:
    return torch.ones(2, 3, 32, 32)


def tokens() -> torch.Tensor:
    return torch.ones(2, 7, dtype=torch.int64)


def llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=50
    )
    return transformers.LlamaForCausalLM(config)


def vit() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, image_size=32, patch_size=8
    )
    return transformers.ViTForImageClassification(config)


MODELS: list[tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = [
    (ConvolutionNet, images),
    (LSTMNet, tokens),
    (llama, tokens),
    (vit, images),
]
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, fused=True),
    "adamw-capturable": lambda p: torch.optim.AdamW(p, capturable=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
}


def loss_of(output: object) -> torch.Tensor:
    logits = getattr(output, "logits", output)
    assert isinstance(logits, torch.Tensor)
    return logits.float().square().mean()


@pytest.mark.cases(6)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("make", "data"), MODELS, ids=lambda f: f.__name__)
def test_models_train(make: Callable[[], nn.Module], data: Callable[[], torch.Tensor], optimizer: str) -> None:
    real = make()
    loss_of(real(data())).backward()
    with fake_mode(gpu=True):
        model = make().cuda()
        opt = OPTIMIZERS[optimizer](model.parameters())
        for _ in range(2):
            opt.zero_grad()
            loss = loss_of(model(data().cuda()))
            loss.backward()
            opt.step()
    assert loss.device == torch.device("cuda:0")
    for (name, found), wanted in zip(model.named_parameters(), real.parameters(), strict=True):
        assert is_fake(found)
        seen = [metadata((one, one.grad), PROPERTIES - {"device"}) for one in (found, wanted)]
        assert seen[0] == seen[1], name
        assert found.device == torch.device("cuda:0")
        assert found.grad is None or found.grad.device == found.device
    assert {int(state["step"]) for state in opt.state.values() if optimizer == "adamw"} <= {2}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("make", "data"), MODELS, ids=lambda f: f.__name__)
def test_models_train_under_autocast(
    make: Callable[[], nn.Module], data: Callable[[], torch.Tensor], dtype: torch.dtype
) -> None:
    with fake_mode(gpu=True):
        model, batch = make().cuda(), data().cuda()
        with torch.autocast("cuda", dtype=dtype):
            output = model(batch)
        assert getattr(output, "logits", output).dtype == dtype
        loss_of(output).backward()
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}


def test_models_accept_attention_masks() -> None:
    with fake_mode(gpu=True):
        batch = tokens().cuda()
        output = llama().cuda()(batch, attention_mask=torch.ones_like(batch), labels=batch)
        output.loss.backward()
    assert output.logits.device == torch.device("cuda:0")


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_recomputes(use_reentrant: bool) -> None:
    calls = []

    def block(x: torch.Tensor) -> torch.Tensor:
        calls.append(x.device)
        return nn.functional.dropout(x.sin(), 0.5)

    with fake_mode(gpu=True):
        x = torch.ones(3, device="cuda", requires_grad=True)
        checkpoint(block, x, use_reentrant=use_reentrant).sum().backward()
    assert calls == [torch.device("cuda:0")] * 2
    assert x.grad is not None
    assert x.grad.device == torch.device("cuda:0")


def test_stages_on_several_devices_train() -> None:
    with fake_mode(gpu=8):
        stages = [nn.Linear(4, 4).to(f"cuda:{i}") for i in range(8)]
        x = torch.ones(2, 4)
        for i, stage in enumerate(stages):
            x = stage(x.to(f"cuda:{i}")).relu()
        (x.sum().cpu() + x.cpu().mean()).backward()
    assert [stage.weight.grad.device.index for stage in stages] == list(range(8))


def test_functions_use_the_fake_devices() -> None:
    with fake_mode(gpu=8):
        assert torch.cuda.is_available()
        assert torch.cuda.device_count() == 8
        assert torch.cuda.current_device() == 0
        torch.cuda.synchronize()
        torch.cuda.synchronize("cuda:7")
        torch.cuda.init()
        torch.cuda.manual_seed_all(0)
        torch.cuda.empty_cache()
        assert torch.cuda.get_device_capability(3) == (9, 0)
        assert torch.cuda.get_device_properties("cuda:1").total_memory > 0
        assert torch.cuda.is_bf16_supported()
        assert torch.accelerator.current_accelerator() == torch.device("cuda")
        torch.cuda.set_rng_state(torch.cuda.get_rng_state())


def test_current_device_is_where_cuda_is() -> None:
    with fake_mode(gpu=4):
        with torch.cuda.device(2):
            assert torch.cuda.current_device() == 2
            assert torch.ones(1, device="cuda").device == torch.device("cuda:2")
            assert torch.ones(1).cuda().device == torch.device("cuda:2")
        torch.cuda.set_device("cuda:1")
        assert torch.ones(1, device="cuda").device == torch.device("cuda:1")
    with fake_mode(gpu=4):
        assert torch.cuda.current_device() == 0


@pytest.mark.parametrize(
    "name_it",
    [
        lambda: torch.ones(1, device="cuda:2"),
        lambda: torch.ones(1).to("cuda:2"),
        lambda: torch.ones(1).cuda(5),
        lambda: torch.tensor([1.0], device="cuda:2"),
        lambda: torch.cuda.set_device(2),
        lambda: torch.cuda.synchronize("cuda:2"),
        lambda: torch.cuda.get_device_name(2),
        lambda: torch.cuda.Stream(2),
        lambda: torch.Stream("cuda:2"),
        lambda: torch.cuda.current_stream(2),
        lambda: torch.cuda.default_stream(-7),
        lambda: torch.accelerator.set_device_index(2),
        lambda: torch.accelerator.current_stream(2),
        lambda: torch.accelerator.synchronize(2),
        lambda: torch.accelerator.device_index(2).__enter__(),
        lambda: torch._C._accelerator_exchangeDevice(2),
    ],
)
def test_missing_devices_are_errors(name_it: Callable[[], object]) -> None:
    with fake_mode(gpu=8):
        torch.ones(1, device="cuda:2").to("cuda:7")
    with fake_mode(gpu=2), pytest.raises(RuntimeError, match="invalid device ordinal"):
        name_it()


def test_tensors_of_a_device_that_no_longer_exists_have_gradients() -> None:
    with fake_mode(gpu=2):
        tensor = torch.ones(3, device="cuda:1", requires_grad=True)
        loss = (tensor * 2).sum()
        module = nn.Linear(3, 3, device="cuda:1")
        with fake_mode(gpu=1):
            product = tensor * tensor
            module(tensor)
    with fake_mode(gpu=1):
        assert (tensor * tensor).requires_grad
    for result in (product.sum(), loss):
        (gradient,) = torch.autograd.grad(result, tensor)
        assert gradient.device == torch.device("cuda:1")


def test_device_that_does_not_exist_does_not_become_current() -> None:
    with fake_mode(gpu=2):
        torch._C._accelerator_maybeExchangeDevice(6)
        assert torch.cuda.current_device() == 0
        assert torch.cuda.Stream.priority_range() == (0, -3)
    assert hasattr(torch.cuda.Stream, "priority_range") == torch.backends.cuda.is_built()


@pytest.mark.parametrize("count", [-1, 65, 1000])
def test_impossible_numbers_of_devices_are_refused(count: int) -> None:
    with pytest.raises(ValueError, match="number of devices from 1 to 64"), fake_mode(gpu=count):
        pass


def test_constants_are_made_on_the_device() -> None:
    with fake_mode(gpu=2):
        assert torch.tensor([1.0, 2.0], device="cuda").device == torch.device("cuda:0")
        assert torch.as_tensor([[1]], device="cuda:1").shape == (1, 1)
        assert torch.tensor(1.0).cuda().new_tensor([2.0]).device == torch.device("cuda:0")
        assert torch.Tensor([1.0]).cuda().is_cuda


def test_default_device_and_device_contexts() -> None:
    with fake_mode(gpu=2), torch.device("cuda:1"):
        assert torch.ones(1).device == torch.device("cuda:1")
        assert torch.tensor([1.0]).device == torch.device("cuda:1")
        assert nn.Linear(2, 2).weight.device == torch.device("cuda:1")


@pytest.fixture
def default_types() -> Iterator[None]:
    """Restore PyTorch's defaults."""
    yield
    torch.set_default_device(None)
    torch.set_default_dtype(torch.float32)


def default_type() -> tuple[torch.dtype, str]:
    made = torch.empty(1)
    return made.dtype, made.device.type


HALF_ON_CUDA = torch.float16, "cuda"


@pytest.mark.usefixtures("default_types")
@pytest.mark.filterwarnings("ignore:torch.set_default_tensor_type")
def test_default_tensor_type_may_be_one_of_cuda() -> None:
    with fake_mode(gpu=True):
        torch.set_default_tensor_type(torch.cuda.HalfTensor)
        assert (torch.randn(2).dtype, nn.Linear(2, 2).weight.device.type) == HALF_ON_CUDA
        assert {torch.arange(3).device.type, torch.tensor([1.0]).device.type} == {"cuda"}
        with pytest.raises(TypeError, match="only floating-point types are supported"):
            torch.set_default_tensor_type("torch.cuda.LongTensor")
        torch.set_default_tensor_type("torch.FloatTensor")
        assert default_type() == (torch.float32, "cpu")
        torch.set_default_tensor_type("torch.cuda.FloatTensor")
    assert default_type() == (torch.float32, "cpu")
    if not torch.backends.cuda.is_built():  # a build for CUDA accepts the type, and raises in the next factory
        with pytest.raises(TypeError, match="type torch.cuda.FloatTensor not available"):
            torch.set_default_tensor_type(torch.cuda.FloatTensor)


@pytest.mark.usefixtures("default_types")
@pytest.mark.filterwarnings("ignore:torch.set_default_tensor_type")
def test_default_tensor_type_lasts_until_the_outermost_block_ends() -> None:
    with fake_mode(gpu=2):
        torch.set_default_tensor_type(torch.cuda.HalfTensor)
        with fake_mode(gpu=2):
            assert default_type() == HALF_ON_CUDA
        assert default_type() == HALF_ON_CUDA
        with fake_mode(gpu=2):
            torch.set_default_tensor_type(torch.cuda.DoubleTensor)
        assert default_type() == (torch.float64, "cuda")
    assert default_type() == (torch.float32, "cpu")


@pytest.mark.usefixtures("default_types")
@pytest.mark.filterwarnings("ignore:torch.set_default_tensor_type")
def test_default_tensor_type_holds_on_threads_in_the_block() -> None:
    with fake_mode(gpu=2), threads_inherit_blocks(), ThreadPoolExecutor(1) as pool:
        torch.set_default_tensor_type(torch.cuda.HalfTensor)
        assert pool.submit(default_type).result() == HALF_ON_CUDA
        assert default_type() == HALF_ON_CUDA
    assert default_type() == (torch.float32, "cpu")


@pytest.mark.usefixtures("default_types")
@pytest.mark.filterwarnings("ignore:torch.set_default_tensor_type")
def test_default_device_of_the_program_takes_precedence_over_the_default_tensor_type() -> None:
    torch.set_default_device("meta")
    with fake_mode(gpu=2):
        torch.set_default_tensor_type(torch.cuda.HalfTensor)
        assert default_type() == (torch.float16, "meta")
    assert default_type() == (torch.float32, "meta")
    torch.set_default_device(None)
    with fake_mode(gpu=2):
        torch.set_default_tensor_type(torch.cuda.HalfTensor)
        torch.set_default_device("cuda:1")
        torch.set_default_tensor_type(torch.FloatTensor)
        assert torch.empty(1).device == torch.device("cuda:1")


def test_real_tensors_and_modules_move_to_fake_devices() -> None:
    tensor, model = torch.ones(2, 3), nn.Linear(3, 4)
    values = model.weight.detach().clone()
    with fake_mode(gpu=True):
        assert is_fake(tensor.cuda())
        assert is_fake(tensor.to("cuda", torch.float16, non_blocking=True))
        moved = fake_like(model, device="cuda")
        assert moved(tensor.cuda()).shape == (2, 4)
    assert torch.equal(model.weight, values)
    assert not is_fake(tensor)


def test_pinned_memory_is_a_copy() -> None:
    with fake_mode(gpu=True):
        tensor = torch.ones(2, 3).t()
        pinned = tensor.pin_memory()
        assert (pinned.shape, pinned.stride(), pinned.device.type) == ((3, 2), (1, 3), "cpu")
        assert pinned.untyped_storage()._cdata != tensor.untyped_storage()._cdata
        assert torch.zeros(3, pin_memory=True).shape == (3,)


class TestOutside:
    def test_everything_is_as_before(self) -> None:
        names = ("is_available", "device_count", "current_device", "synchronize", "get_rng_state", "_lazy_init")
        before = [getattr(torch.cuda, name) for name in names]
        with pytest.raises(ZeroDivisionError), fake_mode(gpu=2), fake_mode(gpu=4):
            torch.cuda.device_count() / 0
        assert [getattr(torch.cuda, name) for name in names] == before
        assert not torch.cuda.is_available()
        assert torch.accelerator.device_count() == 0
        with pytest.raises((RuntimeError, AssertionError), match="CUDA|NVIDIA"):
            torch.ones(1, device="cuda")
        with pytest.raises((RuntimeError, AssertionError), match="CUDA|NVIDIA"):
            torch.tensor([1.0], device="cuda")

    def test_inner_block_ends_before_outer_one(self) -> None:
        with fake_mode(gpu=2):
            with fake_mode(gpu=4):
                assert torch.cuda.device_count() == 4
            with fake_mode():
                assert torch.cuda.device_count() == 2
            assert torch.cuda.device_count() == 2

    def test_other_threads_see_nothing(self) -> None:
        found: list[object] = []

        def look() -> None:
            found.extend([torch.cuda.is_available(), torch.cuda.device_count(), is_fake(torch.ones(1))])
            weight = torch.ones(2, requires_grad=True)
            (weight * 2).sum().backward()
            found.append(weight.grad.tolist())
            for name_it in (
                lambda: torch.ones(1, device="cuda"),
                lambda: torch.ones(1).cuda(),
                lambda: torch.tensor(1.0, device="cuda"),
                lambda: nn.Linear(2, 2).to("cuda"),
            ):
                try:
                    found.append(name_it())
                except (RuntimeError, AssertionError):
                    found.append("refused")

        with fake_mode(gpu=2):
            thread = threading.Thread(target=look)
            thread.start()
            thread.join()
            assert torch.cuda.device_count() == 2
        assert found == [False, 0, False, [2.0, 2.0], *(["refused"] * 4)]

    def test_threads_have_their_own_devices(self) -> None:
        errors: list[BaseException] = []
        barrier = threading.Barrier(4)

        def work(count: int) -> None:
            try:
                for _ in range(20):
                    with fake_mode(gpu=count):
                        barrier.wait()
                        assert torch.cuda.device_count() == count
                        assert torch.tensor(2.0, device="cuda").item() == 2.0
                        weight = torch.ones(2, device=f"cuda:{count - 1}", requires_grad=True)
                        (weight * 2).sum().backward()
                        assert weight.grad is not None
                        assert weight.grad.device.index == count - 1
            except BaseException as error:
                errors.append(error)
                barrier.abort()

        threads = [threading.Thread(target=work, args=(count,)) for count in range(1, 5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors

    def test_inner_block_has_its_own_current_device(self) -> None:
        with fake_mode(gpu=8):
            torch.cuda.set_device(7)
            with fake_mode(gpu=2):
                assert torch.cuda.current_device() == 0
                assert torch.ones(1, device="cuda").device == torch.device("cuda:0")
            assert torch.cuda.current_device() == 7

    def test_backward_has_the_devices_of_its_block(self) -> None:
        counts: list[int] = []
        with fake_mode(gpu=8):
            pass
        with fake_mode(gpu=2):
            weight = torch.ones(2, device="cuda", requires_grad=True)
            weight.register_hook(lambda grad: counts.append(torch.cuda.device_count()))
            weight.sum().backward()
        assert counts == [2]

    def test_block_that_is_left_before_a_later_one_leaves_that_in_force(self) -> None:
        def devices(count: int) -> Iterator[int]:
            with fake_mode(gpu=count):
                while True:
                    yield torch.cuda.device_count()

        outer, inner = devices(2), devices(8)
        assert (next(outer), next(inner)) == (2, 8)
        outer.close()
        assert next(inner) == 8
        inner.close()
        assert not torch.cuda.is_available()

    def test_leaving_a_block_on_another_thread_is_an_error(self) -> None:
        errors: list[Exception] = []
        block = fake_mode(gpu=2)

        def enter() -> None:
            block.__enter__()

        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
        with pytest.raises(RuntimeError, match=r"fake_mode\(.*\) was left on a thread where it is not open"):
            block.__exit__(None, None, None)
        assert not errors
        assert not torch.cuda.is_available()
        with pytest.raises((RuntimeError, AssertionError), match="CUDA|NVIDIA"):
            torch.ones(1, device="cuda")

    def test_checkpoint_is_recomputed_as_in_the_block(self) -> None:
        with fake_mode(gpu=True):
            layer = nn.Linear(4, 4, device="cuda")
            x = torch.ones(2, 4, device="cuda", requires_grad=True)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = checkpoint(layer, x, use_reentrant=False).sum()
        loss.backward()
        assert x.grad is not None
        assert x.grad.dtype == torch.float32

    def test_backward_may_name_cuda(self) -> None:
        class Named(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
                return x.clone()

            @staticmethod
            def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
                return grad * torch.ones(1, device="cuda")

        with fake_mode(gpu=True):
            x = torch.ones(2, device="cuda", requires_grad=True)
            loss = Named.apply(x).sum()  # type: ignore[no-untyped-call]
        with fake_mode():
            loss.backward()
        assert x.grad is not None

    def test_fakes_keep_working(self) -> None:
        with fake_mode(gpu=2):
            model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU()).to("cuda:1")
            optimizer = torch.optim.AdamW(model.parameters())
            batch = torch.ones(3, 4, device="cuda:1")
        for _ in range(2):
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
        assert model[0].weight.grad.device == torch.device("cuda:1")
        (gradient,) = torch.autograd.grad(model(batch).sum(), model[0].bias)
        assert gradient.device == torch.device("cuda:1")
        assert is_fake(torch.linalg.matrix_rank(batch))

    def test_real_tensors_train_as_before(self) -> None:
        with fake_mode(gpu=True):
            torch.ones(2, device="cuda", requires_grad=True).sum().backward()
        weight = torch.ones(2, requires_grad=True)
        (weight * 3).sum().backward()
        assert weight.grad is not None
        assert weight.grad.tolist() == [3.0, 3.0]

    def test_backward_in_a_separate_thread(self) -> None:
        with fake_mode(gpu=True):
            weight = torch.ones(2, device="cuda", requires_grad=True)
            loss = (weight * 2).sum()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        assert weight.grad is not None
        assert weight.grad.is_cuda


def test_accelerator_is_the_threads() -> None:
    def accelerators() -> tuple[Any, ...]:
        return torch._C._get_accelerator(), torch.accelerator.current_accelerator(), torch.accelerator.is_available()

    outside = accelerators()  # builds for CUDA differ: they have an unavailable accelerator
    with fake_mode(gpu=2):
        assert accelerators() == (torch.device("cuda"), torch.device("cuda"), True)
    assert accelerators() == outside


def test_module_of_the_accelerator_is_the_threads() -> None:
    outside = torch.get_device_module()
    with fake_mode(gpu=2):
        assert torch.get_device_module() is torch.cuda
    assert torch.get_device_module() is outside


def test_data_parallel_scatters_to_one_device() -> None:
    with fake_mode(gpu=2):
        module = nn.DataParallel(nn.Linear(4, 3).cuda(), device_ids=[0])
        output = module(torch.randn(6, 4))
        assert (output.shape, output.device) == ((6, 3), torch.device("cuda", 0))


@pytest.mark.parametrize(("sizes", "found"), [(None, [3, 2]), ([1, 4], [1, 4])])
def test_scatter_divides_among_devices(sizes: list[int] | None, found: list[int]) -> None:
    with fake_mode(gpu=2):
        parts = torch.nn.parallel.comm.scatter(torch.ones(5, 2), [1, 0], sizes)
        assert [len(part) for part in parts] == found
        assert [part.device.index for part in parts] == [1, 0]
        out = [torch.empty(2, 2, device="cuda:0"), torch.empty(3, 2, device="cuda:1")]
        assert torch.nn.parallel.comm.scatter(torch.ones(5, 2), out=out)[1] is out[1]
        with pytest.raises(RuntimeError, match=r"len\(devices\) = 2 and len\(chunk_sizes\) = 1"):
            torch.nn.parallel.comm.scatter(torch.ones(5, 2), [0, 1], [5])


def test_addresses_are_compared_in_comprehensions() -> None:
    """Like `Accelerator._get_named_parameters()`, which has a comprehension."""
    functions: dict[str, Any] = {"__name__": "accelerate.accelerator"}
    exec("def _get_named_parameters(module): return {n: p.data_ptr() for n, p in module.named_parameters()}", functions)
    with fake_mode(gpu=True):
        module = nn.Linear(2, 2, device="cuda")
        addresses = functions["_get_named_parameters"](module)
        assert len(set(addresses.values())) == 2
        module.weight.data = module.weight.data.view(-1)
        assert functions["_get_named_parameters"](module) == addresses
        with pytest.raises(RuntimeError, match="This tensor is fake"):
            {name: p.data_ptr() for name, p in module.named_parameters()}


@pytest.mark.parametrize("accumulate", [False, True])
def test_masks_and_indices_combine(accumulate: bool) -> None:
    """The mask has as many elements as its dimension, and represents as many indices as there are true elements."""
    for fake_cuda in (False, True):
        with fake_mode(gpu=fake_cuda):
            device = "cuda" if fake_cuda else "cpu"
            x = torch.zeros(4, 5, 6, device=device)
            mask = torch.empty(4, dtype=torch.bool, device=device)
            index = torch.zeros(2, dtype=torch.int64, device=device)
            x[mask, index] = 1.0
            x.index_put_((mask, index), torch.ones(6, device=device), accumulate=accumulate)
            x[[True, False, True, False], [0, 1]] = 1.0
            assert x.shape == (4, 5, 6)


class TestMixedDevices:
    """Rules of CUDA kernels, from PyTorch's sources."""

    @pytest.fixture(autouse=True)
    def cuda(self) -> Iterator[None]:
        with fake_mode(gpu=2):
            yield

    @pytest.mark.parametrize(
        ("call", "message"),
        [
            (lambda cpu, cuda, n: cpu[torch.zeros(2, dtype=torch.int64, device="cuda")], "indices should be either on"),
            (lambda cpu, cuda, n: cuda[torch.zeros(2, dtype=torch.int64, device="cuda:1")], "indexed tensor .cuda:0."),
            (lambda cpu, cuda, n: cuda.index_put_((torch.tensor([0, 1]),), cpu[:2]), "same device"),
            (lambda cpu, cuda, n: cuda.index_put((torch.tensor([0]),), torch.ones(1)), "same device"),
            (lambda cpu, cuda, n: cpu.index_put_((torch.tensor([0, 1]),), cuda[:2]), "same device"),
            (lambda cpu, cuda, n: n.add_(cuda[0, 0]), "same device"),
            (lambda cpu, cuda, n: torch.add(cuda[0, 0], 1, out=n), "same device"),
            (lambda cpu, cuda, n: torch.addmm(n, cuda, cuda), "same device"),
            (lambda cpu, cuda, n: cuda.gather(0, torch.tensor(0)), "same device"),
            (lambda cpu, cuda, n: cuda.index_select(0, torch.tensor(0)), "same device"),
            (lambda cpu, cuda, n: torch.dot(cuda[0], cpu[0]), "same device"),
            (lambda cpu, cuda, n: nn.functional.nll_loss(cuda[0], torch.tensor(0)), "same device"),
            (lambda cpu, cuda, n: cuda.clamp(min=n), "same device"),
            (lambda cpu, cuda, n: torch.embedding(cuda, torch.tensor(0)), "same device"),
        ],
    )
    def test_are_refused(self, call: Callable[..., object], message: str) -> None:
        for _ in range(2):
            with pytest.raises(RuntimeError, match=message):
                call(torch.ones(3, 3), torch.ones(3, 3, device="cuda"), torch.tensor(1.0))

    @pytest.mark.parametrize(
        "call",
        [
            lambda cuda, n: cuda[torch.tensor([0, 1])],
            lambda cuda, n: cuda[torch.tensor(0)],
            lambda cuda, n: cuda.index_put_((torch.tensor([0, 1]),), n),
            lambda cuda, n: cuda.index_put_((cuda > 0,), torch.ones(1)),
            lambda cuda, n: cuda + n,
            lambda cuda, n: cuda.mul_(n),
            lambda cuda, n: torch.where(cuda > 0, cuda, n),
            lambda cuda, n: cuda.masked_fill(cuda > 0, n),
            lambda cuda, n: cuda.fill_(n),
            lambda cuda, n: torch._foreach_mul([cuda], n)[0],
            lambda cuda, n: cuda.copy_(n),
            lambda cuda, n: torch.lerp(cuda, cuda, 0.5),
        ],
    )
    def test_are_accepted_where_kernels_take_numbers(self, call: Callable[..., torch.Tensor]) -> None:
        assert call(torch.ones(3, 3, device="cuda"), torch.tensor(1.0)).device == torch.device("cuda:0")

    def test_number_on_the_cpu_is_filled_with_one_of_a_device(self) -> None:
        assert torch.tensor(1.0).fill_(torch.tensor(2.0, device="cuda")).device == torch.device("cpu")


LEGACY_ARGUMENTS: dict[str, tuple[object, ...]] = {
    "nothing": (),
    "sizes": (3, 4),
    "size": (torch.Size([2, 3]),),
    "list": ([1.0, 2.0],),
    "lists": ([[1, 2], [3, 4]],),
    "scalar-in-list": ([0],),
}


@pytest.mark.parametrize("arguments", LEGACY_ARGUMENTS.values(), ids=LEGACY_ARGUMENTS)
@pytest.mark.parametrize("name", ["FloatTensor", "HalfTensor", "BFloat16Tensor", "LongTensor", "ByteTensor"])
def test_legacy_constructors_match_those_of_the_cpu(name: str, arguments: tuple[object, ...]) -> None:
    expected = getattr(torch, name)(*arguments)
    with fake_mode(gpu=2):
        torch.cuda.set_device(1)
        made = getattr(torch.cuda, name)(*arguments)
        assert isinstance(made, getattr(torch.cuda, name))
    assert is_fake(made)
    assert (made.shape, made.dtype, made.device) == (expected.shape, expected.dtype, torch.device("cuda:1"))


def test_legacy_constructors_take_devices_and_tensors() -> None:
    with fake_mode(gpu=2):
        assert torch.cuda.FloatTensor(3, device="cuda:1").device.index == 1
        x = torch.ones(3, device="cuda")
        assert torch.cuda.FloatTensor(x).is_set_to(x)
        with pytest.raises(RuntimeError, match="legacy constructor expects device type: cuda"):
            torch.cuda.FloatTensor(3, device="cpu")
    if torch.backends.cuda.is_built():
        error: tuple[type[Exception], str] = RuntimeError, "Found no NVIDIA driver"
    else:
        error = TypeError, "type torch.cuda.FloatTensor not available"
    if not torch.cuda.is_available():
        with pytest.raises(error[0], match=error[1]):
            torch.cuda.FloatTensor(3)


@pytest.mark.parametrize("dim", [-1, 0])
def test_kernels_over_a_dimension_accept_numbers(dim: int) -> None:
    with fake_mode(gpu=1):
        number = torch.empty((), device="cuda")
        assert torch.logsumexp(number, dim).shape == torch.ops.aten._safe_softmax(number, dim).shape == ()


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (lambda: torch._neg_view(torch.ones(2)), "Negative"),
        (lambda: torch.ones(2, dtype=torch.complex64).conj(), "Conjugate"),
        (lambda: torch._efficientzerotensor(2), "ZeroTensor"),
    ],
)
def test_oldest_factories_refuse_the_bits_that_eager_ones_refuse(make: Callable[[], torch.Tensor], key: str) -> None:
    for factory in (lambda t: t.new_tensor(1.0), lambda t: t.new(3)):
        with pytest.raises(RuntimeError, match=f"DispatchKey {key} doesn't correspond to a device"):
            factory(make())
        with fake_mode(), pytest.raises(RuntimeError, match=f"DispatchKey {key} doesn't correspond to a device"):
            factory(make())
