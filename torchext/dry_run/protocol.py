"""The messages between the process of a rank (`messages.py`) and the process that runs ranks (`rank_processes.py`)."""

from __future__ import annotations

from typing import NamedTuple

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

# Reasons why a message does not come.
FINISHED = "finished"  # the sender has made enough
CYCLE = "cycle"
OTHER = "other"


class Channel(NamedTuple):
    """Messages that are received in the order in which they are sent.

    Attributes:
        ranks: The global ranks of the process group.
        group: How many groups of the same ranks were made before it.
        kind: The type of the device, which decides about the backend, or what else is sent.
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
        nbytes: How many bytes it has.
        values: These bytes, if they are known or assumed.
        written: Where not all elements are known, a byte for each that says whether it is.
        kind: 0 if the values are known, or else the policies that they stand on (`ValuePolicy.behind()`).
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
    """The notice that this rank has a tensor for a message, and does not wait for its values."""

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
    """The answer if a message will not come, with the reason."""

    reason: str
    text: str


def mismatch(channel: Channel, sent: Message, received: Message, place: str) -> str:
    """Return the error for a message that does not fit into the tensor that receives it."""
    return (
        f"Rank {channel.source} sends {list(sent.shape)} {sent.dtype}, {sent.nbytes} bytes, and the receiver has "
        f"{list(received.shape)} {received.dtype}, {received.nbytes} bytes, for it ({place}). In a job this hangs or "
        "fails. Receive what is sent."
    )
