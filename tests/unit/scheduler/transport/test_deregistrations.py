from __future__ import annotations

from tunemq_scheduler.transport.deregistered_nodes import Deregistrations


def test_deregistered_node_is_dead_when_its_streams_are_read_to_its_last_entries():
    departures = Deregistrations()
    departures.add("inc1", b"7-0", "it left")
    assert departures.due([b"6-3", b"9-0"]) == {}
    assert departures.due([b"7-3"]) == {}, "the order of two within a millisecond is unknown"
    assert departures.due([b"8-0", b"9-0"]) == {"inc1": "it left"}
    assert departures.due([]) == {}, "reported once"


def test_node_whose_streams_are_already_read_is_dead_at_once():
    departures = Deregistrations()
    departures.add("inc1", b"7-0", "it left")
    departures.add("inc2", b"9-0", "another took its place")
    assert departures.due([]) == {"inc1": "it left", "inc2": "another took its place"}
