"""Patches for functions that communicate metadata in tensors, not values of the user's tensors.

`dist.broadcast_object_list()` puts pickled objects into tensors, a `DeviceMesh` puts ranks there, and a `DTensor` the
indices of the local shard. In a block these tensors would be fake or deferred. They have to be real, like the
processes.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from ..internals.dispatch_keys import without_our_keys
from ..internals.leases import while_fakes_live
from ..internals.patching import Function

__all__: list[str] = []


@while_fakes_live.replaces(
    "torch.distributed.tensor._utils",
    "_compute_local_shape_and_global_offset",
    needs="_compute_local_shape_and_global_offset",
    reason="puts the indices of a shard into a tensor",
)
def _call_on_real_tensors(original: Function, /, *args: Any, **kwargs: Any) -> Any:
    with without_our_keys():
        return original(*args, **kwargs)


if dist.is_available():
    while_fakes_live.replaces(
        "torch.distributed.distributed_c10d",
        *("all_gather_object", "broadcast_object_list", "gather_object"),
        *("recv_object_list", "scatter_object_list", "send_object_list"),
        reason="puts pickled objects into tensors",
    )(_call_on_real_tensors)
    while_fakes_live.replaces("torch.distributed.device_mesh", "init_device_mesh", reason="puts ranks into a tensor")(
        _call_on_real_tensors
    )
    for _name in ("__init__", "_concatenate", "_flatten", "_unflatten", "from_group"):
        while_fakes_live.replaces(
            "torch.distributed.device_mesh:DeviceMesh", _name, needs=_name, reason="puts ranks into a tensor"
        )(_call_on_real_tensors)
