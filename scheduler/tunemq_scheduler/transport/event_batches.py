"""Batches of events as nodes sent them; only the experiment they belong to decodes them.

A supervisor that serves several experiments forwards a batch as bytes, so an event that cannot be
decoded fails only its own experiment.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, TypeAlias

import msgspec

from tunemq_shared.base.decoding_errors import UNDECODABLE
from tunemq_shared.base.errors import TransportError
from tunemq_shared.checkpoints.checkpoint_sink import is_checkpoint_of
from tunemq_shared.protocol import messages as m

#: The events that name a checkpoint which their own attempt wrote.
_ABOUT_OWN_CHECKPOINTS: Final = (m.CheckpointWritten, m.CheckpointCommitted, m.CheckpointLost)
#: The most characters of a key or a trial in a message.
_SHOWN: Final = 200


class EventBatch(msgspec.Struct, frozen=True, array_like=True, tag="events"):
    """Consecutive events of a node.

    Attributes:
        read: the node instance, and the numbers of the first and the last event.
        payload: the events as one msgpack array.
    """

    read: m.BatchRead
    payload: bytes

    def events(self) -> list[m.Event]:
        """Return the `BatchRead`, followed by the events.

        Raises:
            TransportError: an event cannot be decoded, or names a checkpoint of another trial; the
                message names the node and the field.
        """
        read = self.read
        which = f"Events {read.first} to {read.last} of node {read.instance_id}"
        try:
            events = m.decode_node_events(self.payload)
            for event in events:
                if isinstance(event, _ABOUT_OWN_CHECKPOINTS):
                    _check_key(event)
        except UNDECODABLE as error:
            raise TransportError(
                f"{which} cannot be read: {error}. The search ends here, and what was journalled "
                "stays; see that the node runs an unchanged TuneMQ of this version, then resume."
            ) from error
        if len(events) != read.last - read.first + 1:
            raise TransportError(f"{which} are {len(events)}.")
        return [read, *events]


def _check_key(event: m.CheckpointWritten | m.CheckpointCommitted | m.CheckpointLost) -> None:
    """Raise ValidationError unless the checkpoint is one of the event's trial and attempt.

    A checkpoint that is not committed is deleted from the store; a key could name any file.
    """
    if not is_checkpoint_of(event.key, event.trial, event.attempt):
        raise msgspec.ValidationError(
            f"{event.key[:_SHOWN]!r} is no checkpoint of attempt {event.attempt} of trial "
            f"{event.trial[:_SHOWN]!r}"
        )


#: What an experiment reads: a change of a node, or a batch of a node's events.
ReadEvent: TypeAlias = m.Event | EventBatch


def events_of(read_events: Iterable[ReadEvent]) -> list[m.Event]:
    """Return everything read as events, in order.

    Raises:
        TransportError: an event cannot be decoded.
    """
    events: list[m.Event] = []
    for read_event in read_events:
        if isinstance(read_event, EventBatch):
            events += read_event.events()
        else:
            events.append(read_event)
    return events


def count_of(payload: bytes) -> int:
    """Return how many events a payload claims to have; 1 if it is not an array."""
    first = payload[0] if payload else 0
    if first & 0xF0 == 0x90:
        return first & 0x0F
    width = {0xDC: 2, 0xDD: 4}.get(first, 0)
    return int.from_bytes(payload[1 : 1 + width], "big") if len(payload) > width > 0 else 1
