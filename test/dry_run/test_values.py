"""Programs that branch on values: values that they have made are exact, others get plausible assumptions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchext.dry_run import LinePolicy, ValuePolicy, World, world

transformers = pytest.importorskip("transformers", reason="the programs are of transformers")


@pytest.fixture
def job() -> Iterator[World]:
    with world(8, rank=3, gpu="A100-40GB", values="assume") as job:
        yield job


def small_llama() -> Any:
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=1000
    )
    return transformers.LlamaForCausalLM(config).cuda().eval()


@pytest.mark.cases(2)
@pytest.mark.parametrize("way", [{"do_sample": False}, {"do_sample": True, "top_k": 5}, {"num_beams": 3}])
def test_generation_makes_all_tokens(way: dict[str, Any], job: World) -> None:
    tokens = torch.randint(5, 1000, (2, 7), device="cuda")
    made = small_llama().generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=12, **way)
    assert made.shape == (2, 19)


def test_encoder_and_decoder_generate(job: World) -> None:
    config = transformers.T5Config(
        d_model=64, d_kv=16, d_ff=64, num_layers=1, num_heads=2, vocab_size=500, decoder_start_token_id=0
    )
    model = transformers.T5ForConditionalGeneration(config).cuda()
    tokens = torch.tensor([[5, 6, 7, 1], [8, 9, 1, 0]], device="cuda")
    assert model.generate(tokens, max_new_tokens=9).shape == (2, 10)


def test_batch_is_cut_to_its_longest_sequence(job: World) -> None:
    tokens = nn.utils.rnn.pad_sequence([torch.arange(1, 6), torch.arange(1, 4)], batch_first=True)
    tokens = nn.functional.pad(tokens, (0, 20)).cuda()
    length = int((tokens != 0).sum(1).max())
    assert tokens[:, :length].shape == (2, 5)
    assert not job.values


def test_image_features_take_the_places_of_their_tokens(job: World) -> None:
    image_token, features = 32000, torch.randn(6, 16, device="cuda")
    tokens = torch.tensor([[1, image_token, image_token, image_token, 5], [1, *[image_token] * 3, 7]], device="cuda")
    places = tokens == image_token
    assert int(places.sum()) == features.shape[0]
    embedded = torch.randn(2, 5, 16, device="cuda")
    embedded[places] = features
    assert embedded.masked_scatter(places.unsqueeze(-1), features).shape == (2, 5, 16)
    assert not job.values


def test_ranks_agree_that_a_step_is_sound(job: World) -> None:
    """Megatron skips steps this way, and DeepSpeed compares configurations."""
    is_sound = torch.ones(1, device="cuda")
    dist.all_reduce(is_sound, dist.ReduceOp.MIN)
    assert is_sound.item() == 1
    mine = torch.tensor([3, 1, 4], device="cuda")
    lowest, highest = mine.clone(), mine.clone()
    dist.all_reduce(lowest, dist.ReduceOp.MIN)
    dist.all_reduce(highest, dist.ReduceOp.MAX)
    assert torch.equal(lowest, highest)
    assert lowest.tolist() == mine.tolist()


def test_experts_get_their_share_of_tokens(job: World) -> None:
    scores = torch.randn(64, 8, device="cuda").softmax(-1)
    chosen = scores.topk(2, -1).indices
    per_expert = torch.histc(chosen.float(), bins=8, min=0, max=7).long()
    received = torch.empty_like(per_expert)
    dist.all_to_all_single(received, per_expert)
    assert per_expert.tolist() == received.tolist() == [16] * 8
    tokens: Tensor = torch.randn(128, 16, device="cuda")
    assert [part.shape[0] for part in tokens.split(per_expert.tolist())] == [16] * 8


@pytest.mark.parametrize(("routing", "share"), [("balanced", [16] * 8), ("same", [0, 0, 0, 0, 64, 64, 0, 0])])
def test_ranks_get_the_tokens_that_the_policy_for_routing_sends(routing: str, share: list[int]) -> None:
    with world(2, rank=1, gpu="A100-40GB", values=f"assume,routing={routing}") as job:
        chosen = torch.randn(64, 8, device="cuda").topk(2, -1).indices
        per_expert = chosen.flatten().bincount(minlength=8)
        assert per_expert.tolist() == share
        received = torch.empty_like(per_expert)
        dist.all_to_all_single(received, per_expert)
        tokens = torch.empty(int(received.sum()), 16, device="cuda")
        assert tokens.shape[0] == 2 * sum(share[4:])
    assert {site.policy for site in job.values} == {f"routing={routing}"}


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        (ValuePolicy(), "assume,masks=all,routing=balanced"),
        (ValuePolicy("zero"), "zero,masks=none,routing=balanced"),
        (ValuePolicy("zero", masks="half", routing="worst"), "zero,masks=half,routing=worst"),
        (ValuePolicy("raise"), "raise"),
        (
            ValuePolicy(lines=(LinePolicy("train.py", 7, ValuePolicy(masks="half")),)),
            "assume,masks=all,routing=balanced,train.py:7=assume,train.py:7=masks=half,train.py:7=routing=balanced",
        ),
    ],
)
def test_policies_and_their_texts_are_equivalent(policy: ValuePolicy, text: str) -> None:
    assert str(policy) == text
    assert ValuePolicy.parse(text) == policy


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"answer": "guess"}, "`answer`: expected assume or zero or raise, got 'guess'"),
        ({"masks": "most"}, "`masks`: expected all or half or none, got 'most'"),
        ({"routing": "best"}, "routing=best"),
    ],
)
def test_policies_check_their_arguments(arguments: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ValuePolicy(**arguments)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="number of a source line, which is at least 1, got 'train.py:0'"):
        LinePolicy("train.py", 0, ValuePolicy())
    nested = ValuePolicy(lines=(LinePolicy("other.py", 4, ValuePolicy()),))
    with pytest.raises(ValueError, match="The policy for the line train.py:3 cannot have policies for other lines"):
        LinePolicy("train.py", 3, nested)
    for policy in (ValuePolicy("raise", masks="half"), ValuePolicy("raise", routing="worst")):
        with pytest.raises(ValueError, match="`raise` cannot be combined with other value policies, got ValuePolicy"):
            world(2, values=policy)
    with pytest.raises(ValueError, match="`raise` cannot be combined with other value policies"):
        ValuePolicy("raise", lines=nested.lines)
    with pytest.raises(TypeError, match=r"`lines`: expected LinePolicy objects, got \('train.py', 3\)"):
        ValuePolicy(lines=(("train.py", 3),))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="`values`: expected a policy such as 'raise' or 'assume', got None"):
        world(2, values=None)  # type: ignore[arg-type]


def test_file_of_a_line_may_begin_with_the_current_directory() -> None:
    policy = ValuePolicy(lines=(LinePolicy("./train.py", 7, ValuePolicy(masks="half")),))
    assert policy == ValuePolicy.parse(str(policy))
    assert str(policy).count("train.py:7=") == 3
    assert "./" not in str(policy)


def test_world_takes_a_policy() -> None:
    with world(2, gpu="L4", values=ValuePolicy(masks="half")) as job:
        mask = torch.rand(8, device="cuda") > 0.5
        assert mask.nonzero().shape[0] == 4
    assert {site.policy for site in job.values} == {"masks=half"}
