"""`JournalAuditor`: reads a journal as it grows, and checks its invariants.

It has a separate runner, which receives only the journal, and separate records, which are simple
enough to be reviewed. It checks:

* **I1** no suggested trial is missing, and the counts are those of the trials;
* **I2** a step of a trial is recorded once in its lineage; a node's event is journalled once;
* **I3** recorded steps follow one another without a gap, and none follows a trial's last;
* **I4** no event of an older attempt is recorded;
* **I5** a trial has one current attempt; trials never hold more of a node than it has, and nothing
  starts on a withheld device, nor on a node excluded for the trial;
* **I7** kept checkpoints are in the store, and no trial keeps a checkpoint to be removed;
* **I8** the journal gives the state, and the commands, of the runner that wrote it.

I6 (everything ends) and I10 (with the same outcome) concern whole runs: the caller compares their
outcomes. I9 concerns Redis.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, get_args

import msgspec

from tunemq.testing.comparable_state import comparable
from tunemq_scheduler.core import commands as c
from tunemq_scheduler.core.runner_settings import RunnerSettings
from tunemq_scheduler.core.trial_runner import TrialRunner
from tunemq_scheduler.core.trials.trial import FINISHED, PAUSED, PENDING, RUNNING
from tunemq_shared.base.errors import InvariantBroken
from tunemq_shared.protocol import messages as m

#: (instance, number) -> the event that this node reported under this number, if known.
StatedEvent = Callable[[str, int], m.Event | None]

_SLACK = 1e-6
_NODE_EVENTS = frozenset(get_args(m.NodeEvent))


class StoreContents(Protocol):
    """The part of a store that the auditor needs."""

    def has(self, key: str) -> bool:
        """Return whether a checkpoint exists, with all objects to which it refers."""


class _TrialRecord(msgspec.Struct):
    """The auditor's record of a trial: newest attempt, last recorded step, whether it has ended.

    ``is_complete``: that step's result was marked as the last.
    """

    attempt: int = 0
    step: int = 0
    lineage: int = 0
    #: It has reported nothing since it took over the state of a trial.
    inherits: bool = False
    #: The attempt that it left for that; what it saved counts.
    left: int = -1
    is_over: bool = False
    is_complete: bool = False
    #: Checkpoints that it wrote while the attempt that wrote them was the newest.
    written: set[str] = msgspec.field(default_factory=set)


class JournalAuditor:
    """Audit one experiment.

    Args:
        settings: the experiment's settings.
        said: returns the events that nodes reported; None if unknown.
        store: holds the checkpoints; None to skip its checks.
        every: the number of events between two checks of the whole state; each event itself is
            always checked.

    Attributes:
        runner: the state that the journal gives.
        events: the number of checked events.
    """

    def __init__(
        self,
        settings: RunnerSettings,
        *,
        said: StatedEvent | None = None,
        store: StoreContents | None = None,
        every: int = 1,
    ) -> None:
        self.runner = TrialRunner(settings)
        self.events = 0
        self._said, self._store, self._every = said, store, every
        self._books: dict[str, _TrialRecord] = {}
        self._acknowledged: dict[str, int] = {}
        #: The batch being read: its node instance, and the number of the next event.
        self._batch: tuple[str, int, int] | None = None
        #: The trials that took over a state and have not reported since.
        self._inheriting: set[str] = set()
        self._has_removed = False
        self._store_due = 0
        self._checks: dict[type[c.Command], Callable[..., None]] = {
            c.NotifyResult: self._recorded_result,
            c.NotifyTrialStart: self._recorded_start,
            c.NotifyCheckpoint: self._recorded_checkpoint,
            c.NotifyTrialEnd: self._recorded_end,
            c.StartTrial: self._started,
            c.DeleteCheckpoint: self._removed,
        }

    # --- journalled turns and events --------------------------------------------------------------

    def turn(self, journal_records: Iterable[m.JournalRecord]) -> list[c.Command]:
        """Check a journalled turn; return its commands.

        Raises:
            InvariantBroken: an invariant is broken; the message names it, the trial and its
                history.
        """
        if self._has_removed and self.events >= self._store_due:
            # Check after the turn that ordered the removal, once it has been carried out.
            self._has_removed = False
            self._store_due = self.events + self._every
            self.check_store()
        commands: list[c.Command] = []
        for journal_record in journal_records:
            commands += self.event(journal_record.event, journal_record.answers)
        return commands

    def event(self, event: m.Event, answers: Sequence[m.AlgorithmAnswer] = ()) -> list[c.Command]:
        """Check one journalled event of a turn; return its commands.

        Raises:
            InvariantBroken: an invariant is broken; the message names it, the trial and its
                history.
        """
        self._heard(event)
        commands = self.runner.handle(event, answers)
        if type(event) is m.TrialChosen:
            self._begun(event.trial)
        elif isinstance(event, m.ExperimentResumed):
            self._resumed()
        elif type(event) is m.ActionTaken:
            self._acted(event.trial)
        if self.runner.awaited or self._inheriting:
            self._follow_inherited()
        for command in commands:
            check = self._checks.get(type(command))
            if check is not None:
                check(command)
        self.events += 1
        if self.events % self._every == 0:
            self.check()
        return commands

    def same_as(self, live: TrialRunner) -> None:
        """Check that the live runner is in the state that the journal gives.

        Raises:
            InvariantBroken: it is not.
        """
        if comparable(self.runner) != comparable(live):
            self._broken("I8", None, "the journal gives another state than that of its runner")

    def _heard(self, event: m.Event) -> None:
        if self._batch is not None and type(event) in _NODE_EVENTS:
            self._next_of_batch(event, self._batch)
        if type(event) is m.BatchRead:
            self._batch_read(event)
        elif type(event) is m.CheckpointWritten:
            book = self._books[event.trial]
            if event.attempt in {book.attempt, book.left}:
                book.written.add(event.key)
        elif type(event) is m.ConfigSuggested:
            if event.trial in self._books or event.n != len(self._books):
                self._broken("I1", event.trial, f"it is suggested as number {event.n}")
            self._books[event.trial] = _TrialRecord()

    def _batch_read(self, event: m.BatchRead) -> None:
        acknowledged = self._acknowledged.get(event.instance_id, 0)
        if self._batch is not None:
            self._broken("I2", None, f"{event} comes within the batch {self._batch}")
        if event.first != acknowledged + 1:
            self._broken("I2", None, f"{event} is accepted, {acknowledged} was the last event")
        self._acknowledged[event.instance_id] = event.last
        self._batch = (event.instance_id, event.first, event.last)

    def _next_of_batch(self, event: m.Event, batch: tuple[str, int, int]) -> None:
        instance_id, number, last = batch
        self._batch = (instance_id, number + 1, last) if number < last else None
        if self._said is not None and (stated := self._said(instance_id, number)) != event:
            self._broken("I2", None, f"{instance_id}'s event {number} is {stated}, not {event}")

    def _resumed(self) -> None:
        for trial_id, trial in self.runner.live.items():
            book = self._books[trial_id]
            last = trial.last_result
            # A trial that ends with this event has ended once the event is recorded.
            book.is_over = book.is_over and trial.is_finished
            book.is_complete = last is not None and last.done
            if trial.lineage != book.lineage:
                book.lineage, book.step = trial.lineage, 0
                book.left, book.inherits = book.attempt, trial.inherited is not None
                self._inheriting.add(trial_id)
                self._begun(trial_id)  # earlier lineages no longer count

    def _acted(self, trial_id: str) -> None:
        trial, book = self.runner.live.get(trial_id), self._books[trial_id]
        if trial is None or trial.attempt == book.attempt:
            return
        if trial.lineage == book.lineage:  # its configuration changed while its node was away
            self._begun(trial_id)
            return
        if trial.lineage != book.lineage + 1 or book.is_over:
            self._broken("I2", trial_id, f"lineage {trial.lineage} follows {book.lineage}")
        book.lineage, book.inherits, book.is_complete = trial.lineage, True, False
        book.left = book.attempt
        self._inheriting.add(trial_id)
        self._begun(trial_id)

    def _follow_inherited(self) -> None:
        """Note where trials begin that took over a state; it is known once that is in the store."""
        for trial_id in list(self._inheriting):
            trial, book = self.runner.live.get(trial_id), self._books[trial_id]
            if trial is None or not book.inherits or trial.inherited is None:
                self._inheriting.discard(trial_id)
                book.inherits = False
            elif trial.newest is None:
                book.step = trial.inherited.step

    def _begun(self, trial: str) -> None:
        book, attempt = self._books[trial], self.runner.live[trial].attempt
        if attempt <= book.attempt:
            self._broken("I4", trial, f"attempt {attempt} begins behind attempt {book.attempt}")
        book.attempt = attempt

    # --- commands ---------------------------------------------------------------------------------

    def _recorded_result(self, command: c.NotifyResult) -> None:
        book, result = self._books[command.trial], command.result
        if result.attempt != book.attempt:
            told = f"attempt {result.attempt} reported step {result.step}"
            self._broken("I4", command.trial, f"{told}, {book.attempt} is the newest")
        if result.step <= book.step:
            self._broken("I2", command.trial, f"step {result.step} is recorded a second time")
        if result.step != book.step + 1:
            self._broken("I3", command.trial, f"step {result.step} follows step {book.step}")
        if book.is_over:
            self._broken("I3", command.trial, f"step {result.step} is recorded behind its end")
        if book.is_complete:
            self._broken("I3", command.trial, f"step {result.step} follows one that was its last")
        book.is_complete = result.done
        book.step, book.inherits = result.step, False

    def _recorded_start(self, command: c.NotifyTrialStart) -> None:
        book = self._books[command.trial]
        if command.started.attempt != book.attempt or book.is_over:
            self._broken("I4", command.trial, f"attempt {command.started.attempt} is said to start")

    def _recorded_checkpoint(self, command: c.NotifyCheckpoint) -> None:
        kept, book = command.checkpoint, self._books[command.trial]
        if kept.attempt not in {book.attempt, book.left} and kept.key not in book.written:
            self._broken("I4", command.trial, f"{kept.key} is kept, {book.attempt} is the newest")
        if self._store is not None and not self._store.has(kept.key):
            self._broken("I7", command.trial, f"{kept.key} is kept and not in the store")

    def _recorded_end(self, command: c.NotifyTrialEnd) -> None:
        book = self._books[command.trial]
        if book.is_over:
            self._broken("I1", command.trial, "it ends a second time")
        book.is_over = True

    def _started(self, command: c.StartTrial) -> None:
        book = self._books[command.trial]
        if command.attempt != book.attempt:
            self._broken(
                "I5", command.trial, f"attempt {command.attempt} of {book.attempt} is started"
            )
        if command.last_step != book.step:
            told = f"it is told that {command.last_step} is its last step, {book.step} is"
            self._broken("I3", command.trial, told)
        if book.inherits and command.restore and command.restore[0].step > command.last_step:
            told = f"it continues from {command.restore[0]}, and at {command.last_step}"
            self._broken("I3", command.trial, told)
        node = self.runner.nodes[command.instance_id].node
        if node in self.runner.live[command.trial].excluded:
            self._broken("I5", command.trial, f"it begins on {node}, which it is kept away from")
        withheld = self.runner.nodes[command.instance_id].withheld
        if command.devices.keys() & withheld:
            told = f"it begins on {command.devices} of {command.instance_id}: {withheld}"
            self._broken("I5", command.trial, told)
        if len(command.devices) > 1 and any(uuid.startswith("MIG-") for uuid in command.devices):
            self._broken("I5", command.trial, f"it has several with parts: {command.devices}")
        for ref in command.restore:
            if self._store is not None and ref.sha256 and not self._store.has(ref.key):
                self._broken(
                    "I7", command.trial, f"it is to continue from {ref.key}, which is gone"
                )

    def _removed(self, command: c.DeleteCheckpoint) -> None:
        self._has_removed = True
        trial = self.runner.live.get(command.trial)
        known = None if trial is None else trial.checkpoints.get(command.key)
        if known is not None and known.is_wanted:
            self._broken("I7", command.trial, f"{command.key} is removed and kept")

    # --- the whole state --------------------------------------------------------------------------

    def check(self) -> None:
        """Check the state of all live trials.

        Raises:
            InvariantBroken: an invariant is broken; the message names it, the trial and its
                history.
        """
        runner, books = self.runner, self._books
        counts = runner.counts
        known = len(runner.live) + len(runner.finished)
        if not known == runner.suggested == len(books) == sum(counts.values()):
            told = f"{len(books)} were suggested, {known} are known, {dict(counts)} are counted"
            self._broken("I1", None, told)
        # This runs after every event of every simulated search, so one loop checks each trial.
        tally, finished, nodes = dict.fromkeys(counts, 0), runner.finished, runner.nodes
        node_at = runner.slots.node_at
        for trial_id, trial in runner.live.items():
            status, book = trial.status, books[trial_id]
            tally[status] += 1
            if trial_id in finished or (status in FINISHED) != book.is_over:
                self._broken("I1", trial_id, f"it is {status}, and over: {book.is_over}")
            if trial.last_step != book.step or trial.attempt != book.attempt:
                told = f"it is at attempt {trial.attempt} and step {trial.last_step}, not at {book}"
                self._broken("I3", trial_id, told)
            if status == RUNNING:
                node = node_at(trial_id, trial.attempt)
                if node not in nodes:
                    self._broken("I5", trial_id, f"it is RUNNING on {node}, which is not there")
        for status in (PENDING, RUNNING, PAUSED):
            if tally[status] != counts[status]:
                told = f"{counts[status]} trials are counted as {status}, {tally[status]} are"
                self._broken("I1", None, told)
        self._check_slots()

    def _check_slots(self) -> None:
        runner = self.runner
        held, shares = self._held()
        for (node, uuid), share in shares.items():
            if share > 1 + _SLACK:
                self._broken("I5", None, f"{share:g} of the GPU {uuid} of {node} are held")
        left: dict[str, float] = {}
        for node, joined in runner.nodes.items():
            total, on_node = joined.resources, held[node]
            if joined.gpus:
                total = {**total, "gpu": float(len(joined.gpus))}
            for name, amount in total.items():
                taken = on_node.get(name, 0.0)
                if taken > amount + _SLACK:
                    self._broken("I5", None, f"{taken:g} {name} of {node} are held")
                left[name] = left.get(name, 0.0) + amount - taken
            for uuid in joined.withheld.keys() & {gpu.uuid for gpu in joined.gpus}:
                left["gpu"] -= 1 - shares.get((node, uuid), 0.0)
        free = runner.placement.free
        for name, amount in left.items():
            if abs(free[name] - amount) > _SLACK:
                told = f"{free[name]:g} {name} are taken for free, {amount:g} are not held"
                self._broken("I5", None, told)

    def _held(self) -> tuple[dict[str, dict[str, float]], dict[tuple[str, str], float]]:
        """Return what trials hold of each node, by resource, and of each GPU."""
        held: dict[str, dict[str, float]] = {node: {} for node in self.runner.nodes}
        shares: dict[tuple[str, str], float] = {}
        for trial, attempt, node in self.runner.slots:
            if node not in held or not 0 < attempt <= self._books[trial].attempt:
                self._broken("I5", trial, f"attempt {attempt} holds a slot of {node}")
            on_node, slot = held[node], self.runner.slots.held_by(trial, attempt)
            resources = slot.resources
            if slot.devices:
                resources = {**resources, "gpu": sum(slot.devices.values())}
            for name, amount in resources.items():
                on_node[name] = on_node.get(name, 0.0) + amount
            for uuid, share in slot.devices.items():
                shares[node, uuid] = shares.get((node, uuid), 0.0) + share
            if len(slot.devices) > 1 and any(share != 1 for share in slot.devices.values()):
                self._broken("I5", trial, f"it has parts of several GPUs of {node}")
        return held, shares

    def check_store(self) -> None:
        """Check that all kept checkpoints are in the store.

        Raises:
            InvariantBroken: one is not; the message names it.
        """
        if self._store is not None:
            for key in self.runner.live_checkpoints():
                if not self._store.has(key):
                    self._broken("I7", None, f"{key} is kept and not whole in the store")

    def _broken(self, invariant: str, trial: str | None, told: str) -> None:
        live = None if trial is None else self.runner.live.get(trial)
        whose = "" if trial is None else f"trial {trial}: "
        story = "".join(f"\n  {one!r}" for one in (live.story if live is not None else ()))
        raise InvariantBroken(f"{invariant}, event {self.events}: {whose}{told}{story}")
