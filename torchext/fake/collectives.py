"""Patches for functions that communicate metadata in tensors, not values of the user's tensors.

`dist.broadcast_object_list()` puts pickled objects into tensors, a `DeviceMesh` puts ranks there, and a `DTensor` the
indices of the local shard. In a block these tensors would be fake or deferred. They have to be real, like the
processes.
"""

from __future__ import annotations

import torch.distributed as dist

from ..internals.dispatch_keys import call_on_real_tensors
from ..internals.leases import while_fakes_live

__all__: list[str] = []


COMPUTES_SHARD = "_compute_local_shape_and_global_offset"

while_fakes_live.replaces(
    "torch.distributed.tensor._utils",
    COMPUTES_SHARD,
    needs=COMPUTES_SHARD,
    reason="puts the indices of a shard into a tensor",
)(call_on_real_tensors)


if dist.is_available():
    while_fakes_live.replaces(
        "torch.distributed.distributed_c10d",
        *("all_gather_object", "broadcast_object_list", "gather_object"),
        *("recv_object_list", "scatter_object_list", "send_object_list"),
        reason="puts pickled objects into tensors",
    )(call_on_real_tensors)
    while_fakes_live.replaces("torch.distributed.device_mesh", "init_device_mesh", reason="puts ranks into a tensor")(
        call_on_real_tensors
    )
    for _name in ("__init__", "_concatenate", "_flatten", "_unflatten", "from_group"):
        while_fakes_live.replaces(
            "torch.distributed.device_mesh:DeviceMesh", _name, needs=_name, reason="puts ranks into a tensor"
        )(call_on_real_tensors)
