"""Placement of trials on nodes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunemq_scheduler.core.placement.placement import Placement
from tunemq_shared.base.errors import InvariantBroken


def test_placement_takes_the_node_with_least_left_over() -> None:
    placement = Placement()
    placement.add_node("big", {"cpu": 8.0})
    placement.add_node("small", {"cpu": 2.0})
    assert placement.fit({"cpu": 2.0}) == "small"
    assert placement.fit({"cpu": 3.0}) == "big"


def test_preferred_node_is_taken_only_while_it_has_room() -> None:
    placement = Placement()
    placement.add_node("cached", {"cpu": 8.0})
    placement.add_node("small", {"cpu": 2.0})
    assert placement.fit({"cpu": 2.0}, "cached") == "cached"
    placement.take("cached", {"cpu": 7.0})
    assert placement.fit({"cpu": 2.0}, "cached") == "small"
    assert placement.fit({"cpu": 2.0}, "gone") == "small"


@pytest.mark.parity(138)
def test_trial_without_a_gpu_is_placed_where_no_gpu_is_left_idle() -> None:
    placement = Placement()
    placement.add_node("gpus", {"cpu": 2.0, "gpu": 1.0})
    placement.add_node("cpus", {"cpu": 64.0})
    assert placement.fit({"cpu": 1.0}) == "cpus"


@pytest.mark.parity(58)
def test_request_that_can_never_be_met_names_the_resource_and_the_maximum() -> None:
    placement = Placement()
    placement.add_node("one", {"cpu": 2.0})
    placement.add_node("two", {"cpu": 4.0, "gpu": 1.0})
    assert placement.why_never({"cpu": 4.0, "gpu": 1.0}) is None
    assert placement.why_never({"cpu": 8.0}) == "a trial requests cpu=8; the most on any node is 4"
    assert "gpu=2; the most on any node is 1" in str(placement.why_never({"gpu": 2.0}))


def test_request_that_no_single_node_can_meet_is_explained() -> None:
    placement = Placement()
    placement.add_node("one", {"cpu": 8.0})
    placement.add_node("two", {"gpu": 1.0})
    assert "no single node has all of it" in str(placement.why_never({"cpu": 8.0, "gpu": 1.0}))


@pytest.mark.parity(53)
def test_taking_more_than_is_free_is_rejected() -> None:
    placement = Placement()
    placement.add_node("one", {"cpu": 1.0})
    placement.take("one", {"cpu": 1.0})
    with pytest.raises(InvariantBroken):
        placement.take("one", {"cpu": 0.5})


def test_ten_tenths_of_a_gpu_fit_on_one_gpu() -> None:
    placement = Placement()
    placement.add_node("one", {"gpu": 1.0})
    for _ in range(10):
        node = placement.fit({"gpu": 0.1})
        assert node is not None
        placement.take(node, {"gpu": 0.1})
    assert placement.fit({"gpu": 0.1}) is None


@pytest.mark.parity(53, 60)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5), st.integers(1, 4)), max_size=60))
def test_placement_never_oversubscribes_a_node(actions: list[tuple[bool, int, int]]) -> None:
    placement = Placement()
    totals = {f"n{number}": float(number + 1) for number in range(4)}
    for node, cpus in totals.items():
        placement.add_node(node, {"cpu": cpus})
    taken: list[tuple[str, float]] = []
    for take, index, amount in actions:
        if take:
            node = placement.fit({"cpu": amount})
            used = {n: sum(a for m, a in taken if m == n) for n in totals}
            fits = [n for n in totals if totals[n] - used[n] >= amount]
            assert (node is None) == (not fits)
            if node is not None:
                placement.take(node, {"cpu": amount})
                taken.append((node, amount))
        elif taken:
            node, given_back = taken.pop(index % len(taken))
            placement.give_back(node, {"cpu": given_back}, {})
        for node, total in totals.items():
            assert sum(a for n, a in taken if n == node) <= total
