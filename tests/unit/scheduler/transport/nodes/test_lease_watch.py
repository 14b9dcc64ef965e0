from __future__ import annotations

from tunemq_scheduler.transport.nodes.lease_watch import LeaseWatch
from tunemq_shared.broker.redis_keys import LEASE_TTL_S


def watch(*nodes: str) -> LeaseWatch:
    leases = LeaseWatch()
    for node in nodes:
        leases.watch(node, b"0:0:0")
    return leases


def silence(leases: LeaseWatch, start: float, seconds: int, *silent: str, awake: str = "") -> float:
    """Check leases each second; only ``awake`` renews. Return when a node is lost, or inf."""
    for passed in range(seconds + 1):
        values: dict[str, bytes | None] = dict.fromkeys(silent, b"0:0:0")
        values[awake] = f"{start + passed}:0:0".encode()
        lost = leases.look(start + passed, values)[1]
        if lost:
            assert set(lost) <= set(silent)
            return passed
    return float("inf")


def test_node_that_does_not_renew_is_lost_when_its_lease_has_expired():
    leases = watch("a", "b")

    lost_after = silence(leases, 100.0, 20, "a", awake="b")

    assert LEASE_TTL_S < lost_after <= LEASE_TTL_S + 1


def test_removed_lease_counts_like_one_that_is_not_renewed():
    leases = watch("a")
    for passed in range(6):
        assert leases.look(100.0 + passed, {"a": None})[1] == []

    assert leases.look(107.0, {"a": None})[1] == ["a"]


def test_renewals_are_reported_once():
    leases = watch("a")

    assert leases.look(1.0, {"a": b"1:0:0"})[0] == ["a"]
    assert leases.look(2.0, {"a": b"1:0:0"})[0] == []


def test_time_without_checks_does_not_count():
    leases = watch("a")
    silence(leases, 100.0, 5, "a")

    assert leases.look(1_000.0, {"a": b"0:0:0"})[1] == []
    assert silence(leases, 1_001.0, 4, "a") == float("inf")


def test_slow_loop_loses_only_silent_nodes():
    leases = watch("a", "b")
    lost = [leases.look(100.0 + 5 * n, {"a": b"0:0:0", "b": b"%d:0:0" % n})[1] for n in range(10)]
    assert lost[:3] == [[], [], []]
    assert lost[-1] == ["a"]


def test_outage_restarts_the_count():
    leases = watch("a")
    silence(leases, 100.0, 5, "a")
    leases.start_anew()

    assert silence(leases, 106.0, 6, "a") == float("inf")


def test_forgotten_node_is_never_lost():
    leases = watch("a", "b")
    leases.forget("a")

    assert silence(leases, 100.0, 20, awake="b") == float("inf")


def test_many_nodes_silent_at_once_get_half_a_minute_more():
    leases = watch("a", "b", "c")

    lost_after = silence(leases, 100.0, 60, "a", "b", awake="c")

    assert lost_after >= LEASE_TTL_S + 30


def test_node_silent_a_moment_later_counts_as_silent_at_once():
    leases = watch("a", "b")
    lost_after = float("inf")
    for passed in range(20):  # b renews once more, in another second of the outage
        values = {"a": b"0:0:0", "b": b"1:0:0" if passed else b"0:0:0"}
        if leases.look(100.0 + passed, values)[1]:
            lost_after = min(lost_after, passed)

    assert lost_after == float("inf"), "the network has failed"


def test_one_of_two_nodes_or_a_single_node_is_no_network_failure():
    assert silence(watch("a", "b"), 100.0, 20, "a", awake="b") <= LEASE_TTL_S + 1
    assert silence(watch("a"), 100.0, 20, "a") <= LEASE_TTL_S + 1


def test_nodes_silent_after_half_a_minute_are_lost_without_another_wait():
    leases = watch("a", "b")
    lost: list[tuple[float, str]] = []
    for passed in range(90):
        for node in leases.look(100.0 + passed, {"a": b"0:0:0", "b": b"0:0:0"})[1]:
            lost.append((passed, node))
            leases.put_away(node)

    assert [node for _, node in lost] == ["a", "b"]
    assert {when for when, _ in lost} == {LEASE_TTL_S + 31}


def test_nodes_that_are_away_are_watched_and_are_no_network_failure():
    leases = watch("a", "b", "c", "d")
    for node in "ab":
        leases.put_away(node)
    assert silence(leases, 100.0, 20, "c", awake="d") <= LEASE_TTL_S + 1
    leases.put_away("c")

    renewed, lost = leases.look(130.0, {"a": b"7:0:0", "d": b"9:0:0"})
    assert (renewed, lost) == (["a", "d"], [])
    assert leases.look(131.0, {"a": b"8:0:0"})[0] == ["a"], (
        "the caller decides whether the node is back"
    )
    leases.watch("a", b"8:0:0")
    assert silence(leases, 132.0, 20, "a", awake="d") < float("inf")
