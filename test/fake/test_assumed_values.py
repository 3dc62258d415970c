"""Values that are not known are assumed where they come about, if somebody answers: NOTE [Assumed values]."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import nn

from torchext.fake import DataDependentError, FakeGPU, fake_mode, is_fake
from torchext.fake.assumed_values import AssumedValues, assuming_values
from torchext.memory import fits, max_batch


@pytest.fixture
def assumed() -> Iterator[AssumedValues]:
    with fake_mode(fake_cuda=True), assuming_values() as values:
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


def test_known_values_are_not_noted(assumed: AssumedValues) -> None:
    tokens = torch.tensor([[5, 6, 0]], device="cuda")
    assert int((tokens != 0).sum(1).max()) == 2
    assert tokens.tolist() == [[5, 6, 0]]
    assert tokens[tokens != 0].shape == (2,)
    assert not assumed.sites


def test_what_follows_from_assumptions_is_noted(assumed: AssumedValues) -> None:
    finished = torch.zeros(2, dtype=torch.bool, device="cuda")
    tokens = unknown(2, 50).argmax(-1)
    finished |= tokens == 25
    assert finished.tolist() == [True, False]
    assert [site.answer for site in assumed.sites] == ["[True, False]"]


def test_what_is_overwritten_with_unknown_values_is_not_stale(assumed: AssumedValues) -> None:
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


def test_zeros_without_room_are_not_taken_for_known(assumed: AssumedValues) -> None:
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


def test_places_that_read_often_show_a_few_answers(assumed: AssumedValues) -> None:
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
    with fake_mode(fake_cuda=True), assuming_values(policy) as values:
        made = mask()
        data = unknown(*made.shape)
        assert data[made].shape == (share * made.numel(),)
        assert made.sum().item() == share * made.numel()
        assert (~made).sum().item() == (1 - share) * made.numel()
        assert (made.any().item(), made.all().item()) == (share > 0, share == 1)
        assert {site.policy for site in values.sites} == {policy.removeprefix("assume,")}


@pytest.mark.parametrize("policy", ["assume", "assume,masks=half", "assume,masks=none"])
def test_what_does_not_depend_on_a_policy_stands_on_none(policy: str) -> None:
    with fake_mode(fake_cuda=True), assuming_values(policy) as values:
        for x in (unknown(*LARGE), unknown(30)):
            assert not x.isnan().any()
            assert (x == x).all()
            assert not (x > 65504).any()
            assert not (torch.tensor([1, 0, 3], device="cuda") == 7).any()
        assert unknown().item() == 0.125
        assert {site.policy for site in values.sites} == {""}


@pytest.mark.parametrize("tokens", [64, 2**16, 2**18])
def test_policy_for_routing_says_which_experts_get_tokens(tokens: int) -> None:
    def loads(policy: str) -> tuple[list[int], list[int], set[str]]:
        with fake_mode(fake_cuda=True), assuming_values(policy) as values:
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
    with fake_mode(fake_cuda=True), assuming_values(policy):
        mask = (unknown(*sizes) > 0.5).float()
        assert mask.mean().item() == share
        assert mask.sum().item() == share * math.prod(sizes)


def test_number_stands_on_all_policies_that_it_is_computed_by() -> None:
    with fake_mode(fake_cuda=True), assuming_values("assume,masks=half") as values:
        chosen = unknown(8, 4).topk(1).indices.squeeze(1)
        (chosen * (unknown(8) > 0.5)).sum().item()
        assert [site.policy for site in values.sites] == ["masks=half, routing=balanced"]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(("policy", "longest"), [("assume", 10), ("assume,masks=half", 5), ("assume,masks=none", 1)])
def test_unknown_lengths_are_the_share_that_counts(policy: str, longest: int, device: str) -> None:
    with fake_mode(fake_cuda=True), assuming_values(policy) as values:
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
        ("zeros", "expected to begin with one of assume, raise, got 'zeros'"),
        ("raise,masks=all", "no other policy can follow it, got 'raise,masks=all'"),
        ("assume,masks=most", r"expected to have masks=all\|half\|none or routing=balanced\|same, got"),
        ("assume,shapes=all", r"expected to have masks=all\|half\|none or routing=balanced\|same, got"),
    ],
)
def test_policies_are_checked(policy: str, message: str) -> None:
    with pytest.raises(ValueError, match=message), assuming_values(policy):
        pass
    with pytest.raises(ValueError, match=message):
        fits(lambda: None, values=policy)


def test_old_name_of_a_policy_is_deprecated() -> None:
    with pytest.warns(FutureWarning, match="`zero` is called `assume`"), fake_mode(), assuming_values("zero"):
        assert torch.empty(()).item() == 0.125


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
        max_batch(reads_its_loss, "L4-24GB", limit=8)
    batch = max_batch(reads_its_loss, "L4-24GB", limit=8, values="assume")
    assert batch == 8
    assert [site.answer for site in batch.assumed] == ["0.125"]
    assert pickle.loads(pickle.dumps(batch)).assumed == batch.assumed
    none = max_batch(reads_its_loss, FakeGPU("tiny", memory=2**22), limit=8, values="assume")
    assert (none, none.assumed) == (0, [])
    fit = fits(lambda: reads_its_loss(4)(), "L4-24GB", values="assume")
    assert fit
    assert [site.answer for site in fit.assumed] == ["0.125"]


def selects(batch: int) -> Callable[[], None]:
    """A step whose memory is what a mask selects."""

    def step() -> None:
        data = torch.empty(batch * 2**18, device="cuda")
        kept = data[data > 0.5]
        del kept

    return step


def test_largest_batch_depends_on_the_policy_for_masks() -> None:
    gpu = FakeGPU("small", memory=64 * 2**20)

    def largest(policy: str) -> int:
        return max_batch(selects, gpu, values=policy)

    # Of each batch the data take 1 MiB, positions of 8 bytes and elements of 4 bytes what is selected, and the mask.
    assert largest("assume,masks=all") < largest("assume,masks=half") < largest("assume,masks=none")
