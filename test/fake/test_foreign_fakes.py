"""Our fakes with another owner of the `Fake` key: the owner of the tensors or of the mode handles a call.

Runs in a process in which the other owner has registered the key first (`--foreign-fakes`), started by test_package.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from foreign_fakes import foreign_fake, foreign_mode, is_foreign
from torch import Tensor

from torchext import amp, inference
from torchext.deferred_init import deferred_init, is_deferred, materialize_module, materialize_tensor
from torchext.fake import fake_like, fake_mode, is_fake
from torchext.inspect import route

pytestmark = pytest.mark.foreign_fakes

OTHERS = torch.ops.torchext_foreign
MIXED = r"fake tensors of two kinds: of torchext in .*foreign_fakes\.cpp:\d+, in .*with the same library"


def ours(*shape: int) -> Tensor:
    with fake_mode():
        return torch.empty(shape)


def deferred(*shape: int) -> Tensor:
    return deferred_init(torch.ones, shape)


@pytest.fixture(autouse=True)
def _share() -> None:
    ours(1)


def test_calls_with_their_tensors_are_theirs() -> None:
    before = OTHERS.calls()
    result = foreign_fake(2, 3) + 1
    assert is_foreign(result)
    assert not is_fake(result)
    assert OTHERS.calls() == before + 1


def test_calls_with_our_tensors_are_ours() -> None:
    before = OTHERS.calls()
    assert is_fake(ours(2, 3) + torch.ones(3))
    assert is_fake(torch.nn.functional.linear(ours(2, 3), ours(4, 3), ours(4)))
    assert OTHERS.calls() == before


@pytest.mark.parametrize("make", [ours, deferred])
@pytest.mark.parametrize(
    "call",
    [
        lambda mine, theirs: mine + theirs,
        lambda mine, theirs: theirs.mul_(mine),
        lambda mine, theirs: torch.cat([mine, theirs]),
        lambda mine, theirs: OTHERS.give_key(torch.stack([theirs, mine])),
    ],
)
def test_calls_with_both_are_an_error_that_names_both(make: Any, call: Any) -> None:
    with pytest.raises(RuntimeError, match=MIXED):
        call(make(2), foreign_fake(2))


def test_error_for_both_names_the_arguments() -> None:
    with pytest.raises(RuntimeError, match=r"`aten::add.Tensor` .*of torchext in `other`, and of .* in `self`"):
        foreign_fake(2) + ours(2)


def test_factories_in_our_block_make_our_fakes() -> None:
    with fake_mode():
        assert is_fake(torch.zeros(2))
    assert is_deferred(deferred_init(torch.zeros, 2))


def test_factories_in_their_block_make_their_fakes() -> None:
    with foreign_mode():
        assert is_foreign(torch.zeros(2))
        assert is_foreign(torch.arange(3))
    assert not is_foreign(torch.zeros(2))


@pytest.mark.parametrize("outer", [fake_mode, foreign_mode])
def test_factories_in_blocks_of_both_use_our_mode(outer: Any) -> None:
    inner = foreign_mode if outer is fake_mode else fake_mode
    with outer(), inner():
        assert is_fake(torch.zeros(2))


def test_our_block_leaves_their_block_as_it_was() -> None:
    with foreign_mode():
        with fake_mode():
            pass
        assert is_foreign(torch.zeros(2))
        assert deferred_init(torch.zeros, 2).is_cpu
        assert is_foreign(torch.zeros(2))


def test_their_call_leaves_our_block_as_it_was() -> None:
    with fake_mode():
        torch.neg(foreign_fake(2))  # removes the key from the thread, like PyTorch after a call
        assert is_fake(torch.zeros(2))


def test_real_calls_outside_of_blocks_are_real() -> None:
    before = OTHERS.calls()
    assert (torch.ones(2) + 1).tolist() == [2.0, 2.0]
    assert OTHERS.calls() == before


def test_real_calls_in_their_block_use_their_mode() -> None:
    real = torch.ones(2)
    before = OTHERS.calls()
    with foreign_mode(), pytest.raises(RuntimeError):  # its Meta kernel gets a CPU tensor
        torch.empty(2).copy_(real).add_(real).item()
    assert OTHERS.calls() > before


def test_real_calls_in_our_block_are_real() -> None:
    real = torch.ones(2)
    with fake_mode():
        assert not is_fake(real + 1)


def test_deferred_init_leaves_their_tensors_to_them() -> None:
    theirs = foreign_fake(2)
    assert is_foreign(deferred_init(lambda: theirs + 1))
    assert is_foreign(deferred_init(lambda: torch.zeros_like(theirs)))
    assert is_foreign(theirs)


def test_becoming_real_takes_the_call_to_the_backend() -> None:
    module = deferred_init(torch.nn.Linear, 2, 2)
    before = OTHERS.calls()
    materialize_module(module)
    assert not is_fake(module(torch.ones(2)))
    assert OTHERS.calls() == before


@pytest.mark.parametrize("make", [deferred, lambda size: deferred_init(lambda: torch.ones(size)[:])])
def test_real_tensor_with_formerly_fake_data_is_not_their_fake(make: Any) -> None:
    real, mine = torch.ones(2), make(2)
    real.data = mine
    materialize_tensor(mine)
    before = OTHERS.calls()
    assert (real + 1).tolist() == [2.0, 2.0]
    assert OTHERS.calls() == before


def test_dropping_stale_keys_keeps_the_other_owners() -> None:
    theirs = foreign_fake(2)
    deferred_init(lambda: theirs.add_(1))
    with fake_mode():
        theirs.add_(1)
    assert is_foreign(theirs)


def test_real_tensor_with_data_that_was_fake_is_real_in_our_block() -> None:
    real, mine = torch.ones(2), deferred(2)
    real.data = mine
    materialize_tensor(mine)
    with fake_mode():
        real.add_(1)
    assert real.tolist() == [2.0, 2.0]


def test_their_kernels_for_one_operator_do_not_get_our_fakes() -> None:
    before = OTHERS.own_calls()
    assert is_fake(OTHERS.next(ours(2)))
    assert is_fake(OTHERS.next(fake_like(torch.ones(2, requires_grad=False))))
    assert is_deferred(deferred_init(lambda: OTHERS.next(torch.ones(2))))
    assert OTHERS.own_calls() == before
    assert is_foreign(OTHERS.next(foreign_fake(2)))
    assert OTHERS.own_calls() == before + 1
    assert OTHERS.next(torch.ones(2)).tolist() == [2.0, 2.0]


def test_their_later_kernels_do_not_get_our_fakes() -> None:
    met: list[str] = []
    library = torch.library.Library("torchext_foreign_later", "FRAGMENT")
    library.define("same(Tensor tensor) -> Tensor")
    library.impl("same", torch.clone, "CPU")
    library.impl("same", torch.empty_like, "Meta")
    mine = ours(2)

    def meets(tensor: Tensor) -> Tensor:
        met.append("kernel")
        return tensor

    library.impl("same", meets, "Fake")
    op = torch.ops.torchext_foreign_later.same
    assert is_fake(op(mine))
    assert op(mine) is not mine
    assert met == []
    theirs = foreign_fake(2)
    op(theirs)
    assert met == ["kernel"]
    library._destroy()


def test_their_higher_order_operators_use_their_rule() -> None:
    mine, theirs = ours(2), foreign_fake(2)
    assert is_fake(torch.cond(torch.tensor(True), lambda x: x + 1, lambda x: x - 1, (mine,)))
    assert is_foreign(theirs)


def test_tolist_materializes_our_tensors() -> None:
    assert mine_has_key(ours(2))
    with pytest.raises(RuntimeError, match="fake"):
        ours(2).tolist()


def mine_has_key(tensor: Tensor) -> bool:
    """Return the result of `TensorImpl::is_fake()`."""
    keys: Any = torch._C._dispatch_keys(tensor)
    return bool(keys.has(torch._C._dispatch_key_parse("Fake")))


def test_route_of_a_factory_in_our_block_matches_the_call() -> None:
    def last_step() -> str:
        step = route(torch.ops.aten.empty.memory_format, [2])[-1]
        return f"{step.key}: {step.comment}"

    told: list[str] = []
    deferred_init(lambda: told.append(last_step()))
    with fake_mode():
        told.append(last_step())
    assert [text.partition(":")[0] for text in told] == ["Meta", "Meta"]


def test_inference_and_amp_do_not_mind() -> None:
    with inference.inference_mode(), amp.autocast("cpu"):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
