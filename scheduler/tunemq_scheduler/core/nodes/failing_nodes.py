"""`FailingNodes`: which nodes keep failing, and for how long nothing is placed on them.

A node on which the hosts of several different trials in a row fail, while none that is started
there gets as far as a new result, is set aside: for a minute, then for longer each time. A node
without which a trial has no place is set aside for a moment only, however often it was: a search
goes on, and ends, on whatever it has.

All of it follows from failures, results and the elapsed seconds that were told with them. Whether a
node may be used *now* is worked out when it is asked, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from tunemq_scheduler.core.placement.placement import holds_when_empty
from tunemq_scheduler.core.trials.trial import Trial
from tunemq_shared.base.backoff import backoff_s
from tunemq_shared.protocol.messages import NodeJoined

#: So many different trials in a row have to fail on a node.
TRIALS_IN_A_ROW: Final = 3
#: How long a node is set aside, the first time and at most.
FIRST_PAUSE_S: Final = 60.0
MAX_PAUSE_S: Final = 600.0
#: How long a node is that nobody can stand in for.
LAST_NODE_PAUSE_S: Final = 1.0


class NodeFailures(msgspec.Struct, array_like=True):
    """What speaks against a node.

    It is gone with the first new result of a trial that the node was given; where a checkpoint
    could not be kept, which trials find out behind their first results, with the first one kept.

    Attributes:
        trials: which failed on it in a row, the newest last.
        times: how often it was set aside; those for a moment only count as one.
        since: when it last was, in elapsed seconds.
        request: what the trial had that failed last.
        reason: why it failed.
        keeps_nothing: a checkpoint could not be kept there, as on a disk that is full.
    """

    trials: list[str] = []
    times: int = 0
    since: float = 0.0
    request: dict[str, float] = {}
    reason: str = ""
    keeps_nothing: bool = False

    @property
    def pause_s(self) -> float:
        """How long it is set aside; 0 where it never was."""
        return backoff_s(self.times - 1, FIRST_PAUSE_S, MAX_PAUSE_S) if self.times else 0.0

    def until(self, spare: _Spare) -> float:
        """Until when it is set aside, in elapsed seconds; ``spare``: who could stand in for it."""
        can_wait = spare.could_hold(self.request)
        return self.since + (self.pause_s if can_wait else LAST_NODE_PAUSE_S)


class FailingNodes:
    """The nodes that failed since a trial got on there; by name, for a node may be started again.

    Methods that need them are given all nodes, by instance.
    """

    def __init__(self) -> None:
        self._troubled: dict[str, NodeFailures] = {}

    def __bool__(self) -> bool:
        return bool(self._troubled)

    def __getitem__(self, node: str) -> NodeFailures:
        """What speaks against a node of this name."""
        return self._troubled[node]

    def failed(
        self,
        instance_id: str,
        trial: Trial,
        reason: str,
        nodes: Mapping[str, NodeJoined],
        elapsed: float,
        *,
        keeps_nothing: bool = False,
    ) -> float:
        """A trial's host failed on a node; returns for how many seconds it is set aside, and told.

        What fails while a node is set aside was there before and changes nothing; what fails on one
        that nobody can stand in for is told once.
        """
        node = nodes[instance_id].node
        trouble = self._troubled.setdefault(node, NodeFailures())
        trouble.keeps_nothing |= keeps_nothing
        if self._until(nodes[instance_id], nodes, elapsed) > elapsed:
            return 0.0
        different = [one for one in trouble.trials if one != trial.trial_id]
        trouble.trials = [*different, trial.trial_id]
        trouble.request, trouble.reason = trial.resources, reason
        if len(trouble.trials) < TRIALS_IN_A_ROW:
            return 0.0
        trouble.since = elapsed
        others = {one: joined for one, joined in nodes.items() if one != instance_id}
        if not self._spare(others, elapsed).could_hold(trouble.request):
            was_told, trouble.times, trouble.trials = trouble.times, max(trouble.times, 1), []
            return 0.0 if was_told else LAST_NODE_PAUSE_S
        trouble.times += 1
        trouble.trials = trouble.trials[1:]  # one more, and it is set aside again
        return trouble.pause_s

    def succeeded(self, node: str) -> None:
        """A trial that was started on the node reported its first new result."""
        if node in self._troubled and not self._troubled[node].keeps_nothing:
            del self._troubled[node]

    def has_kept(self, node: str) -> bool:
        """A new checkpoint is on the node's disk, or was written from there to where it stays.

        Returns whether that changes anything.
        """
        return self._troubled.pop(node, None) is not None

    def aside(self, nodes: Mapping[str, NodeJoined], elapsed: float) -> dict[str, float]:
        """The attempts that are set aside, and until when."""
        troubles = {node: trouble for node, trouble in self._troubled.items() if trouble.times}
        if not troubles:
            return {}
        looked_up = ((one, troubles.get(joined.node)) for one, joined in nodes.items())
        accused = [(one, trouble) for one, trouble in looked_up if trouble is not None]
        if not accused:
            return {}
        spare = self._spare(nodes, elapsed)
        until = {one: trouble.until(spare) for one, trouble in accused}
        return {one: due for one, due in until.items() if due > elapsed}

    def state(self) -> list[tuple[str, NodeFailures]]:
        """All of it, in one order."""
        return sorted(self._troubled.items())

    def load(self, state: Iterable[tuple[str, NodeFailures]]) -> None:
        """Take over what `state` gave."""
        self._troubled = dict(state)

    def _until(self, joined: NodeJoined, nodes: Mapping[str, NodeJoined], elapsed: float) -> float:
        """Until when one node is set aside; in the past where it is not."""
        trouble = self._troubled[joined.node]
        return trouble.until(self._spare(nodes, elapsed)) if trouble.times else 0.0

    def _spare(self, nodes: Mapping[str, NodeJoined], elapsed: float) -> _Spare:
        """The nodes that are not set aside, each as long as if it were not the last one."""
        of_no_trouble = NodeFailures()
        troubles = ((one, self._troubled.get(one.node, of_no_trouble)) for one in nodes.values())
        return _Spare(
            one for one, trouble in troubles if trouble.since + trouble.pause_s <= elapsed
        )


class _Spare:
    """Nodes on which trials could go on; asked about few different requests."""

    def __init__(self, nodes: Iterable[NodeJoined]) -> None:
        self._nodes = list(nodes)
        self._known: dict[tuple[tuple[str, float], ...], bool] = {}

    def could_hold(self, request: Mapping[str, float]) -> bool:
        """Whether one of them, were it empty, could hold a request."""
        key = tuple(request.items())
        if key not in self._known:
            self._known[key] = any(holds_when_empty(one, request) for one in self._nodes)
        return self._known[key]
