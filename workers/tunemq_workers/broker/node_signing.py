"""`NodeSigning`: where a node signs what it says, and checks what its scheduler says.

It is the only place. What is not what the farm's scheduler said to this node is refused here, and
counted. Without keys nothing is signed, see `tunemq_shared.signing.message_signing`.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

from tunemq_shared.protocol import message_limits as limits
from tunemq_shared.protocol.rejections import RejectionCounter
from tunemq_shared.signing.live_keys import LiveKeys
from tunemq_shared.signing.message_signing import InvalidSignature

_NAMES: Final = MappingProxyType(
    {
        "command": "An assignment",
        "reply": "A scheduler's reply",
        "challenge": "A scheduler's challenge to leases",
    }
)
#: What a person can do about a message that is refused, by the reason.
_ADVICE: Final = MappingProxyType(
    {
        "unsigned": "Start the farm's scheduler with its keys: --keys scheduler.toml.",
        "signed_without_keys": "Start this worker with the farm's keys: --keys worker.toml.",
        "unknown_key": "This worker has the keys of another farm, or old ones: give it the present"
        " worker.toml.",
        "altered": "Somebody who is not the farm's scheduler may write to its Redis.",
        "unreadable": "The scheduler has another version of TuneMQ, or it is from nobody of ours.",
    }
)
_OTHER: Final = "Somebody who is not the farm's scheduler may write to its Redis."


class _Field(NamedTuple):
    signed_message: bytes
    opened: bytes


class NodeSigning:
    """Seals and opens the messages of one node instance; for all threads but `replies`.

    Args:
        keys: of the farm; none where nothing is signed.
        refused: is told of what is refused.
    """

    def __init__(
        self,
        instance_id: str,
        keys: LiveKeys | None = None,
        rejected: RejectionCounter | None = None,
    ) -> None:
        self.keys = LiveKeys.none() if keys is None else keys
        self.rejected = RejectionCounter() if rejected is None else rejected
        self._instance_id = instance_id.encode()
        #: What was read last of the reply.
        self._reply: dict[str, _Field] = {}
        self._version = self.keys.version
        #: The challenge that was read last, with the version of the keys then; and the last one
        #: that was believed.
        self._challenge_read = (b"", -1)
        self._challenge = b""

    # --- from the scheduler -----------------------------------------------------------------------

    def command(self, text: bytes) -> bytes | None:
        """The assignment in a task's argument; None where it is refused."""
        if len(text) > limits.COMMAND_TEXT_BYTES:
            self.reject_command("oversized", "is too long")
            return None
        try:
            signed_message = base64.b64decode(text, validate=True)
        except binascii.Error as problem:
            self.reject_command("unreadable", f"cannot be read ({problem})")
            return None
        return self._open(
            "command", signed_message, limits.COMMAND_BYTES, b"command", self._instance_id
        )

    def reject_command(self, reason: str, why: str) -> None:
        """An assignment was refused for this reason."""
        self._reject("command", reason, why)

    def reject_key(self, key: str) -> None:
        """A key of the farm has another type than it has."""
        why = f"The key {key} in Redis has another type: nothing is read from it."
        self.rejected.add("key", "wrong_type", f"{why} {_OTHER}")

    def replies(self, fields: Mapping[str, bytes]) -> dict[str, bytes]:
        """What the fields of the scheduler's reply say, as they are now; empty what is refused.

        It is read again and again: what stays the same is looked at once, and refused once.
        """
        before, self._reply = self._reply, {}
        if self._version != self.keys.version:  # what was refused may be believed now
            self._version, before = self.keys.version, {}
        for name, signed_message in fields.items():
            field = before.get(name)
            if field is None or field.signed_message != signed_message:
                field = _Field(signed_message, self._opened_field(name, signed_message))
            self._reply[name] = field
        return {name: field.opened for name, field in self._reply.items()}

    def hear_challenge(self, signed_message: bytes) -> bool:
        """Take note of what leases have to repeat from now on; whether that is news.

        Where there are no keys nothing has to be repeated.
        """
        read = (signed_message, self.keys.version)
        if not self.keys.is_signed or not signed_message or read == self._challenge_read:
            return False
        self._challenge_read, before = read, self._challenge
        opened = self._open("challenge", signed_message, limits.CHALLENGE_BYTES, b"challenge")
        if opened is not None:
            self._challenge = opened
        return self._challenge != before

    def _opened_field(self, name: str, signed_message: bytes) -> bytes:
        if not signed_message:  # it is not there
            return b""
        about = (b"reply", self._instance_id, name.encode())
        return self._open("reply", signed_message, limits.REPLY_BYTES, *about) or b""

    def _open(self, kind: str, signed_message: bytes, longest: int, *about: bytes) -> bytes | None:
        if len(signed_message) > longest:
            self._reject(kind, "oversized", "is too long")
            return None
        try:
            return self.keys.orders.open(signed_message, *about)
        except InvalidSignature as problem:
            self._reject(kind, problem.reason, str(problem))
            return None

    def _reject(self, kind: str, reason: str, why: str) -> None:
        advice = _ADVICE.get(reason, _OTHER)
        self.rejected.add(kind, reason, f"{_NAMES[kind]} {why}: it is refused. {advice}")

    # --- to the scheduler -------------------------------------------------------------------------

    def registration(self, registration: bytes) -> bytes:
        """An introduction."""
        return self.keys.events.close(registration, b"registration")

    def deregistration(self) -> bytes:
        """That this attempt ends in peace."""
        return self.keys.events.close(self._instance_id, b"bye")

    def lease(self, value: str) -> bytes:
        """What a lease says, which begins with a number that grows with each renewal.

        Where there are keys the scheduler's challenge stands behind it.
        """
        answer = b":" + self._challenge if self.keys.is_signed else b""
        return self.keys.events.close(value.encode() + answer, b"lease", self._instance_id)

    def node_metrics(self, node_metrics: bytes) -> bytes:
        """How this machine is."""
        return self.keys.events.close(node_metrics, b"node_metrics", self._instance_id)

    def header(self, events_key: str, header: bytes, events: bytes) -> bytes:
        """The header of a batch of events for this stream."""
        return self.keys.events.close(header, b"batch", events_key.encode(), events)

    def output(self, events_key: str, piece: bytes) -> bytes:
        """A piece of what a trial of the experiment with these events prints."""
        return self.keys.events.close(piece, b"output", events_key.encode())
