"""The least time that a collective occupies the links of a GPU.

These are the bytes that enter and leave a rank in any algorithm, NVLink SHARP and InfiniBand SHARP included. An
all-reduce of S bytes sends and receives S bytes on each rank, because switches may compute the sums. A rank of an
all-gather receives the shards of the others, and a rank of a reduce-scatter sends them.

Between machines, ranks of one group and one machine may share their traffic: each byte enters and leaves the machine
once, and the adapters of all these ranks transfer it. The links and the network may work at the same time.
"""

from __future__ import annotations

from typing import NamedTuple

from ...descriptions.rates import PeakRates
from ..collectives import Collective

__all__ = ["Crossing", "crossing_of"]


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
