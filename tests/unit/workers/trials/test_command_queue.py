"""Which assignments a node opens."""

from __future__ import annotations

import base64

import msgspec
import pytest

from tests.unit.workers.fakes import order, start
from tunemq_shared.protocol.message_limits import MAIL_TEXT_BYTES
from tunemq_shared.protocol.messages import PROTOCOL_VERSION, Assignment, TrialSpec, encode
from tunemq_shared.signing.message_signing import MessageSigner
from tunemq_workers.broker.node_signing import NodeSigning
from tunemq_workers.trials.command_queue import CommandQueue

_SEAL = MessageSigner("orders")


def sealed(body):
    return base64.b64encode(_SEAL.close(body))


def mail(term=1, version=1, *, protocol=PROTOCOL_VERSION, incarnation="me"):
    return sealed(encode(Assignment(protocol, incarnation, term, version, ())))


def counted(seals):
    return {(kind, reason): times for kind, reason, times in seals.refused.counts()}


def forged(place, value):
    """Mail with two orders, of which the second one has another value at this place."""
    ok = order("fine", start())
    bad = msgspec.msgpack.decode(encode(order("bad", start(), epoch=3)))
    *path, last = place
    inner = bad
    for one in path:
        inner = inner[one]
    inner[last] = value
    return sealed(msgspec.msgpack.encode([PROTOCOL_VERSION, "me", 1, 1, [ok, bad]]))


TRIAL_NUMBER = (4, TrialSpec.__struct_fields__.index("trial_number"))


def test_order_that_cannot_be_read_is_told_to_its_experiment_and_others_are_obeyed():
    seals, told = NodeSigning("me"), []
    box = CommandQueue("me", seals, lambda *what: told.append(what))
    assignment = box.open(forged(TRIAL_NUMBER, "five"))
    assert assignment is not None
    assert [one.trial for one in assignment.orders] == ["fine"]
    ((key, events_key, problem),) = told
    assert (key, events_key) == (("bad", 3), "events")
    assert "Expected `int`, got `str`" in problem
    assert counted(seals) == {("mail", "unreadable"): 1}
    assert box.open(forged(TRIAL_NUMBER, "five")) is None, "the same once more"
    assert len(told) == 1


@pytest.mark.parametrize(("place", "value"), [((0,), 7), ((1,), "x"), ((4,), 9), ((4, 1), 5)])
def test_assignment_with_an_order_of_nobody_known_is_refused(place, value):
    seals, told = NodeSigning("me"), []
    box = CommandQueue("me", seals, lambda *what: told.append(what))
    assert box.open(forged(place, value)) is None
    assert not told
    assert box.taken == (0, 0)
    assert counted(seals) == {("mail", "unreadable"): 1}


def test_only_newer_assignments_are_let_through():
    seals = NodeSigning("me")
    box = CommandQueue("me", seals)
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
    seals = NodeSigning("me")
    box = CommandQueue("me", seals)
    assert box.open(letter) is None
    assert box.taken == (0, 0)
    assert counted(seals) == {("mail", why): 1}
    (line,) = seals.refused.news()
    assert line.startswith("An assignment ")
