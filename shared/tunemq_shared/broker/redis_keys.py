"""Names of all keys that TuneMQ uses in Redis, in one place.

Scheduler and nodes sign what they write (`tunemq_shared.signing.message_signing`): assignments,
each field of a reply, the challenge, leases, node metrics, registrations and deregistrations, the
headers of batches (with their events) and output chunks. The other keys are not signed: a forger
could only delay the farm with them.

tunemq:generation     random, with the run of Redis in which it was made; if it is missing or
                      changed, Redis lost its data (scheduler sets it)
tunemq:nodes          stream: the NodeRegistration of every instance, and its deregistration when it
                      ends normally (nodes append, scheduler reads)
tunemq:challenge      a random number that the scheduler replaces every few seconds, if it has keys;
                      a lease that does not repeat it is an old one (scheduler sets it)
tunemq:lease:<inc>    counter that a node raises every second, the assignment that it accepted, and
                      the challenge; expires after LEASE_TTL_S
tunemq:vitals:<inc>   the node's metrics; set with the lease, expires with it
tunemq:reply:<inc>    hash for that node instance: v term and version of the newest assignment; f
                      fenced; r why it is to end normally;
                      for each experiment j:<key of its events stream>, up to which number its
                      events are journalled (scheduler sets them; node removes the last kind
                      when it forgets the experiment); expires REPLY_TTL_S after the node's death
tunemq:events:<exp>   stream of event batches (scheduler creates, nodes append with NOMKSTREAM);
                      each instance numbers its events in each stream from 1
tunemq.node.<inc>     Celery queue of that instance
tunemq:farm           JSON: a scheduler accepts requests, and its version (scheduler sets it)
tunemq:requests       stream of users' requests to the farm (users append, the scheduler removes
                      those that it begins to serve)
tunemq:answer:<id>    the answer to a request; expires ANSWER_TTL_S after the scheduler wrote it
tunemq:scheduler      lease of a farm's scheduler: its term and identity
tunemq:term           the highest term that a scheduler of this farm has had; never expires
tunemq:signs          the id of the key that the scheduler signs with, in hex, so that a worker
                      without that key can report it; only informative (scheduler sets it, if it
                      has keys)
tunemq:streams        the keys of the events streams of the scheduler of that term, or of an earlier
                      one that got as far as using the farm, one a line; never expires. The next
                      scheduler deletes the streams that it does not own: they have no reader left
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
#: A lease expires this long after its last renewal.
LEASE_TTL_S: Final = 6.0
#: A node's reply expires this long after the node's last lease.
REPLY_TTL_S: Final = 86_400
#: An answer that its client has not fetched, or an unserved request, expires after this time.
ANSWER_TTL_S: Final = 60
#: How many bytes of unjournalled events a node keeps. At this limit it stops reading from the
#: trials of experiments that exceed a fair share of them.
OUTBOX_BYTES: Final = 64 * 2**20
#: A node stops sending an experiment's events while Redis holds this many unjournalled bytes of
#: them from it: a hanging search must not fill Redis, however many nodes it has.
SENT_BYTES: Final = 2 * 2**20
#: The same for a node that ends, and keeps nothing: half an hour of a trial's usual results.
LAST_SENT_BYTES: Final = 16 * 2**20
#: Of OUTBOX_BYTES, how much is in memory; the rest is on disk.
OUTBOX_MEMORY_BYTES: Final = 2**20
#: How many output chunks, of at most 16 KiB, an experiment's stream holds, and for how long.
OUTPUT_CHUNKS: Final = 1000
OUTPUT_TTL_S: Final = 86_400
#: A signed request expires this long after it was sent, by the scheduler's clock.
REQUEST_TTL_S: Final = 120
#: The scheduler rejects a request that is dated further ahead of its clock than this.
CLOCK_TOLERANCE_S: Final = 60

#: "Journalled up to here" of an ended experiment: its remaining events have no reader.
EVERYTHING: Final = 2**63 - 1

#: Fields of a batch in an events stream, and of an entry of the nodes' stream.
HEADER, EVENTS, REGISTRATION, BYE = b"h", b"e", b"hello", b"bye"

#: The field of an entry of a stream of output.
CHUNK: Final = b"o"

#: Why an instance is fenced after a newer instance of its node registers.
STARTED_AGAIN: Final = "its node was started again"


def lease(instance_id: str) -> str:
    """The key of a node instance's lease."""
    return f"tunemq:lease:{instance_id}"


def node_metrics(instance_id: str) -> str:
    """The key of a node instance's metrics."""
    return f"tunemq:vitals:{instance_id}"


def reply(instance_id: str) -> str:
    """The key of the scheduler's reply to a node instance."""
    return f"tunemq:reply:{instance_id}"


def events(experiment: str) -> str:
    """The key of an experiment's event stream."""
    return f"tunemq:events:{experiment}"


def listed(events_keys: Iterable[str]) -> str:
    """Encode the keys of streams for the farm's list of them."""
    return "\n".join(events_keys)


def unlisted(streams: str) -> list[str]:
    """Decode the farm's list of streams into their keys."""
    return streams.split("\n")


def output(events_key: str) -> str:
    """The key of a short stream with the output of an experiment's trials."""
    return f"{events_key}:output"


def acknowledged_up_to(events_key: str) -> str:
    """The field of a reply that says how far an experiment's events are journalled."""
    return f"j:{events_key}"


def answer(request: str) -> str:
    """The key of the answer to a request."""
    return f"tunemq:answer:{request}"


def queue(instance_id: str) -> str:
    """The name of a node instance's Celery queue."""
    return f"tunemq.node.{instance_id}"
