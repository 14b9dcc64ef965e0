"""`WaitingTrials`: those that wait for a slot, and those that wait until somebody resumes them.

Thousands may wait at once, as after the loss of many nodes, and most turns place a few of them or
none. So trials that wait for the same stand in one *line*: where its first has no place, nobody in
it has one. What a turn costs grows with the number of lines, of which there are as many as there
are different requests, and with what is placed; not with how many wait.

Who waits before the next try stands in no line until that time has come. A line then has each in
the place that its ticket says, which is given out when a trial begins to wait.

A line of which none was placed while `MAX_TIMES_PASSED_OVER` slots were given back is passed over:
what it asks for is more than any node has free at once while smaller requests take what comes free.
Then a node is kept for it, which takes no others until it fits.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from typing import Final, NamedTuple

import msgspec

from tunemq_scheduler.core.trials.trial import PAUSED, PENDING, Trial

#: So many slots may be given back before a node is kept for a line of which none was placed.
MAX_TIMES_PASSED_OVER: Final = 64

#: A heap is made anew when it holds more entries than twice what counts, and this.
_SLACK: Final = 64


class _Kind(NamedTuple):
    """What the trials of a line have in common: all that decides whether there is a place.

    Attributes:
        is_apart: they must not share a node with any other trial.
        excluded: the nodes, by name, that they must not be placed on.
    """

    status: str
    request: tuple[tuple[str, float], ...]
    is_apart: bool
    excluded: tuple[str, ...] = ()


class _Line:
    """Trials of one kind; the first is found at once, whoever left and joined in between."""

    __slots__ = ("_heap", "since", "tickets")

    def __init__(self, since: int) -> None:
        self.tickets: dict[str, int] = {}
        #: How many slots had been given back when one of it was placed, or it was looked after.
        self.since = since
        #: Holds those of trials that left, too, which are passed over.
        self._heap: list[tuple[int, str]] = []

    def join(self, trial: str, ticket: int) -> None:
        self.tickets[trial] = ticket
        heapq.heappush(self._heap, (ticket, trial))

    def leave(self, trial: str) -> None:
        del self.tickets[trial]
        if len(self._heap) > 2 * len(self.tickets) + _SLACK:
            self._heap = self.in_order()

    def first(self) -> tuple[int, str]:
        while self.tickets.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0]

    def in_order(self) -> list[tuple[int, str]]:
        return sorted((ticket, trial) for trial, ticket in self.tickets.items())


class _WaitingPlace(NamedTuple):
    """Where a trial waits.

    Attributes:
        kind: of its line; None while it waits before the next try.
        nodes: those that may have something to do with whether it is apart.
    """

    ticket: int
    kind: _Kind | None
    nodes: tuple[str, ...]


class PassedOverLines(msgspec.Struct, frozen=True, array_like=True):
    """How long lines were passed over, written down.

    Attributes:
        freed: how many slots were given back.
        due: when somebody has to look, in these.
        since: of each line of PENDING trials, by what they ask for and whether they are apart.
        since_excluded: likewise of those that shun nodes, by which, too.
    """

    freed: int = 0
    due: int = MAX_TIMES_PASSED_OVER
    since: list[tuple[tuple[tuple[str, float], ...], bool, int]] = []
    since_excluded: list[tuple[tuple[tuple[str, float], ...], bool, tuple[str, ...], int]] = []


class WaitingTrials:
    """PENDING and PAUSED trials; each kind in the order in which they began to wait.

    Args:
        is_apart: whether a trial must not share a node with any other. It is asked when a trial
            begins to wait, and by `review` and `regroup`.
        line_is_over: told of a request when none of a line of PENDING trials waits for it any more.
    """

    def __init__(
        self,
        is_apart: Callable[[Trial], bool],
        line_is_over: Callable[[dict[str, float]], None] = lambda _request: None,
    ) -> None:
        self._is_apart = is_apart
        self._line_is_over = line_is_over
        self._trials: dict[str, dict[str, Trial]] = {PENDING: {}, PAUSED: {}}
        self._places: dict[str, _WaitingPlace] = {}
        self._lines: dict[str, dict[_Kind, _Line]] = {PENDING: {}, PAUSED: {}}
        #: When who waits before the next try may go on; holds trials that left, too.
        self._later: list[tuple[float, int, str]] = []
        #: Who fell with a node.
        self._fell_with: dict[str, dict[str, None]] = {}
        self._tickets = 0
        #: The time when it was told last.
        self._now = 0.0
        #: How many slots were given back, and when lines are to be looked after, in these.
        self.freed, self._due = 0, MAX_TIMES_PASSED_OVER

    def __iter__(self) -> Iterator[Trial]:
        """All: the PENDING, then the PAUSED."""
        for trials in self._trials.values():
            yield from trials.values()

    # --- who waits --------------------------------------------------------------------------------

    def follow(self, trial: Trial) -> None:
        """A trial's status changed."""
        if trial.trial_id in self._places:
            self._leave(trial.trial_id)
            for trials in self._trials.values():
                trials.pop(trial.trial_id, None)
        if trial.status in self._trials:
            self._trials[trial.status][trial.trial_id] = trial
            self._tickets += 1
            self._rest(trial, self._tickets)

    def review(self, node: str) -> None:
        """A node came or went: who fell with it may be apart now, or not any longer."""
        for trial in list(self._fell_with.get(node, ())):
            self._regroup(self._trial(trial))

    def regroup(self) -> None:
        """Anything may have changed about those that wait, but for their order."""
        for trial in self:
            self._regroup(trial)

    def dumped(self) -> tuple[list[str], list[str]]:
        """The ids of the PENDING and of the PAUSED, each in their order."""
        return list(self._trials[PENDING]), list(self._trials[PAUSED])

    def passed_over(self) -> PassedOverLines:
        """How long each line was."""
        lines = self._lines[PENDING].items()
        since = [
            (kind.request, kind.is_apart, line.since) for kind, line in lines if not kind.excluded
        ]
        since_excluded = [
            (kind.request, kind.is_apart, kind.excluded, line.since)
            for kind, line in lines
            if kind.excluded
        ]
        return PassedOverLines(self.freed, self._due, since, since_excluded)

    def take_back(
        self,
        pending: Iterable[Trial],
        paused: Iterable[Trial],
        passed_over: PassedOverLines = PassedOverLines(),  # noqa: B008  it is frozen
        elapsed: float = 0.0,
    ) -> None:
        """Be as it was when it was `dumped`."""
        self.freed, self._due = passed_over.freed, passed_over.due
        self.wake(elapsed)
        for trial in (*pending, *paused):
            self.follow(trial)
        plain = ((request, is_apart, (), since) for request, is_apart, since in passed_over.since)
        for request, is_apart, excluded, since in (*plain, *passed_over.since_excluded):
            line = self._lines[PENDING].get(_Kind(PENDING, request, is_apart, excluded))
            if line is not None:
                line.since = since

    # --- who is next ------------------------------------------------------------------------------

    def wake(self, elapsed: float) -> None:
        """Have those stand in line whose time has come; whoever left is forgotten."""
        self._now, later = elapsed, self._later
        while later and (later[0][0] <= elapsed or not self._is_resting(later[0])):
            entry = heapq.heappop(later)
            if self._is_resting(entry):
                self._stand(self._trial(entry[2]))

    def has_any(self, elapsed: float) -> bool:
        """Whether one waits for nothing but a slot."""
        self.wake(elapsed)
        return bool(self._lines[PENDING] or self._lines[PAUSED])

    def has_pending(self, elapsed: float) -> bool:
        """Likewise, of those that are PENDING."""
        self.wake(elapsed)
        return bool(self._lines[PENDING])

    def keeps_others_waiting(self, elapsed: float) -> bool:
        """Likewise; a trial that shuns nodes, or runs alone, does not: others may have a place."""
        return self.has_pending(elapsed) and any(
            not (kind.excluded or kind.is_apart) for kind in self._lines[PENDING]
        )

    def apart(self, status: str) -> list[Trial]:
        """The first of each line of trials that must not share a node, in their order."""
        if not any(kind.is_apart for kind in self._lines[status]):
            return []
        trials = self._trials[status]
        lines = (line for kind, line in self._lines[status].items() if kind.is_apart)
        return [trials[trial] for _, trial in sorted(line.first() for line in lines)]

    def placeable(self, elapsed: float, has_place: Callable[[Trial], bool]) -> Iterator[Trial]:
        """Those that could be placed now; the first costs as much as there are lines.

        To be used up before anything changes. ``has_place`` is asked about one trial of a line.
        """
        self.wake(elapsed)
        for status, lines in self._lines.items():
            trials = self._trials[status]
            firsts = [(line.first(), line) for line in lines.values()]
            usable = [(first, line) for first, line in firsts if has_place(trials[first[1]])]
            if usable:
                (ticket, trial), _ = min(usable, key=lambda one: one[0])
                yield trials[trial]
                rest = heapq.merge(*(line.in_order() for _, line in usable))
                yield from (trials[one] for other, one in rest if other != ticket)

    def lines(self, status: str) -> Iterator[tuple[Trial, int]]:
        """The first of each line, and how many stand in it."""
        trials = self._trials[status]
        for line in self._lines[status].values():
            yield trials[line.first()[1]], len(line.tickets)

    # --- who was passed over ----------------------------------------------------------------------

    def served(self, trial: Trial) -> None:
        """One that waits is placed now: who waits for the same was not passed over."""
        request = tuple(sorted(trial.resources.items()))
        for is_apart in (False, True):
            kind = _Kind(PENDING, request, is_apart, _excluded(trial))
            line = self._lines[PENDING].get(kind)
            if line is not None:
                line.since = self.freed
        self._line_is_over(trial.resources)

    def slot_freed(self, keep_node: Callable[[Trial], None]) -> None:
        """A slot was given back; ``keep_node`` is asked for the first of each line in its turn."""
        self.freed += 1
        if self.freed < self._due:
            return
        trials, lines = self._trials[PENDING], self._lines[PENDING].values()
        passed_over = [line for line in lines if self.freed >= line.since + MAX_TIMES_PASSED_OVER]
        # Not as the lines came to be, of which nothing is written down.
        for line in sorted(passed_over, key=_Line.first):
            line.since = self.freed
            keep_node(trials[line.first()[1]])
        self._due = min((line.since for line in lines), default=self.freed) + MAX_TIMES_PASSED_OVER

    # --- who comes later --------------------------------------------------------------------------

    def next_try(self, elapsed: float) -> float | None:
        """When the next that waits to be tried again may go on, in elapsed seconds."""
        self.wake(elapsed)
        return self._later[0][0] if self._later else None

    # --- small things -----------------------------------------------------------------------------

    def _trial(self, trial: str) -> Trial:
        return next(trials[trial] for trials in self._trials.values() if trial in trials)

    def _rest(self, trial: Trial, ticket: int) -> None:
        """Wait for the next try; where that may be at once, for a slot."""
        nodes = tuple(trial.fell_with)
        self._places[trial.trial_id] = _WaitingPlace(ticket, None, nodes)
        for node in nodes:
            self._fell_with.setdefault(node, {})[trial.trial_id] = None
        if trial.not_before > self._now:
            heapq.heappush(self._later, (trial.not_before, ticket, trial.trial_id))
        else:
            self._stand(trial)

    def _stand(self, trial: Trial) -> None:
        """Wait for nothing but a slot."""
        place = self._places[trial.trial_id]
        request = tuple(sorted(trial.resources.items()))
        kind = _Kind(trial.status, request, self._is_apart(trial), _excluded(trial))
        self._places[trial.trial_id] = place._replace(kind=kind)
        lines = self._lines[trial.status]
        if kind not in lines:
            lines[kind] = _Line(self.freed)
        lines[kind].join(trial.trial_id, place.ticket)

    def _leave(self, trial: str) -> int:
        """Wait no longer; returns the ticket."""
        place = self._places.pop(trial)
        for node in place.nodes:
            self._fell_with[node].pop(trial, None)
            if not self._fell_with[node]:
                del self._fell_with[node]
        if place.kind is not None:
            lines = self._lines[place.kind.status]
            lines[place.kind].leave(trial)
            if not lines[place.kind].tickets:
                del lines[place.kind]
                if place.kind.status == PENDING:
                    self._line_is_over(dict(place.kind.request))
        elif len(self._later) > 2 * len(self._places) + _SLACK:
            self._later = [one for one in self._later if self._is_resting(one)]
            heapq.heapify(self._later)
        return place.ticket

    def _regroup(self, trial: Trial) -> None:
        if self._places[trial.trial_id].kind is None:
            return  # it is asked about when it stands in a line
        self._rest(trial, self._leave(trial.trial_id))

    def _is_resting(self, entry: tuple[float, int, str]) -> bool:
        _, ticket, trial = entry
        place = self._places.get(trial)
        return place is not None and place.kind is None and place.ticket == ticket


def _excluded(trial: Trial) -> tuple[str, ...]:
    # Who avoids a node for a while only must not wait behind those that never go there.
    for_a_while = [f"{trial.unlucky_on}, for a while"] if trial.unlucky_on else []
    return (*sorted(trial.excluded), *for_a_while)
