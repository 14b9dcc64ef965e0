"""`RunnerState`: what is known of an experiment, and what one may ask about it.

Only `tunemq_scheduler.core.runner.TrialRunner` changes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from tunemq_scheduler.core.checkpoint_book import CheckpointBook
from tunemq_scheduler.core.review import Review
from tunemq_scheduler.core.settings import RunnerSettings
from tunemq_scheduler.core.slots import Slots
from tunemq_scheduler.core.trial import (
    FINISHED,
    PAUSED,
    PENDING,
    RUNNING,
    STATES,
    Trial,
    TrialSummary,
)
from tunemq_scheduler.core.values import reaches
from tunemq_scheduler.core.waiting import WaitingTrials
from tunemq_shared import messages as m


class RunnerState:
    """The state of one experiment.

    Attributes:
        live: trials that are not over, or whose hosts or uploads are still there.
        finished: the other ones' summaries, packed.
        elapsed: seconds for which a scheduler ran the experiment, all runs together.
        suggested: how many configurations there are so far; ``exhausted``: no more come.
        stale: facts that came too late to count; ``repeated``: results of steps that are recorded.
        accepted: how far each node incarnation's events are journalled.
        cursor: the stream entry up to which all is read.
    """

    def __init__(self, settings: RunnerSettings) -> None:
        self.settings = settings
        self.slots = Slots()
        self.placement = self.slots.placement
        self.nodes: dict[str, m.NodeJoined] = {}
        self.live: dict[str, Trial] = {}
        self.finished: dict[str, bytes] = {}
        self.book = CheckpointBook(settings, self.live, self._forget_checkpoint)
        self.queue = WaitingTrials()
        self.counts: dict[str, int] = dict.fromkeys(STATES, 0)
        self.elapsed = 0.0
        self.suggested = 0
        self.exhausted = False
        #: Why the experiment ends before its search does; empty while it does not.
        self.stopping = ""
        #: Why it is left as it is, to be resumed; empty while it is not.
        self.interrupted = ""
        self.stale = 0
        self.repeated = 0
        self.accepted: dict[str, int] = {}
        self.cursor = "0-0"

    @property
    def is_finished(self) -> bool:
        """Whether every trial is over, its host gone, its uploads settled, and no more to come."""
        if self.interrupted:
            return not len(self.slots) and not self.uploading
        return not self.live and (self.exhausted or bool(self.stopping))

    @property
    def uploading(self) -> int:
        """How many checkpoints are written and neither committed nor lost."""
        return self.book.uploading

    def review(self, result: m.ResultReported) -> Review:
        """What a reported result means, before it is handled."""
        trial = self.live.get(result.trial)
        if trial is None or result.epoch != trial.epoch or trial.status in FINISHED:
            return Review.STALE
        if result.step <= trial.last_step:
            return Review.REPEATED
        if result.done:
            return Review.FINAL
        is_leaving = trial.ending or trial.pausing
        is_due = not is_leaving and reaches(result, trial.run_until)
        return Review.DUE if is_due else Review.PASSING

    def is_current(self, trial: str, epoch: int) -> bool:
        """Whether facts of this incarnation still count."""
        live = self.live.get(trial)
        return live is not None and live.epoch == epoch and live.status not in FINISHED

    def wants_config(self) -> bool:
        """Whether one more configuration could start now."""
        ends = self.exhausted or self.stopping or self.interrupted
        if ends or not self.nodes:
            return False
        # Who waits for a slot comes first; who waits before the next try keeps nobody waiting.
        if self.queue.has_pending(self.elapsed):
            return False
        unfinished = self.counts[PENDING] + self.counts[RUNNING] + self.counts[PAUSED]
        if 0 < self.settings.max_concurrent <= unfinished:
            return False
        request = self.settings.request
        if request is None or self.placement.fit(request) is not None:
            return True
        # What no node can ever hold is suggested nevertheless: whoever adds the trial refuses it,
        # or it waits, in sight, for a bigger node.
        return self.placement.why_never(request) is not None

    def waiting(self) -> Iterator[Trial]:
        """Trials that could be placed now: PENDING ones, then PAUSED; the longest waiting first."""
        return iter(()) if self.interrupted else self.queue.placeable(self.elapsed, self.placement)

    def next_wake(self) -> float | None:
        """When a trial that waits to be tried again may go on, in elapsed seconds."""
        return self.queue.next_try(self.elapsed)

    def live_checkpoints(self) -> Mapping[str, str]:
        """All checkpoints that have to stay in the store: key -> hash of the manifest there.

        For collection: this looks at every trial of the experiment.
        """
        trials = (*self.live, *self.finished)
        kept = (one for trial in trials for one in self.summary(trial).checkpoints)
        return {**{one.key: one.sha256 for one in kept}, **dict(self.book.pinned())}

    def is_busy(self, key: str) -> bool:
        """Whether a checkpoint with this key may be being written, is kept, or is of no trial here.

        What is of no trial here is somebody else's, who was given the same place at the same time.
        """
        folder = key.partition("/")[0]
        if self.book.is_writing(folder):
            return True
        parts = folder.split("_")
        trials = ("_".join(parts[place:]) for place in range(len(parts)))
        known = [one for one in trials if one in self.live or one in self.finished]
        kept = (kept.key for one in known for kept in self.summary(one).checkpoints)
        return not known or key in kept

    def summary(self, trial: str) -> TrialSummary:
        """What is known of a trial, over or not.

        Raises:
            KeyError: there is no such trial.
        """
        packed = self.finished.get(trial)
        return self.live[trial].summary() if packed is None else _unpack_summary(packed)

    def _forget_checkpoint(self, trial: str, key: str) -> None:
        """A trial that is over has this checkpoint no longer."""
        summary = _unpack_summary(self.finished[trial])
        kept = tuple(one for one in summary.checkpoints if one.key != key)
        self.finished[trial] = m.encode(msgspec.structs.replace(summary, checkpoints=kept))


_unpack_summary = msgspec.msgpack.Decoder(TrialSummary).decode
