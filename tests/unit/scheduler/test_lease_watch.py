from __future__ import annotations

from tunemq_scheduler.executors.lease_watch import LeaseWatch
from tunemq_shared.wire import LEASE_TTL_S


def watch(*nodes: str) -> LeaseWatch:
    leases = LeaseWatch()
    for node in nodes:
        leases.watch(node, b"0:0:0")
    return leases


def silence(leases: LeaseWatch, start: float, seconds: int, *silent: str, awake: str = "") -> float:
    """Look once a second; ``silent`` do not renew, ``awake`` does. When one is lost, or inf."""
    for passed in range(seconds + 1):
        values: dict[str, bytes | None] = dict.fromkeys(silent, b"0:0:0")
        values[awake] = f"{start + passed}:0:0".encode()
        lost = leases.look(start + passed, values)[1]
        if lost:
            assert set(lost) <= set(silent)
            return passed
    return float("inf")


def test_a_node_that_does_not_renew_is_lost_when_its_lease_has_run_out():
    leases = watch("a", "b")

    lost_after = silence(leases, 100.0, 20, "a", awake="b")

    assert LEASE_TTL_S < lost_after <= LEASE_TTL_S + 1


def test_a_lease_that_is_gone_counts_like_one_that_stands_still():
    leases = watch("a")
    for passed in range(6):
        assert leases.look(100.0 + passed, {"a": None})[1] == []

    assert leases.look(107.0, {"a": None})[1] == ["a"]


def test_renewals_are_told_once():
    leases = watch("a")

    assert leases.look(1.0, {"a": b"1:0:0"})[0] == ["a"]
    assert leases.look(2.0, {"a": b"1:0:0"})[0] == []


def test_time_in_which_nobody_looked_does_not_count():
    leases = watch("a")
    silence(leases, 100.0, 5, "a")

    assert leases.look(1_000.0, {"a": b"0:0:0"})[1] == []
    assert silence(leases, 1_001.0, 4, "a") == float("inf")


def test_an_outage_starts_the_count_anew():
    leases = watch("a")
    silence(leases, 100.0, 5, "a")
    leases.start_anew()

    assert silence(leases, 106.0, 6, "a") == float("inf")


def test_a_forgotten_node_is_never_lost():
    leases = watch("a", "b")
    leases.forget("a")

    assert silence(leases, 100.0, 20, awake="b") == float("inf")


def test_when_many_fall_silent_at_once_it_is_the_network_and_they_get_half_a_minute_more():
    leases = watch("a", "b", "c")

    lost_after = silence(leases, 100.0, 60, "a", "b", awake="c")

    assert lost_after >= LEASE_TTL_S + 30
