"""`NodeSigning`: sign a node's messages and verify its scheduler's messages.

All signing of a node happens here. `NodeSigning` rejects, and counts, each message that the farm's
scheduler did not send to this node. Without keys it signs nothing; see
`tunemq_shared.signing.message_signing`.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Final, NamedTuple

from tunemq_shared.protocol import message_limits as limits
from tunemq_shared.protocol.rejection_counter import RejectionCounter
from tunemq_shared.signing.live_keys import LiveKeys
from tunemq_shared.signing.message_signing import InvalidSignature

_NAMES: Final = {
    "command": "An assignment",
    "reply": "A scheduler's reply",
    "challenge": "A scheduler's challenge to leases",
}
#: For each reason of a rejection, what a person can do about it.
_ADVICE: Final = {
    "unsigned": "Start the farm's scheduler with its keys: --keys scheduler.toml.",
    "signed_without_keys": "Start this worker with the farm's keys: --keys worker.toml.",
    "unknown_key": (
        "This worker has the keys of another farm, or old ones: copy the current worker.toml to it."
    ),
    "altered": "A program other than the farm's scheduler may write to its Redis.",
    "unreadable": "The scheduler has another version of TuneMQ, or is not this farm's.",
}
_OTHER: Final = "A program other than the farm's scheduler may write to its Redis."


class _Field(NamedTuple):
    signed_message: bytes
    opened: bytes


class NodeSigning:
    """Sign and verify the messages of one node instance. Thread-safe except for `replies`.

    Args:
        instance_id: the node instance.
        keys: the farm's keys; None where nothing is signed.
        rejected: counts the rejected messages.
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
        #: The fields of the reply as they were read last.
        self._reply: dict[str, _Field] = {}
        self._version = self.keys.version
        #: The last challenge that was read, with the version of the keys at that time; and the last
        #: one with a valid signature.
        self._challenge_read = (b"", -1)
        self._challenge = b""

    # --- from the scheduler -----------------------------------------------------------------------

    def command(self, text: bytes) -> bytes | None:
        """Return the assignment in a task's argument, or None if it is rejected."""
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
        """Count a rejected assignment; ``why`` completes the sentence "An assignment ..."."""
        self._reject("command", reason, why)

    def reject_key(self, key: str) -> None:
        """Count a key of the farm that has the wrong type in Redis."""
        why = f"The key {key} in Redis has another type: nothing is read from it."
        self.rejected.add("key", "wrong_type", f"{why} {_OTHER}")

    def replies(self, fields: Mapping[str, bytes]) -> dict[str, bytes]:
        """Return the current content of the reply's fields; rejected fields are empty.

        The publisher reads the reply every second, so an unchanged field is verified, and rejected,
        only once.
        """
        before, self._reply = self._reply, {}
        if self._version != self.keys.version:  # new keys may accept what old ones rejected
            self._version, before = self.keys.version, {}
        for name, signed_message in fields.items():
            field = before.get(name)
            if field is None or field.signed_message != signed_message:
                field = _Field(signed_message, self._opened_field(name, signed_message))
            self._reply[name] = field
        return {name: field.opened for name, field in self._reply.items()}

    def hear_challenge(self, signed_message: bytes) -> bool:
        """Store the challenge that leases must repeat; return whether it changed.

        Without keys there is no challenge.
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
        if not signed_message:  # the field does not exist
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
        """Sign a registration."""
        return self.keys.events.close(registration, b"registration")

    def deregistration(self) -> bytes:
        """Sign the deregistration of this node instance."""
        return self.keys.events.close(self._instance_id, b"bye")

    def lease(self, value: str) -> bytes:
        """Sign a lease; ``value`` begins with a number that grows with each renewal.

        With keys, the scheduler's challenge is appended.
        """
        answer = b":" + self._challenge if self.keys.is_signed else b""
        return self.keys.events.close(value.encode() + answer, b"lease", self._instance_id)

    def node_metrics(self, node_metrics: bytes) -> bytes:
        """Sign encoded node metrics."""
        return self.keys.events.close(node_metrics, b"node_metrics", self._instance_id)

    def header(self, events_key: str, header: bytes, events: bytes) -> bytes:
        """Sign the header of a batch of ``events`` for the stream ``events_key``."""
        return self.keys.events.close(header, b"batch", events_key.encode(), events)

    def output(self, events_key: str, piece: bytes) -> bytes:
        """Sign a piece of trial output of the experiment with this events stream."""
        return self.keys.events.close(piece, b"output", events_key.encode())
