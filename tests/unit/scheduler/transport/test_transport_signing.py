"""How a scheduler verifies messages of nodes, and signs its own."""

from __future__ import annotations

import base64

import pytest

from tests.support.keys import key_folder, of_scheduler, of_worker
from tunemq_scheduler.transport.scheduler_signing import SchedulerSigning
from tunemq_shared.broker import redis_keys
from tunemq_shared.protocol import message_limits as limits
from tunemq_shared.signing.live_keys import LiveKeys
from tunemq_shared.signing.message_signing import InvalidSignature
from tunemq_workers.broker.node_signing import NodeSigning

KEY = redis_keys.events("one")


@pytest.fixture(params=["signed", "unsigned"])
def both(request, tmp_path):
    """The message signers of a scheduler and of a node of its farm."""
    if request.param == "unsigned":
        return SchedulerSigning(), NodeSigning("inc1")
    folder = key_folder(tmp_path / "keys")
    scheduler, node = SchedulerSigning(of_scheduler(folder)), NodeSigning("inc1", of_worker(folder))
    assert node.hear_challenge(posed(scheduler))
    return scheduler, node


@pytest.fixture
def signed(tmp_path):
    folder = key_folder(tmp_path / "keys")
    scheduler, node = SchedulerSigning(of_scheduler(folder)), NodeSigning("inc1", of_worker(folder))
    assert node.hear_challenge(posed(scheduler))
    return scheduler, node


def posed(scheduler, now=0.0):
    """Return the challenge as it is stored in Redis."""
    ((_, key, signed_message),) = scheduler.challenge(now)
    assert key == redis_keys.CHALLENGE
    return signed_message


def counted(signing):
    return {(kind, reason): times for kind, reason, times in signing.rejected.counts()}


def batch_of(node, header=b"header", events=b"events", key=KEY):
    return {redis_keys.HEADER: node.header(key, header, events), redis_keys.EVENTS: events}


def test_message_signed_by_one_side_is_read_by_the_other(both):
    scheduler, node = both
    assert node.command(scheduler.command("inc1", b"orders").encode()) == b"orders"
    ((*_, told),) = scheduler.replies([("HSET", redis_keys.reply("inc1"), "f", "it is dead")])
    assert node.replies({"f": told}) == {"f": b"it is dead"}
    assert scheduler.registration_entry({redis_keys.REGISTRATION: node.registration(b"me")}) == (
        b"me",
        False,
    )
    assert scheduler.registration_entry({redis_keys.BYE: node.deregistration()}) == (b"inc1", True)
    assert scheduler.batch(KEY, batch_of(node)) == {
        redis_keys.HEADER: b"header",
        redis_keys.EVENTS: b"events",
    }
    assert scheduler.leases({"inc1": node.lease("1:2:3"), "inc2": None}) == [b"1:2:3", None]
    assert scheduler.node_metrics("inc1", node.node_metrics(b"well")) == b"well"
    assert scheduler.node_metrics("inc1", None) is None
    assert scheduler.output(KEY, node.output(KEY, b"registration")) == b"registration"
    assert scheduler.rejected.counts() == node.rejected.counts() == ()


def test_only_hset_commands_on_replies_are_signed(both):
    scheduler, _ = both
    others = [
        ("EXPIRE", redis_keys.reply("inc1"), "60"),
        ("HSET", "tunemq:something", "f", "v"),
        ("XDEL", redis_keys.NODES, b"1-0"),
    ]
    assert scheduler.replies(others) == others


def test_s02_signature_for_one_place_is_invalid_in_another(signed):
    scheduler, node = signed
    registration = node.registration(b"inc1")
    assert scheduler.registration_entry({redis_keys.BYE: registration}) is None
    assert scheduler.batch(redis_keys.events("two"), batch_of(node)) is None
    assert scheduler.batch(KEY, {**batch_of(node), redis_keys.EVENTS: b"others"}) is None
    assert scheduler.leases({"inc2": node.lease("1:0:0")}) == [None]
    assert scheduler.node_metrics("inc2", node.node_metrics(b"well")) is None
    assert scheduler.output(redis_keys.events("two"), node.output(KEY, b"x")) is None
    assert {kind for kind, reason in counted(scheduler) if reason == "altered"} == {
        *("deregistration", "events", "lease", "node_metrics", "output"),
    }
    assert node.command(scheduler.command("inc2", b"orders").encode()) is None
    ((*_, told),) = scheduler.replies([("HSET", redis_keys.reply("inc1"), "r", "retire")])
    assert node.replies({"f": told}) == {"f": b""}
    assert counted(node) == {("command", "altered"): 1, ("reply", "altered"): 1}
    with pytest.raises(InvalidSignature):  # nodes send no orders, schedulers no events
        node.keys.events.open(base64.b64decode(scheduler.command("inc1", b"orders")))


@pytest.mark.parametrize(
    ("mine", "others", "reason"),
    [(True, False, "unsigned"), (False, True, "signed_without_keys"), (True, True, "unknown_key")],
)
def test_s02_sides_without_shared_keys_reject_all_messages(mine, others, reason, tmp_path):
    def keys(has_some, name, of):
        return of(key_folder(tmp_path / name)) if has_some else LiveKeys.none()

    scheduler = SchedulerSigning(keys(mine, "mine", of_scheduler))
    node = NodeSigning("inc1", keys(others, "others", of_worker))
    assert scheduler.registration_entry({redis_keys.REGISTRATION: node.registration(b"me")}) is None
    assert scheduler.batch(KEY, batch_of(node)) is None
    assert counted(scheduler) == {("registration", reason): 1, ("events", reason): 1}
    assert all("refused" in line for line in scheduler.rejected.notices())
    assert node.command(scheduler.command("inc1", b"orders").encode()) is None
    theirs = {"unsigned": "signed_without_keys", "signed_without_keys": "unsigned"}
    assert counted(node) == {("command", theirs.get(reason, reason)): 1}


def test_s15_message_that_is_too_long_is_rejected_unread(both):
    scheduler, _ = both
    long = b"\1" + bytes(limits.EVENTS_BYTES)
    assert scheduler.registration_entry({redis_keys.REGISTRATION: long}) is None
    assert scheduler.registration_entry({redis_keys.BYE: long}) is None
    assert scheduler.batch(KEY, {redis_keys.HEADER: b"", redis_keys.EVENTS: long}) is None
    assert scheduler.batch(KEY, {redis_keys.HEADER: long, redis_keys.EVENTS: b""}) is None
    assert scheduler.leases({"inc1": long}) == [None]
    assert scheduler.node_metrics("inc1", long) is None
    assert scheduler.output(KEY, long) is None
    kinds = ("registration", "deregistration", "lease", "node_metrics", "output")
    assert counted(scheduler) == {
        **{(kind, "oversized"): 1 for kind in kinds},
        ("events", "oversized"): 2,
    }


def test_s03_old_lease_is_no_sign_of_life(signed):
    scheduler, node = signed
    first, second, third = (node.lease(f"{number}:0:0") for number in (8, 9, 10))
    assert scheduler.leases({"inc1": second}) == [b"9:0:0"]
    for old in (first, second, first):
        assert scheduler.leases({"inc1": old}) == [b"9:0:0"]
    assert scheduler.leases({"inc1": None}) == [None]
    assert scheduler.leases({"inc1": first}) == [b"9:0:0"]
    assert scheduler.leases({"inc1": third}) == [b"10:0:0"]
    assert counted(scheduler) == {("lease", "repeated"): 3}


def test_rejected_lease_is_counted_once_while_it_stays(signed):
    scheduler, node = signed
    assert scheduler.leases({"inc1": node.lease("3:0:0")}) == [b"3:0:0"]
    for _ in range(10):
        assert scheduler.leases({"inc1": b"forged"}) == [None]
    assert scheduler.leases({"inc1": node.lease("nonsense")}) == [None]
    assert scheduler.leases({"inc1": node.lease("4:0:0")}) == [b"4:0:0"]
    assert counted(scheduler) == {("lease", "unreadable"): 1, ("lease", "repeated"): 1}


def test_reply_is_verified_once_and_again_with_other_keys(tmp_path):
    folder = key_folder(tmp_path / "keys")
    scheduler, node = SchedulerSigning(of_scheduler(folder)), NodeSigning("inc1", of_worker(folder))
    ((*_, told),) = scheduler.replies([("HSET", redis_keys.reply("inc1"), "v", "1:2")])
    for _ in range(5):
        assert node.replies({"v": b"forged", "f": b""}) == {"v": b"", "f": b""}
        assert node.replies({"v": b"forged", "f": told}) == {"v": b"", "f": b""}
    assert counted(node) == {("reply", "unreadable"): 1, ("reply", "altered"): 5}
    node.keys.version += 1
    assert node.replies({"v": b"forged"}) == {"v": b""}
    assert counted(node)["reply", "unreadable"] == 2


def test_node_that_other_keys_might_accept_is_asked_again_once(tmp_path):
    folder = key_folder(tmp_path / "keys")
    stranger = NodeSigning("inc9", of_worker(key_folder(tmp_path / "others")))
    scheduler = SchedulerSigning(of_scheduler(folder))
    assert (
        scheduler.registration_entry({redis_keys.REGISTRATION: stranger.registration(b"me")})
        is None
    )
    assert scheduler.are_changed() == (False, False)
    scheduler.keys.version += 1
    assert scheduler.are_changed() == (True, True)
    assert scheduler.are_changed() == (True, True), "until all its consequences are done"
    scheduler.change_is_told()
    assert scheduler.are_changed() == (False, False)
    scheduler.keys.version += 1
    assert scheduler.are_changed() == (True, False)


def test_lease_counts_once_it_answers_the_scheduler(tmp_path):
    folder = key_folder(tmp_path / "keys")
    node = NodeSigning("inc1", of_worker(folder))
    before, after = SchedulerSigning(of_scheduler(folder)), SchedulerSigning(of_scheduler(folder))
    assert before.leases({"inc1": node.lease("1:0:0")}) == [None]
    node.hear_challenge(posed(before))
    assert before.leases({"inc1": node.lease("2:0:0")}) == [b"2:0:0"]
    assert counted(before) == {}

    old = [node.lease(f"{number}:0:0") for number in range(3, 8)]
    assert {said for lease in old for said in after.leases({"inc1": lease})} == {None}
    # The first two are not counted: honest nodes send such leases to a new scheduler.
    assert counted(after) == {("lease", "unanswered"): 3}
    assert len(after.rejected.notices()) == 1
    assert node.hear_challenge(posed(after))
    assert not node.hear_challenge(posed(after))
    assert after.leases({"inc1": node.lease("8:0:0")}) == [b"8:0:0"]


def test_challenge_counts_until_the_next_one_is_replaced(signed):
    scheduler, node = signed
    assert not node.hear_challenge(posed(scheduler, redis_keys.LEASE_TTL_S - 0.1))
    assert scheduler.leases({"inc1": node.lease("1:0:0")}) == [b"1:0:0"]
    second = posed(scheduler, redis_keys.LEASE_TTL_S)
    assert scheduler.leases({"inc1": node.lease("2:0:0")}) == [b"2:0:0"]
    posed(scheduler, 60.0)
    assert scheduler.leases({"inc1": node.lease("3:0:0")}) == [b"2:0:0"]
    assert node.hear_challenge(second)
    assert scheduler.leases({"inc1": node.lease("4:0:0")}) == [b"4:0:0"]


def test_s02_challenge_of_others_is_rejected_once_and_changes_nothing(signed, tmp_path):
    scheduler, node = signed
    others = posed(SchedulerSigning(of_scheduler(key_folder(tmp_path / "others"))))
    for forged in (others, others, b"", b"x" * 300):
        assert not node.hear_challenge(forged)
    assert counted(node) == {("challenge", "unknown_key"): 1, ("challenge", "oversized"): 1}
    assert scheduler.leases({"inc1": node.lease("1:0:0")}) == [b"1:0:0"]


def test_without_keys_no_challenge_is_sent_or_answered():
    scheduler, node = SchedulerSigning(), NodeSigning("inc1")
    assert scheduler.challenge(0.0) == []
    assert not node.hear_challenge(b"\0anything")
    assert scheduler.leases({"inc1": node.lease("1:0:0")}) == [b"1:0:0"]
