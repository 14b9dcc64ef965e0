"""`AssignmentFilter`: accepts a node's newest assignment, and rejects older and invalid ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from tunemq_shared.base.decoding_errors import UNDECODABLE
from tunemq_shared.protocol import messages
from tunemq_workers.broker.node_signing import NodeSigning
from tunemq_workers.runtime.trial_process_state import AttemptId


class _SpecPrefix(msgspec.Struct, frozen=True, array_like=True):
    """The first fields of a `TrialSpec`."""

    experiment: str
    events_key: str


class _OrderPrefix(msgspec.Struct, frozen=True, array_like=True):
    """The first fields of a `TrialOrder`, up to those that name its trial and experiment."""

    trial: str
    attempt: int
    run_until: Any
    stop: Any
    start: _SpecPrefix


class _AssignmentEnvelope(msgspec.Struct, frozen=True, array_like=True):
    """An `Assignment` whose orders are not decoded yet."""

    protocol: int
    instance_id: str
    term: int
    version: int
    orders: tuple[msgspec.Raw, ...]
    untouched: tuple[str, ...] = ()
    store: str = ""


_decode_envelope = msgspec.msgpack.Decoder(_AssignmentEnvelope).decode
_decode_order = msgspec.msgpack.Decoder(messages.TrialOrder).decode
_decode_beginning = msgspec.msgpack.Decoder(_OrderPrefix).decode


class AssignmentFilter:
    """Accepts each assignment that is newer than the last accepted one.

    Args:
        instance_id: the node's; assignments for other instances are rejected.
        signing: checks the scheduler's signature, and counts rejections.
        on_unreadable: called for an order that cannot be decoded, with its trial, the key of its
            experiment's events and the reason; the other orders of its assignment count.
    """

    def __init__(
        self,
        instance_id: str,
        signing: NodeSigning,
        on_unreadable: Callable[[AttemptId, str, str], object] = lambda *_: None,
    ) -> None:
        self._on_unreadable = on_unreadable
        self._instance_id, self._signing = instance_id, signing
        #: The newest assignment's (term, version).
        self.confirmed = (0, 0)

    def open(self, command: bytes) -> messages.Assignment | None:
        """Return the assignment in ``command``, base64 of a signed message; None if it is rejected.

        Each rejection is counted; all but those of old assignments are also reported.
        """
        body = self._signing.command(command)
        if body is None:
            return None
        unreadable: list[tuple[_OrderPrefix, str]] = []
        try:
            try:
                assignment = messages.decode_assignment(body)
            except UNDECODABLE:
                assignment = _read_each(body, unreadable)
        except UNDECODABLE as problem:
            self._signing.reject_command("unreadable", f"cannot be read ({problem})")
            return None
        version = (assignment.term, assignment.version)
        if assignment.protocol != messages.PROTOCOL_VERSION:
            ours = messages.PROTOCOL_VERSION
            theirs = f"has version {assignment.protocol} of the protocol, not {ours}"
            self._signing.reject_command("version", theirs)
        elif assignment.instance_id != self._instance_id:
            self._signing.reject_command("instance_id", f"is for the node {assignment.instance_id}")
        elif version > self.confirmed:
            self.confirmed = version
            for order, why in unreadable:
                about = f"has an order for trial {order.trial} that cannot be read ({why})"
                self._signing.reject_command("unreadable", about)
                self._on_unreadable((order.trial, order.attempt), order.start.events_key, why)
            return assignment
        else:
            is_of_old_term = assignment.term < self.confirmed[0]
            self._signing.rejected.add("command", "old_term" if is_of_old_term else "repeated")
        return None


def _read_each(body: bytes, unreadable: list[tuple[_OrderPrefix, str]]) -> messages.Assignment:
    """Decode an assignment order by order; add those that fail, with the reason, to a list.

    Raises:
        the errors of `UNDECODABLE`: it is not an assignment, or such an order does not name its
        trial.
    """
    envelope, orders = _decode_envelope(body), []
    for order in envelope.orders:
        try:
            orders.append(_decode_order(order))
        except UNDECODABLE as problem:
            unreadable.append((_decode_beginning(order), str(problem)))
    fields = msgspec.structs.asdict(envelope) | {"orders": tuple(orders)}
    return messages.Assignment(**fields)
