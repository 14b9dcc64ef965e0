"""`FailingNodes`: which nodes keep failing, and how long nothing is placed on them.

A node is set aside when several different trials in a row fail on it and none that starts there
reaches a new result: for a minute at first, then for longer each time. A node without which a trial
has no place is set aside only for a moment, however often it failed: a search continues, and
finishes, on whatever nodes it has.

All of it follows from failures, results and the elapsed seconds passed with them. Whether a node is
usable *now* is computed on request, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from tunemq_scheduler.core.placement.placement import holds_when_empty
from tunemq_scheduler.core.trials.trial import Trial
from tunemq_shared.base.backoff import backoff_s
from tunemq_shared.protocol.messages import NodeJoined

#: The number of different trials in a row that must fail on a node.
TRIALS_IN_A_ROW: Final = 3
#: How long a node is set aside, in seconds: the first time, and at most.
FIRST_PAUSE_S: Final = 60.0
MAX_PAUSE_S: Final = 600.0
#: Seconds for which a node is set aside if no other can replace it.
LAST_NODE_PAUSE_S: Final = 1.0


class NodeFailures(msgspec.Struct, array_like=True):
    """The failures of one node.

    The record is deleted at the first new result of a trial on that node. If a checkpoint could not
    be saved, which happens only after first results, the first saved checkpoint deletes it.

    Attributes:
        trials: the trials that failed on it in a row, newest last.
        times: how often it was set aside; all times for a moment count as one.
        since: when it was last set aside, in elapsed seconds.
        request: the resources of the trial that failed last.
        reason: why that trial failed.
        keeps_nothing: a checkpoint could not be saved there, as on a full disk.
    """

    trials: list[str] = []
    times: int = 0
    since: float = 0.0
    request: dict[str, float] = {}
    reason: str = ""
    keeps_nothing: bool = False

    @property
    def pause_s(self) -> float:
        """How long it is set aside in seconds; 0 if it never was."""
        return backoff_s(self.times - 1, FIRST_PAUSE_S, MAX_PAUSE_S) if self.times else 0.0

    def until(self, spare: _Spare) -> float:
        """Return when its pause ends, in elapsed seconds; ``spare``: possible replacements."""
        can_wait = spare.could_hold(self.request)
        return self.since + (self.pause_s if can_wait else LAST_NODE_PAUSE_S)


class FailingNodes:
    """The nodes with failures since the last progress there, by name, since a node may restart.

    Methods that need them receive all nodes by instance.
    """

    def __init__(self) -> None:
        self._troubled: dict[str, NodeFailures] = {}

    def __bool__(self) -> bool:
        return bool(self._troubled)

    def __getitem__(self, node: str) -> NodeFailures:
        """Return the failures of the node with this name."""
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
        """Record that a trial failed on a node; return for how many seconds to set it aside.

        A failure while the node is set aside began before that and changes nothing. For a node that
        no other can replace, only the first call returns a positive number. The caller warns if the
        number is positive.
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
        trouble.trials = trouble.trials[1:]  # one more failure sets it aside again
        return trouble.pause_s

    def succeeded(self, node: str) -> None:
        """Clear a node's failures after a trial started there reported its first new result."""
        if node in self._troubled and not self._troubled[node].keeps_nothing:
            del self._troubled[node]

    def has_kept(self, node: str) -> bool:
        """Clear a node's failures after it saved a new checkpoint, on its disk or in the store.

        Return whether there were any.
        """
        return self._troubled.pop(node, None) is not None

    def aside(self, nodes: Mapping[str, NodeJoined], elapsed: float) -> dict[str, float]:
        """Return the node instances that are set aside, and until when in elapsed seconds."""
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
        """Return the whole state, sorted."""
        return sorted(self._troubled.items())

    def load(self, state: Iterable[tuple[str, NodeFailures]]) -> None:
        """Restore what `state` returned."""
        self._troubled = dict(state)

    def _until(self, joined: NodeJoined, nodes: Mapping[str, NodeJoined], elapsed: float) -> float:
        """Return until when one node is set aside; a time in the past if it is not."""
        trouble = self._troubled[joined.node]
        return trouble.until(self._spare(nodes, elapsed)) if trouble.times else 0.0

    def _spare(self, nodes: Mapping[str, NodeJoined], elapsed: float) -> _Spare:
        """Return the nodes that are not set aside; the shorter pause of a last node is ignored."""
        of_no_trouble = NodeFailures()
        troubles = ((one, self._troubled.get(one.node, of_no_trouble)) for one in nodes.values())
        return _Spare(
            one for one, trouble in troubles if trouble.since + trouble.pause_s <= elapsed
        )


class _Spare:
    """Nodes on which trials could run instead; queried about a few different requests."""

    def __init__(self, nodes: Iterable[NodeJoined]) -> None:
        self._nodes = list(nodes)
        self._known: dict[tuple[tuple[str, float], ...], bool] = {}

    def could_hold(self, request: Mapping[str, float]) -> bool:
        """Whether one of them, if empty, could hold a request."""
        key = tuple(request.items())
        if key not in self._known:
            self._known[key] = any(holds_when_empty(one, request) for one in self._nodes)
        return self._known[key]
