"""`SchedulerSigning`: where a scheduler signs what it says to nodes, and checks what they say.

It is the only place. What is not what a node of this farm said about that is refused here: counted,
told, and skipped; whoever uses this sees only the bodies of messages. Without keys nothing is
signed, see `tunemq_shared.signing.message_signing`.
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
from tunemq_shared.protocol.rejections import RejectionCounter
from tunemq_shared.signing.live_keys import LiveKeys
from tunemq_shared.signing.message_signing import InvalidSignature

_REPLY: Final = redis_keys.reply("")
#: A node that renews its lease a thousand times a second for ever needs fewer.
_DIGITS: Final = 18
#: A live node shows so many leases without an answer at most when a scheduler starts: the one that
#: stands there, and the one that it writes just before it reads the challenge.
_UNANSWERED_AT_MOST: Final = 2
#: What a person can do about a message that is refused, by the reason.
_ADVICE: Final = MappingProxyType(
    {
        "unsigned": "Start its worker with the farm's keys: tunemq worker --keys worker.toml.",
        "signed_without_keys": "Start this scheduler with the farm's keys, too: --keys"
        " scheduler.toml; or its worker without --keys.",
        "unknown_key": "Its worker has the keys of another farm, or old ones: give it the present"
        " worker.toml.",
        "altered": "Somebody who is no node of this farm may write to its Redis.",
        "unreadable": "Its worker has another version of TuneMQ, or it is from nobody of ours.",
        "oversized": "Somebody who is no node of this farm may write to its Redis.",
        "repeated": "Somebody who is no node of this farm may write to its Redis.",
        "unanswered": "Its worker has another version of TuneMQ, or somebody plays old leases of a"
        " node that is gone.",
    }
)


class RegistrationEntry(NamedTuple):
    """An entry of the nodes' stream: a hello, or the instance that takes its leave."""

    body: bytes
    is_deregistration: bool


class _Lease(NamedTuple):
    """A lease as it was seen last.

    Attributes:
        opened: what the last one that counted said.
        renewals: the greatest number that one that counted ever said.
        unanswered: how many in a row did not answer the scheduler's challenge.
    """

    signed_message: bytes
    opened: bytes | None
    renewals: int
    unanswered: int = 0


class SchedulerSigning:
    """Seals and opens the messages between a scheduler and its nodes.

    Args:
        keys: of the farm; none where nothing is signed.
        refused: is told of what is refused.
    """

    def __init__(
        self, keys: LiveKeys | None = None, rejected: RejectionCounter | None = None
    ) -> None:
        self.keys = LiveKeys.none() if keys is None else keys
        self.rejected = RejectionCounter() if rejected is None else rejected
        self._leases: dict[str, _Lease] = {}
        self._challenge = LeaseChallenge()
        self._version = self.keys.version
        #: Whether a node was refused that other keys might make welcome.
        self._has_rejected = False

    # --- to nodes ---------------------------------------------------------------------------------

    def command(self, instance_id: str, assignment: bytes) -> str:
        """An assignment as it travels."""
        signed_message = self.keys.orders.close(assignment, b"command", instance_id.encode())
        return base64.b64encode(signed_message).decode()

    def replies(self, commands: Iterable[RedisCommand]) -> list[RedisCommand]:
        """The same commands, with what they set in replies to nodes sealed."""
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
        """Show nodes what their leases have to repeat; nothing where nothing is signed.

        Args:
            now: a monotonic clock.
        """
        if not self.keys.is_signed:
            return []
        posed = self._challenge.pose(now).encode()
        return [("SET", redis_keys.CHALLENGE, self.keys.orders.close(posed, b"challenge"))]

    # --- from nodes -------------------------------------------------------------------------------

    def registration_entry(self, fields: Mapping[bytes, bytes]) -> RegistrationEntry | None:
        """What an entry of the nodes' stream says."""
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
        """The fields of a batch of events that a node put into this stream."""
        header, events = fields.get(redis_keys.HEADER, b""), fields.get(redis_keys.EVENTS, b"")
        if len(events) > limits.EVENTS_BYTES:
            self._reject("events", "oversized", "is too long")
            return None
        about = (b"batch", events_key.encode(), events)
        opened = self._open("events", header, limits.HEADER_BYTES, *about)
        return None if opened is None else {redis_keys.HEADER: opened, redis_keys.EVENTS: events}

    def leases(self, values: Mapping[str, bytes | None]) -> list[bytes | None]:
        """What the leases of these attempts say; None where it is gone or refused.

        A lease that was renewed says so by a greater number, and repeats the challenge of this
        scheduler, so that an old one does not pass for a sign of life.
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
        """What a node says of its machine, if it does."""
        if value is None:
            return None
        return self._open(
            "node_metrics", value, limits.NODE_METRICS_BYTES, b"node_metrics", instance_id.encode()
        )

    def output(self, events_key: str, piece: bytes) -> bytes | None:
        """A piece of what trials of the experiment with these events print."""
        return self._open("output", piece, limits.OUTPUT_BYTES, b"output", events_key.encode())

    # --- keys -------------------------------------------------------------------------------------

    @property
    def signer(self) -> str:
        """The id of the key that signs orders, as nodes are told it; empty without keys."""
        return self.keys.orders.signer.hex()

    def are_changed(self) -> tuple[bool, bool]:
        """Whether the keys are others than at the last `change_is_told`.

        And whether nodes were refused since that these might make welcome.
        """
        is_changed = self.keys.version != self._version
        return is_changed, is_changed and self._has_rejected

    def change_is_told(self) -> None:
        """All that follows from a change of keys is done."""
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
    """Which renewal it is; 0 of what is no lease."""
    number = lease.partition(b":")[0]
    return int(number) if number.isdigit() and len(number) < _DIGITS else 0


#: What each kind is called at the beginning of a sentence.
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
