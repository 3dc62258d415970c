"""The state dict of an optimizer of FSDP1 with `use_orig_params=True`, without the other ranks.

A rank has state only for the parameters with elements in its shard. The other ranks have the same kind of state for
their own elements, so their messages follow from the sharding.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch

from ..internals.patching import Function
from .current import while_world_is_open
from .objects import assigned, others_sending

__all__: list[str] = []

replaces = partial(
    while_world_is_open.replaces, "torch.distributed.fsdp._optim_utils", reason="receives the states of other ranks"
)

# A state of this rank, in any FSDP unit. This rank may have no elements of the parameters in a unit.
_any_state: ContextVar[Mapping[str, Any]] = ContextVar("_any_state")


@replaces("_optim_state_dict")
def _optim_state_dict(original: Function, /, *args: Any, optim_state_dict: Mapping[str, Any], **kwargs: Any) -> Any:
    states = optim_state_dict.get("state", {}).values()
    with assigned(_any_state, next(filter(None, states), {})):
        return original(*args, optim_state_dict=optim_state_dict, **kwargs)


@replaces("_map_param_key_to_optim_keys")
def _map_param_key_to_optim_keys(original: Function, /, *args: Any, **kwargs: Any) -> Any:
    given = inspect.signature(original).bind(*args, **kwargs).arguments
    if not (given.get("merge_keys") and given["optim_state_dict"]["state"]):
        return original(*args, **kwargs)
    names = [given["param_to_fqns"][parameter] for parameter in given["param_key_to_param"].values()]
    key = sys.modules["torch.distributed.fsdp._optim_utils"]._OptimStateKey
    managed = [key(tuple(one), True) for one in names if one[0] in given["fqn_to_fsdp_param_info"]]
    with others_sending(lambda rank: managed):
        return original(*args, **kwargs)


@replaces("_gather_all_orig_param_state")
def _gather_all_orig_param_state(
    original: Function, /, info: Any, input_states: Mapping[str, Any], *args: Any, **kwargs: Any
) -> Any:
    with others_sending(partial(_states_of, info, input_states)):
        return original(info, input_states, *args, **kwargs)


def _states_of(info: Any, own: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """Return the states that a rank sends, by the names of parameters: names, sizes and dtypes, and scalars."""
    utils: Any = sys.modules["torch.distributed.fsdp._optim_utils"]
    numels = _numels(info.handle.flat_param, rank)
    likely = next(filter(None, own.values()), _any_state.get({}))
    found = {}
    for name, state in own.items():
        numel = numels[info.param_indices[name]]
        sent = found[name] = utils.StateInfo({}, {}, {})
        for key, value in (state or likely).items() if numel else ():
            if not isinstance(value, torch.Tensor):
                sent.non_tensors[key] = value
            elif value.dim() == 0:
                sent.scalar_tensors[key] = value.cpu()
            else:
                sent.tensors[key] = utils._PosDimTensorInfo(torch.Size([numel]), value.dtype)
    return found


def _numels(flat: Any, rank: int) -> list[int]:
    """Return how many elements of each parameter the shard of a rank has."""
    begin = rank * flat._sharded_size.numel()
    end = begin + flat._sharded_size.numel()
    numels, offset = [], 0
    for numel, is_padding in zip(flat._numels_with_padding, flat._is_padding_mask, strict=True):
        if not is_padding:
            numels.append(max(0, min(offset + numel, end) - max(offset, begin)))
        offset += numel
    return numels
