"""The work that an operator certainly does on a GPU: operations, and bytes that its memory transfers.

A lower bound of time counts only work that every implementation of the operator does:

- Products of matrices are counted as PyTorch's `FlopCounterMode` counts them. No library for GPUs multiplies matrices
  with fewer operations (Strassen's algorithm).
- Causal attention needs the lower triangle only. With a mask, a window or packed sequences, nothing is certain.
- A convolution may be computed by Winograd's algorithm or by Fourier transforms. These need at least one
  multiplication for each output element and pair of channels, so the size of the kernel is not counted.
- Inputs are read if the operator reads each element, and results are written if it writes each element. Operators
  that select elements, such as `embedding` and `index_select`, may read a few rows only. `TABLE` lists the operators;
  others transfer nothing.
- When a kernel begins, the L2 cache contains at most its capacity of the inputs. When it ends, the cache contains at
  most its capacity of results that have not reached the memory. So reads and writes each count beyond that capacity.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from itertools import chain
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...descriptions import PeakRates
from ...internals.held_tensors import storage_of, tensors_in
from ..collectives import Collective

__all__ = ["Crossing", "certain_flops", "crossing_of", "gpu_of", "rate_of", "traffic_of"]

aten: Any = torch.ops.aten

# ---- Operations

PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "_scaled_mm"})
CONVOLUTIONS = frozenset({"convolution", "_convolution"})
ATTENTION = ("_scaled_dot_product_", "_flash_attention_", "_efficient_attention_")


def certain_flops(packet: Any, counted: int, out: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return the certain operations of a call for which PyTorch counts `counted`."""
    name = packet.__name__
    if name in PRODUCTS:
        return 0 if kwargs.get("alpha", 1) == 0 else counted
    if name.startswith(ATTENTION):
        return int(counted * _share_of_attention(_named(packet, args, kwargs), name.startswith("_scaled")))
    if name in CONVOLUTIONS or name == "convolution_backward":
        return _convolution(out, _named(packet, args, kwargs))
    return 0


def rate_of(packet: Any, args: tuple[Any, ...], rates: PeakRates) -> float:
    """Return the operations per second for the dtype of the factors, by the data sheet; 0 if unknown."""
    factor = args[1 if packet.__name__ in ("addmm", "baddbmm") else 0]
    name = str(factor.dtype).removeprefix("torch.").partition("_")[0]
    if name == "float32" and _allows_tf32(packet.__name__ in PRODUCTS):
        name = "tf32"
    return float(getattr(rates, name, 0.0))


def _allows_tf32(is_product: bool) -> bool:
    try:
        return bool(torch.backends.cuda.matmul.allow_tf32 if is_product else torch.backends.cudnn.allow_tf32)
    except RuntimeError:  # the newer `fp32_precision` has been set, after which this may not be read
        return True


def _share_of_attention(given: dict[str, Any], has_heads_first: bool) -> float:
    """Return the part of the square of queries and keys that a kernel cannot skip."""
    if any(_is_given(given.get(name)) for name in ("attn_bias", "bias", "seqused_k", "seqlen_k", "window_size")):
        return 0.0
    if any((given.get(name) or -1) >= 0 for name in ("window_size_left", "window_size_right")):
        return 0.0
    if given["query"].dim() != 4:  # packed sequences
        return 0.0
    sequence = 2 if has_heads_first else 1
    queries, keys = given["query"].shape[sequence], given["key"].shape[sequence]
    if given.get("is_causal") or given.get("custom_mask_type"):
        least = min(queries, keys)
        return least * (least + 1) / 2 / (queries * keys) if least else 0.0
    return 1.0


def _is_given(value: Any) -> bool:
    return value is not None and not (isinstance(value, Tensor) and not value.numel())


def _convolution(out: Any, given: dict[str, Any]) -> int:
    """Return the operations of a convolution, or of its gradients, with a kernel of one element."""
    outputs = given.get("grad_output", out)
    elements = given["input"].numel() if given.get("transposed") else outputs.numel()
    return int(2 * elements * given["weight"].shape[1] * sum(given.get("output_mask", (True,))[:2]))


def _named(packet: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**dict(zip(_parameters(packet), args, strict=False)), **kwargs}


@cache
def _parameters(packet: Any) -> tuple[str, ...]:
    return tuple(argument.name for argument in getattr(packet, packet.overloads()[0])._schema.arguments)


# ---- Memory

ALL, NONE, FIRST, FIRST_TWO, SECOND = slice(None), slice(0), slice(1), slice(2), slice(1, 2)

# The arguments that an operator certainly reads. Its results are written.
TABLE: dict[str, slice] = {
    **dict.fromkeys(PRODUCTS | CONVOLUTIONS, ALL),
    **dict.fromkeys(("convolution_backward", "nll_loss_backward"), FIRST),
    **dict.fromkeys(("sum", "mean", "var", "var_mean", "std", "prod", "amax", "amin", "argmax", "argmin"), FIRST),
    **dict.fromkeys(("norm", "linalg_vector_norm", "logsumexp", "cumsum", "_softmax", "_log_softmax"), FIRST),
    **dict.fromkeys(("native_layer_norm", "native_batch_norm", "cudnn_batch_norm", "native_group_norm"), FIRST),
    **dict.fromkeys(("_fused_rms_norm", "native_dropout", "_to_copy"), FIRST),
    **dict.fromkeys(("_softmax_backward_data", "_log_softmax_backward_data"), FIRST_TWO),
    **dict.fromkeys(("native_layer_norm_backward", "native_batch_norm_backward"), FIRST_TWO),
    **dict.fromkeys(("cudnn_batch_norm_backward", "native_dropout_backward", "_fused_rms_norm_backward"), FIRST_TWO),
    **dict.fromkeys(("cat", "stack", "clone"), FIRST),
    **dict.fromkeys(("copy_", "_foreach_copy_"), SECOND),
    **dict.fromkeys(("where", "masked_fill", "masked_fill_", "tril", "triu", "index", "index_select", "gather"), NONE),
    **dict.fromkeys(("zeros", "zeros_like", "ones", "ones_like", "full", "full_like", "new_zeros"), NONE),
    **dict.fromkeys(("fill_", "zero_", "_foreach_zero_", "normal_", "uniform_", "bernoulli_"), NONE),
    **dict.fromkeys(
        ("embedding", "embedding_dense_backward", "select_backward", "slice_backward", "max_pool2d_with_indices"), NONE
    ),
    "max_pool2d_with_indices_backward": FIRST,
    **dict.fromkeys(("_fused_adam_", "_fused_adamw_", "_fused_sgd_"), ALL),
}


@cache
def _reads_of(packet: Any) -> slice | None:
    """Return what an operator certainly reads; None if its traffic is unknown."""
    name = packet.__name__
    if name in TABLE:
        return TABLE[name]
    is_pointwise = torch.Tag.pointwise in getattr(packet, packet.overloads()[0]).tags
    return ALL if is_pointwise or name.startswith("_foreach_") else None


def traffic_of(packet: Any, out: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, int]:
    """Return the bytes of GPU memory that a call certainly reads and writes, through the cache; 0 for views."""
    reads = _reads_of(packet)
    if reads is None or kwargs.get("beta", 1) == 0:
        return 0, 0
    name = packet.__name__
    written = list(tensors_in(out))
    if name.startswith("_fused_"):
        written = list(tensors_in((args[0], *(args[2:4] if name.startswith("_fused_adam") else args[2:3]))))
    elif name.endswith("_"):
        written = list(tensors_in(args[0]))
    elif "out" not in kwargs:
        given = {storage_of(one)[0] for one in tensors_in((args, kwargs))}
        if any(storage_of(one)[0] in given for one in written):
            return 0, 0
    return _distinct_bytes(tensors_in(args[reads])), _distinct_bytes(written)


def gpu_of(values: Any) -> int | None:
    """Return the number of the first GPU with a tensor of `values`; None if they are elsewhere."""
    return next((one.device.index for one in tensors_in(values) if one.device.type == "cuda"), None)


def _distinct_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes in GPU memory of tensors that may share storages."""
    spans: dict[int, list[tuple[int, int, int]]] = {}
    for tensor in tensors:
        if tensor.device.type == "cuda" and tensor.layout is torch.strided and tensor.numel():
            size = tensor.element_size()
            extent, count = _extent(tensor.shape, tensor.stride())
            begin = int(tensor.storage_offset()) * size
            spans.setdefault(storage_of(tensor)[0], []).append((begin, begin + extent * size, count * size))
    return sum(_union(sorted(parts)) for parts in spans.values())


def _extent(shape: Iterable[int], strides: Iterable[int]) -> tuple[int, int]:
    """Return the length of the range of elements, and the number of distinct ones; 0 if windows overlap."""
    extent, sizes = 1, []
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size == 1 or stride == 0:
            continue
        if stride < extent:
            return extent + stride * (size - 1), 0
        extent += stride * (size - 1)
        sizes.append(size)
    return extent, prod(sizes)


def _union(spans: list[tuple[int, int, int]]) -> int:
    """Return the least number of bytes in ranges of (begin, end, bytes) that may overlap."""
    total = latest = until = 0
    for begin, end, count in chain(spans, [(1 << 62, 0, 0)]):
        if begin >= until:
            total, latest = total + latest, count
        else:
            latest = max(latest, count)
        until = max(until, end)
    return total


# ---- The least time that a collective occupies the links of a GPU
#
# These are the bytes that enter and leave a rank in any algorithm, NVLink SHARP and InfiniBand SHARP included. An
# all-reduce of S bytes sends and receives S bytes on each rank, because switches may compute the sums. A rank of an
# all-gather receives the shards of the others, and a rank of a reduce-scatter sends them.
#
# Between machines, ranks of one group and one machine may share their traffic: each byte enters and leaves the machine
# once, and the adapters of all these ranks transfer it. The links and the network may work at the same time.


class Crossing(NamedTuple):
    """Bytes that enter and leave a rank, and bytes of these that enter and leave by its network adapter.

    `spans` is true if the group spans machines, so that bytes may take the links or the network.
    """

    received: float = 0.0
    sent: float = 0.0
    network_received: float = 0.0
    network_sent: float = 0.0
    spans: bool = False

    def seconds(self, rates: PeakRates) -> float:
        """Return the least time for these bytes."""
        link = rates.link + (rates.network if self.spans else 0.0)
        return max(max(self.received, self.sent) / link, max(self.network_received, self.network_sent) / rates.network)


def crossing_of(one: Collective, rank: int, per_node: int) -> Crossing:
    """Return the bytes that must cross the links of `rank` in any algorithm.

    Args:
        one: A collective of the rank.
        rank: The global rank.
        per_node: The number of ranks of a machine.
    """
    size = one.group_size
    if rank not in one.ranks or size == 1 or not one.device.startswith("cuda"):
        return Crossing()
    local = sum(other // per_node == rank // per_node for other in one.ranks)
    spans = local < size
    name = one.operator
    if name.startswith(("send", "recv")):
        return _message(one, rank, per_node)
    if "alltoall" in name:
        kept, is_even = one.bytes_kept, one.bytes_kept * size == one.bytes_sent == one.bytes_received
        far = one.bytes_sent * (size - local) / size if is_even else 0.0
        return Crossing(max(one.bytes_received - kept, 0), one.bytes_sent - kept, far, far, spans)
    if "allgather" in name or "reduce_scatter" in name:
        whole = max(one.bytes_sent, one.bytes_received)
        least = min(one.bytes_sent, one.bytes_received)  # the shard of this rank
        most, is_even = whole - least, least * size == whole
        far, near = (least * (size - local) / local, least) if spans and is_even else (0.0, 0.0)
        return (
            Crossing(most, least, far, near, spans) if "allgather" in name else Crossing(least, most, near, far, spans)
        )
    if "allreduce" in name:
        far = one.bytes_sent / local if spans else 0.0
        return Crossing(one.bytes_sent, one.bytes_sent, far, far, spans)
    return Crossing()  # collectives with a root are rare in steps


def _message(one: Collective, rank: int, per_node: int) -> Crossing:
    count = max(one.bytes_sent, one.bytes_received)
    if one.peer is None or not 0 <= one.peer < len(one.ranks):
        return Crossing()
    spans = one.ranks[one.peer] // per_node != rank // per_node
    far = count if spans else 0
    return Crossing(0, count, 0, far, spans) if one.operator == "send" else Crossing(count, 0, far, 0, spans)
