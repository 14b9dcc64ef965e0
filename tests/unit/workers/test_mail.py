"""Which assignments a node opens."""

from __future__ import annotations

import base64
import logging

import pytest

from tunemq_shared.messages import PROTOCOL_VERSION, Assignment, encode
from tunemq_workers.mail import Mailbox


def mail(term=1, version=1, *, protocol=PROTOCOL_VERSION, incarnation="me"):
    return base64.b64encode(encode(Assignment(protocol, incarnation, term, version, ())))


def test_only_newer_assignments_are_let_through():
    box = Mailbox("me")
    opened = [
        box.open(mail(*v)) is not None for v in [(1, 2), (1, 2), (1, 1), (1, 3), (2, 1), (1, 9)]
    ]
    assert opened == [True, False, False, True, True, False]
    assert box.taken == (2, 1)


@pytest.mark.parametrize(
    ("letter", "why"),
    [
        (mail(incarnation="somebody"), "incarnation"),
        (mail(protocol=PROTOCOL_VERSION + 1), "protocol"),
        (b"not base64!", "unreadable"),
        (base64.b64encode(b"\xc1"), "unreadable"),
        (base64.b64encode(encode(["no assignment"])), "unreadable"),
    ],
)
def test_what_is_not_for_this_node_or_not_readable_is_refused_and_logged(letter, why, caplog):
    box = Mailbox("me")
    with caplog.at_level(logging.WARNING):
        assert box.open(letter) is None
    assert why in caplog.text
    assert box.taken == (0, 0)
