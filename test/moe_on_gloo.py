"""Programs for `test_mixture_of_experts.py`: experts on gloo with a router that is forced, and in a world of fakes."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fsdp_on_gloo import SMALL, letting_gloo_forget, without_group
from processes import program
from torch import Tensor, nn
from torch.nn import functional

from torchext.dry_run import world
from torchext.memory import Category, track_memory

TOKENS, EXPERTS, CHOSEN, WIDTH = 32, 8, 2, 64
SHARES = [4, 8, 12, 16, 6, 2, 10, 6]  # one for each of the 64 chosen experts

Seen = list[tuple[str, object]]
Dispatcher = Callable[["Experts", Tensor, Tensor, Tensor, Seen], Tensor]


class Exchange(torch.autograd.Function):
    """Send rows to other ranks, and their gradients back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, received: list[int], sent: list[int]) -> Tensor:
        ctx.splits = sent, received
        result = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(result, rows.contiguous(), received, sent)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return Exchange.apply(gradients[0], *ctx.splits), None, None  # type: ignore[no-untyped-call]


class Experts(nn.Module):
    """A layer whose experts are distributed over all ranks."""

    def __init__(self, dispatch: Dispatcher) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        local = EXPERTS // dist.get_world_size()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(local))
        self.dispatch = dispatch

    def forward(self, tokens: Tensor, forced: Tensor, seen: Seen) -> Tensor:
        weights, chosen = (self.router(tokens).sigmoid() + forced).topk(CHOSEN, dim=-1)
        return self.dispatch(self, tokens, weights, chosen, seen)

    def run(self, rows: Tensor, counts: list[int], seen: Seen) -> Tensor:
        """Run the local experts on rows that are sorted by expert."""
        parts = rows.split(counts)
        seen.append(("tokens of experts", [tuple(part.shape) for part in parts]))
        return torch.cat([expert(part).relu() for expert, part in zip(self.experts, parts, strict=True)])


def by_sorting(layer: Experts, tokens: Tensor, weights: Tensor, chosen: Tensor, seen: Seen) -> Tensor:
    """Sort tokens by expert, and exchange counts, as torchtitan does."""
    size = dist.get_world_size()
    counts = torch.histc(chosen.flatten().float(), bins=EXPERTS, min=0, max=EXPERTS).long()
    received = torch.empty_like(counts)
    dist.all_to_all_single(received, counts)
    sent_rows, received_rows = counts.view(size, -1).sum(1).tolist(), received.view(size, -1).sum(1).tolist()
    seen += [("sent", sent_rows), ("received", received_rows)]
    order = chosen.flatten().argsort(stable=True)
    routed = tokens[order // CHOSEN] * weights.flatten()[order].unsqueeze(1)
    arrived = Exchange.apply(routed, received_rows, sent_rows)  # type: ignore[no-untyped-call]
    experts = torch.arange(EXPERTS // size).repeat(size).repeat_interleave(received)
    seen += [("arrived", tuple(arrived.shape)), ("experts of arrived tokens", experts.sort().values.tolist())]
    sorting = experts.argsort(stable=True)
    computed = layer.run(arrived[sorting], received.view(size, -1).sum(0).tolist(), seen)
    returned = Exchange.apply(computed[sorting.argsort()], sent_rows, received_rows)  # type: ignore[no-untyped-call]
    return torch.zeros_like(tokens).index_add(0, order // CHOSEN, returned)


def by_masks(layer: Experts, tokens: Tensor, weights: Tensor, chosen: Tensor, seen: Seen) -> Tensor:
    """Select tokens by a map of tokens and experts, and gather counts, as Megatron does."""
    size, rank = dist.get_world_size(), dist.get_rank()
    local = EXPERTS // size
    routing = torch.zeros(TOKENS, EXPERTS, dtype=torch.bool).scatter(1, chosen, True)
    counts = routing.sum(0)
    everywhere = torch.empty(size * EXPERTS, dtype=counts.dtype)
    dist.all_gather_into_tensor(everywhere, counts)
    mine = everywhere.view(size, EXPERTS)[:, rank * local : (rank + 1) * local].contiguous()
    sent, received = counts.view(size, local).sum(1).numpy().tolist(), mine.sum(1).numpy().tolist()
    rows = torch.arange(TOKENS).expand(EXPERTS, -1).masked_select(routing.t())
    seen += [("sent", sent), ("received", received), ("selected", tuple(rows.shape))]
    arrived = Exchange.apply(tokens.index_select(0, rows), received, sent)  # type: ignore[no-untyped-call]
    chunks = arrived.split(mine.flatten().tolist())
    seen.append(("chunks", [tuple(chunk.shape) for chunk in chunks]))
    by_expert = torch.cat([chunks[i * local + j] for j in range(local) for i in range(size)])
    computed = layer.run(by_expert, mine.sum(0).tolist(), seen)
    parts = computed.split(mine.t().flatten().tolist())
    by_rank = torch.cat([parts[j * size + i] for i in range(size) for j in range(local)])
    returned = Exchange.apply(by_rank, sent, received)  # type: ignore[no-untyped-call]
    scale = torch.zeros(TOKENS, EXPERTS).scatter(1, chosen, weights).t()[routing.t()]
    return torch.zeros_like(tokens).index_add(0, rows, returned * scale.unsqueeze(1))


def by_masks_of_one_hot(layer: Experts, tokens: Tensor, weights: Tensor, chosen: Tensor, seen: Seen) -> Tensor:
    """Run all experts on all ranks, as transformers does."""
    mask = functional.one_hot(chosen, EXPERTS).permute(2, 1, 0)
    result = torch.zeros_like(tokens)
    for expert in (mask.sum((1, 2)) > 0).nonzero():
        position, token = torch.where(mask[expert[0]])
        seen.append((f"tokens of {int(expert)}", tuple(token.shape)))
        rows = layer.experts[0](tokens[token]) * weights[token, position, None]
        result = result.index_add(0, token, rows)
    return result


def step(dispatch: Dispatcher, forced: Tensor) -> tuple[Seen, int, dict[str, int]]:
    """Train for a step. Return the dispatched shapes, and the bytes at the peak, all together and by category."""
    seen: Seen = []
    torch.manual_seed(0)
    with track_memory() as memory:
        layer = Experts(dispatch)
        tokens = torch.randn(TOKENS, WIDTH)
        made = layer(tokens, forced, seen)
        seen.append(("combined", tuple(made.shape)))
        made.sum().backward()
        del made
    peak = memory.peak_allocated("cpu")
    held = (Category.PARAMETER, Category.GRADIENT, Category.INPUT)
    return seen, peak.allocated, {category.label: peak.by_category[category] for category in held}


def forcing(counts: list[int]) -> Tensor:
    """Return additions to scores in [0, 1] for which each expert is chosen by that many tokens."""
    forced = torch.zeros(TOKENS, EXPERTS)
    left = torch.tensor(counts)
    for token in range(TOKENS):
        chosen = left.topk(CHOSEN).indices
        left[chosen] -= 1
        forced[token, chosen] = 10
    assert not left.any()
    return forced


@contextmanager
def histogram() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "shares.json"
        file.write_text(json.dumps(SHARES))
        yield f"histogram={file}"


def assert_fakes_follow(policy: str, counts_for: Callable[[int], list[int]]) -> None:
    """Compare each rank with a real job whose router is forced to `counts_for` that rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dispatchers = by_sorting, by_masks, by_masks_of_one_hot
    with letting_gloo_forget():
        jobs = [[step(dispatch, forcing(counts_for(one))) for one in range(size)] for dispatch in dispatchers]
    with without_group(), world(size, rank, gpu=None, values=policy):
        for dispatch, real in zip(dispatchers, [job[rank] for job in jobs], strict=True):
            fake = step(dispatch, torch.zeros(TOKENS, EXPERTS))
            assert fake[0] == real[0], (dispatch.__name__, fake[0], real[0])
            assert fake[2] == real[2], (dispatch.__name__, fake, real)
            assert abs(fake[1] - real[1]) <= SMALL, (dispatch.__name__, fake, real)


@program(4)
def balanced_routing() -> None:
    assert_fakes_follow("balanced", lambda rank: [TOKENS * CHOSEN // EXPERTS] * EXPERTS)


@program(4)
def worst_routing() -> None:
    local = EXPERTS // dist.get_world_size()
    assert_fakes_follow("worst", lambda rank: [TOKENS if i // local == rank else 0 for i in range(EXPERTS)])


@program(4)
def measured_routing() -> None:
    with histogram() as policy:
        assert_fakes_follow(policy, lambda rank: SHARES)
