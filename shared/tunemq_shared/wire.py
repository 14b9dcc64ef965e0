"""Names of everything of ours in Redis, in one place, so that nothing there is without an owner.

tunemq:generation     random, with the run of Redis that it was made in; gone or changed: the wire
                      was reset (scheduler sets it)
tunemq:nodes          stream: NodeHello of every incarnation, and its goodbye when it ends in peace
                      (nodes append, scheduler reads)
tunemq:lease:<inc>    counter that a node raises every second; expires after LEASE_TTL_S
tunemq:reply:<inc>    hash for that node: v newest assignment's term and version; f fenced;
                      for each experiment j:<key of its events stream>, up to which number its
                      events are journalled (scheduler sets them; node removes the last kind
                      when it forgets the experiment); expires REPLY_TTL_S after the node's death
tunemq:events:<exp>   stream of event batches (scheduler creates, nodes append with NOMKSTREAM);
                      each incarnation numbers its events in each stream from 1
tunemq.node.<inc>     Celery queue of that incarnation
tunemq:scheduler      lease of a farm's scheduler: its term and who it is
tunemq:term           the highest term that a scheduler of this farm has had; kept for ever
tunemq:stream         the key of the events stream of the scheduler that has that term, or of one
                      before it that came as far as to use the farm; kept for ever. Who comes next
                      with another stream deletes this one: nobody is left to read it
"""

from __future__ import annotations

from typing import Final

TASK: Final = "tunemq.run_steps"

GENERATION: Final = "tunemq:generation"
SCHEDULER: Final = "tunemq:scheduler"
TERM: Final = "tunemq:term"
STREAM: Final = "tunemq:stream"
NODES: Final = "tunemq:nodes"

#: A node renews its lease this often.
LEASE_PERIOD_S: Final = 1.0
#: A lease that was not renewed for so long is void.
LEASE_TTL_S: Final = 6.0
#: What the scheduler has told a node is kept so long after the node was seen last.
REPLY_TTL_S: Final = 86_400
#: What a node may hold that is not journalled yet; beyond it its hosts wait.
OUTBOX_BYTES: Final = 64 * 2**20
#: Of which so much in memory, the rest on disk.
OUTBOX_MEMORY_BYTES: Final = 2**20

#: "Journalled up to here" of an experiment that is over: nobody wants what is left of it.
EVERYTHING: Final = 2**63 - 1

#: Fields of a batch in an events stream, and of an entry of the nodes' stream.
HEADER, EVENTS, HELLO, BYE = b"h", b"e", b"hello", b"bye"

#: Why an incarnation is fenced whose node introduced itself with another one.
STARTED_AGAIN: Final = "its node was started again"


def lease(incarnation: str) -> str:
    """The key of an incarnation's lease."""
    return f"tunemq:lease:{incarnation}"


def reply(incarnation: str) -> str:
    """The key of the scheduler's reply to an incarnation."""
    return f"tunemq:reply:{incarnation}"


def events(experiment: str) -> str:
    """The key of an experiment's event stream."""
    return f"tunemq:events:{experiment}"


def journalled(events_key: str) -> str:
    """The field of a reply that says how far an experiment's events are journalled."""
    return f"j:{events_key}"


def queue(incarnation: str) -> str:
    """The name of an incarnation's Celery queue."""
    return f"tunemq.node.{incarnation}"
