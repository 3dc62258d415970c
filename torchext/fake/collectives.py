"""Patches for functions that communicate metadata in tensors, not values of the user's tensors.

`dist.broadcast_object_list()` puts pickled objects into tensors, a `DeviceMesh` puts ranks there, and a `DTensor` the
indices of the local shard. In a block these tensors would be fake or deferred. They have to be real, like the
processes.
"""

from __future__ import annotations

from types import ModuleType

import torch.distributed as dist

from ..internals.calls import running_in
from ..internals.dispatch_keys import without_our_keys
from ..internals.imports import patch_imported
from ..internals.leases import while_fakes_live

__all__ = ["install", "teach_offsets"]

OBJECTS = (
    *("all_gather_object", "broadcast_object_list", "gather_object"),
    *("recv_object_list", "scatter_object_list", "send_object_list"),
)
COMPUTING = "_compute_local_shape_and_global_offset"
METHODS_OF_MESHES = ("__init__", "_concatenate", "_flatten", "_unflatten", "from_group")


_on_real_tensors = running_in(without_our_keys)


def install() -> None:
    """Install the patches."""
    if not dist.is_available():
        return
    from torch.distributed import device_mesh, distributed_c10d

    for name in OBJECTS:
        while_fakes_live.patch(distributed_c10d, name, _on_real_tensors, "puts pickled objects into tensors")
    while_fakes_live.patch(device_mesh, "init_device_mesh", _on_real_tensors, "puts ranks into a tensor")
    for name in METHODS_OF_MESHES:
        if name in vars(device_mesh.DeviceMesh):
            while_fakes_live.patch(device_mesh.DeviceMesh, name, _on_real_tensors, "puts ranks into a tensor")


def teach_offsets() -> None:
    """Patch the function that computes the local shard's offsets, if distributed tensors are imported."""
    patch_imported("torch.distributed.tensor._utils", (COMPUTING,), _patch_offsets)


def _patch_offsets(utils: ModuleType) -> None:
    while_fakes_live.patch(utils, COMPUTING, _on_real_tensors, "puts the indices of a shard into a tensor")
