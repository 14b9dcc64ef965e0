"""`SchedulerSigning`: signs a scheduler's messages to nodes and verifies theirs.

All signing of the transport is here. It rejects, counts and reports messages that no node of this
farm signed for this purpose; its callers see only verified message bodies. Without keys, messages
are not signed; see `tunemq_shared.signing.message_signing`.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

from tunemq_scheduler.transport.lease_challenge import LeaseChallenge
from tunemq_scheduler.transport.redis.redis_connection import RedisCommand
from tunemq_shared.broker import redis_keys
from tunemq_shared.protocol import message_limits as limits
from tunemq_shared.protocol.rejection_counter import RejectionCounter
from tunemq_shared.signing.live_keys import LiveKeys
from tunemq_shared.signing.message_signing import InvalidSignature

_REPLY: Final = redis_keys.reply("")
#: Enough for a node that renews its lease a thousand times a second forever.
_DIGITS: Final = 18
#: When a scheduler starts, a live node shows at most this many unanswered leases: the existing one,
#: and one that it writes just before it reads the challenge.
_UNANSWERED_AT_MOST: Final = 2
_FOREIGN: Final = "A client that is no node of this farm may have write access to its Redis."
#: What a person can do about a rejected message, by reason.
_ADVICE: Final = MappingProxyType(
    {
        "unsigned": "Start its worker with the farm's keys: tunemq worker --keys worker.toml.",
        "signed_without_keys": "Start this scheduler with the farm's keys, too: --keys"
        " scheduler.toml; or its worker without --keys.",
        "unknown_key": "Its worker has the keys of another farm, or old ones: give it the present"
        " worker.toml.",
        "altered": _FOREIGN,
        "unreadable": "Its worker has another version of TuneMQ, or no node of this farm sent it.",
        "oversized": _FOREIGN,
        "repeated": _FOREIGN,
        "unanswered": "Its worker has another version of TuneMQ, or a client repeats old leases of"
        " a lost node.",
    }
)


class RegistrationEntry(NamedTuple):
    """An entry of the nodes' stream: a registration, or the id of an instance that deregisters."""

    body: bytes
    is_deregistration: bool


class _Lease(NamedTuple):
    """A lease as last seen.

    Attributes:
        signed_message: the bytes in Redis.
        opened: the content of the last accepted lease.
        renewals: the greatest renewal number of all accepted leases.
        unanswered: how many leases in a row did not answer the scheduler's challenge.
    """

    signed_message: bytes
    opened: bytes | None
    renewals: int
    unanswered: int = 0


class SchedulerSigning:
    """Signs and verifies the messages between a scheduler and its nodes.

    Args:
        keys: the farm's keys; None if messages are not signed.
        rejected: counts rejected messages.
    """

    def __init__(
        self, keys: LiveKeys | None = None, rejected: RejectionCounter | None = None
    ) -> None:
        self.keys = LiveKeys.none() if keys is None else keys
        self.rejected = RejectionCounter() if rejected is None else rejected
        self._leases: dict[str, _Lease] = {}
        self._challenge = LeaseChallenge()
        self._version = self.keys.version
        #: Whether a node was rejected that new keys might accept.
        self._has_rejected = False

    # --- to nodes ---------------------------------------------------------------------------------

    def command(self, instance_id: str, assignment: bytes) -> str:
        """Return an assignment in its signed and encoded form."""
        signed_message = self.keys.orders.close(assignment, b"command", instance_id.encode())
        return base64.b64encode(signed_message).decode()

    def replies(self, commands: Iterable[RedisCommand]) -> list[RedisCommand]:
        """Return the same commands, with the values of replies to nodes signed."""
        return [self._reply(command) for command in commands]

    def _reply(self, command: RedisCommand) -> RedisCommand:
        if command[0] != "HSET" or not str(command[1]).startswith(_REPLY):
            return command
        name, key, field, value = map(str, command)
        instance_id = key.removeprefix(_REPLY).encode()
        signed_message = self.keys.orders.close(
            value.encode(), b"reply", instance_id, field.encode()
        )
        return name, key, field, signed_message

    def challenge(self, now: float) -> list[RedisCommand]:
        """Return the command that publishes the lease challenge; empty without keys.

        Args:
            now: the time of a monotonic clock, in seconds.
        """
        if not self.keys.is_signed:
            return []
        posed = self._challenge.pose(now).encode()
        return [("SET", redis_keys.CHALLENGE, self.keys.orders.close(posed, b"challenge"))]

    # --- from nodes -------------------------------------------------------------------------------

    def registration_entry(self, fields: Mapping[bytes, bytes]) -> RegistrationEntry | None:
        """Verify an entry of the nodes' stream and return its content; None if rejected."""
        if (deregistration := fields.get(redis_keys.BYE)) is not None:
            body = self._open("deregistration", deregistration, limits.DEREGISTRATION_BYTES, b"bye")
            return None if body is None else RegistrationEntry(body, is_deregistration=True)
        body = self._open(
            "registration",
            fields.get(redis_keys.REGISTRATION, b""),
            limits.REGISTRATION_BYTES,
            b"registration",
        )
        return None if body is None else RegistrationEntry(body, is_deregistration=False)

    def batch(self, events_key: str, fields: Mapping[bytes, bytes]) -> dict[bytes, bytes] | None:
        """Verify a batch that a node added to this stream; return its fields, None if rejected."""
        header, events = fields.get(redis_keys.HEADER, b""), fields.get(redis_keys.EVENTS, b"")
        if len(events) > limits.EVENTS_BYTES:
            self._reject("events", "oversized", "is too long")
            return None
        about = (b"batch", events_key.encode(), events)
        opened = self._open("events", header, limits.HEADER_BYTES, *about)
        return None if opened is None else {redis_keys.HEADER: opened, redis_keys.EVENTS: events}

    def leases(self, values: Mapping[str, bytes | None]) -> list[bytes | None]:
        """Verify the leases of these instances; None for one that is gone or was rejected.

        A renewed lease has a greater number and repeats this scheduler's challenge, so that an old
        lease does not count as a sign of life.
        """
        before, self._leases = self._leases, {}
        said = []
        for instance_id, value in values.items():
            last = before.get(instance_id, _Lease(b"", None, 0))
            if value is not None and value != last.signed_message:
                last = self._renewed(instance_id, value, last)
            self._leases[instance_id] = last
            said.append(None if value is None else last.opened)
        return said

    def _renewed(self, instance_id: str, value: bytes, last: _Lease) -> _Lease:
        opened = self._open("lease", value, limits.LEASE_BYTES, b"lease", instance_id.encode())
        if opened is None or not self.keys.is_signed:
            return _Lease(value, opened, last.renewals)
        said, _, answer = opened.rpartition(b":")
        if (renewals := _number(opened)) <= last.renewals:
            self._reject("lease", "repeated", "is an old one")
            return last._replace(signed_message=value)
        if not self._challenge.is_answered_by(answer.decode(errors="replace")):
            if last.unanswered >= _UNANSWERED_AT_MOST:
                self._reject("lease", "unanswered", "does not answer this scheduler")
            return last._replace(signed_message=value, unanswered=last.unanswered + 1)
        return _Lease(value, said, renewals)

    def node_metrics(self, instance_id: str, value: bytes | None) -> bytes | None:
        """Verify a node's metrics; None if there are none or they are rejected."""
        if value is None:
            return None
        return self._open(
            "node_metrics", value, limits.NODE_METRICS_BYTES, b"node_metrics", instance_id.encode()
        )

    def output(self, events_key: str, piece: bytes) -> bytes | None:
        """Verify a piece of trial output of the experiment with this events key."""
        return self._open("output", piece, limits.OUTPUT_BYTES, b"output", events_key.encode())

    # --- keys -------------------------------------------------------------------------------------

    @property
    def signer(self) -> str:
        """The id of the key that signs orders, as nodes see it; empty without keys."""
        return self.keys.orders.signer.hex()

    def are_changed(self) -> tuple[bool, bool]:
        """Return whether the keys changed since the last `change_is_told`.

        The second value says whether nodes were rejected since then that the new keys may accept.
        """
        is_changed = self.keys.version != self._version
        return is_changed, is_changed and self._has_rejected

    def change_is_told(self) -> None:
        """Mark the change of keys as handled."""
        self._version, self._has_rejected = self.keys.version, False

    def _open(self, kind: str, signed_message: bytes, longest: int, *about: bytes) -> bytes | None:
        if len(signed_message) > longest:
            self._reject(kind, "oversized", "is too long")
            return None
        try:
            return self.keys.events.open(signed_message, *about)
        except InvalidSignature as problem:
            self._reject(kind, problem.reason, str(problem))
            if kind in {"registration", "events"} and problem.reason == "unknown_key":
                self._has_rejected = True
            return None

    def _reject(self, kind: str, reason: str, why: str) -> None:
        advice = _ADVICE.get(reason, "")
        text = f"{_NAMES[kind]} {why}: it is refused. {advice}"
        self.rejected.add(kind, reason, text.rstrip())


def _number(lease: bytes) -> int:
    """Return the renewal number of a lease; 0 if it is malformed."""
    number = lease.partition(b":")[0]
    return int(number) if number.isdigit() and len(number) < _DIGITS else 0


#: The name of each kind of message, at the beginning of a sentence.
_NAMES: Final = MappingProxyType(
    {
        "registration": "A node's registration",
        "deregistration": "A node's deregistration",
        "events": "A batch of a node's events",
        "lease": "A node's lease",
        "node_metrics": "A node's metrics",
        "output": "A piece of what trials print",
    }
)
