"""Differences between the metadata of Meta kernels and of eager kernels: NOTE [Errors of real tensors]."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from comparisons import metadata
from torch import Tensor, nn
from torch.nn import functional

from torchext.deferred_init import deferred_init, is_deferred, materialize_tensor
from torchext.fake import fake_like, fake_mode

Program = Callable[[], Tensor]


def column() -> Tensor:
    """Return two rows of one element, with strides (1, 2). With one column, the stride 2 is unused."""
    return torch.ones(1, 2).t()


PROGRAMS: dict[str, Program] = {
    "empty convolution": lambda: functional.conv1d(torch.ones(0, 2, dtype=torch.int64), torch.ones(2, 0, 2)),
    "addr": lambda: torch.addr(torch.ones(2, 3), torch.ones(2), torch.ones(3, dtype=torch.float64)),
    "addr of many": lambda: torch.addr(torch.ones(300, 300), torch.ones(300), torch.ones(300, dtype=torch.float64)),
    "huber_loss": lambda: functional.huber_loss(torch.ones(3), torch.ones(3, dtype=torch.float64), reduction="none"),
    "nothing is left unshuffled": lambda: functional.pixel_unshuffle(torch.ones(0, 1, 6, 6), 3),
    "zeros_like a column": lambda: torch.zeros_like(column()),
    "full_like a column": lambda: torch.full_like(column(), 2.0),
    "relu of a column": lambda: column().relu(),
    "column and number": lambda: column() + 1,
    "bytes of a column": lambda: torch.ones_like(column()).mT.view(torch.uint8),
    "batch norm": lambda: nn.BatchNorm1d(3)(torch.ones(4, 5, 3).transpose(1, 2)),
    "batch norm of images": lambda: nn.BatchNorm2d(3)(torch.ones(4, 5, 3, 6).transpose(1, 2)),
    "many in batch norm": lambda: nn.BatchNorm1d(30)(torch.ones(400, 50, 30).transpose(1, 2)),
    "normal": lambda: torch.normal(torch.ones(4, 6).t(), 1.0),
    "many in normal": lambda: torch.normal(torch.ones(400, 600).t(), torch.ones(400, 600).t()),
    "poisson": lambda: torch.poisson(torch.ones(400, 600).t()),
    "copysign": lambda: torch.copysign(torch.ones(400, 600).t(), torch.ones(())),
    "floor_divide": lambda: torch.ones(400, 600).t() // torch.ones(()),
    "many in floor_divide": lambda: torch.ones(400, 600).t() // torch.ones(600, 1),
    "many in rrelu": lambda: functional.rrelu(torch.ones(20_000, 6).t(), training=True),
    "channel_shuffle": lambda: functional.channel_shuffle(
        torch.ones(2, 4, 9, 9).contiguous(memory_format=torch.channels_last), 2
    ),
    "cpu with an index": lambda: torch.ones(2, device="cpu:0"),
    "moved to the cpu with an index": lambda: torch.ones(2).to("cpu:1"),
    "number on the cpu with an index": lambda: torch.tensor(5, device="cpu:0"),
    "like one on the cpu with an index": lambda: torch.empty_like(torch.ones(2), device="cpu:1"),
    "meta with an index": lambda: torch.ones(2, device="meta:0"),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_fakes_look_like_real_tensors(name: str) -> None:
    wanted = metadata(PROGRAMS[name]())
    with fake_mode():
        for _ in range(2):  # the second result comes from the cache
            assert metadata(PROGRAMS[name]()) == wanted


@pytest.mark.parametrize("name", PROGRAMS)
def test_deferred_tensors_look_like_real_ones(name: str) -> None:
    wanted = metadata(PROGRAMS[name]())
    tensor = deferred_init(PROGRAMS[name])
    assert metadata(tensor) == wanted
    if is_deferred(tensor):
        assert metadata(materialize_tensor(tensor)) == wanted


def test_default_device_may_have_an_index() -> None:
    with fake_mode(), torch.device("cpu:0"):
        assert torch.ones(2).device == torch.device("cpu")
        assert fake_like(torch.ones(2), device="cpu:0").device == torch.device("cpu")


def shuffled_into(out: Tensor) -> Tensor:
    result = torch.ops.aten.channel_shuffle.out(torch.rand(2, 4, 3, 3), 2, out=out)
    assert isinstance(result, Tensor)
    return result


def test_result_that_is_an_argument_stays_it() -> None:
    """In inference mode no kernel above the `Fake` key replaces the result by the argument."""
    with fake_mode(), torch.inference_mode():
        out = torch.empty(2, 4, 3, 3)
        assert shuffled_into(out) is out


@pytest.mark.parametrize("is_wanted", [True, False])
def test_attention_returns_no_weights_that_are_not_wanted(is_wanted: bool) -> None:
    attention, x = nn.MultiheadAttention(8, 2, batch_first=True).eval(), torch.ones(2, 3, 8)
    fake_attention, fake_x = fake_like(attention), fake_like(x)
    with torch.no_grad():  # lets the module take its fast path
        _, weights = fake_attention(fake_x, fake_x, fake_x, need_weights=is_wanted)
    assert (weights is not None) == is_wanted


@pytest.mark.parametrize(
    ("dtype", "other"),
    [(torch.float32, torch.float64), (torch.float64, torch.complex128), (torch.int64, torch.float16)],
    ids=str,
)
def test_cuda_converts_expanded_tensors_without_a_copy(dtype: torch.dtype, other: torch.dtype) -> None:
    """On the CPU `TensorIteratorBase::compute_types()` copies them first, and the copy is contiguous."""

    def strides(device: str) -> tuple[int, ...]:
        expanded = torch.ones((), dtype=dtype, device=device).expand(2, 3, 2, 3)
        images = torch.ones(2, 3, 2, 3, dtype=other, device=device).to(memory_format=torch.channels_last)
        return (expanded * images).stride()

    with fake_mode(gpu=True):
        assert strides("cpu") == (18, 6, 3, 1)
        assert strides("cuda") == (18, 1, 9, 3)
    assert strides("cpu") == (18, 6, 3, 1)


def test_where_copies_expanded_tensors_on_every_device() -> None:
    """`where_self_out()` converts both tensors before its iterator."""

    def strides(device: str) -> tuple[int, ...]:
        condition = torch.ones((), dtype=torch.bool, device=device).expand(2, 3, 2, 3)
        expanded = torch.ones((), device=device).expand(2, 3, 2, 3)
        images = torch.ones(2, 3, 2, 3, dtype=torch.float64, device=device).to(memory_format=torch.channels_last)
        return torch.where(condition, expanded, images).stride()

    with fake_mode(gpu=True):
        assert strides("cuda") == strides("cpu")


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning")
def test_dense_and_sparse_fakes_on_cuda_are_added() -> None:
    with fake_mode(gpu=True):
        sparse = torch.sparse_coo_tensor([[0, 1], [1, 2]], torch.ones(2, device="cuda"), (3, 3), device="cuda")
        added = torch.ones(3, 3, device="cuda") + sparse
        assert (added.shape, added.device.type, added.layout) == ((3, 3), "cuda", torch.strided)


def test_sampling_by_cudnn_returns_what_its_kernels_return() -> None:
    """A build with cuDNN uses it for bilinear `grid_sample(align_corners=True)`."""
    with fake_mode(gpu=True):
        images = torch.ones(2, 3, 5, 7, device="cuda").to(memory_format=torch.channels_last).requires_grad_()
        grid = torch.zeros(2, 4, 6, 2, device="cuda", requires_grad=True)
        sampled = torch.cudnn_grid_sampler(images, grid)
        sampled.sum().backward()
    assert (sampled.shape, sampled.stride()) == ((2, 3, 4, 6), (72, 24, 6, 1))
    assert images.grad is not None
    assert grid.grad is not None
    assert (images.grad.shape, grid.grad.shape) == (images.shape, grid.shape)


@pytest.mark.parametrize("grid", [(3, 4, 6, 2), (2, 4, 6, 3), (2, 4, 2)], ids=str)
def test_sampling_by_cudnn_refuses_other_shapes(grid: tuple[int, ...]) -> None:
    with fake_mode(gpu=True), pytest.raises(RuntimeError, match="Invalid arguments to cudnn_grid_sampler"):
        torch.cudnn_grid_sampler(torch.ones(2, 3, 5, 7, device="cuda"), torch.zeros(grid, device="cuda"))
