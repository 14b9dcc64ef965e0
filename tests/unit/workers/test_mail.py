"""Which assignments a node opens."""

from __future__ import annotations

import base64

import pytest

from tunemq_shared.message_limits import MAIL_TEXT_BYTES
from tunemq_shared.messages import PROTOCOL_VERSION, Assignment, encode
from tunemq_shared.seals import Seal
from tunemq_workers.mail import Mailbox
from tunemq_workers.wire_seals import NodeSeals

_SEAL = Seal("orders")


def sealed(body):
    return base64.b64encode(_SEAL.close(body))


def mail(term=1, version=1, *, protocol=PROTOCOL_VERSION, incarnation="me"):
    return sealed(encode(Assignment(protocol, incarnation, term, version, ())))


def counted(seals):
    return {(kind, reason): times for kind, reason, times in seals.refused.counts()}


def test_only_newer_assignments_are_let_through():
    seals = NodeSeals("me")
    box = Mailbox("me", seals)
    opened = [
        box.open(mail(*v)) is not None for v in [(1, 2), (1, 2), (1, 1), (1, 3), (2, 1), (1, 9)]
    ]
    assert opened == [True, False, False, True, True, False]
    assert box.taken == (2, 1)
    assert counted(seals) == {("mail", "repeated"): 2, ("mail", "old_term"): 1}
    assert seals.refused.news() == []


@pytest.mark.parametrize(
    ("letter", "why"),
    [
        (mail(incarnation="somebody"), "incarnation"),
        (mail(protocol=PROTOCOL_VERSION + 1), "version"),
        (b"not base64!", "unreadable"),
        ("no ASCII: ä".encode(), "unreadable"),
        (sealed(b"\xc1"), "unreadable"),
        (sealed(encode(["no assignment"])), "unreadable"),
        (sealed(b"\x91" * 100_000), "unreadable"),
        (base64.b64encode(encode(Assignment(PROTOCOL_VERSION, "me", 1, 1, ()))), "unreadable"),
        (b"A" * (MAIL_TEXT_BYTES + 1), "oversized"),
        (base64.b64encode(b"\1" + bytes(40)), "signed_without_keys"),
    ],
)
def test_what_is_not_for_this_node_or_not_readable_is_refused_counted_and_told(letter, why):
    seals = NodeSeals("me")
    box = Mailbox("me", seals)
    assert box.open(letter) is None
    assert box.taken == (0, 0)
    assert counted(seals) == {("mail", why): 1}
    (line,) = seals.refused.news()
    assert line.startswith("An assignment ")
