"""When, and up to which event, an experiment releases nodes' events to its supervisor."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.support.searches.plans import PLAN
from tunemq_scheduler.farm.ipc import ipc_messages as r
from tunemq_scheduler.farm.ipc.experiment_side import SupervisorConnection
from tunemq_scheduler.farm.ipc.nonblocking_frames import FrameSocket
from tunemq_scheduler.farm.ipc.relayed_executor import RelayedExecutor
from tunemq_scheduler.transport.event_batches import EventBatch
from tunemq_shared.protocol import messages as m


class Ends:
    """An experiment's executor and the supervisor's end of its line."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.line, self.supervisor = SupervisorConnection(ours), FrameSocket(theirs)
        self.executor = RelayedExecutor(self.line)
        self.executor.open(PLAN)
        self.executor.reattach((), (), {})

    def read(self, *batches: tuple[str, int]) -> None:
        """Let the experiment read batches that end with these events."""
        reads = [m.BatchRead(node, last, last, "1-0") for node, last in batches]
        said = m.SlotFreed("t", 1)
        self.supervisor.put(
            r.encode(r.NewEvents([EventBatch(one, m.encode([said])) for one in reads]))
        )
        self.supervisor.flush()
        assert self.executor.poll(5.0) == [
            read_event for one in reads for read_event in (one, said)
        ]

    def told(self) -> list[dict[str, int] | None]:
        """Return the releases that the supervisor received since the last call."""
        return [
            said.acknowledged
            for said in map(r.decode_for_supervisor, self.supervisor.receive())
            if isinstance(said, r.EventsAcknowledged)
        ]

    def released(self, acknowledged: dict[str, int]) -> dict[str, int] | None:
        """Return the last event of each node that the supervisor received as released."""
        self.supervisor.receive()
        self.executor.acknowledge(acknowledged)
        [said] = map(r.decode_for_supervisor, self.supervisor.receive())
        assert isinstance(said, r.EventsAcknowledged)
        return said.acknowledged


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.line.close()
    made.supervisor.close()


def test_first_release_names_all_nodes(ends: Ends) -> None:
    assert ends.released({"a": 3, "b": 5}) == {"a": 3, "b": 5}


def test_later_releases_name_nodes_with_newly_read_events(ends: Ends) -> None:
    ends.released({"a": 3, "b": 5})
    ends.read(("a", 4))
    assert ends.released({"a": 4, "b": 5}) == {"a": 4}
    assert ends.released({"a": 4, "b": 5}) == {}


def test_events_read_and_not_yet_saved_are_released_once_saved(ends: Ends) -> None:
    ends.released({"a": 3, "b": 5})
    ends.read(("a", 4), ("b", 9))
    assert ends.released({"a": 4, "b": 5}) == {"a": 4, "b": 5}  # as far as the copy goes
    assert ends.released({"a": 4, "b": 9}) == {"b": 9}
    assert ends.released({"a": 4, "b": 9}) == {}


def test_dead_node_is_not_released(ends: Ends) -> None:
    ends.released({"a": 3, "b": 5})
    ends.read(("a", 4))
    assert ends.released({"b": 5}) == {}
    assert ends.released({"b": 5}) == {}


@dataclass
class Place:
    """The current turn of a journal or of its copy."""

    turn: int = 0


def test_store_outage_of_any_length_holds_two_releases_including_the_newest(
    ends: Ends,
) -> None:
    executor, journal, copy = ends.executor, Place(), Place()
    executor.follow(journal, copy, releases=True)
    ends.told()
    for turn in range(1, 1001):
        journal.turn = turn
        executor.acknowledge({"inc1": 10 * turn})
    assert [turn for turn, _ in executor._acknowledgements] == [1, 1000]
    executor.do_copied()
    assert ends.told() == []
    # A copy that always lags by a few turns must not wait for a turn that keeps moving.
    copy.turn = 1
    executor.do_copied()
    assert ends.told() == [{"inc1": 10}]
    journal.turn = 1001
    ends.read(("inc1", 10_020))
    executor.acknowledge({"inc1": 10_010})
    executor.acknowledge({"inc1": 10_020})
    copy.turn = 1000
    executor.do_copied()
    assert ends.told()[-1] == {"inc1": 10_000}
    copy.turn = 1001
    executor.do_copied()
    assert ends.told() == [{"inc1": 10_020}]
    assert not executor._acknowledgements
