"""Reading a node's mail: which assignment is the newest, and whether one is overdue."""

from __future__ import annotations

import base64
import binascii
import logging

import msgspec

from tunemq_shared.messages import PROTOCOL_VERSION, Assignment, decode_assignment

_log = logging.getLogger(__name__)


class Mailbox:
    """Lets through each assignment that is newer than the one taken before."""

    def __init__(self, incarnation: str) -> None:
        self._incarnation = incarnation
        #: The newest assignment's (term, version).
        self.taken = (0, 0)

    def open(self, mail: bytes) -> Assignment | None:
        """The assignment in ``mail``, base64 of msgpack; None if it does not count.

        Why one does not is logged, unless it is only an old one.
        """
        try:
            assignment = decode_assignment(base64.b64decode(mail, validate=True))
        except (binascii.Error, msgspec.DecodeError) as problem:
            _log.error("mail.unreadable problem=%r", str(problem))
            return None
        version = (assignment.term, assignment.version)
        if assignment.protocol != PROTOCOL_VERSION:
            theirs = assignment.protocol
            _log.error("mail.refused reason=protocol theirs=%d ours=%d", theirs, PROTOCOL_VERSION)
        elif assignment.incarnation != self._incarnation:
            _log.warning("mail.refused reason=incarnation theirs=%s", assignment.incarnation)
        elif version > self.taken:
            self.taken = version
            return assignment
        return None
