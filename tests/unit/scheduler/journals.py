"""Small journals for tests, and the states that they give."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from tunemq_scheduler.core.runner_settings import RunnerSettings
from tunemq_scheduler.journal.journal_headers import JournalHeader, JournalSnapshot
from tunemq_scheduler.journal.journal_reader import RecoveredJournal
from tunemq_scheduler.journal.journal_writer import Journal
from tunemq_shared.protocol import messages as m

HEADER: Final = JournalHeader(
    experiment="digits",
    experiment_id="abc",
    started=1.0,
    settings=RunnerSettings(max_failures=3),
)
TURNS: Final = [
    [
        m.JournalRecord(m.Tick(float(turn))),
        m.JournalRecord(m.SlotFreed("a", turn), (m.DecisionMade("a", 1, "STOP", "why"),)),
    ]
    for turn in range(6)
]

#: The state that a journal gives: the turns that it is made of, and the finished trials.
State = tuple[tuple[bytes, ...], tuple[tuple[str, bytes], ...]]


def begun(
    folder: Path,
    turns: Sequence[Sequence[m.JournalRecord]],
    *,
    snapshot_before: tuple[int, ...] = (2, 3),
) -> list[State]:
    """Write a journal with snapshots whose state holds all earlier turns; return all states.

    The first is the state of an empty journal, the others are the states after each turn.
    """
    states: list[State] = [((), ())]
    with Journal.create(folder, HEADER) as journal:
        for n, turn in enumerate(turns):
            if n in snapshot_before:
                take_snapshot(journal, states[-1])
            journal.append(turn)
            states.append(after(states[-1], turn))
    return states


def after(state: State, turn: Sequence[m.JournalRecord]) -> State:
    """Return the state after a turn, which finishes one trial and changes an earlier one."""
    turns, finished = state
    number = len(turns)
    over = {**dict(finished), f"t{number}": b"over"}
    if number > 1:
        over[f"t{number - 2}"] = b"changed"
    return (*turns, m.encode(turn)), tuple(over.items())


def take_snapshot(journal: Journal, state: State) -> bool:
    """Take a snapshot of this state, with the finished trials in the history."""
    turns, finished = state
    return journal.snapshot(JournalSnapshot(state=m.encode(turns)), finished)


def state_of(found: RecoveredJournal) -> State:
    """Return the state that a journal gives."""
    state: State = ((), ())
    if found.snapshot is not None:
        turns = msgspec.msgpack.decode(found.snapshot.state, type=tuple[bytes, ...])
        state = (turns, tuple(found.finished.items()))
    for turn in found.turns:
        state = after(state, turn)
    return state
