"""`UsageTracker`: computes what an experiment holds of each node and what it wants.

The cost grows with the number of changed nodes and of different requests, not with the number of
trials or nodes.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Final

from tunemq_scheduler.core.nodes.failing_nodes import LAST_NODE_PAUSE_S
from tunemq_scheduler.core.runner_state import RunnerState
from tunemq_scheduler.core.shared_amounts import (
    MOST_DEMANDS,
    OfferUsage,
    ResourceAmounts,
    SlotDemand,
)
from tunemq_scheduler.core.trials.trial import PAUSED, PENDING, RUNNING, Trial

#: The number of trials that a search without a limit would run at once.
ANY_NUMBER: Final = 1_000_000


class UsageTracker:
    """Computes the `OfferUsage` of one experiment."""

    def __init__(self, state: RunnerState) -> None:
        self._state = state
        self._seen: dict[str, int] = {}
        self._held: dict[str, ResourceAmounts] = {}
        self._newest = OfferUsage()

    def usage(self, configurations: int = ANY_NUMBER) -> OfferUsage:
        """Return the current usage; the same object as before if nothing changed.

        Args:
            configurations: the most further configurations that the search may suggest.
        """
        state, newest = self._state, self._newest
        changed = sum(self._follow(node) for node in state.placement.touched())
        wants = tuple(islice(_wants(state, configurations), MOST_DEMANDS))
        alone = tuple(node for node, trial in state.alone.items() if trial)
        if changed:
            self._newest = OfferUsage(dict(self._seen), dict(self._held), wants, alone)
        elif (wants, alone) != (newest.wants, newest.alone):
            self._newest = OfferUsage(newest.seen, newest.held, wants, alone)
        return self._newest

    def _follow(self, node: str) -> bool:
        """Update the amounts held of a node; return whether they changed."""
        before = self._seen.pop(node, None), self._held.pop(node, None)
        if node not in self._state.placement:
            return before[0] is not None
        offer, held = self._state.offers.get(node), self._state.placement.held(node)
        self._seen[node] = 0 if offer is None else offer.n
        if held.resources or held.devices:
            self._held[node] = held
        return before != (self._seen[node], self._held.get(node))


def _wants(state: RunnerState, configurations: int) -> Iterator[SlotDemand]:
    limit = state.settings.max_concurrent
    left = limit - state.counts[RUNNING] if limit else ANY_NUMBER
    if state.interrupted or left <= 0:
        return
    paused, suspects = state.queue.apart(PAUSED), state.queue.apart(PENDING)
    # One suspect at a time gets a node; a paused one only if no other trial can make progress.
    is_any_unfinished = state.counts[PENDING] or state.counts[RUNNING]
    for trial in (suspects or ([] if is_any_unfinished else paused))[:1]:
        excluded = _excluded(state, trial)
        yield SlotDemand(trial.resources, 1, trial.checkpoints.node, excluded, is_alone=True)
    for trial, count in state.queue.lines(PENDING):
        if trial not in suspects and left > 0:
            excluded = _excluded(state, trial)
            yield SlotDemand(trial.resources, min(count, left), trial.checkpoints.node, excluded)
            left -= count
    request = state.settings.request
    if request is not None and not (state.exhausted or state.stopping):
        unfinished = state.counts[PENDING] + state.counts[RUNNING] + state.counts[PAUSED]
        more = min(configurations, limit - unfinished if limit else ANY_NUMBER)
        if more > 0:
            yield SlotDemand(request, more, excluded=tuple(_set_aside(state)))
    # The trial scheduler decides which paused trials resume, and when; the runner asks it only when
    # one has room. So one slot per request is all that is certain to be used.
    for trial, _ in state.queue.lines(PAUSED):
        if trial not in paused:
            yield SlotDemand(trial.resources, 1, trial.checkpoints.node, _excluded(state, trial))


def _excluded(state: RunnerState, trial: Trial) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*state.shunned_by(trial), *_set_aside(state))))


def _set_aside(state: RunnerState) -> list[str]:
    """Return the nodes that stay set aside for long; the farm should offer others instead."""
    soon = state.elapsed + LAST_NODE_PAUSE_S
    return [node for node, until in state.aside.items() if until > soon]
