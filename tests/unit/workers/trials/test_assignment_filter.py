"""Which assignments a node accepts."""

from __future__ import annotations

import base64

import msgspec
import pytest

from tests.unit.workers.fakes import order, start
from tunemq_shared.protocol.message_limits import COMMAND_TEXT_BYTES
from tunemq_shared.protocol.messages import PROTOCOL_VERSION, Assignment, TrialSpec, encode
from tunemq_shared.signing.message_signing import MessageSigner
from tunemq_workers.broker.node_signing import NodeSigning
from tunemq_workers.trials.assignment_filter import AssignmentFilter

_SIGNER = MessageSigner("orders")


def signed_message(body):
    return base64.b64encode(_SIGNER.close(body))


def message(term=1, version=1, *, protocol=PROTOCOL_VERSION, instance_id="me"):
    return signed_message(encode(Assignment(protocol, instance_id, term, version, ())))


def counted(signing):
    return {(kind, reason): times for kind, reason, times in signing.rejected.counts()}


def forged(place, value):
    """Return an assignment of two orders; the second has another value at this place."""
    ok = order("fine", start())
    bad = msgspec.msgpack.decode(encode(order("bad", start(), attempt=3)))
    *path, last = place
    inner = bad
    for one in path:
        inner = inner[one]
    inner[last] = value
    return signed_message(msgspec.msgpack.encode([PROTOCOL_VERSION, "me", 1, 1, [ok, bad]]))


TRIAL_NUMBER = (4, TrialSpec.__struct_fields__.index("trial_number"))


def test_unreadable_order_is_reported_to_its_experiment_and_others_are_obeyed():
    signing, told = NodeSigning("me"), []
    box = AssignmentFilter("me", signing, lambda *what: told.append(what))
    assignment = box.open(forged(TRIAL_NUMBER, "five"))
    assert assignment is not None
    assert [one.trial for one in assignment.orders] == ["fine"]
    ((key, events_key, problem),) = told
    assert (key, events_key) == (("bad", 3), "events")
    assert "Expected `int`, got `str`" in problem
    assert counted(signing) == {("command", "unreadable"): 1}
    assert box.open(forged(TRIAL_NUMBER, "five")) is None, "the same once more"
    assert len(told) == 1


@pytest.mark.parametrize(("place", "value"), [((0,), 7), ((1,), "x"), ((4,), 9), ((4, 1), 5)])
def test_assignment_with_an_order_of_an_unknown_experiment_is_rejected(place, value):
    signing, told = NodeSigning("me"), []
    box = AssignmentFilter("me", signing, lambda *what: told.append(what))
    assert box.open(forged(place, value)) is None
    assert not told
    assert box.confirmed == (0, 0)
    assert counted(signing) == {("command", "unreadable"): 1}


def test_only_newer_assignments_are_accepted():
    signing = NodeSigning("me")
    box = AssignmentFilter("me", signing)
    opened = [
        box.open(message(*v)) is not None for v in [(1, 2), (1, 2), (1, 1), (1, 3), (2, 1), (1, 9)]
    ]
    assert opened == [True, False, False, True, True, False]
    assert box.confirmed == (2, 1)
    assert counted(signing) == {("command", "repeated"): 2, ("command", "old_term"): 1}
    assert signing.rejected.notices() == []


@pytest.mark.parametrize(
    ("letter", "why"),
    [
        (message(instance_id="another"), "instance_id"),
        (message(protocol=PROTOCOL_VERSION + 1), "version"),
        (b"not base64!", "unreadable"),
        ("no ASCII: ä".encode(), "unreadable"),
        (signed_message(b"\xc1"), "unreadable"),
        (signed_message(encode(["no assignment"])), "unreadable"),
        (signed_message(b"\x91" * 100_000), "unreadable"),
        (base64.b64encode(encode(Assignment(PROTOCOL_VERSION, "me", 1, 1, ()))), "unreadable"),
        (b"A" * (COMMAND_TEXT_BYTES + 1), "oversized"),
        (base64.b64encode(b"\1" + bytes(40)), "signed_without_keys"),
    ],
)
def test_message_for_another_node_or_unreadable_is_rejected_counted_and_reported(letter, why):
    signing = NodeSigning("me")
    box = AssignmentFilter("me", signing)
    assert box.open(letter) is None
    assert box.confirmed == (0, 0)
    assert counted(signing) == {("command", why): 1}
    (line,) = signing.rejected.notices()
    assert line.startswith("An assignment ")
