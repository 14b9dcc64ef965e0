"""`RunnerState`: the state of an experiment, and queries about it.

Only `tunemq_scheduler.core.trial_runner.TrialRunner` changes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

import msgspec

from tunemq_scheduler.core.checkpoints.checkpoint_book import CheckpointBook
from tunemq_scheduler.core.nodes.away_nodes import AwayNode
from tunemq_scheduler.core.nodes.failing_nodes import FailingNodes
from tunemq_scheduler.core.nodes.slots import SlotTable
from tunemq_scheduler.core.placement.placement import could_hold, holds_when_empty
from tunemq_scheduler.core.result_lookup import reaches
from tunemq_scheduler.core.runner_settings import RunnerSettings
from tunemq_scheduler.core.trials.trial import (
    ERROR,
    FINISHED,
    PAUSED,
    PENDING,
    RUNNING,
    STATES,
    ResultReview,
    Trial,
    TrialSummary,
)
from tunemq_scheduler.core.trials.waiting_trials import WaitingTrials
from tunemq_shared.protocol import messages as m

#: Seconds that a trial which failed repeatedly on one node waits for another node.
ELSEWHERE_S: Final = 120.0


class RunnerState:
    """The state of one experiment.

    Attributes:
        live: trials that have not ended, or that still have processes or uploads.
        finished: the packed summaries of all other trials.
        elapsed: seconds for which a scheduler ran the experiment, over all runs.
        suggested: the number of configurations so far; ``exhausted``: no more come.
        nodes: the connected node instances; ``away``: those that are not connected and may come
            back.
        offers: the newest offer for each shared node.
        alone: the nodes that take no further trial, because a trial that may crash its node runs
            there (its id), or will run there next (an empty string).
        giving_way: the trials being preempted, and the time by which they must have paused.
        stale: the number of events that came too late; ``repeated``: the number of results for
            steps that were already recorded.
        acknowledged: the last journalled event of each node instance.
        cursor: the last stream entry that was read.
    """

    def __init__(self, settings: RunnerSettings) -> None:
        self.settings = settings
        self.slots = SlotTable()
        self.placement = self.slots.placement
        self.health = FailingNodes()
        #: Nodes that take no trials at present, and until when; derived from `health`.
        self.aside: dict[str, float] = {}
        self.nodes: dict[str, m.NodeJoined] = {}
        self.away: dict[str, AwayNode] = {}
        self.offers: dict[str, m.NodeOffered] = {}
        self.giving_way: dict[str, float] = {}
        self.live: dict[str, Trial] = {}
        self.finished: dict[str, bytes] = {}
        #: The finished trials whose summaries changed since `forget_changes`.
        self._changed: dict[str, None] = {}
        self.book = CheckpointBook(settings, self.live, self._forget_checkpoint)
        #: Trial -> the trials that wait for a checkpoint of it; derived from `Trial.inherited`.
        self.awaited: dict[str, dict[str, None]] = {}
        self.alone: dict[str, str] = {}
        self.queue = WaitingTrials(self.is_suspect, self.placement.unreserve)
        #: Trial -> the away nodes that ran it or hold checkpoints of it; some may be back.
        self.left_behind: dict[str, dict[str, None]] = {}
        self.counts: dict[str, int] = dict.fromkeys(STATES, 0)
        self.elapsed = 0.0
        #: Counts the schedulers that ran this experiment.
        self.run = 1
        #: The first run that shares its nodes' events with the newest; 0 for the first run.
        self.cold_run = 0
        #: New attempts of trials have higher numbers than this.
        self.attempts_from = 0
        self.suggested = 0
        self.exhausted = False
        #: Why the experiment ends before its search does; empty if it does not.
        self.stopping = ""
        #: Why the run ends and the experiment can be resumed; empty if it does not.
        self.interrupted = ""
        self.stale = 0
        self.repeated = 0
        self.acknowledged: dict[str, int] = {}
        self.cursor = "0-0"

    @property
    def is_finished(self) -> bool:
        """Whether no trials, processes or uploads are left, and no more trials come."""
        if self.interrupted:
            return not len(self.slots) and not self.uploading
        return not self.live and (self.exhausted or bool(self.stopping))

    @property
    def uploading(self) -> int:
        """The number of checkpoints that are written and neither committed nor lost."""
        return self.book.uploading

    def review(self, result: m.ResultReported) -> ResultReview:
        """Classify a reported result before it is handled."""
        trial = self.live.get(result.trial)
        if trial is None or not self.is_attempt(trial, result.attempt) or trial.status in FINISHED:
            return ResultReview.STALE
        if result.step <= trial.last_step or trial.is_complete:
            return ResultReview.REPEATED
        if result.done:
            return ResultReview.FINAL
        is_leaving = trial.ending or trial.pausing
        is_due = not is_leaving and reaches(result, trial.run_until)
        return ResultReview.DUE if is_due else ResultReview.BEFORE_HORIZON

    def is_current(self, trial: str, attempt: int) -> bool:
        """Whether events of this attempt still count."""
        live = self.live.get(trial)
        return live is not None and self.is_attempt(live, attempt) and live.status not in FINISHED

    def is_attempt(self, trial: Trial, attempt: int) -> bool:
        """Whether this is the trial's newest attempt."""
        return trial.attempt == attempt

    def is_superseded(self, trial: str, attempt: int) -> bool:
        """Whether a newer attempt of the trial replaced this one."""
        is_known = trial in self.live or trial in self.finished
        return is_known and attempt < self.summary(trial).attempt

    def is_leaving(self, trial: str) -> bool:
        """Whether a trial has ended; its process or uploads may still exist."""
        live = self.live.get(trial)
        return live is None or live.is_finished

    @property
    def ends(self) -> bool:
        """Whether the experiment wants no further configuration."""
        return self.exhausted or bool(self.stopping or self.interrupted)

    def may_add_trial(self) -> bool:
        """Whether the search may get another trial before one of those that it has ends."""
        limit = self.settings.max_concurrent
        return not self.ends and not 0 < limit <= self._unfinished()

    def has_unplaced_trial(self) -> bool:
        """Whether a trial is PENDING or PAUSED and does not wait for another one's checkpoint."""
        awaiting = sum(map(len, self.awaited.values()))
        return self.counts[PENDING] + self.counts[PAUSED] > awaiting

    def _unfinished(self) -> int:
        return self.counts[PENDING] + self.counts[RUNNING] + self.counts[PAUSED]

    def wants_config(self) -> bool:
        """Whether to ask for a configuration: it could start now, or shows whether more come."""
        if self.ends:
            return False
        unfinished = self._unfinished()
        if not unfinished and self.settings.nodes_may_come:
            # No trial is left. Only the search algorithm knows whether more come and what they
            # request, and it may be long until a node has room: one configuration waits visibly.
            return True
        if not self.nodes:
            return False
        # Trials that wait for a slot come first; those that wait for their next retry block no
        # others.
        if self.queue.keeps_others_waiting(self.elapsed):
            return False
        if 0 < self.settings.max_concurrent <= unfinished:
            return False
        request = self.settings.request
        if request is None or self.placement.fit(request) is not None:
            return True
        # The runner asks even if no node can ever hold the request: adding the trial then fails, or
        # the trial waits visibly for a bigger node.
        return not self.placement.could_hold(request)

    def waiting(self) -> Iterator[Trial]:
        """Yield the trials that could be placed now: PENDING before PAUSED, longest wait first."""
        if self.interrupted or self.is_at_limit:
            return iter(())
        return self.queue.placeable(self.elapsed, self.has_place)

    @property
    def is_at_limit(self) -> bool:
        """Whether as many trials run as may run at once; more may wait, such as resumed ones."""
        return 0 < self.settings.max_concurrent <= self.counts[RUNNING]

    def has_waiting(self) -> bool:
        """Whether a trial waits only for a slot; `waiting` yields those for which one is free."""
        return not self.interrupted and self.queue.has_any(self.elapsed)

    def has_place(self, trial: Trial) -> bool:
        """Whether a node has room for a waiting trial now."""
        return self.place_of(trial) is not None

    def kept_from(self, trial: Trial) -> list[str]:
        """Return the names of the nodes on which a trial is not placed now.

        The node on which it failed repeatedly is included only for a while, and only if another
        node could hold the trial.
        """
        name = trial.unlucky_on
        if not name or name in trial.excluded or self.elapsed >= trial.not_before + ELSEWHERE_S:
            return trial.excluded
        names = [*trial.excluded, name]
        others = (one for one in self.nodes.values() if one.node not in names)
        is_other = any(holds_when_empty(one, trial.resources) for one in others)
        return names if is_other else trial.excluded

    def place_of(self, trial: Trial) -> str | None:
        """Return the node on which a waiting trial would run now, or None."""
        if not self.is_suspect(trial):
            return self.placement.fit(
                trial.resources, trial.checkpoints.node, self.shunned_by(trial)
            )
        preferred = trial.checkpoints.node
        if preferred in self.nodes and self._is_free_for_suspect(preferred, trial):
            return preferred
        kept = [node for node, held_slots in self.alone.items() if not held_slots]
        places = (one for one in (*kept, *self.nodes) if self._is_free_for_suspect(one, trial))
        return next(places, None)

    def _is_free_for_suspect(self, node: str, trial: Trial) -> bool:
        """Whether a node runs nothing, can hold this trial, and will get no other beside it."""
        if node in self.aside or self.alone.get(node) or self.slots.on_node(node):
            return False
        if self.nodes[node].is_ending or self.nodes[node].node in trial.excluded:
            return False
        return self.placement.is_whole(node) and self.placement.can_hold(node, trial.resources)

    def hostname_of(self, trial: Trial) -> str:
        """Return the hostname where a trial runs, or where it last ran."""
        instance_id = self.slots.node_at(trial.trial_id, trial.attempt)
        node = self.nodes.get(instance_id or "")
        if node is not None:
            return node.hostname
        return trial.started.hostname if trial.started is not None else ""

    def shunned_by(self, trial: Trial) -> list[str]:
        """Return the present node instances on which a trial is not placed."""
        names = self.kept_from(trial)
        return [one for one, joined in self.nodes.items() if joined.node in names] if names else []

    def shuns_all(self, trial: Trial) -> bool:
        """Whether a trial excludes every node, present or away, that could hold it."""
        return bool(trial.excluded) and not self.may_hold(trial, trial.resources)

    def may_hold(self, trial: Trial, request: Mapping[str, float]) -> bool:
        """Whether a node, present or away, that the trial does not exclude could hold this."""
        nodes = [*self.nodes.values(), *(away.joined for away in self.away.values())]
        return any(one.node not in trial.excluded and could_hold(one, request) for one in nodes)

    def is_suspect(self, trial: Trial) -> bool:
        """Whether a trial is suspected of having crashed its nodes or their forkservers.

        A suspect trial runs alone until that is clear. Losses that it shared with other trials make
        it a suspect, and are no evidence against it.
        """
        limit = self.settings.max_node_losses
        enough = max(1, limit)
        return (
            limit >= 0
            and enough <= len(trial.fell_with)
            and enough <= len(self.still_away(trial.fell_with))
        )

    def keep_alone(self, node: str, trial: str) -> None:
        """Reserve a node for this trial alone."""
        self.alone[node] = trial
        self._close_nodes()

    def _review_alone(self) -> None:
        """Update which nodes suspect trials reserve: those in use, and one for the next trial.

        For a shared node the farm decides who else may use it.
        """
        waiting = self.queue.apart(PENDING)
        if not (self.alone or waiting):
            return
        for node, held_slots in list(self.alone.items()):
            if not (
                self._runs_suspect(node, held_slots) if held_slots else self._serves(node, waiting)
            ):
                del self.alone[node]
        if all(self.alone.values()):
            for trial in waiting:
                if self.place_of(trial) is not None:
                    continue
                nodes = [one for one in self.nodes if self._serves(one, [trial])]
                if nodes:
                    self.alone[min(nodes, key=lambda one: len(self.slots.on_node(one)))] = ""
                    return

    def _runs_suspect(self, node: str, trial_id: str) -> bool:
        trial = self.live.get(trial_id)
        return (
            node in self.nodes
            and trial is not None
            and self.slots.node_at(trial_id, trial.attempt) == node
            and self.is_suspect(trial)
        )

    def _serves(self, node: str, waiting: list[Trial]) -> bool:
        """Whether a node, once empty, would fit one of these trials."""
        joined = self.nodes.get(node)
        if joined is None or joined.is_shared or joined.is_ending:
            return False
        if node in self.aside or self.alone.get(node):
            return False
        return any(
            joined.node not in trial.excluded and holds_when_empty(joined, trial.resources)
            for trial in waiting
        )

    def still_away(self, nodes: Iterable[str]) -> list[str]:
        """Return those of these node instances that were lost and did not come back."""
        return [one for one in nodes if one not in self.nodes]

    def review_nodes(self) -> None:
        """Update which nodes are set aside, after time has passed or a node has changed."""
        if self.aside or self.health:
            self.aside = self.health.aside(self.nodes, self.elapsed)
        self._review_alone()
        self._close_nodes()

    def _close_nodes(self) -> None:
        ending = (one for one, joined in self.nodes.items() if joined.is_ending)
        self.placement.set_aside((*self.aside, *self.alone, *ending))

    def leave_behind(self, node: str) -> None:
        """Record for each trial that a node, now away, ran it or holds its checkpoints."""
        held_slots = (one.trial for one in self.away[node].held_slots)
        for trial in (*held_slots, *self.book.owners(node)):
            nodes = self.left_behind.setdefault(trial, {})
            nodes.pop(node, None)  # keeps the order in which the nodes went away
            nodes[node] = None

    def next_wake(self) -> float | None:
        """Return when to retry a trial or a node, in elapsed seconds; None if none waits."""
        due = [self.queue.next_try(self.elapsed), *self.aside.values(), *self.giving_way.values()]
        return min((one for one in due if one is not None), default=None)

    def live_checkpoints(self) -> Mapping[str, str]:
        """Map the key of each checkpoint that must stay in the store to its manifest's hash.

        For garbage collection: this looks at every trial of the experiment.
        """
        found = {
            one.key: one.sha256 for trial in self.live.values() for one in trial.checkpoints.kept()
        }
        for packed in self.finished.values():
            found.update((one.key, one.sha256) for one in _unpack_summary(packed).checkpoints)
        found.update(self.book.pinned())
        return found

    def is_busy(self, key: str) -> bool:
        """Whether a checkpoint may be being written, is retained, or belongs to another run.

        Another search that shares the folder has other trials, and another run of this search has
        attempts that this run did not start.
        """
        folder = key.partition("/")[0]
        if self.book.is_writing(folder):
            return True
        parts = folder.split("_")
        trials = ("_".join(parts[place:]) for place in range(len(parts)))
        known = [self.summary(one) for one in trials if one in self.live or one in self.finished]
        kept = (kept.key for one in known for kept in one.checkpoints)
        attempt = key.rpartition("/checkpoint_")[2].partition("-")[0]
        last = max((one.attempt for one in known), default=0)
        return not known or key in kept or (attempt.isdecimal() and int(attempt) > last)

    def summary(self, trial: str) -> TrialSummary:
        """Return the summary of a trial, live or ended.

        Raises:
            KeyError: there is no such trial.
        """
        packed = self.finished.get(trial)
        return self.live[trial].summary() if packed is None else _unpack_summary(packed)

    def keep_summary(self, trial: str, summary: TrialSummary) -> None:
        """Store the summary of an ended trial, which replaces its full state."""
        self.finished[trial] = m.encode(summary)
        self._changed[trial] = None

    def drop_summary(self, trial: str) -> None:
        """Remove the summary of an ended trial that runs again."""
        del self.finished[trial]
        self._changed[trial] = None

    def changed_summaries(self) -> list[tuple[str, bytes]]:
        """Return the summaries changed since `forget_changes`; empty if a trial runs again."""
        return [(trial, self.finished.get(trial, b"")) for trial in self._changed]

    def forget_changes(self) -> None:
        """Mark all summaries as stored."""
        self._changed.clear()

    def errored(self) -> list[str]:
        """Return the trials in ERROR by their number in the search; looks at every ended trial."""
        summaries = {trial: self.summary(trial) for trial in (*self.finished, *self.live)}
        found = [trial for trial, one in summaries.items() if one.status == ERROR]
        return sorted(found, key=lambda trial: summaries[trial].number)

    def revived_by(self, event: m.ExperimentResumed) -> list[str]:
        """Return the ended trials that this event runs again."""
        errored = self.errored() if event.errored else []
        also = [one for one in event.also if one not in errored and self.is_leaving(one)]
        return [*errored, *also]

    def _keep_node(self, trial: Trial) -> None:
        """Reserve a node for a trial that was passed over too often, until the trial has room.

        If there is room already, the trial was just not chosen, and a reservation would be wasted.
        """
        if self.is_suspect(trial):  # suspects have their own reservation
            return
        if self.has_place(trial):
            self.placement.unreserve(trial.resources)
        elif not self.placement.is_reserved_for(trial.resources):
            self.placement.reserve(trial.resources, self.shunned_by(trial))

    def _forget_checkpoint(self, trial: str, key: str) -> None:
        """Remove a checkpoint from the summary of an ended trial."""
        if trial not in self.finished:  # `tunemq journal salvage` found no summary
            return
        summary = _unpack_summary(self.finished[trial])
        ranked = zip(summary.checkpoints, summary.ranks, strict=True)
        kept = [(one, rank) for one, rank in ranked if one.key != key]
        self.keep_summary(
            trial,
            msgspec.structs.replace(
                summary,
                checkpoints=tuple(one for one, _ in kept),
                ranks=tuple(rank for _, rank in kept),
            ),
        )


_unpack_summary = msgspec.msgpack.Decoder(TrialSummary).decode
