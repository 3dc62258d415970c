"""Policies for routing: how many tokens each expert gets, against real processes whose router is forced."""

from __future__ import annotations

import json
from pathlib import Path

import moe_on_gloo
import pytest
import torch
import torch.distributed as dist
from processes import PROGRAMS, run_program
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from torchext.dry_run import World, world

NAMES = [name for name, it in PROGRAMS.items() if it.function.__module__ == moe_on_gloo.__name__]
EXPERTS, SIZE, RANK = 8, 4, 1


@pytest.mark.ci
@pytest.mark.skipif(not dist.is_gloo_available(), reason="this build of PyTorch has no gloo")
@pytest.mark.parametrize("name", NAMES)
def test_fakes_dispatch_what_real_processes_do(name: str) -> None:
    run_program(moe_on_gloo.__name__, name)


def job(values: str) -> World:
    return world(SIZE, RANK, gpu="A100-40GB", values=values)


def counts_of(tokens: int = 12, chosen: int = 2, experts: int = EXPERTS) -> list[int]:
    indices = torch.randn(tokens, experts, device="cuda").topk(chosen, -1).indices
    return indices.flatten().bincount(minlength=experts).tolist()  # type: ignore[no-any-return]


@pytest.fixture
def shares(tmp_path: Path) -> Path:
    file = tmp_path / "shares.json"
    file.write_text(json.dumps([1, 2, 3, 4, 5, 6, 7, 4]))
    return file


@pytest.mark.parametrize("tokens", [1, 7, 12, 32])
def test_histogram_distributes_all_tokens(tokens: int, shares: Path) -> None:
    with job(f"histogram={shares}") as made:
        counts = counts_of(tokens)
        wanted = [share * tokens * 2 / 32 for share in (1, 2, 3, 4, 5, 6, 7, 4)]
        assert sum(counts) == tokens * 2
        assert all(abs(count - share) < 1 for count, share in zip(counts, wanted, strict=True))
        assert {site.policy for site in made.values} == {f"routing=histogram:{shares}"}


def test_histogram_without_matching_experts_is_not_used(shares: Path) -> None:
    with job(f"histogram={shares}") as made:
        assert counts_of(experts=4) == [6] * 4
        assert {site.policy for site in made.values} == {"routing=balanced"}
        assert made.value_remarks == [
            f"{shares} was not used: the program never chose among 8 experts, it chose among 4 positions."
        ]


class Router(nn.Module):
    def forward(self, tokens: Tensor) -> Tensor:
        return functional.one_hot(tokens.topk(1, -1).indices, EXPERTS).sum((0, 1))


def test_layers_have_their_own_histogram_also_when_they_are_recomputed(tmp_path: Path) -> None:
    file = tmp_path / "shares.csv"
    file.write_text("1,1,0,0,0,0,0,0\n0,0,0,0,0,0,1,1\n")
    seen = []

    def layer(router: Router, tokens: Tensor) -> Tensor:
        seen.append(router(tokens).tolist())
        return tokens * 2

    with job(f"histogram={file}"):
        routers = [Router(), Router()]
        tokens = torch.randn(4, EXPERTS, device="cuda", requires_grad=True)
        made = tokens
        for router in routers:
            made = checkpoint(layer, router, made, use_reentrant=False)
        made.sum().backward()
    first, second = [2, 2, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 2, 2]
    assert seen[:2] == [first, second]
    assert sorted(seen[2:]) == sorted([second, first][: len(seen) - 2])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[1, -1]", r"share of at least 0 for expert 1 of layer 0 in the histogram .*, got -1"),
        ("[1, NaN]", "share of at least 0 .* got nan"),
        ("[1, true]", "share of at least 0 .* got True"),
        ('[1, "x"]', "share of at least 0 .* got 'x'"),
        ("[[1, 1], [1]]", "has 1 shares in layer 1, but 2 in layer 0"),
        ("[0, 0]", "all shares of layer 0 .* are zero"),
        ("[]", "expected shares of experts"),
        ("{}", "expected shares of experts"),
        ("[1", "cannot read the histogram"),
        (None, "cannot read the histogram .*No such file"),
    ],
)
def test_bad_histograms_are_refused(content: str | None, message: str, tmp_path: Path) -> None:
    file = tmp_path / "shares.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ValueError, match=f"(?i){message}"), job(f"histogram={file}"):
        pass


def test_share_that_no_router_can_reach_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "shares.json"
    file.write_text("[9, 1, 1, 1, 1, 1, 1, 1]")
    message = "gives expert 0 the share 0.5625, but each token chooses 2 different experts, so expected at most 0.5"
    with job(f"histogram={file}"), pytest.raises(ValueError, match=message):
        counts_of()


@pytest.mark.parametrize("tokens", [1, 3, 40, 1001])
def test_sorted_positions_follow_the_histogram_as_far_as_a_router_can(tokens: int, shares: Path) -> None:
    with job(f"histogram={shares}"):
        order = torch.randn(tokens, EXPERTS, device="cuda").argsort(-1)
        assert torch.tensor(order.tolist()).sort(-1).values.equal(torch.arange(EXPERTS).expand(tokens, -1))
        for chosen in range(1, 5):  # the largest share is 7/32
            counts = order[:, :chosen].flatten().bincount(minlength=EXPERTS).tolist()
            wanted = [share * tokens * chosen / 32 for share in (1, 2, 3, 4, 5, 6, 7, 4)]
            assert all(abs(count - share) < 3 for count, share in zip(counts, wanted, strict=True)), chosen
        assert order[:, :4].flatten().bincount(minlength=EXPERTS).tolist() == counts_of(tokens, 4)


def test_sampling_with_replacement_follows_the_histogram(tmp_path: Path) -> None:
    file = tmp_path / "shares.json"
    file.write_text("[5, 1, 2, 0]")
    with job(f"histogram={file}"):
        chosen = torch.rand(2, 4, device="cuda").multinomial(16, replacement=True)
        assert chosen.flatten().bincount(minlength=4).tolist() == [20, 4, 8, 0]


def test_large_counts_of_a_histogram_do_not_overflow(tmp_path: Path) -> None:
    file = tmp_path / "shares.json"
    file.write_text("[1e308, 1e308, 1e308, 1e308, 0, 0, 0, 0]")
    with job(f"histogram={file}"):
        assert counts_of(12, 2) == [6, 6, 6, 6, 0, 0, 0, 0]


@pytest.mark.parametrize(("values", "count"), [("worst:8", 3), ("worst:2", 0)])
def test_first_expert_beyond_all_positions_is_not_used(values: str, count: int) -> None:
    with job(values) as made:
        assert counts_of(12, 2)[7] == count
        wanted = "worst:8 was not used: the program never chose among more than 8 experts, it chose among 8 positions."
        assert made.value_remarks == ([wanted] if count else [])
        assert {site.policy for site in made.values} == {"routing=balanced" if count else "routing=worst:2"}


def test_layers_of_a_pipeline_stage_that_do_not_fit_the_histogram_are_explained(tmp_path: Path) -> None:
    file = tmp_path / "shares.csv"
    file.write_text("1,1,0,0,0,0,0,0\n0,0,0,0,0,0,1,1\n")
    with job(f"histogram={file}") as made:
        Router()(torch.randn(4, EXPERTS, device="cuda"))
        [remark] = made.value_remarks
        assert remark.startswith(f"{file} has 2 layers, but 1 modules chose experts. Layers are counted from the first")


def test_worst_routing_fills_the_experts_of_this_rank() -> None:
    with job("worst") as made:
        assert counts_of(12, 2) == [0, 0, 12, 12, 0, 0, 0, 0]
        assert counts_of(12, 3)[2:4] == [12, 12], "no more can reach it"
        assert made.value_remarks[0].startswith(
            "routing=worst: this rank holds experts 2-3 of 8, as rank 1 of 4 in the group of all ranks."
        )


def test_group_of_experts_is_found_by_its_name() -> None:
    with job("worst"):
        dist.init_device_mesh("cuda", (2, 2), mesh_dim_names=("dp", "ep"))
        assert counts_of(12, 1)[4:] == [12, 0, 0, 0]


def test_group_of_experts_is_found_by_the_exchange_of_counts() -> None:
    with job("worst") as made:
        group, _ = dist.new_subgroups(2)
        counts = torch.tensor(counts_of(12, 1), device="cuda")
        assert counts.tolist() == [0, 0, 12, 0, 0, 0, 0, 0], "a quarter of the experts, before the first exchange"
        dist.all_to_all_single(torch.empty_like(counts), counts, group=group)
        assert counts_of(12, 1)[4:] == [12, 0, 0, 0]
        assert "holds experts 4-7 of 8, as rank 1 of 2" in made.value_remarks[1]


def test_policy_applies_to_its_line_only() -> None:
    code = "def first(f):\n    return f()\n\ndef second(f):\n    return f()\n"
    scope: dict[str, object] = {}
    exec(compile(code, "/programs/route.py", "exec"), scope)
    with job("route.py:2=worst,route.py:99=zero,other/route.py:5=same") as made:
        assert scope["first"](counts_of) == [0, 0, 12, 12, 0, 0, 0, 0]  # type: ignore[operator]
        assert scope["second"](counts_of) == [3] * 8  # type: ignore[operator]
        assert {site.policy for site in made.values} == {"route.py:2=worst", "routing=balanced"}
        assert [remark for remark in made.value_remarks if "not used" in remark] == [
            f"The policy {text} was not used: no value was read or chosen on this line."
            for text in ("route.py:99=zero", "other/route.py:5=same")
        ]


def test_policies_for_one_line_apply_together() -> None:
    scope: dict[str, object] = {}
    exec(compile("def read(f):\n    return f()\n", "/programs/read.py", "exec"), scope)
    with job("read.py:2=worst:1,./read.py:2=masks=half,read.py:2=zero") as made:
        scores = torch.randn(8, device="cuda")
        selected, counts = scope["read"](lambda: (scores[scores > 0].shape[0], counts_of(12, 2)))  # type: ignore[operator]
        assert (selected, counts) == (4, [0, 12, 12, 0, 0, 0, 0, 0])
        assert not made.value_remarks


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ("x.py:3=zero,x.py:3=assume", "one value policy for answer, got both zero and assume in"),
        ("x.py:3=same,./x.py:3=worst", "one value policy for routing, got both same and worst in"),
        ("x.py:3=masks=half,x.py:3=raise", "`raise` cannot be combined"),
        ("x.py:0=zero", "number of a source line, which is at least 1, got 'x.py:0=zero'"),
    ],
)
def test_policies_of_lines_that_cannot_apply_are_refused(values: str, message: str) -> None:
    with pytest.raises(ValueError, match=message), job(values):
        pass


def test_line_can_refuse_values_or_have_its_own_mask() -> None:
    scope: dict[str, object] = {}
    exec(compile("def read(f):\n    return f()\n", "/programs/read.py", "exec"), scope)
    read = scope["read"]
    with job("read.py:2=raise"), pytest.raises(RuntimeError, match="The policy read.py:2=raise refuses to assume it"):
        read(lambda: torch.empty(1, device="cuda").item())  # type: ignore[operator]
    with job("read.py:2=masks=half") as made:
        scores = torch.randn(8, device="cuda")
        assert read(lambda: scores[scores > 0].shape[0]) == 4  # type: ignore[operator]
        assert scores[scores > 0].shape[0] == 8
        assert {site.policy for site in made.values} == {"read.py:2=masks=half", "masks=all"}


def test_column_connects_policies_of_more_than_four_lines_with_or() -> None:
    scope: dict[str, object] = {}
    exec(compile("def read(f):\n" + "    f()\n" * 5, "/programs/read.py", "exec"), scope)
    texts = [f"read.py:{line}=worst:{line}" for line in range(2, 7)]
    with job(",".join(texts)) as made:
        scope["read"](counts_of)  # type: ignore[operator]
        assert {site.policy for site in made.values} == {*texts[:4], f"{texts[0]} or {texts[4]}"}


@pytest.mark.parametrize("experts", [8, 64])
def test_tokens_of_large_batches_are_counted_exactly(experts: int) -> None:
    """The map of tokens and experts is larger than the values that are kept otherwise."""
    tokens = 40000
    with job("balanced"):
        chosen = torch.randn(tokens, experts, device="cuda").topk(4, -1).indices
        mask = torch.zeros(tokens, experts, device="cuda", dtype=torch.bool).scatter_(1, chosen, True)
        wanted = [tokens * 4 // experts] * experts
        assert mask.sum(0).tolist() == wanted
        assert torch.histc(chosen, bins=experts, min=0, max=experts).tolist() == wanted
        assert [torch.where(functional.one_hot(chosen, experts)[..., i])[0].shape[0] for i in range(2)] == wanted[:2]
        first = torch.searchsorted(chosen.flatten().sort().values, torch.tensor([1, 2], device="cuda"))
        assert first.tolist() == [wanted[0], 2 * wanted[0]]


def test_experts_of_exchanged_tokens_are_those_that_each_rank_sends() -> None:
    with job("worst"):
        chosen = torch.randn(6, EXPERTS, device="cuda").topk(2, -1).indices.flatten().sort().values
        counts = chosen.bincount(minlength=EXPERTS).view(SIZE, -1).sum(1)
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts)
        arrived = chosen.new_empty(int(received.sum()))
        dist.all_to_all_single(arrived, chosen, received.tolist(), counts.tolist())
        assert arrived.bincount().tolist() == [0, 0, 6 * SIZE, 6 * SIZE]
