"""`ExperimentLoop`: runs turn after turn until the search ends.

In a turn the loop reads a batch of events, asks the algorithms, and lets the runner handle each
event. It writes the events and answers to the journal with one fsync. Only then does it execute the
runner's commands and acknowledge the events to the nodes.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from tunemq_scheduler.base.experiment_plan import ExperimentPlan
from tunemq_scheduler.core import commands as c
from tunemq_scheduler.core.trials.trial import PAUSED, PENDING, RUNNING
from tunemq_scheduler.experiment.event_driver import EventDriver
from tunemq_scheduler.journal.journal_writer import Journal
from tunemq_scheduler.output.callback_dispatcher import CallbackDispatcher
from tunemq_scheduler.output.terminal.notice_text import (
    format_checkpoint_event,
    format_failing_node,
    format_lost_node,
    format_state_lost,
    format_superseded,
    format_trial_end,
    format_unreported,
)
from tunemq_scheduler.results.trial_view import TrialView
from tunemq_scheduler.search.search_generator import Suggestion
from tunemq_scheduler.storage.checkpoint_garbage_collector import Removal
from tunemq_scheduler.transport.trial_executor import TrialExecutor
from tunemq_shared.base.errors import (
    JournalFull,
    ResourceError,
    SearchFailed,
    TransportError,
    TuneError,
)
from tunemq_shared.code.config_packing import pack_config
from tunemq_shared.protocol import messages as m
from tunemq_shared.protocol.message_limits import CONFIG_BYTES, check_size
from tunemq_shared.protocol.result_conditions import lookup
from tunemq_shared.trial.results import measured

#: Seconds a turn waits for its first event if nothing else is due; the table redraws that often.
POLL_S: Final = 0.5
#: Seconds that trial processes get to end by themselves when the search is interrupted.
INTERRUPT_GRACE_S: Final = 1.0
#: Seconds for which a search algorithm may suggest nothing while there is no trial.
SEARCH_TIMEOUT_S: Final = 60.0
#: Seconds between two attempts to write a turn to a full disk.
RETRY_S: Final = 0.5
#: Seconds until a notice says that the search waits for its algorithm.
SEARCH_TOLD_S: Final = 10.0


@dataclass(kw_only=True, eq=False)
class ExperimentLoop:
    """Runs one experiment: the I/O around the pure `TrialRunner`.

    Attributes:
        driver: the state and the algorithms; only this loop passes events to it.
        plan: the experiment's plan, which nodes receive.
        executor: runs the trials.
        journal: stores the turns.
        dispatcher: receives notifications for loggers, callbacks and the table.
        resources_for: returns the resource request for a configuration.
        trial_prefix: the first part of all trial ids.
        clock: seconds for which a scheduler has run this experiment, earlier runs included.
        discard: queues a deletion from the store; must not block.
        time_budget_s: the search stops after this many seconds.
        max_trials: the most trials; None leaves it to the search algorithm.
        nodes_may_come: whether a request that no node can hold waits for a bigger node (a farm) or
            is an error (embedded).
        after_turn: called at the end of each turn.
        interrupt_grace_s: see `INTERRUPT_GRACE_S`.
        trials: the trials that have not ended, by id.
        has_leftovers: whether the store may contain objects that no manifest refers to.
    """

    driver: EventDriver
    plan: ExperimentPlan
    executor: TrialExecutor
    journal: Journal
    dispatcher: CallbackDispatcher
    resources_for: Callable[[dict[str, object]], dict[str, float]]
    trial_prefix: str
    clock: Callable[[], float]
    discard: Callable[[Removal], None] = lambda _removal: None
    time_budget_s: float | None = None
    max_trials: int | None = None
    nodes_may_come: bool = False
    after_turn: Callable[[], None] = lambda: None
    interrupt_grace_s: float = INTERRUPT_GRACE_S

    def __post_init__(self) -> None:
        """Take the state from the driver; nothing has happened yet."""
        self.runner, self.algorithms = self.driver.runner, self.driver.algorithms
        self.trials = self.driver.trials
        self.has_leftovers = False
        #: Since when the search algorithm has suggested nothing while there is no trial.
        self._waits_since: float | None = None
        self._is_wait_told = False
        #: The stream entry read before the newest batch.
        self._cursor_before = ""
        self._requests: deque[m.Event] = deque()
        #: This turn's warnings from nodes and about checkpoints.
        self._warnings: list[str] = []
        #: The number of this turn's results from superseded attempts.
        self._superseded = 0
        #: What the stop criteria compare, until the first result was looked at.
        self._stop_keys = tuple(condition.key for condition in self.plan.stop)
        #: Trials that began or ceased to wait for the store in this turn.
        self._store_waits: dict[str, None] = {}
        #: The nodes set aside at the end of the last journalled turn.
        self._aside = self._nodes_aside()

    @property
    def is_all_journalled(self) -> bool:
        """Whether the journal has all that the runner knows; False after a failed turn."""
        return not self.driver.journal_records

    @property
    def waits_for_search(self) -> str:
        """A note that the search waits for its algorithm's suggestions; empty if it does not."""
        waited = self._search_waits_s()
        if waited < SEARCH_TOLD_S:
            return ""
        return (
            f"waiting for {self.algorithms.search_name}: it has suggested no configuration for "
            f"{waited:.0f} s, and no trial runs; after {SEARCH_TIMEOUT_S:g} s the search fails"
        )

    # --- interface --------------------------------------------------------------------------------

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        """Run turns until the search ends, or its processes have ended after an interrupt.

        After an interrupt it returns at the latest when `interrupt_grace_s` has passed.

        Args:
            until: checked before each turn; True ends the loop.
        """
        deadline: float | None = None
        while not self.runner.is_finished and not until():
            self.step()
            if self.runner.interrupted:
                deadline = deadline or time.monotonic() + self.interrupt_grace_s
                if time.monotonic() > deadline:
                    return

    def resume(self, event: m.ExperimentResumed, recovered_events: Iterable[m.Event] = ()) -> None:
        """Run the first turn of a further run.

        Args:
            event: the start of the run.
            recovered_events: what was found out about the previous run; handled before ``event``.

        Raises:
            SearchFailed, JournalError: as in `step`.
        """
        for recovered_event in recovered_events:
            self.driver.handle(recovered_event)
        self.driver.handle(event)
        # The previous run may have been cut off at any point.
        self.has_leftovers = True
        self._commit()

    def reattach(self) -> None:
        """Continue what nodes still run; called after `resume` and the executor's `open`."""
        runner = self.runner
        away = [node.joined for node in runner.away.values()]
        self.executor.reattach(runner.nodes.values(), away, runner.acknowledged)
        self.executor.perform(runner.standing_orders())

    def request_stop(self, reason: str, trial: str | None = None) -> None:
        """Stop a trial, or the whole search; safe in any thread or signal handler."""
        self._requests.append(m.StopRequested(trial, reason))
        self.executor.wake()

    def forget_checkpoints(self, trial: str) -> None:
        """Make a trial restart from scratch at its next retry or resume; safe in any thread."""
        self._requests.append(m.CheckpointsForgotten(trial))
        self.executor.wake()

    def interrupt(self, reason: str) -> None:
        """End the run and leave every trial to be resumed; safe in signal handlers, too."""
        self._requests.append(m.RunInterrupted(reason))
        self.executor.wake()

    def step(self) -> None:
        """Run one turn.

        Raises:
            SearchFailed: a search algorithm, trial scheduler, stopper or callback raised.
            JournalError: the turn could not be made durable, and none of its commands were
                executed. While the disk is full this waits for space instead, until the search is
                interrupted.
            ResourceError: a trial requests more than any node has.
        """
        self.dispatcher.turn_began()
        events = self.executor.poll(self._search_timeout_s())
        self.driver.handle(m.Tick(self.clock()))
        try:
            self._handle_all(events)
            while self._requests:
                self.driver.handle(self._requests.popleft())
            self._check_time_budget()
            self._ask_whether_enough()
            self._fill_slots()
        except TuneError:
            # The search ends here; results reported before the algorithm raised are kept.
            dispatcher = [one for one in self.driver.commands if isinstance(one, c.NotifyCommand)]
            self.driver.commands[:] = dispatcher
            self._commit()
            raise
        self._commit()
        for trial in self._store_waits:
            if trial in self.trials:
                self.dispatcher.trial_waits(self.trials[trial])
        self._store_waits.clear()
        if self._superseded:
            self._warnings.append(format_superseded(self._superseded))
            self._superseded = 0
        for text in (*self._warnings, *self.executor.notices()):
            self.dispatcher.notices(text)
        self._warnings.clear()
        self.dispatcher.turn_ended()
        self.after_turn()

    def _commit(self) -> None:
        """Make the turn durable, then execute its commands."""
        journal_records = self.driver.journal_records
        # Time alone has effects, too: overdue uploads are given up, and the order in which nodes
        # become usable again decides which is chosen first.
        is_changed = self.driver.commands or self._nodes_aside() != self._aside
        if is_changed or any(type(one.event) is not m.Tick for one in journal_records):
            self._append(journal_records)
            self.driver.journal_records, self._aside = [], self._nodes_aside()
            self._perform()
            self.executor.acknowledge(self.runner.acknowledged)
        else:
            self.driver.end_turn()

    def _append(self, journal_records: Sequence[m.JournalRecord]) -> None:
        """Write the turn, and wait as long as the disk has no space for it.

        A full disk is no reason to end a search of days: once an operator frees space, it
        continues. Until then the loop holds the turn, takes no events and sends no commands, and
        nodes keep what they have reported.
        """
        since: float | None = None
        while True:
            try:
                self.journal.append(journal_records)
            except JournalFull as full:
                if self._is_interrupted():
                    raise
                if since is None:
                    since = time.monotonic()
                    self.dispatcher.notices(
                        f"degraded: {full} Nothing is lost; the search waits for space, or "
                        "until it is interrupted."
                    )
                self.executor.pause(RETRY_S)
            else:
                break
        if since is not None:
            waited = time.monotonic() - since
            self.dispatcher.notices(
                f"the disk has space again after {waited:.0f} s; the search continues"
            )

    def _nodes_aside(self) -> set[str]:
        return {*self.runner.aside, *self.runner.alone}

    def _is_interrupted(self) -> bool:
        return bool(self.runner.interrupted) or any(
            isinstance(request, m.RunInterrupted) for request in tuple(self._requests)
        )

    # --- events -----------------------------------------------------------------------------------

    def _search_timeout_s(self) -> float:
        due = self.runner.next_wake()
        if self._requests:
            return 0.0
        if due is None:
            return POLL_S
        return min(POLL_S, max(0.001, due - self.clock()))

    def _handle_all(self, events: Iterable[m.Event]) -> None:
        skip = 0
        try:
            for event in events:
                if type(event) is m.BatchRead:
                    skip = self._open_batch(event)
                elif skip:
                    skip -= 1
                elif type(event) is m.ResultReported:
                    self._take_result(event)
                else:
                    self._take(event)
        except TuneError:
            self._shorten_batch()
            raise

    def _shorten_batch(self) -> None:
        """Mark the unhandled rest of the newest batch as unread; a restart reads it again."""
        journal_records = self.driver.journal_records
        for place in reversed(range(len(journal_records))):
            batch = journal_records[place].event
            if isinstance(batch, m.BatchRead):
                behind = journal_records[place + 1 :]
                handled = sum(type(one.event) is not m.ActionTaken for one in behind)
                last = batch.first + handled - 1
                if last < batch.last:
                    read = m.BatchRead(batch.instance_id, batch.first, last, self._cursor_before)
                    self.runner.handle(read)
                    journal_records[place] = m.JournalRecord(read)
                return

    def _take(self, event: m.Event) -> None:
        match event:
            case m.NodeWarned():
                self.has_leftovers |= event.has_leftovers
                self._warnings.append(event.text)
            case m.CheckpointLost() | m.CheckpointDamaged():
                self.has_leftovers = True
                self._warnings.append(format_checkpoint_event(event))
            case m.TrialProcessDied() | m.TrialFailed(kind=m.FORKSERVER_LOST):
                self.has_leftovers = True  # an upload or a copy may have been cut off
            case m.NodeLost():
                self.has_leftovers = True
                if keys := self.runner.book.uploads_of(event.instance_id):
                    self._warnings.append(format_lost_node(event, keys))
            case _:
                pass
        self.driver.handle(event)
        if type(event) is m.TrialWaits and event.trial in self.runner.live:
            self._store_waits[event.trial] = None

    def _open_batch(self, batch: m.BatchRead) -> int:
        """Record a batch; return how many of its first events are known or of a dead node."""
        if batch.instance_id not in self.runner.nodes:
            return batch.last - batch.first + 1
        expected = self.runner.acknowledged.get(batch.instance_id, 0) + 1
        if batch.first > expected:
            raise TransportError(
                f"node {batch.instance_id} sent event {batch.first}, {expected} is missing before "
                "it."
            )
        if batch.last < expected:
            return batch.last - batch.first + 1
        self._cursor_before = self.runner.cursor
        self.driver.handle(m.BatchRead(batch.instance_id, expected, batch.last, batch.cursor))
        return expected - batch.first

    def _take_result(self, event: m.ResultReported) -> None:
        stale = self.runner.stale
        self.driver.handle(event)
        if self.runner.stale > stale and self.runner.is_superseded(event.trial, event.attempt):
            self._superseded += 1
        elif self._stop_keys:
            self._look_for_stop_keys(event)

    def _look_for_stop_keys(self, event: m.ResultReported) -> None:
        """Warn of stop criteria that the first result lacks, as misspelt ones would end nothing."""
        keys, self._stop_keys = self._stop_keys, ()
        found = measured(event)
        if lacking := [key for key in keys if lookup(found, key) is None]:
            self._warnings.append(format_unreported(lacking, event.trial, found))

    def _check_time_budget(self) -> None:
        budget = self.time_budget_s
        is_up = budget is not None and self.runner.elapsed >= budget
        if is_up and not (self.runner.stopping or self._only_uploads()):
            self.driver.handle(m.StopRequested(None, f"the time budget of {budget:g} s is used up"))

    def _ask_whether_enough(self) -> None:
        ends = self.runner.stopping or self.runner.interrupted or self._only_uploads()
        if self.runner.suggested and not ends:  # even if an earlier run left no live trials
            reason = self.algorithms.enough()
            if reason:
                self.driver.handle(m.StopRequested(None, reason))

    def _only_uploads(self) -> bool:
        """Whether all trials have ended and only checkpoint uploads remain."""
        counts = self.runner.counts
        return self.runner.exhausted and not any(
            counts[state] for state in (PENDING, RUNNING, PAUSED)
        )

    # --- new trials -------------------------------------------------------------------------------

    def _fill_slots(self) -> None:
        # New configurations come before paused trials, which paused to give way to others.
        if self.runner.queue.has_pending(self.runner.elapsed):
            self._place_waiting()
        self._note_exhausted()
        while self.runner.wants_config():
            n = self.runner.suggested
            trial_id = f"{self.trial_prefix}_{n:05d}"
            suggestion = self.algorithms.suggest(n, trial_id)
            if suggestion is None:
                self._check_search_timeout()
                break
            if isinstance(suggestion, str):
                self.driver.handle(m.SearchExhausted())
                break
            self._add_trial(n, trial_id, suggestion)
            self._note_exhausted()
            self._place_waiting()
        else:
            self._waits_since = None
        self._place_waiting()
        if self._is_stalled():
            self.driver.handle(m.SearchStalled())
            self._place_waiting()
            self._check_choice()

    def _note_exhausted(self) -> None:
        """End the search if the count of configurations shows that no more come; needs no node."""
        runner, most = self.runner, self.max_trials
        total = self.algorithms.search.total
        if total is not None:
            most = total if most is None else min(most, total)
        if most is not None and runner.suggested >= most and not runner.ends:
            self.driver.handle(m.SearchExhausted())

    def _is_stalled(self) -> bool:
        """Whether no trial runs, and the trial scheduler chose none of those that could.

        No result and no end of a trial would give it a reason to choose differently later.
        """
        runner, counts = self.runner, self.runner.counts
        if counts[RUNNING] or len(runner.slots) or runner.next_wake() is not None:
            return False
        first = next(runner.waiting(), None)
        # If only paused trials could start, the pending ones wait for a node, which may come.
        return first is not None and not (first.status == PAUSED and counts[PENDING])

    def _check_choice(self) -> None:
        """Require that a trial runs, or that there is a reason to wait."""
        counts = self.runner.counts
        if not self._is_stalled():
            return
        first = next(self.runner.waiting())
        scheduler = type(self.algorithms.scheduler).__name__
        raise SearchFailed(
            f"all {counts[PENDING] + counts[PAUSED]} trials that are not over are {first.status}, "
            f"and {scheduler} lets none of them continue (choose_trial_to_run returned None, and "
            "on_stall resumed and stopped none of them)."
        )

    def _check_search_timeout(self) -> None:
        """Fail a search whose algorithm suggests nothing for too long while there is no trial."""
        if self.runner.live:
            self._waits_since = None
            return
        if self._waits_since is None:
            self._waits_since, self._is_wait_told = self.runner.elapsed, False
        if not self._is_wait_told and (told := self.waits_for_search):
            self._is_wait_told = True
            self._warnings.append(told)
        if self._search_waits_s() > SEARCH_TIMEOUT_S:
            raise SearchFailed(
                f"{self.algorithms.search_name} suggested no configuration for "
                f"{SEARCH_TIMEOUT_S:g} s, and no trial runs whose result it could wait for. A "
                "search algorithm that has no more configurations must return "
                "Searcher.FINISHED."
            )

    def _search_waits_s(self) -> float:
        since = self._waits_since
        return 0.0 if since is None else self.runner.elapsed - since

    def _add_trial(self, n: int, trial_id: str, suggestion: Suggestion) -> None:
        resources = self.resources_for(suggestion.config)
        if not self.nodes_may_come and (why := self.runner.placement.why_never(resources)):
            raise ResourceError(
                f"{why}. Ask for less (with_resources(trainable, ...)), or use a machine that has "
                "it."
            )
        config = pack_config(suggestion.config)
        check_size(trial_id, len(config), CONFIG_BYTES)
        self.driver.handle(m.ConfigSuggested(n, trial_id, config, suggestion.tag, resources))
        self.trials[trial_id].evaluated_params = suggestion.evaluated_params

    def _place_waiting(self) -> None:
        while self.runner.has_waiting():
            chosen = self.algorithms.choose(self._placeable)
            if chosen is None:
                return
            self.driver.handle(m.TrialChosen(chosen.trial_id))

    def _placeable(self) -> Iterator[TrialView]:
        return (self.trials[one.trial_id] for one in self.runner.waiting())

    # --- execution --------------------------------------------------------------------------------

    def _perform(self) -> None:
        orders: list[c.ExecutorCommand] = []
        removals: list[Removal] = []
        for command in self.driver.commands:
            if isinstance(command, c.ExecutorCommand):
                orders.append(command)
            elif isinstance(command, c.DeleteCheckpoint | c.DeleteObjects):
                removals.append(command)
            elif isinstance(command, c.WarnFailingNode):
                self._warnings.append(format_failing_node(command))
            elif isinstance(command, c.WarnStateLost):
                self._warnings.append(format_state_lost(command))
            elif isinstance(command, c.WarnTrialEnd):
                at_end = self.plan.checkpoint_at_end
                self._warnings.append(format_trial_end(command, saves_at_end=at_end))
        if orders:
            # First, so that trial processes work while loggers write.
            self.executor.perform(orders)
        self.driver.end_turn(self.dispatcher.notify)
        for removal in removals:
            self.discard(removal)
