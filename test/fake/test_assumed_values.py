"""Unknown values are assumed where they are created, if a policy provides answers: NOTE [Assumed values]."""

from __future__ import annotations

import math
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from torchext.fake import DataDependentError, FakeGPU, fake_mode, is_fake
from torchext.fake.values import AssumedValues, assuming_values
from torchext.memory import fits, max_batch


@pytest.fixture
def assumed() -> Iterator[AssumedValues]:
    with fake_mode(gpu=True), assuming_values() as values:
        yield values


def unknown(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(sizes, dtype=dtype, device="cuda")


LARGE = (2000, 1000)


@pytest.mark.parametrize(
    ("read", "answer"),
    [
        (lambda: unknown().item(), 0.125),
        (lambda: unknown(1, dtype=torch.int64).item(), 0),
        (lambda: bool(unknown(1, dtype=torch.bool)), False),
        (lambda: unknown(2, 2).tolist(), [[0.125, 0.125], [0.125, 0.125]]),
        (lambda: torch.tensor([unknown(), unknown()]).tolist(), [0.125, 0.125]),
        (lambda: (unknown(dtype=torch.int64) + 8).item(), 8),
        (lambda: unknown(*LARGE).isnan().any().item(), False),
        (lambda: unknown(*LARGE).isinf().any().item(), False),
        (lambda: unknown(*LARGE).isfinite().all().item(), True),
        (lambda: (unknown(*LARGE) != 0).sum().item(), math.prod(LARGE)),
        (lambda: unknown(*LARGE).any().item(), True),
        (lambda: unknown(5).any().item(), True),
        (lambda: torch.allclose(unknown(3), unknown(3)), True),
        (lambda: math.log(unknown(4).mean().item()) < 0, True),
        (lambda: sorted(torch.randperm(7).tolist()), list(range(7))),
        (lambda: set(torch.randint(3, 5, (50,)).tolist()), {3, 4}),
        (lambda: unknown(2, 50).argmax(-1).tolist(), [25, 26]),
        (lambda: unknown(6, 4).topk(2).indices.flatten().bincount().tolist(), [3, 3, 3, 3]),
        (lambda: sorted(unknown(3, 5).sort(0).indices[:, 2].tolist()), [0, 1, 2]),
        (lambda: torch.multinomial(unknown(2, 9), 1).tolist(), [[4], [5]]),
    ],
)
def test_answer_is_plausible(read: Callable[[], object], answer: object, assumed: AssumedValues) -> None:
    assert read() == answer
    assert assumed.sites


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: unknown(6, 4)[unknown(6, 4) > 0], (24,)),
        (lambda: unknown(*LARGE)[unknown(*LARGE) > 0], (math.prod(LARGE),)),
        (lambda: unknown(*LARGE)[unknown(*LARGE) > 1], (math.prod(LARGE),)),
        (lambda: unknown(*LARGE)[unknown(*LARGE) < 1], (math.prod(LARGE),)),
        (lambda: unknown(6, 4)[unknown(6, 4) > 1], (24,)),
        (lambda: unknown(6, 4)[unknown(6, 4) > torch.arange(4, device="cuda")], (24,)),
        (lambda: unknown(*LARGE)[unknown(*LARGE, dtype=torch.bool)], (math.prod(LARGE),)),
        (lambda: unknown(*LARGE).nonzero(), (math.prod(LARGE), 2)),
        (lambda: unknown(5, dtype=torch.bool).nonzero(), (5, 1)),
        (lambda: torch.masked_select(unknown(*LARGE), unknown(*LARGE) > 0), (math.prod(LARGE),)),
        (lambda: unknown(4, dtype=torch.int64).unique(), (1,)),
        (lambda: unknown(4, dtype=torch.int64).bincount(minlength=3), (3,)),
    ],
)
def test_shape_that_depends_on_values_is_noted(
    make: Callable[[], torch.Tensor], shape: tuple[int, ...], assumed: AssumedValues
) -> None:
    result = make()
    assert is_fake(result)
    assert (result.shape, result.device.type) == (shape, "cuda")
    assert assumed.sites[0].line.endswith("in <lambda>")


SMALL = (2, 3, 4)
REDUCTIONS = ("argmax", "argmin", "sort", "argsort", "max", "min", "median", "nanmedian", "mode")


@pytest.mark.parametrize("empty", range(3))
@pytest.mark.parametrize("dim", [0, 1, 2, -1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
@pytest.mark.parametrize("base", ["small", "large"])
def test_indices_of_empty_tensors_are_empty(
    empty: int, dim: int, dtype: torch.dtype, base: str, assumed: AssumedValues
) -> None:
    sizes = [*SMALL]
    sizes[empty] = 0
    x = unknown(*sizes, dtype=dtype) if base == "small" else unknown(*LARGE, 4, dtype=dtype)[:2, :3][:, :, :4]
    x = x.narrow(empty, 0, 0)
    like = torch.zeros(x.shape, dtype=dtype)
    if like.shape[dim] > 0:
        for name in REDUCTIONS if dtype is torch.float32 else set(REDUCTIONS) - {"nanmedian"}:
            assert positions(getattr(x, name)(dim)).shape == positions(getattr(like, name)(dim)).shape
        assert x.kthvalue(1, dim).indices.numel() == 0
    assert x.topk(0, dim).indices.numel() == 0
    assert x.sort(dim).indices.tolist() == like.tolist()
    for mask in (x > 0, x != 0, x == x, x.bool(), x > x[:0].sum()):
        assert mask.tolist() == like.tolist()
        assert x[mask].shape == (0,)
        assert mask.nonzero().shape == (0, 3)
        assert (mask.sum().item(), mask.any().item(), mask.all().item()) == (0, False, True)
    assert x.masked_select(x > 0).shape == x.nonzero()[:, 0].shape == (0,)


def positions(result: Any) -> torch.Tensor:
    return result if isinstance(result, torch.Tensor) else result.indices


def test_samples_of_empty_batches_are_empty(assumed: AssumedValues) -> None:
    for rows in (unknown(0, 5), unknown(4, 5)[:0], unknown(*LARGE)[:0]):
        assert torch.multinomial(rows, 1).tolist() == []
        assert torch.randint(3, rows.shape, device="cuda").tolist() == []
        assert torch.where(rows > 0, 1, 0).argmax(-1).tolist() == []
        assert torch.isin(rows.long(), torch.tensor([1, 2], device="cuda")).tolist() == []
    assert unknown(0, dtype=torch.int64).unique().shape == (0,)
    assert unknown(0, dtype=torch.int64).bincount().shape == (0,)
    assert torch.randperm(0, device="cuda").tolist() == []
    assert torch.searchsorted(unknown(5), unknown(0)).tolist() == []


def test_program_that_writes_into_an_array_changes_that_array_alone(assumed: AssumedValues) -> None:
    for sizes in ((), (5,), (2, 3)):
        for dtype in (torch.bool, torch.int64, torch.float32):
            array = torch.empty(sizes, dtype=dtype).numpy()
            assert array.flags.c_contiguous
            before = array.copy()
            array[...] = 1 - before
            assert (torch.empty(sizes, dtype=dtype).numpy() == before).all()
    assert unknown(5, dtype=torch.bool).nonzero().shape == (5, 1)
    large = torch.empty(LARGE, dtype=torch.bool)
    large.numpy()[...] = False
    assert large.numpy().all()


COPIES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "itself": lambda t: t,
    "cpu": lambda t: t.cpu(),
    "clone": torch.clone,
    "sum of two": lambda t: t + 0,
    "transposed": lambda t: t.t().contiguous().t(),
    "view": lambda t: t.view(-1).view(t.shape),
    "int32": lambda t: t.to(torch.int32),
    "cat": lambda t: torch.cat([t[:1], t[1:]]),
    "written to another": lambda t: torch.empty_like(t).copy_(t),
    "rows": lambda t: torch.stack([*t]),
    "selected": lambda t: t[:, torch.arange(t.shape[1], device="cuda")],
}


@pytest.mark.parametrize("copy", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int16, torch.uint8])
def test_known_elements_are_found_among_unknown_ones(
    copy: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype, assumed: AssumedValues
) -> None:
    tokens = unknown(2, 6, dtype=dtype)
    prompt = torch.tensor([[5, 6, 7], [8, 9, 10]], device="cuda", dtype=dtype)
    tokens[:, :3] = prompt
    copied = copy(tokens)
    assert copied.tolist() == [[5, 6, 7, 0, 0, 0], [8, 9, 10, 0, 0, 0]]
    assert copied[:, :3].tolist() == prompt.tolist()
    assert copied.sum().item() == 45
    assert copied.max().item() == 10
    assert (copied == 6).nonzero()[0].tolist() == [0, 1]
    assert tokens[:, :3].tolist() == prompt.tolist()


@pytest.mark.parametrize(("policy", "rest"), [("assume", True), ("assume,masks=none", False)])
def test_rest_of_a_mask_follows_the_policy(policy: str, rest: bool) -> None:
    with fake_mode(gpu=True), assuming_values(policy):
        mask = unknown(4, dtype=torch.bool)
        mask[0] = not rest
        wanted = [not rest, *[rest] * 3]
        assert mask.tolist() == mask.clone().tolist() == mask.cpu().tolist() == wanted
        assert mask.sum().item() == sum(wanted)
        assert mask.nonzero().shape == (*unknown(4)[mask].shape, 1) == (sum(wanted), 1)
        mask[1] = unknown(3).argmax() == 1  # is assumed
        assert mask.tolist() == [not rest, True, rest, rest]
        tokens = unknown(4, dtype=torch.int64)
        tokens[:2] = torch.tensor([5, 7], device="cuda")
        assert (tokens != 7).tolist() == [True, False, rest, rest]
        assert (tokens > 6).tolist()[:2] == [False, True]


def test_values_of_one_tensor_may_be_known_and_assumed(assumed: AssumedValues) -> None:
    tokens = unknown(6, dtype=torch.int64)
    tokens[:3] = torch.tensor([5, 6, 7], device="cuda")
    tokens[3:5] = unknown(2, 50).argmax(-1)
    assert (tokens[:3].tolist(), tokens[0].item()) == ([5, 6, 7], 5)
    assert not assumed.sites
    assert tokens.tolist() == [5, 6, 7, 25, 26, 0]
    assert [site.policy for site in assumed.sites] == ["routing=balanced"]
    tokens[2:4].add_(1)
    assert tokens.tolist() == [5, 6, 8, 26, 26, 0]
    assert len(assumed.sites) == 2
    tokens[3] = 9
    assert [*tokens[:2].tolist(), tokens[3].item()] == [5, 6, 9]
    assert len(assumed.sites) == 2


def test_slice_that_is_written_keeps_its_known_elements(assumed: AssumedValues) -> None:
    counts = unknown(4, dtype=torch.int64)
    counts[:2] = torch.tensor([5, 6], device="cuda")
    counts[:3].add_(unknown(3).argmax())
    assert counts.tolist() == [6, 7, 1, 0]


@pytest.mark.parametrize("read", [lambda t: t.cpu().numpy().tolist(), lambda t: t.tolist()])
def test_large_masks_are_read_as_they_are_computed(
    read: Callable[[torch.Tensor], list[bool]], assumed: AssumedValues
) -> None:
    x = unknown(2**21)
    assert not any(read(x.isnan()))
    assert all(read(x == x))
    assert all(read(x > 0.5))
    with fake_mode(gpu=True), assuming_values("assume,masks=half"):
        assert read(x > 0.5)[:4] == [True, False, True, False]


@pytest.mark.parametrize(("lengths", "targets"), [(4, 40), (4, 43), (3, 0), (1, 7)])
def test_lengths_of_targets_in_a_row_fill_it(lengths: int, targets: int, assumed: AssumedValues) -> None:
    scores = unknown(50, lengths, 20).log_softmax(2)
    given, wanted = torch.empty(lengths, dtype=torch.int64), torch.empty(lengths, dtype=torch.int64)
    loss = nn.functional.ctc_loss(scores, torch.ones(targets, dtype=torch.int64, device="cuda"), given, wanted)
    assert loss.shape == ()
    padded = torch.ones(lengths, targets, dtype=torch.int64, device="cuda")
    assert nn.functional.ctc_loss(scores, padded, given, wanted).shape == ()


@pytest.mark.parametrize(
    ("sizes", "of_mask"),
    [((10**6, 4), (10**6, 1)), ((10**6, 4), (4,)), ((4,), (10**6, 4)), ((5, 4), (5, 1)), ((1, 4), (10**6, 1))],
)
@pytest.mark.parametrize(("policy", "share"), [("assume", 1), ("assume,masks=half", 0.5)])
def test_broadcast_masks_select_as_often_as_they_are_repeated(
    sizes: tuple[int, ...], of_mask: tuple[int, ...], policy: str, share: float
) -> None:
    numel = math.prod(torch.broadcast_shapes(sizes, of_mask))
    with fake_mode(gpu=True), assuming_values(policy):
        for mask in (unknown(*of_mask) > 0, unknown(*of_mask, dtype=torch.bool)):
            count = unknown(*sizes).masked_select(mask).numel()
            assert abs(count - share * numel) <= numel / math.prod(of_mask)


def test_values_may_be_assumed_no_more_while_another_thread_computes() -> None:
    with fake_mode(gpu=True):
        x, large = unknown(4, 5), unknown(*LARGE)
    stop = threading.Event()

    def compute() -> None:
        while not stop.is_set():
            x.argmax(-1)
            x.topk(2)
            try:
                large.masked_select(large > 0)
                large.nonzero()
            except DataDependentError:
                pass  # nothing is assumed now

    threads = [threading.Thread(target=compute) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(300):
        with assuming_values():
            x.argmax(-1)
    stop.set()
    for thread in threads:
        thread.join()


def test_known_values_are_not_counted(assumed: AssumedValues) -> None:
    tokens = torch.tensor([[5, 6, 0]], device="cuda")
    assert int((tokens != 0).sum(1).max()) == 2
    assert tokens.tolist() == [[5, 6, 0]]
    assert tokens[tokens != 0].shape == (2,)
    assert not assumed.sites


def test_consequences_of_assumptions_are_counted(assumed: AssumedValues) -> None:
    finished = torch.zeros(2, dtype=torch.bool, device="cuda")
    tokens = unknown(2, 50).argmax(-1)
    finished |= tokens == 25
    assert finished.tolist() == [True, False]
    assert [site.answer for site in assumed.sites] == ["[True, False]"]


def test_values_overwritten_with_unknown_ones_are_not_stale(assumed: AssumedValues) -> None:
    weights = torch.ones(4, device="cuda")
    weights.copy_(unknown(4))
    assert weights.tolist() == [0.125] * 4
    large = torch.ones(LARGE, device="cuda", dtype=torch.bool).logical_and(unknown(*LARGE).isnan())
    assert not large.any()
    large.copy_(unknown(*LARGE) > 0)
    assert large.any()


def test_statistics_of_assumed_values_are_assumed(assumed: AssumedValues) -> None:
    norm = nn.BatchNorm1d(4, device="cuda")
    norm(unknown(3, 4))
    assert (norm.running_mean > 0.01).any()
    assert assumed.sites


def test_lengths_of_large_unknown_tokens_are_all(assumed: AssumedValues) -> None:
    tokens = unknown(64, 65536, dtype=torch.int64)
    assert int((tokens != 0).sum(1).max()) == 65536
    assert not (tokens == 2).any()


def test_tensors_of_other_shapes_and_values_are_not_equal(assumed: AssumedValues) -> None:
    assert not torch.equal(unknown(3), unknown(4))
    assert torch.equal(unknown(3), unknown(3))
    assert torch.allclose(unknown(1000, 1000), unknown(1000, 1000))
    index = unknown(dtype=torch.int64) + 5
    assert not torch.equal(index, torch.tensor(3, device="cuda"))


def test_large_integers_are_exact(assumed: AssumedValues) -> None:
    index = unknown(dtype=torch.int64)
    assert torch.where(index < 100, torch.iinfo(torch.int64).max, index).item() == torch.iinfo(torch.int64).max


def test_zeros_without_memory_are_not_known(assumed: AssumedValues) -> None:
    tensors = [torch.full((2**17,), 3) for _ in range(64)]
    counts = torch.zeros(1000, dtype=torch.int64)
    counts.add_(1)
    del tensors
    counts.tolist()
    assert assumed.sites


def test_arrays_of_devices_are_refused_unless_forced(assumed: AssumedValues) -> None:
    known = torch.tensor([3, 4], device="cuda")
    for convert in (lambda: known.numpy(), lambda: np.asarray(known, dtype=np.float32)):
        with pytest.raises(TypeError, match="can't convert cuda:0 device type tensor to numpy"):
            convert()
    assert known.numpy(force=True).tolist() == [3, 4]
    assert not assumed.sites


def test_scaler_finds_no_infinities(assumed: AssumedValues) -> None:
    model = nn.Linear(400, 4000, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cuda", growth_interval=2)
    for _ in range(2):
        scaler.scale(model(unknown(3, 400)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert optimizer.state[model.weight]["step"].item() == 2
    assert scaler.get_scale() == 2.0**17


def test_frequent_places_show_a_few_answers(assumed: AssumedValues) -> None:
    for index in range(9):
        (unknown(dtype=torch.int64) + index).item()
    (site,) = assumed.sites
    assert (site.count, site.answer) == (9, "0, 1, 2, ...")


COUNT = math.prod(LARGE)


@pytest.mark.parametrize(
    ("policy", "share"), [("assume,masks=all", 1), ("assume,masks=half", 0.5), ("assume,masks=none", 0)]
)
@pytest.mark.parametrize(
    "mask",
    [
        lambda: unknown(*LARGE) > 0.5,
        lambda: unknown(*LARGE) < -3,
        lambda: unknown(*LARGE, dtype=torch.bool),
        lambda: unknown(*LARGE, dtype=torch.int64) != 7,
        lambda: ~(unknown(*LARGE, dtype=torch.int64) == 7),
        lambda: (unknown(*LARGE, dtype=torch.int64) >= 0) & (unknown(*LARGE) > 2),
        lambda: unknown(40, 10) >= 0.3,
        lambda: unknown(40, 10, dtype=torch.bool),
        lambda: unknown(40, 10, dtype=torch.int64) != -100,
        lambda: unknown(40, 10) > torch.linspace(-5, 5, 10, device="cuda"),
    ],
)
def test_policy_for_masks_is_the_share_that_counts(mask: Callable[[], torch.Tensor], policy: str, share: float) -> None:
    with fake_mode(gpu=True), assuming_values(policy) as values:
        made = mask()
        data = unknown(*made.shape)
        assert data[made].shape == (share * made.numel(),)
        assert made.sum().item() == share * made.numel()
        assert (~made).sum().item() == (1 - share) * made.numel()
        assert (made.any().item(), made.all().item()) == (share > 0, share == 1)
        assert {site.policy for site in values.sites} == {policy.removeprefix("assume,")}


@pytest.mark.parametrize("policy", ["assume", "assume,masks=half", "assume,masks=none"])
def test_value_without_a_policy_names_no_policy(policy: str) -> None:
    with fake_mode(gpu=True), assuming_values(policy) as values:
        for x in (unknown(*LARGE), unknown(30)):
            assert not x.isnan().any()
            assert (x == x).all()
            assert not (x > 65504).any()
            assert not (torch.tensor([1, 0, 3], device="cuda") == 7).any()
        assert unknown().item() == 0.125
        assert {site.policy for site in values.sites} == {""}


@pytest.mark.parametrize("tokens", [64, 2**16, 2**18])
def test_policy_for_routing_selects_the_experts(tokens: int) -> None:
    def loads(policy: str) -> tuple[list[int], list[int], set[str]]:
        with fake_mode(gpu=True), assuming_values(policy) as values:
            chosen = unknown(tokens, 8).topk(2).indices
            counted = torch.histc(chosen.float(), bins=8, min=0, max=7).long().tolist()
            return counted, chosen.flatten().bincount(minlength=8).tolist(), {site.policy for site in values.sites}

    balanced = [tokens // 4] * 8
    assert loads("assume") == (balanced, balanced, {"routing=balanced"})
    same = [0, 0, 0, 0, tokens, tokens, 0, 0]
    assert loads("assume,routing=same") == (same, same, {"routing=same"})


@pytest.mark.parametrize("sizes", [(40, 10), LARGE])
@pytest.mark.parametrize(("policy", "share"), [("assume", 1), ("assume,masks=half", 0.5)])
def test_averages_over_masks_follow_from_the_policy(sizes: tuple[int, int], policy: str, share: float) -> None:
    with fake_mode(gpu=True), assuming_values(policy):
        mask = (unknown(*sizes) > 0.5).float()
        assert mask.mean().item() == share
        assert mask.sum().item() == share * math.prod(sizes)


def test_number_depends_on_all_policies_of_its_inputs() -> None:
    with fake_mode(gpu=True), assuming_values("assume,masks=half") as values:
        chosen = unknown(8, 4).topk(1).indices.squeeze(1)
        (chosen * (unknown(8) > 0.5)).sum().item()
        assert [site.policy for site in values.sites] == ["masks=half, routing=balanced"]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(("policy", "longest"), [("assume", 10), ("assume,masks=half", 5), ("assume,masks=none", 1)])
def test_unknown_lengths_are_the_share_that_counts(policy: str, longest: int, device: str) -> None:
    with fake_mode(gpu=True), assuming_values(policy) as values:
        lengths = torch.empty(4, dtype=torch.int64)
        packed = nn.utils.rnn.pack_padded_sequence(torch.ones(4, 10, 3, device=device), lengths, batch_first=True)
        assert packed.data.shape == (4 * longest, 3)
        padded, found = nn.utils.rnn.pad_packed_sequence(packed, batch_first=True)
        assert (padded.shape, found.tolist()) == ((4, longest, 3), [longest] * 4)
        assert {site.policy for site in values.sites} == {
            policy.removeprefix("assume").removeprefix(",") or "masks=all"
        }


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("zeros", r"of the form assume\|zero\|raise, masks=all\|half\|none, .* got 'zeros' in 'zeros'"),
        ("assume,zero", "one value policy for answer, got both assume and zero"),
        ("raise,masks=all", "cannot be combined with other value policies, got 'raise,masks=all'"),
        ("assume,masks=most", "of the form .*, got 'masks=most' in"),
        ("assume,shapes=all", "of the form .*, got 'shapes=all' in"),
    ],
)
def test_policies_are_checked(policy: str, message: str) -> None:
    with pytest.raises(ValueError, match=message), assuming_values(policy):
        pass
    with pytest.raises(ValueError, match=message):
        fits(lambda: None, values=policy)


def test_numbers_are_zero_and_masks_select_nothing() -> None:
    with fake_mode(gpu=True), assuming_values("zero"):
        loss = unknown(8)
        assert (loss.sum().item(), loss[loss > 0.5].shape[0]) == (0, 0)
    with fake_mode(gpu=True), assuming_values("zero,masks=half"):
        loss = unknown(8)
        assert loss[loss > 0.5].shape[0] == 4


def reads_its_loss(batch: int) -> Callable[[], None]:
    model = nn.Linear(1024, 1024, device="cuda")
    data = torch.ones(batch, 1024, device="cuda")

    def step() -> None:
        loss = model(data).square().mean()
        loss.backward()
        assert loss.item() > 0
        assert data.sum(1)[0].item() == 1024 or batch > 256

    return step


def test_batches_of_programs_that_read_values_are_found() -> None:
    with pytest.raises(DataDependentError, match="needs the values"):
        max_batch(reads_its_loss, "L4-24GB", limit=8, values="raise")
    batch = max_batch(reads_its_loss, "L4-24GB", limit=8, values="assume")
    assert batch == 8
    assert [site.answer for site in batch.assumed] == ["0.125"]
    assert pickle.loads(pickle.dumps(batch)).assumed == batch.assumed
    none = max_batch(reads_its_loss, FakeGPU("tiny", memory=2**22), limit=8, values="assume")
    assert (none, none.assumed) == (0, ())
    fit = fits(lambda: reads_its_loss(4)(), "L4-24GB", values="assume")
    assert fit
    assert [site.answer for site in fit.assumed] == ["0.125"]


def selects(batch: int) -> Callable[[], None]:
    """A step whose memory depends on the elements that a mask selects."""

    def step() -> None:
        data = torch.empty(batch * 2**18, device="cuda")
        kept = data[data > 0.5]
        del kept

    return step


@pytest.mark.ci
def test_largest_batch_depends_on_the_policy_for_masks() -> None:
    gpu = FakeGPU("small", memory=64 * 2**20)

    def largest(policy: str) -> int:
        return max_batch(selects, gpu, values=policy).size

    # Per batch: the data take 1 MiB; the selected elements take 8 bytes for positions and 4 for values; and the mask.
    assert largest("assume,masks=all") < largest("assume,masks=half") < largest("assume,masks=none")
