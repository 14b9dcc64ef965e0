"""`UsageTracker`: what an experiment tells its farm: what it holds of each node, and would like to.

What it costs to ask grows with the nodes of which something changed, and with the number of
different requests; not with how many trials or nodes there are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from tunemq_scheduler.core.allotments import OfferUsage, ResourceAmounts, SlotDemand
from tunemq_scheduler.core.nodes.failing_nodes import LAST_NODE_PAUSE_S
from tunemq_scheduler.core.runner_state import RunnerState
from tunemq_scheduler.core.trials.trial import PAUSED, PENDING, RUNNING, Trial

#: How many trials a search without a limit would have at once.
ANY_NUMBER: Final = 1_000_000


class UsageTracker:
    """Works out the `OfferUsage` of one experiment."""

    def __init__(self, state: RunnerState) -> None:
        self._state = state
        self._seen: dict[str, int] = {}
        self._held: dict[str, ResourceAmounts] = {}
        self._newest = OfferUsage()

    def usage(self, configurations: int = ANY_NUMBER) -> OfferUsage:
        """What holds now; the very same object as before where nothing changed.

        Args:
            configurations: how many more the search may give, at most.
        """
        state, newest = self._state, self._newest
        changed = sum(self._follow(node) for node in state.placement.touched())
        wants = tuple(_wants(state, configurations))
        alone = tuple(node for node, trial in state.alone.items() if trial)
        if changed:
            self._newest = OfferUsage(dict(self._seen), dict(self._held), wants, alone)
        elif (wants, alone) != (newest.wants, newest.alone):
            self._newest = OfferUsage(newest.seen, newest.held, wants, alone)
        return self._newest

    def _follow(self, node: str) -> bool:
        """Take in what is held of a node now; returns whether that is something else."""
        before = self._seen.pop(node, None), self._held.pop(node, None)
        if node not in self._state.placement:
            return before[0] is not None
        offer, held = self._state.offers.get(node), self._state.placement.held(node)
        self._seen[node] = 0 if offer is None else offer.n
        if held.resources or held.devices:
            self._held[node] = held
        return before != (self._seen[node], self._held.get(node))


def _wants(state: RunnerState, configurations: int) -> Iterator[SlotDemand]:
    if state.interrupted:
        return
    suspects = state.queue.apart(PENDING)
    for trial, count in state.queue.lines(PENDING):
        if trial not in suspects:
            yield SlotDemand(
                trial.resources, count, trial.checkpoints.node, _excluded(state, trial)
            )
    request = state.settings.request
    if request is not None and not (state.exhausted or state.stopping):
        unfinished = state.counts[PENDING] + state.counts[RUNNING] + state.counts[PAUSED]
        limit = state.settings.max_concurrent
        more = min(configurations, limit - unfinished if limit else ANY_NUMBER)
        if more > 0:
            yield SlotDemand(request, more, excluded=tuple(_set_aside(state)))
    # Which of the paused go on, and when, is up to the trial scheduler; it is asked where one has a
    # place, so that one place for each request is all that is known to be of use.
    paused = state.queue.apart(PAUSED)
    for trial, _ in state.queue.lines(PAUSED):
        if trial not in paused:
            yield SlotDemand(trial.resources, 1, trial.checkpoints.node, _excluded(state, trial))
    # One at a time is given a node; a paused one only where nothing else could get on.
    if not suspects and not (state.counts[PENDING] or state.counts[RUNNING]):
        suspects = paused
    for trial in suspects[:1]:
        excluded = _excluded(state, trial)
        yield SlotDemand(trial.resources, 1, trial.checkpoints.node, excluded, is_alone=True)


def _excluded(state: RunnerState, trial: Trial) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*state.shunned_by(trial), *_set_aside(state))))


def _set_aside(state: RunnerState) -> list[str]:
    """The nodes of which nothing would be used for more than a moment: others are to be offered."""
    soon = state.elapsed + LAST_NODE_PAUSE_S
    return [node for node, until in state.aside.items() if until > soon]
