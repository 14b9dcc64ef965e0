"""`WaitingTrials`: the queue of trials that wait for a slot, or to be resumed.

Thousands of trials may wait at once, as after the loss of many nodes, and most turns place a few of
them or none. So trials with equal requirements share a *line*: if its first has no place, none in
it has. The cost of a turn grows with the number of lines, one per different request, and with the
number of placed trials; not with the number of waiting ones.

A trial that waits for its next retry joins its line only when that time has come. Within a line,
tickets determine the order; a trial gets its ticket when it begins to wait.

A line is passed over if none of it was placed while `MAX_TIMES_PASSED_OVER` slots were freed: it
requests more than any node has free at once while smaller requests take each freed slot. The runner
then reserves a node for it, which takes no other trials until the request fits.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from typing import Final, NamedTuple

import msgspec

from tunemq_scheduler.core.trials.trial import PAUSED, PENDING, Trial

#: The number of freed slots after which a line without a placed trial gets a reserved node.
MAX_TIMES_PASSED_OVER: Final = 64

#: A heap is rebuilt when it holds more than twice its valid entries plus this.
_SLACK: Final = 64


class _Kind(NamedTuple):
    """The common properties of a line's trials, which together decide whether there is room.

    Attributes:
        is_apart: they must not share a node with any other trial.
        excluded: the names of the nodes on which they must not be placed.
    """

    status: str
    request: tuple[tuple[str, float], ...]
    is_apart: bool
    excluded: tuple[str, ...] = ()


class _Line:
    """Trials of one kind; finds the first one quickly after any joins and leaves."""

    __slots__ = ("_heap", "since", "tickets")

    def __init__(self, since: int) -> None:
        self.tickets: dict[str, int] = {}
        #: The count of freed slots when the line last had a trial placed, or was last checked.
        self.since = since
        #: May contain entries of trials that left, which are skipped.
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
    """A trial's position in the queue.

    Attributes:
        kind: the kind of its line; None while it waits for its next retry.
        nodes: the lost nodes that may decide whether it must run apart.
    """

    ticket: int
    kind: _Kind | None
    nodes: tuple[str, ...]


class PassedOverLines(msgspec.Struct, frozen=True, array_like=True):
    """How long lines were passed over, in serialized form.

    Attributes:
        freed: the number of freed slots so far.
        due: the number of freed slots at which the next check is due.
        since: the `since` of each line of PENDING trials.
    """

    freed: int = 0
    due: int = MAX_TIMES_PASSED_OVER
    since: list[tuple[_Kind, int]] = []


class WaitingTrials:
    """PENDING and PAUSED trials; each kind in the order in which they began to wait.

    Args:
        is_apart: whether a trial must not share a node with any other. It is called when a trial
            begins to wait, and by `review` and `regroup`.
        line_is_over: called with a request when no trial of a line of PENDING trials waits for it
            any more.
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
        #: The times of the next retries; may contain trials that left.
        self._later: list[tuple[float, int, str]] = []
        #: The waiting trials by each lost node that ran them.
        self._fell_with: dict[str, dict[str, None]] = {}
        self._tickets = 0
        #: The time of the latest `wake`, in elapsed seconds.
        self._now = 0.0
        #: The number of freed slots, and the number at which lines are checked next.
        self.freed, self._due = 0, MAX_TIMES_PASSED_OVER

    def __iter__(self) -> Iterator[Trial]:
        """Iterate over all trials: PENDING, then PAUSED."""
        for trials in self._trials.values():
            yield from trials.values()

    # --- membership -------------------------------------------------------------------------------

    def follow(self, trial: Trial) -> None:
        """Update the queue after a trial's status changed."""
        if trial.trial_id in self._places:
            self._leave(trial.trial_id)
            for trials in self._trials.values():
                trials.pop(trial.trial_id, None)
        if trial.status in self._trials:
            self._trials[trial.status][trial.trial_id] = trial
            self._tickets += 1
            self._rest(trial, self._tickets)

    def review(self, node: str) -> None:
        """Regroup the trials lost with this node, which came or went: suspicion may change."""
        for trial in list(self._fell_with.get(node, ())):
            self._regroup(self._trial(trial))

    def regroup(self) -> None:
        """Regroup all waiting trials in their order, after any change of their properties."""
        for trial in self:
            self._regroup(trial)

    def dumped(self) -> tuple[list[str], list[str]]:
        """Return the ids of the PENDING and of the PAUSED trials, each in order."""
        return list(self._trials[PENDING]), list(self._trials[PAUSED])

    def passed_over(self) -> PassedOverLines:
        """Return how long each line was passed over."""
        since = [(kind, line.since) for kind, line in self._lines[PENDING].items()]
        return PassedOverLines(self.freed, self._due, since)

    def take_back(
        self,
        pending: Iterable[Trial],
        paused: Iterable[Trial],
        passed_over: PassedOverLines = PassedOverLines(),  # noqa: B008  it is frozen
        elapsed: float = 0.0,
    ) -> None:
        """Restore the state that `dumped` and `passed_over` returned."""
        self.freed, self._due = passed_over.freed, passed_over.due
        self.wake(elapsed)
        for trial in (*pending, *paused):
            self.follow(trial)
        for kind, since in passed_over.since:
            line = self._lines[PENDING].get(kind)
            if line is not None:
                line.since = since

    # --- the next trials --------------------------------------------------------------------------

    def wake(self, elapsed: float) -> None:
        """Add trials to their lines whose retry time has come; drop entries of trials that left."""
        self._now, later = elapsed, self._later
        while later and (later[0][0] <= elapsed or not self._is_resting(later[0])):
            entry = heapq.heappop(later)
            if self._is_resting(entry):
                self._stand(self._trial(entry[2]))

    def has_any(self, elapsed: float) -> bool:
        """Whether any trial waits only for a slot."""
        self.wake(elapsed)
        return bool(self._lines[PENDING] or self._lines[PAUSED])

    def has_pending(self, elapsed: float) -> bool:
        """Whether any PENDING trial waits only for a slot."""
        self.wake(elapsed)
        return bool(self._lines[PENDING])

    def keeps_others_waiting(self, elapsed: float) -> bool:
        """Whether a PENDING trial blocks others; one that excludes nodes or runs apart does not."""
        return self.has_pending(elapsed) and any(
            not (kind.excluded or kind.is_apart) for kind in self._lines[PENDING]
        )

    def apart(self, status: str) -> list[Trial]:
        """Return the first trial of each line whose trials run apart, in order."""
        if not any(kind.is_apart for kind in self._lines[status]):
            return []
        trials = self._trials[status]
        lines = (line for kind, line in self._lines[status].items() if kind.is_apart)
        return [trials[trial] for _, trial in sorted(line.first() for line in lines)]

    def placeable(self, elapsed: float, has_place: Callable[[Trial], bool]) -> Iterator[Trial]:
        """Yield the trials that could be placed now; finding the first costs one step per line.

        Consume it before anything changes. It calls ``has_place`` for one trial of each line.
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
        """Yield the first trial of each line, and the line's length."""
        trials = self._trials[status]
        for line in self._lines[status].values():
            yield trials[line.first()[1]], len(line.tickets)

    # --- lines that were passed over --------------------------------------------------------------

    def served(self, trial: Trial) -> None:
        """Record that a waiting trial was placed, so its line was not passed over."""
        request = tuple(sorted(trial.resources.items()))
        for is_apart in (False, True):
            kind = _Kind(PENDING, request, is_apart, _excluded(trial))
            line = self._lines[PENDING].get(kind)
            if line is not None:
                line.since = self.freed
        self._line_is_over(trial.resources)

    def slot_freed(self, keep_node: Callable[[Trial], None]) -> None:
        """Count a freed slot, and call ``keep_node`` for the first trial of each overdue line."""
        self.freed += 1
        if self.freed < self._due:
            return
        trials, lines = self._trials[PENDING], self._lines[PENDING].values()
        passed_over = [line for line in lines if self.freed >= line.since + MAX_TIMES_PASSED_OVER]
        # Sorted, because the order in which the lines arose is not stored.
        for line in sorted(passed_over, key=_Line.first):
            line.since = self.freed
            keep_node(trials[line.first()[1]])
        self._due = min((line.since for line in lines), default=self.freed) + MAX_TIMES_PASSED_OVER

    # --- retries ----------------------------------------------------------------------------------

    def next_try(self, elapsed: float) -> float | None:
        """Return when the next retry is due, in elapsed seconds; None if none waits."""
        self.wake(elapsed)
        return self._later[0][0] if self._later else None

    # --- small things -----------------------------------------------------------------------------

    def _trial(self, trial: str) -> Trial:
        return next(trials[trial] for trials in self._trials.values() if trial in trials)

    def _rest(self, trial: Trial, ticket: int) -> None:
        """Wait for the next retry, or for a slot if that may start at once."""
        nodes = tuple(trial.fell_with)
        self._places[trial.trial_id] = _WaitingPlace(ticket, None, nodes)
        for node in nodes:
            self._fell_with.setdefault(node, {})[trial.trial_id] = None
        if trial.awaits_state:
            return  # `follow` is called again when it is there
        if trial.not_before > self._now:
            heapq.heappush(self._later, (trial.not_before, ticket, trial.trial_id))
        else:
            self._stand(trial)

    def _stand(self, trial: Trial) -> None:
        """Join the line of trials that wait only for a slot."""
        place = self._places[trial.trial_id]
        request = tuple(sorted(trial.resources.items()))
        kind = _Kind(trial.status, request, self._is_apart(trial), _excluded(trial))
        self._places[trial.trial_id] = place._replace(kind=kind)
        lines = self._lines[trial.status]
        if kind not in lines:
            lines[kind] = _Line(self.freed)
        lines[kind].join(trial.trial_id, place.ticket)

    def _leave(self, trial: str) -> int:
        """Remove a trial from the queue; return its ticket."""
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
            return  # it is grouped when it joins a line
        self._rest(trial, self._leave(trial.trial_id))

    def _is_resting(self, entry: tuple[float, int, str]) -> bool:
        _, ticket, trial = entry
        place = self._places.get(trial)
        return place is not None and place.kind is None and place.ticket == ticket


def _excluded(trial: Trial) -> tuple[str, ...]:
    # A trial that avoids a node only for a while must not wait behind those that always do.
    for_a_while = [f"{trial.unlucky_on}, temporarily"] if trial.unlucky_on else []
    return (*sorted(trial.excluded), *for_a_while)
