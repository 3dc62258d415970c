"""The messages between the process of a rank (`messages.py`) and the process that runs ranks (`ranks/processes.py`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

__all__ = [
    "CYCLE",
    "FINISHED",
    "OBJECTS",
    "OTHER",
    "TO_ALL",
    "Awaited",
    "Channel",
    "Message",
    "Missing",
    "Received",
    "Sent",
    "mismatch",
]

TO_ALL = -1
OBJECTS = "objects"

# Reasons why a message is missing.
FINISHED = "finished"  # the sender has reached its goal
CYCLE = "cycle"
OTHER = "other"


class Channel(NamedTuple):
    """Messages that are received in the order in which they are sent.

    Attributes:
        ranks: The global ranks of the process group.
        group: The number of earlier groups with the same ranks.
        kind: The device type, which selects the backend, or the kind of other messages.
        source: The global rank of the sender.
        destination: The global rank of the receiver; `TO_ALL` for a broadcast.
        tag: The tag; NCCL has none.
    """

    ranks: tuple[int, ...]
    group: int
    kind: str
    source: int
    destination: int
    tag: int


class Message(NamedTuple):
    """One message.

    Attributes:
        shape: The shape of a tensor.
        dtype: Its dtype; None for objects.
        nbytes: The number of its bytes.
        values: These bytes, if they are known or assumed.
        written: If only some elements are known, a byte for each element: 1 if it is known.
        kind: 0 if the values are known, otherwise the policies that they depend on (`ValuePolicy.behind()`).
    """

    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    nbytes: int = 0
    values: bytes | None = None
    written: bytes | None = None
    kind: int = 0


class Sent(NamedTuple):
    """The notice that this rank has sent a message."""

    channel: Channel
    number: int
    message: Message


class Received(NamedTuple):
    """The notice that this rank receives a message into a tensor, without waiting for its values."""

    channel: Channel
    number: int
    message: Message
    place: str


class Awaited(NamedTuple):
    """The notice that the rank `receiver` waits for a message. The answer is a `Message`, or `Missing`."""

    channel: Channel
    number: int
    receiver: int
    place: str


class Missing(NamedTuple):
    """The answer for a message that will not be sent, with the reason."""

    reason: str
    text: str


def mismatch(channel: Channel, sent: Message, received: Message, place: str) -> str:
    """Return the error for a message that is received into a tensor of another size."""
    return (
        f"Rank {channel.source} sends {list(sent.shape)} {sent.dtype}, {sent.nbytes} bytes, but the receiver expects "
        f"{list(received.shape)} {received.dtype}, {received.nbytes} bytes ({place}). In a job this hangs or fails. "
        "Receive a tensor of the size that is sent."
    )
