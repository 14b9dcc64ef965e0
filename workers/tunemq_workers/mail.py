"""Reading a node's mail: which assignment is the newest, and whether one is overdue."""

from __future__ import annotations

from tunemq_shared.messages import PROTOCOL_VERSION, Assignment, decode_assignment
from tunemq_shared.undecodable import UNDECODABLE
from tunemq_workers.wire_seals import NodeSeals


class Mailbox:
    """Lets through each assignment that is newer than the one taken before.

    Args:
        incarnation: whose it is.
        seals: tell which mail is the scheduler's, and are told of what else is refused.
    """

    def __init__(self, incarnation: str, seals: NodeSeals) -> None:
        self._incarnation, self._seals = incarnation, seals
        #: The newest assignment's (term, version).
        self.taken = (0, 0)

    def open(self, mail: bytes) -> Assignment | None:
        """The assignment in ``mail``, base64 of a sealed one; None if it does not count.

        That one does not is counted, and why is told, unless it is only an old one.
        """
        body = self._seals.mail(mail)
        if body is None:
            return None
        try:
            assignment = decode_assignment(body)
        except UNDECODABLE as problem:
            self._seals.refuse_mail("unreadable", f"cannot be read ({problem})")
            return None
        version = (assignment.term, assignment.version)
        if assignment.protocol != PROTOCOL_VERSION:
            theirs = f"has version {assignment.protocol} of the protocol, not {PROTOCOL_VERSION}"
            self._seals.refuse_mail("version", theirs)
        elif assignment.incarnation != self._incarnation:
            self._seals.refuse_mail("incarnation", f"is for the node {assignment.incarnation}")
        elif version > self.taken:
            self.taken = version
            return assignment
        else:
            is_of_old_term = assignment.term < self.taken[0]
            self._seals.refused.add("mail", "old_term" if is_of_old_term else "repeated")
        return None
