"""Names of everything of ours in Redis, in one place, so that nothing there is without an owner.

What scheduler and nodes say to each other is sealed (`tunemq_shared.signing.message_signing`):
mail, each field of a reply, the challenge, leases, vitals, hellos and deregistrations, the headers
of batches (with their events) and pieces of output. All else is of no use to who may forge it, but
to hold the farm up.

tunemq:generation     random, with the run of Redis that it was made in; gone or changed: the wire
                      was reset (scheduler sets it)
tunemq:nodes          stream: NodeHello of every instance, and its deregistration when it ends in
peace
                      (nodes append, scheduler reads)
tunemq:challenge      a random number that the scheduler replaces every few seconds, where it has
                      keys; a lease that does not repeat it is an old one (scheduler sets it)
tunemq:lease:<inc>    counter that a node raises every second, the assignment that it has taken, and
                      the challenge; expires after LEASE_TTL_S
tunemq:vitals:<inc>   NodeVitals: how its machine is; set beside the lease, expires with it
tunemq:reply:<inc>    hash for that node: v newest assignment's term and version; f fenced; r why
                      it is to end in peace;
                      for each experiment j:<key of its events stream>, up to which number its
                      events are journalled (scheduler sets them; node removes the last kind
                      when it forgets the experiment); expires REPLY_TTL_S after the node's death
tunemq:events:<exp>   stream of event batches (scheduler creates, nodes append with NOMKSTREAM);
                      each attempt numbers its events in each stream from 1
tunemq.node.<inc>     Celery queue of that instance
tunemq:farm           that a scheduler takes requests, and of which version, as JSON (it sets it)
tunemq:requests       stream of what users ask of the farm (they append, the scheduler removes what
                      it begins to do)
tunemq:answer:<id>    the answer to a request; expires ANSWER_TTL_S after it was given
tunemq:scheduler      lease of a farm's scheduler: its term and who it is
tunemq:term           the highest term that a scheduler of this farm has had; kept for ever
tunemq:signs          the id of the key that the scheduler signs with, in hex, so that a worker
                      that does not know it can say so; nothing depends on it (scheduler sets it,
                      where it has keys)
tunemq:streams        the keys of the events streams of the scheduler that has that term, or of one
                      before it that came as far as to use the farm, one a line; kept for ever. Who
                      comes next deletes those that are not its own: nobody is left to read them
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

TASK: Final = "tunemq.run_steps"

GENERATION: Final = "tunemq:generation"
SCHEDULER: Final = "tunemq:scheduler"
TERM: Final = "tunemq:term"
STREAMS: Final = "tunemq:streams"
NODES: Final = "tunemq:nodes"
FARM: Final = "tunemq:farm"
SIGNS: Final = "tunemq:signs"
CHALLENGE: Final = "tunemq:challenge"
REQUESTS: Final = "tunemq:requests"

#: A node renews its lease this often.
LEASE_PERIOD_S: Final = 1.0
#: A lease that was not renewed for so long is void.
LEASE_TTL_S: Final = 6.0
#: What the scheduler has told a node is kept so long after the node was seen last.
REPLY_TTL_S: Final = 86_400
#: An answer that nobody has fetched for so long is of no use any more, nor is such a request.
ANSWER_TTL_S: Final = 60
#: How many bytes of events a node keeps that are not journalled. At this limit it reads nothing
#: from the trials of the experiments that have more than a fair share of them.
OUTBOX_BYTES: Final = 64 * 2**20
#: A node sends no more of an experiment's events while Redis has so many bytes of them from it that
#: are not journalled: a search that hangs must not fill Redis, however many nodes it has.
SENT_BYTES: Final = 2 * 2**20
#: Of which so much in memory, the rest on disk.
OUTBOX_MEMORY_BYTES: Final = 2**20
#: So many pieces of output, of at most 16 KiB, are about in an experiment's stream, and so long.
OUTPUT_PIECES: Final = 1000
OUTPUT_TTL_S: Final = 86_400
#: A signed request is void so long after it was sent; by the scheduler's clock.
REQUEST_TTL_S: Final = 120
#: A request that was sent so much later than now, by the scheduler's clock, is not taken.
CLOCK_TOLERANCE_S: Final = 60

#: "Journalled up to here" of an experiment that is over: nobody wants what is left of it.
EVERYTHING: Final = 2**63 - 1

#: Fields of a batch in an events stream, and of an entry of the nodes' stream.
HEADER, EVENTS, REGISTRATION, BYE = b"h", b"e", b"hello", b"bye"

#: The field of an entry of a stream of output.
PIECE: Final = b"o"

#: Why an instance is fenced whose node introduced itself with another one.
STARTED_AGAIN: Final = "its node was started again"


def lease(instance_id: str) -> str:
    """The key of an attempt's lease."""
    return f"tunemq:lease:{instance_id}"


def node_metrics(instance_id: str) -> str:
    """The key of what an attempt says of its machine."""
    return f"tunemq:vitals:{instance_id}"


def reply(instance_id: str) -> str:
    """The key of the scheduler's reply to an attempt."""
    return f"tunemq:reply:{instance_id}"


def events(experiment: str) -> str:
    """The key of an experiment's event stream."""
    return f"tunemq:events:{experiment}"


def listed(events_keys: Iterable[str]) -> str:
    """Streams as the list of the farm's says them."""
    return "\n".join(events_keys)


def unlisted(streams: str) -> list[str]:
    """The keys in the list of the farm's streams."""
    return streams.split("\n")


def output(events_key: str) -> str:
    """The key of a short stream with what an experiment's trials print."""
    return f"{events_key}:output"


def acknowledged_up_to(events_key: str) -> str:
    """The field of a reply that says how far an experiment's events are journalled."""
    return f"j:{events_key}"


def answer(request: str) -> str:
    """The key of the answer to a request."""
    return f"tunemq:answer:{request}"


def queue(instance_id: str) -> str:
    """The name of an attempt's Celery queue."""
    return f"tunemq.node.{instance_id}"
