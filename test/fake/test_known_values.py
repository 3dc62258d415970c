"""Small tensors keep their values while the values of their inputs are known."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from common import has_same_bits
from fuzz.memory import OUTERS, Outer
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from torchext import _C
from torchext.fake import DataDependentError, fake_like, fake_mode, is_fake
from torchext.fake.values import assuming_values

UNKNOWN = "needs the values of its arguments"


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.tensor(3.0),
        lambda: torch.tensor([3]),
        lambda: torch.tensor(True),
        lambda: torch.tensor(1 + 2j),
        lambda: torch.zeros(()),
        lambda: torch.ones(1, 1, dtype=torch.bfloat16),
        lambda: torch.full((1,), 2.5, dtype=torch.float64),
        lambda: torch.arange(7, 8),
        lambda: torch.scalar_tensor(4),
        lambda: torch.zeros_like(torch.tensor(3.0)),
        lambda: torch.tensor(3.0, requires_grad=True),
        lambda: torch.tensor(2.0).to(torch.int32),
        lambda: torch.tensor([2.0]).view(()).t(),
        lambda: torch.tensor(1 + 2j).conj().imag,
        lambda: torch.tensor(3.0) * torch.tensor(2) + 1,
        lambda: torch.stack([torch.tensor(1.0), torch.tensor(2.0)]).sum(),
        lambda: torch.tensor(4.0).sqrt().clone().detach(),
        lambda: torch.tensor(3.0) * torch.ones(1).numel(),
        lambda: torch.tensor(3.0).expand(1).contiguous(),
        lambda: copy.deepcopy(torch.tensor(5.0)),
        lambda: torch.tensor(2.0).max(torch.tensor(7.0)),
        lambda: torch.where(torch.tensor(True), torch.tensor(1.0), torch.tensor(2.0)),
        lambda: nn.Parameter(torch.tensor(0.5)),
        lambda: torch.empty(1).new_ones(()),
    ],
)
def test_value_is_that_of_the_real_run(make: Callable[[], torch.Tensor]) -> None:
    with fake_mode():
        tensor = make()
        assert is_fake(tensor)
        assert tensor.item() == make().item()
    assert tensor.item() == make().item()


TABLES: dict[str, Callable[[], object]] = {
    "a list": lambda: torch.tensor([3, 1, 2]),
    "a comparison": lambda: torch.ones(3).max() == 0,
    "lengths": lambda: (torch.tensor([[1, 2, 0], [3, 0, 0]]) != 0).sum(1).max(),
    "a mask": lambda: torch.arange(6).view(2, 3)[torch.tensor([[True, False, True], [False, True, False]])],
    "a mask that is written": lambda: torch.zeros(3).index_put((torch.arange(3) > 0,), torch.tensor([5.0, 6.0])),
    "a causal mask": lambda: torch.ones(4, 4, dtype=torch.bool).tril(),
    "a written part": lambda: torch.zeros(2, 3).select(1, 1).add_(2)._base,
    "a fill of an empty tensor": lambda: torch.empty(3).fill_(2).view(3, 1).expand(3, 2),
    "ones in place": lambda: torch.empty(2, 3).fill_(1).t()[1:],
    "zeros in place": lambda: torch.tensor([1.0, 2.0]).zero_() + 1,
    "negative zeros": lambda: 1 / torch.empty(2).fill_(-0.0),
    "an output": lambda: torch.add(torch.ones(2), 1, out=torch.empty(0)),
    "a range": lambda: torch.cat([torch.arange(3), torch.linspace(0, 1, 2).long()]).flip(0).cumsum(0),
    "unique values": lambda: torch.unique(torch.tensor([3, 1, 3]), return_counts=True)[1],
    "sorted values": lambda: torch.tensor([3, 1, 2]).sort(descending=True).indices,
    "repetitions": lambda: torch.arange(3).repeat_interleave(torch.tensor([2, 0, 1])),
    "one-hot": lambda: nn.functional.one_hot(torch.tensor([2, 0])),
    "conjugated": lambda: torch.tensor([1 + 2j, 3.0]).conj() * 1j,
    "viewed as another dtype": lambda: torch.tensor([1.0, 2.0]).view(torch.int32),
    "a list of fakes": lambda: torch.tensor([torch.tensor(1.0), torch.tensor([2.0])[0]]),
    "batches": lambda: (
        nn.utils.rnn.pack_padded_sequence(torch.ones(3, 2, 1), torch.tensor([3, 1], device="cpu")).batch_sizes
    ),
    "read in a transform": lambda: torch.vmap(torch.sum)(torch.ones(2, 3)),
}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", TABLES)
def test_tables_have_the_values_of_the_real_run(name: str, device: str) -> None:
    wanted = TABLES[name]().tolist()  # type: ignore[attr-defined]
    with fake_mode(gpu=True):
        if device == "cpu":
            found = TABLES[name]()
        else:
            with torch.device(device):
                found = TABLES[name]()
        assert is_fake(found)  # type: ignore[arg-type]
        assert found.tolist() == wanted  # type: ignore[attr-defined]


def test_values_are_moved_to_devices_and_back() -> None:
    data = torch.tensor([[5, 6], [7, 0]])
    with fake_mode(gpu=True):
        batch = data.to("cuda", non_blocking=True)
        assert int((batch != 0).sum(1).max()) == 2
        assert batch[batch != 0].shape == (3,)
        assert batch.cpu().numpy().tolist() == data.tolist()
        with pytest.raises(RuntimeError, match="numpy.* needs the data"):
            batch.numpy()
    data.zero_()
    assert batch.tolist() == [[5, 6], [7, 0]], "a copy"


def test_array_of_known_values_shares_them() -> None:
    with fake_mode():
        tensor = torch.zeros(3)
        array = tensor.numpy()
        array[0] = 5
        tensor[1] = 6
        assert array.tolist() == tensor.tolist() == [5, 6, 0]
        with pytest.raises(RuntimeError, match="requires grad"):
            tensor.requires_grad_().numpy()


def test_unknown_data_are_cut_by_known_sizes() -> None:
    with fake_mode(gpu=True):
        data = torch.empty(2, 7, 3, device="cuda")
        lengths = torch.tensor([7, 5])
        packed = nn.utils.rnn.pack_padded_sequence(data, lengths, batch_first=True)
        assert (packed.data.shape, packed.data.device.type) == ((12, 3), "cuda")
        assert packed.batch_sizes.tolist() == [2, 2, 2, 2, 2, 1, 1]
        output, _ = nn.LSTM(3, 4, device="cuda")(packed)
        assert nn.utils.rnn.pad_packed_sequence(output, batch_first=True)[0].shape == (2, 7, 4)
        longer = nn.utils.rnn.pack_padded_sequence(data, torch.tensor([9, 1]), batch_first=True)
        assert longer.data.shape == (8, 3)  # as for real tensors, without an error
        mask = torch.tensor([True, False, True, True])
        assert torch.masked_select(torch.empty(3, 4), mask).shape == (9,)
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            torch.masked_select(torch.empty(3, 4, device="cuda"), mask)
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            torch.masked_select(torch.empty(3, 4, device="cuda"), torch.tensor(True))
        assert torch.empty(3, 4)[:, mask].shape == (3, 3)
        assert [part.shape[0] for part in torch.tensor_split(torch.empty(6), torch.tensor([1, 3]))] == [1, 2, 3]
        assert torch.repeat_interleave(torch.empty(2, 3), torch.tensor([3, 1]), dim=0).shape == (4, 3)
        positions = torch.tensor([1, 3, 3])
        for weights, minlength, dtype in (
            (torch.empty(3), 0, torch.float32),
            (torch.empty(3).long(), 9, torch.float64),
        ):
            counts = torch.bincount(positions, weights, minlength)
            assert (counts.shape, counts.dtype) == ((max(minlength, 4),), dtype)
        assert torch.bincount(positions, torch.empty(3), minlength=2**40).shape == (2**40,)  # without memory
        with pytest.raises(RuntimeError, match=r"Expected all tensors to be on the same device.*aten::bincount"):
            torch.bincount(positions, torch.empty(3, device="cuda"))


def test_known_values_that_are_out_of_bounds_are_refused() -> None:
    with fake_mode():
        with pytest.raises(IndexError, match="index 7 is out of bounds"):
            torch.ones(3)[torch.tensor([7])]
        with pytest.raises(RuntimeError, match="singular"):
            torch.linalg.inv(torch.zeros(3, 3))


def test_storage_that_has_grown_is_unknown() -> None:
    with fake_mode():
        tensor = torch.arange(4)
        tensor.untyped_storage().resize_(2**21)
        torch.empty(0, dtype=torch.int64).set_(tensor.untyped_storage(), 0, (2**18,)).random_()
        tensor.untyped_storage().resize_(32)
        with pytest.raises(DataDependentError, match=UNKNOWN):
            tensor.sum().item()


def test_values_of_all_fakes_are_bounded() -> None:
    with fake_mode():
        tensors = [torch.full((2**18,), 2.0) for _ in range(80)]  # 1 MiB each
        assert tensors[0].sum().item() == 2.0**19
        with pytest.raises(DataDependentError, match=UNKNOWN):
            tensors[-1].sum().item()
        del tensors[:40]
        assert torch.full((2**18,), 2.0).sum().item() == 2.0**19


def test_bound_includes_which_elements_are_known() -> None:
    with fake_mode():
        tensors = [torch.empty(2**17, dtype=torch.int64) for _ in range(40)]  # 1 MiB each
        for tensor in tensors:
            tensor[0] = 7
        assert tensors[0][0].item() == tensors[30][0].item() == 7
        with pytest.raises(DataDependentError, match=UNKNOWN):
            tensors[32][0].item()
        del tensors[:20], tensor
        whole = [torch.full((2**18,), 2.0) for _ in range(24)]
        assert whole[-1].sum().item() == 2.0**19


def test_calls_continue_without_room_for_values() -> None:
    with fake_mode():
        tensors = [torch.full((2**18,), 2.0) for _ in range(64)]
        tensors += [torch.full((1000,), 2.0) for _ in range(2**20 // 4000)]  # the last large one may not fit
        unknown = torch.empty(1000).fill_(2.5)
        assert torch.empty(1000).copy_(torch.tensor(3.0)).shape == (1000,)
        assert torch.add(tensors[0][:1000], 1, out=torch.empty(1000)).shape == (1000,)
        del tensors
        with pytest.raises(DataDependentError, match=UNKNOWN):
            unknown.sum().item()


def test_memory_of_arrays_is_shared() -> None:
    array = np.zeros(3)
    with fake_mode():
        tensor = torch.from_numpy(array)
        array[:] = [1, 2, 3]
        tensor.add_(5)
        assert tensor.tolist() == array.tolist() == [6, 7, 8]
        buffer = torch.zeros(2)
        shown = buffer.numpy()
        for step in (1, 2):
            buffer.zero_()
            shown[:] = step
            assert buffer.tolist() == [step, step]


def test_output_that_is_a_part_leaves_the_rest() -> None:
    with fake_mode():
        base = torch.arange(10, 20)
        torch.masked_select(torch.tensor([1, 2, 3]), torch.tensor([True, False, True]), out=base[:2])
        assert base.tolist() == [1, 3, *range(12, 20)]
        unknown = torch.empty(10, dtype=torch.int64)
        torch.nonzero(torch.tensor([1, 0, 1]), out=unknown[:2].view(2, 1))
        with pytest.raises(DataDependentError, match=UNKNOWN):
            unknown[5].item()


def test_part_that_was_written_is_known() -> None:
    with fake_mode():
        buffer = torch.empty(8, dtype=torch.int32)
        buffer[:3].copy_(torch.tensor([1, 2, 3], dtype=torch.int32))
        buffer[4] = 7
        assert buffer[:3].tolist() == [1, 2, 3]
        assert buffer.view(2, 4)[1, 0].item() == 7
        buffer[:2].add_(10)
        assert buffer[:3].tolist() == [11, 12, 3]
        for unknown in (buffer, buffer[3], buffer[2:4]):
            with pytest.raises(DataDependentError, match=UNKNOWN):
                unknown.sum().item()
        buffer[5:].random_(9)
        with pytest.raises(DataDependentError, match=UNKNOWN):
            buffer[0].item()
        buffer.fill_(5)
        assert buffer.tolist() == [5] * 8
        mask = torch.empty(3, dtype=torch.bool)
        mask[1:] = True
        assert mask[1:].tolist() == [True, True]
        numbers = torch.empty(3)
        numbers[0] = 1.5
        with pytest.raises(DataDependentError, match=UNKNOWN):
            numbers[0].item()


@pytest.mark.parametrize(
    "write",
    [
        lambda x, part: x.fill_(part),
        lambda x, part: x.__setitem__(slice(None), part),
        lambda x, part: x.masked_fill_(torch.ones(8, dtype=torch.bool), part),
        lambda x, part: x[:4].fill_(part),
    ],
)
@pytest.mark.parametrize("place", [0, 3, 7])
@pytest.mark.parametrize("dtype", [torch.int32, torch.float32, torch.uint8], ids=str)
def test_value_in_the_memory_that_is_written_is_read_first(
    dtype: torch.dtype, place: int, write: Callable[[torch.Tensor, torch.Tensor], object]
) -> None:
    def run() -> torch.Tensor:
        x = torch.empty(8)
        part = x.view(dtype)[place]
        part.fill_(4)
        write(x, part)
        return x

    expected = run()
    with fake_mode():
        known = _C.known_value(run())
    assert known is None or torch.equal(known, expected)


def test_part_that_was_written_stays_apart_from_assumed_values() -> None:
    with fake_mode(), assuming_values() as assumed:
        buffer = torch.empty(4, dtype=torch.int64)
        buffer[:2] = torch.tensor([5, 6])
        assert buffer[:2].tolist() == [5, 6]
        assert not assumed.sites
        buffer[2] = torch.randn(3).argmax()
        assert buffer[:3].tolist() == [5, 6, 1]
        assert len(assumed.sites) == 1


def test_refused_call_leaves_no_values() -> None:
    with fake_mode():
        out = torch.empty(3, dtype=torch.int64)
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            torch.remainder(torch.tensor([1, 2, 3]), torch.tensor([1, 0, 1]), out=out)
        with pytest.raises(DataDependentError, match=UNKNOWN):
            out[0].item()


def test_threads_may_write_to_parts_of_zeros() -> None:
    with fake_mode():
        for _ in range(50):
            tensor = torch.zeros(1000)
            parts = [tensor[:500], tensor[500:]]
            threads = [threading.Thread(target=part.add_, args=(1,)) for part in parts]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert tensor.sum().item() == 1000


def test_zeros_take_no_memory_until_they_are_read() -> None:
    with fake_mode():
        tensors = [torch.zeros(2**18) for _ in range(80)]
        assert tensors[-1].sum().item() == 0
        tensors[-1][0] = 3
        assert tensors[-1].sum().item() == 3


@pytest.mark.parametrize(
    "write",
    [
        lambda t: t.add_(1),
        lambda t: t.mul_(torch.tensor(2.0)),
        lambda t: t.view(1).fill_(7),
        lambda t: t.detach().sub_(3),
        lambda t: torch.add(t, t, out=t),
        lambda t: torch._foreach_add_([t, torch.tensor(0.0)], 1),
        lambda t: t.copy_(torch.tensor(9)),
    ],
)
def test_writes_change_the_value(write: Callable[[torch.Tensor], object]) -> None:
    real = torch.tensor(5.0)
    write(real)
    with fake_mode():
        fake = torch.tensor(5.0)
        alias = fake.view(1)
        write(fake)
        assert fake.item() == alias.item() == real.item()


@pytest.mark.parametrize(
    "write",
    [
        lambda t, unknown: t.add_(unknown),
        lambda t, unknown: t.view(1).copy_(unknown.view(1)),
        lambda t, unknown: torch._foreach_mul_([t], [unknown]),
        lambda t, unknown: t.uniform_(),
        lambda t, unknown: t.data.mul_(unknown),
    ],
)
def test_value_is_forgotten_when_a_fake_is_written_into_it(
    write: Callable[[torch.Tensor, torch.Tensor], object],
) -> None:
    with fake_mode():
        unknown = torch.empty(())
        tensor = torch.tensor(5.0)
        alias = tensor.detach()
        write(tensor, unknown)
        for t in (tensor, alias):
            with pytest.raises(DataDependentError, match=UNKNOWN):
                t.item()


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.empty(1),
        lambda: torch.rand(1),
        lambda: torch.randint(3, (1,)),
        lambda: torch.empty(2, 2).sum(),
        lambda: torch.ones(2**20).sum(),
        lambda: torch.randperm(5)[0],
        lambda: torch.tensor(1.0) + torch.rand(3).sum(),
        lambda: torch.empty_like(torch.tensor(3.0)),
    ],
)
def test_other_tensors_are_unknown(make: Callable[[], torch.Tensor]) -> None:
    with fake_mode(), pytest.raises(DataDependentError, match=UNKNOWN):
        make().item()


def test_value_is_forgotten_when_a_custom_operator_writes_it() -> None:
    library = torch.library.Library("torchext_test_known_values", "FRAGMENT")
    library.define("scale_(Tensor(a!) x, float factor) -> ()")
    library.impl("scale_", lambda x, factor: x.mul_(factor), "CPU")
    library.impl("scale_", lambda x, factor: None, "Meta")
    with fake_mode():
        tensor = torch.tensor(5.0)
        torch.ops.torchext_test_known_values.scale_(tensor, 2.0)
        with pytest.raises(DataDependentError, match=UNKNOWN):
            tensor.item()
    library._destroy()


def test_random_constants_draw_nothing() -> None:
    state = torch.get_rng_state()
    with fake_mode():
        torch.tensor(1.0).normal_()
        torch.bernoulli(torch.tensor(0.5))
    assert torch.equal(torch.get_rng_state(), state)


def test_operators_that_need_values_run_on_known_ones() -> None:
    with fake_mode():
        a, b = torch.tensor(2), torch.tensor(2)
        assert torch.equal(a, b)
        assert bool(a == b)
        assert a.view(1).nonzero().shape == (1, 1)
        assert torch.zeros(1).nonzero().shape == (0, 1)
        assert list(range(int(a))) == [0, 1]


def results_of(result: object) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else [t for t in result if isinstance(t, torch.Tensor)]  # type: ignore[attr-defined]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    "read",
    [
        lambda t: t.nonzero(),
        lambda t: torch.nonzero(t, out=torch.empty(0, dtype=torch.int64, device=t.device)),
        lambda t: torch.where(t),
        lambda t: torch.where(t > 0, t, 0),
        lambda t: torch.argwhere(t),
        lambda t: torch.repeat_interleave(t),
        lambda t: torch.repeat_interleave(torch.ones(1, 3, device=t.device), t, dim=0),
        lambda t: torch.unique(t, return_inverse=True, return_counts=True),
        lambda t: torch.unique_consecutive(t),
        lambda t: torch.bincount(t),
        lambda t: t[t > 0],
        lambda t: t[t < 0],
        lambda t: t.masked_select(t > 0),
        lambda t: torch.ones(1, 3, device=t.device)[t > 0],
        lambda t: torch.ones(2, 1, 3, device=t.device)[:, t < 0],
        lambda t: torch.ones(3, 1, device=t.device)[torch.tensor([0, 1], device=t.device), t[0] > 0],
        lambda t: torch.combinations(t, with_replacement=True),
    ],
)
def test_results_of_known_values_are_where_these_are(device: str, read: Callable[[torch.Tensor], object]) -> None:
    expected = [(r.shape, r.dtype) for r in results_of(read(torch.tensor([1])))]
    with fake_mode(gpu=True):
        for _ in range(2):
            results = results_of(read(torch.tensor([1], device=device)))
            assert [(r.shape, r.dtype) for r in results] == expected
            assert all(is_fake(r) and r.device.type == device for r in results)


def test_real_tensors_are_indexed_by_real_masks_for_real() -> None:
    values = torch.arange(4.0)
    mask = values > 1
    with fake_mode():
        assert values[mask].tolist() == [2, 3]
        assert is_fake(fake_like(values)[mask])


def test_known_numbers_make_tensors_and_lists() -> None:
    with fake_mode():
        one, two = torch.tensor(1.0), torch.tensor([2.0])
        assert torch.tensor([one, one + 1]).shape == (2,)
        assert torch.as_tensor([[one], [one]]).shape == (2, 1)
        assert torch.tensor([one + 1]).item() == 2.0
        assert (one.tolist(), two.tolist(), two.view(1, 1).tolist()) == (1.0, [2.0], [[2.0]])
        with pytest.raises(DataDependentError, match=UNKNOWN):
            torch.tensor([torch.empty(())])


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_out_of_another_size_is_resized_to_known_values(device: str) -> None:
    with fake_mode(gpu=True):
        out = torch.empty(0, dtype=torch.int64, device=device)
        for value in (3, 0, 2):
            assert torch.nonzero(torch.tensor([value], device=device), out=out) is out
            assert out.shape == ((1, 1) if value else (0, 1))
            out.resize_(0)


COPIES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "fake_like": fake_like,
    "deepcopy": copy.deepcopy,
    "clone": torch.clone,
    "cuda": lambda t: t.to("cuda").to("cuda:0", torch.float64),
    "copy_": lambda t: torch.empty(()).copy_(t),
    "load_state_dict": lambda t: loaded({"value": t}),
    "assigned": lambda t: loaded({"value": fake_like(t)}, assign=True),
    "module": lambda t: fake_like(nn.ParameterList([t])).get_parameter("0"),
    "data": lambda t: nn.Parameter(t).data,
    "numbers": lambda t: fake_like({"a": [t]})["a"][0],
}


def loaded(state: dict[str, torch.Tensor], assign: bool = False) -> torch.Tensor:
    module = nn.Module()
    module.register_buffer("value", torch.zeros(()))
    module.load_state_dict(state, assign=assign)
    return module.value  # type: ignore[return-value]


@pytest.mark.parametrize("is_real", [True, False])
@pytest.mark.parametrize("name", COPIES)
def test_value_follows_copies(name: str, is_real: bool) -> None:
    real = torch.tensor(5.5)
    with fake_mode(gpu=True):
        assert COPIES[name](real if is_real else torch.tensor(5.5)).item() == 5.5


def test_copy_does_not_share_the_value() -> None:
    real = torch.tensor(1.0)
    first, second = fake_like(real), fake_like(real)
    first.add_(1)
    real.add_(5)
    assert (first.item(), second.item()) == (2.0, 1.0)


def test_element_of_a_larger_storage_is_unknown() -> None:
    for source in (torch.ones(4)[1:2], torch.ones(2, device="meta")[0]):
        with pytest.raises(DataDependentError, match=UNKNOWN):
            fake_like(source, device="cpu").item()


@pytest.mark.cases(70)
@pytest.mark.filterwarnings("ignore:.*lr_scheduler")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("way", ["real state", "real file", "fake state", "fake_like", "fake to fake"])
@pytest.mark.parametrize(
    "cls",
    [
        torch.optim.ASGD,
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
    ],
)
def test_state_of_optimizers_keeps_its_numbers(cls: Any, way: str, device: str, tmp_path: Path) -> None:
    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        for _ in range(2):
            model(torch.ones(4, 3, device=next(model.parameters()).device)).sum().backward()
            optimizer.step()
        tensors = [value for state in optimizer.state.values() for value in state.values()]
        return [float(value) for value in tensors if isinstance(value, torch.Tensor) and value.dim() == 0]

    def make(device: str) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(3, 2, device=device)
        return model, cls(model.parameters(), lr=0.1)

    model, optimizer = make("cpu")
    train(model, optimizer)
    state = copy.deepcopy(optimizer.state_dict())
    file = tmp_path / "optimizer.pt"
    torch.save(state, file)
    with fake_mode(gpu=True):
        if way == "fake_like":
            fakes = fake_like((model, optimizer))
        else:
            fakes = make(device)
            if way == "fake to fake":
                other = make("cpu")
                train(*other)
                state = copy.deepcopy(other[1].state_dict())
            if way == "real file":
                state = torch.load(file, map_location=device)
            fakes[1].load_state_dict(fake_like(state) if way == "fake state" else state)
        numbers = train(*fakes)
    assert numbers == pytest.approx(train(model, optimizer))


def test_counters_of_modules_are_copied() -> None:
    averaged = torch.optim.swa_utils.AveragedModel(nn.BatchNorm1d(3))
    averaged.update_parameters(nn.BatchNorm1d(3))
    copied = fake_like(averaged)
    assert copied.n_averaged.item() == 1
    assert copied.module.num_batches_tracked.item() == 0


def test_errors_of_values_are_raised_as_by_the_real_run() -> None:
    with fake_mode(), pytest.raises(RuntimeError, match="ZeroDivisionError"):
        torch.tensor(1) // torch.tensor(0)


CHECKED: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "index": lambda values, positions: values[positions],
    "write": lambda values, positions: values.index_copy_(0, positions, torch.ones(len(positions), 3)),
    "rows of a large table": lambda values, positions: nn.functional.embedding(positions, torch.empty(7, 300_000)),
    "loss": lambda values, positions: nn.functional.cross_entropy(torch.empty(len(positions), 7), positions),
    "division": lambda values, positions: values.long() // (positions - 100).unsqueeze(1),
    "expanded": lambda values, positions: values.gather(0, positions.unsqueeze(1).expand(-1, 3)),
    "under vmap": lambda values, positions: torch.vmap(torch.index_select, (0, None, None))(
        values.expand(2, 7, 3), 0, positions
    ),
    "twice": lambda values, positions: (values[positions - 100], values[positions]),
}


@pytest.mark.parametrize("is_real", [False, True], ids=["known", "real"])
@pytest.mark.parametrize("name", CHECKED)
def test_known_integers_are_checked_where_other_values_are_unknown(name: str, is_real: bool) -> None:
    def outcome(number: int) -> str | None:
        values, positions = torch.rand(7, 3), torch.tensor([number, 0])
        try:
            CHECKED[name](values, fake_like(positions) if is_fake(values) and not is_real else positions)
        except Exception as error:
            return str(error)
        return None

    eager = [outcome(number) for number in (3, 100, 3, 100)]
    with fake_mode():
        positions = [torch.tensor([number, 0]) for number in (3, 100)]
        assert all(map(is_fake, positions))
        assert [outcome(number) for number in (3, 100, 3, 100)] == eager
    assert eager[1] is not None


def test_known_parameters_of_random_operators_are_checked() -> None:
    with fake_mode():
        for values in (torch.tensor([0.5, -1.0]), torch.tensor([0.5, 1.0])):
            for draw in (torch.bernoulli, torch.poisson, lambda probabilities: torch.multinomial(probabilities, 1)):
                if (values < 0).any():
                    with pytest.raises(RuntimeError, match="p_in >= 0|invalid Poisson rate|element < 0"):
                        draw(values)
                else:
                    assert is_fake(draw(values))


def test_tensor_is_unknown_after_a_write_that_is_refused_for_its_values() -> None:
    with fake_mode():
        counts, numbers = torch.tensor([4, 5]), torch.randint(0, 9, (2,))
        assert counts.sum().item() == 9
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            torch.floor_divide(numbers, torch.tensor([1, 0]), out=counts)  # may have written the first element
        with pytest.raises(DataDependentError, match=UNKNOWN):
            counts.sum().item()


def test_tensors_are_unknown_after_a_foreach_call_that_raises() -> None:
    with fake_mode():
        floats, integers = torch.ones(3), torch.ones(3, dtype=torch.int32)
        with pytest.raises(RuntimeError, match="can't be cast"):
            torch._foreach_add_([floats, integers], 0.5)  # the real call has written the first tensor
        with pytest.raises(DataDependentError, match=UNKNOWN):
            floats.sum().item()


def test_memory_of_arrays_does_not_grow() -> None:
    with fake_mode():
        shared = torch.from_numpy(np.ones(3, dtype=np.float32))
        with pytest.raises(RuntimeError, match="Trying to resize storage that is not resizable"):
            shared.resize_(4)
        assert shared.resize_(2).tolist() == [1.0, 1.0]


def test_expanded_tensor_of_more_bytes_than_64_bits_count_is_unknown() -> None:
    with fake_mode():
        total = torch.ones(1).expand(2**62).sum()  # 2**64 bytes, which would take years to add
        with pytest.raises(DataDependentError, match=UNKNOWN):
            total.item()


def test_positions_are_not_checked_on_fake_gpus() -> None:
    with fake_mode(gpu="H100-80GB"):  # a kernel would end the program with an assertion, at any later call
        assert torch.rand(7, device="cuda")[torch.tensor([9], device="cuda")].shape == (1,)


def test_resized_constant_is_unknown() -> None:
    with fake_mode():
        tensor = torch.tensor([1.0])
        tensor.resize_(2)
        with pytest.raises(DataDependentError, match=UNKNOWN):
            tensor[1].item()


def test_constants_on_fake_devices_have_values() -> None:
    with fake_mode(gpu=2):
        if torch.cuda.get_device_name() != "torchext fake CUDA device":
            pytest.skip("this machine has CUDA")
        assert torch.tensor(3.0, device="cuda").item() == 3.0
        step = torch.zeros((), device="cuda:1")
        step += 1
        assert step.item() == 1.0
        assert step.to("cuda:0").cpu().item() == 1.0


def test_cuda_supports_operators_that_the_cpu_lacks() -> None:
    with fake_mode(gpu=True):
        result = torch.ones(1, dtype=torch.bool, device="cuda").abs()
        assert result.dtype == torch.bool


def test_constants_are_followed_in_the_handler_of_a_dispatch_mode() -> None:
    with fake_mode(), FlopCounterMode(display=False):
        counter = torch.zeros(1)
        counter += 2
        assert counter.item() == 2.0
        assert torch.tensor(3.0).mul(counter).item() == 6.0


def test_constants_of_deferred_init_are_its_own() -> None:
    from torchext.deferred_init import deferred_init, materialize_tensor

    def make() -> list[torch.Tensor]:
        counter = torch.zeros(1)
        counter += 2
        return [counter, torch.full((int(counter),), 1.5)]

    counter, tensor = deferred_init(make)
    assert materialize_tensor(counter).tolist() == [2.0]
    assert materialize_tensor(tensor).tolist() == [1.5, 1.5]


def test_writes_inside_deferred_init_are_followed() -> None:
    from torchext.deferred_init import deferred_init

    with fake_mode():
        counter = torch.zeros(1)
    deferred_init(lambda: counter.add_(1))
    assert counter.item() == 1.0


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize(
    "optimizer", [torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam, torch.optim.ASGD, torch.optim.Adamax]
)
def test_optimizers_count_their_steps(optimizer: type[torch.optim.Optimizer], foreach: bool) -> None:
    def steps() -> list[float]:
        model = nn.Linear(3, 2)
        opt = optimizer(model.parameters(), foreach=foreach)  # type: ignore[call-arg]
        for _ in range(3):
            model(torch.ones(4, 3)).sum().backward()
            opt.step()
        return [float(state["step"]) for state in opt.state.values()]

    with fake_mode():
        assert steps() == [3.0, 3.0]


def test_threads_are_independent() -> None:
    results: list[float] = []

    def count() -> None:
        with fake_mode():
            tensor = torch.tensor(0.0)
            for _ in range(300):
                tensor += 1
            results.append(tensor.item())

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [300.0] * 4


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_ctc_loss_takes_lengths_in_tensors(reduction: str, device: str) -> None:
    with fake_mode(gpu=True):
        logits = torch.randn(50, 4, 20, device=device, requires_grad=True)
        targets = torch.ones(4, 10, dtype=torch.int64, device=device)
        lengths = torch.full((4,), 50, dtype=torch.int32), torch.tensor([10, 5, 6, 7])
        loss = nn.functional.ctc_loss(logits.log_softmax(2), targets, *lengths, reduction=reduction)
        loss.sum().backward()
    assert is_fake(loss)
    assert (loss.shape, loss.device.type) == ((4,) if reduction == "none" else (), device)
    assert logits.grad is not None


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    "options",
    [{}, {"batch_first": True}, {"total_length": 12}, {"padding_value": 1.0}],
    ids=lambda o: next(iter(o), ""),
)
def test_packed_sequences_are_padded_as_eager_does(options: dict[str, Any], device: str) -> None:
    def pad(x: torch.Tensor, lengths: torch.Tensor, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        padded, found = nn.utils.rnn.pad_packed_sequence(packed, **{**options, **more})
        padded.sum().backward()
        return padded, found

    data = torch.ones(4, 10, 3, requires_grad=True)
    expected, lengths = pad(data, torch.tensor([10, 6, 5, 5]))
    with fake_mode(gpu=True):
        x = torch.ones(4, 10, 3, device=device, requires_grad=True)
        padded, found = pad(x, torch.tensor([10, 6, 5, 5]))
        assert is_fake(padded)
        assert (padded.shape, padded.stride(), padded.device.type) == (expected.shape, expected.stride(), device)
        assert found.tolist() == lengths.tolist()
        assert x.grad is not None
        with pytest.raises(ValueError, match="total_length=3 and max sequence length being 10"):
            pad(x, torch.tensor([10, 6, 5, 5]), total_length=3)


@pytest.mark.parametrize("seed", range(20))
def test_random_programs_have_the_values_of_the_real_run(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def pick(count: int) -> int:
        return int(torch.randint(count, (), generator=generator))

    steps: list[Callable[[list[torch.Tensor]], object]] = []
    for _ in range(40):
        kind, i, j, number = pick(9), pick(4), pick(4), pick(5)
        steps.append(
            [
                lambda t, i=i, j=j: t[i].add_(t[j]),
                lambda t, i=i, j=j: t[i].copy_(t[j]),
                lambda t, i=i, n=number: t[i][n % 4 :].fill_(n),
                lambda t, i=i, j=j: t[i].t().mul_(t[j][:1, 0].clone()),
                lambda t, i=i: t[i].zero_(),
                lambda t, i=i, n=number: t.__setitem__(i, t[i].roll(n, 0)),
                lambda t, i=i, j=j: t.__setitem__(i, torch.where(t[j] > 1, t[i], t[j])),
                lambda t, i=i, j=j: torch.add(t[i], 1, out=t[j]),
                lambda t, i=i, n=number: t[i].view(-1)[n::3].clamp_(max=n + 2),
            ][kind]
        )

    def run() -> list[list[float]]:
        tensors = [torch.arange(12.0).view(4, 3), torch.ones(4, 3), torch.zeros(4, 3), torch.full((4, 3), 2.5)]
        for step in steps:
            step(tensors)
        return [tensor.tolist() for tensor in tensors]

    wanted = run()
    with fake_mode():
        assert run() == wanted


# ---- Calls that raise after they have written a part


WRITTEN_DTYPES = (torch.uint8, torch.int64, torch.bool, torch.float16, torch.float64, torch.complex64)


def write_and_return(call: Outer, read_dtype: torch.dtype, out_dtype: torch.dtype) -> tuple[bool, Tensor]:
    """Return whether the call raises, and its output afterwards."""
    a, b = (torch.arange(6).reshape(2, 3).add(i).to(read_dtype) for i in (1, 2))
    out = torch.full((6,), 5, dtype=out_dtype)
    try:
        call(a, b, 2, out=out)
    except (RuntimeError, TypeError, IndexError, ValueError):
        return True, out
    return False, out


@pytest.mark.cases(3)
@pytest.mark.parametrize("out_dtype", WRITTEN_DTYPES, ids=str)
@pytest.mark.parametrize("read_dtype", [torch.float32, torch.int32, torch.bool], ids=str)
def test_values_after_a_refused_write_are_those_of_the_real_call_or_unknown(
    read_dtype: torch.dtype, out_dtype: torch.dtype
) -> None:
    for i, call in enumerate(OUTERS):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about outputs that are resized
            is_refused, real = write_and_return(call, read_dtype, out_dtype)
            with fake_mode():
                for _ in range(2):  # the second call finds the refusal in the cache
                    is_fake_refused, fake = write_and_return(call, read_dtype, out_dtype)
                    if is_refused and is_fake_refused and fake.shape == real.shape:
                        known = _C.known_value(fake)
                        assert known is None or has_same_bits(known, real), f"OUTERS[{i}]: {known} for {real}"


def test_values_are_unknown_after_a_kernel_has_failed_halfway() -> None:
    """The kernel of `mean.out` writes the sum, and then cannot divide it."""
    with fake_mode():
        number = torch.zeros(())
        byte = torch.empty(0, dtype=torch.uint8).set_(number.untyped_storage())[:1]
        with pytest.raises(RuntimeError, match="can't be cast to the desired output type Byte"):
            torch.mean(torch.ones(7), -1, keepdim=True, out=byte)
        with pytest.raises(DataDependentError):
            number.item()
