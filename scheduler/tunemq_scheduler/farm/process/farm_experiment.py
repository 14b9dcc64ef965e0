"""`FarmExperiment`: an experiment on a farm's nodes, which may outlive its scheduler.

If a scheduler ends without deregistration, its nodes keep running its trials and keep its events.
The next scheduler, on this machine or another, takes them over with the same stream of events and
the same attempts; it restarts no running trial.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Final

import msgspec

from tunemq_scheduler.base.experiment_plan import ExperimentPlan
from tunemq_scheduler.base.stop_signals import StopSignals
from tunemq_scheduler.experiment.code_package import CodePackage
from tunemq_scheduler.experiment.experiment_view import ExperimentView
from tunemq_scheduler.experiment.open_experiment import (
    ATTEMPTS_BEYOND,
    KeepTuner,
    OpenExperiment,
    ResumeOptions,
    has_work,
    resumption,
    take_up,
)
from tunemq_scheduler.experiment.run_experiment import Experiment
from tunemq_scheduler.experiment.search_run import SearchRun
from tunemq_scheduler.experiment.start_checks import PreparedSearch
from tunemq_scheduler.farm.common.scheduler_exit_codes import lacks_threads
from tunemq_scheduler.farm.ipc.experiment_side import SupervisorConnection
from tunemq_scheduler.farm.ipc.ipc_messages import ExperimentJob
from tunemq_scheduler.farm.ipc.relayed_executor import RelayedExecutor
from tunemq_scheduler.results.result_grid import ResultGrid
from tunemq_scheduler.settings.storage_settings import StorageLocation
from tunemq_scheduler.storage.last_run import RunRecord, write_record
from tunemq_shared.base.errors import JournalError, SchedulerSuperseded, StoreError
from tunemq_shared.broker import redis_keys
from tunemq_shared.code.blob_folder import BlobFolder
from tunemq_shared.protocol.farm_requests import ScriptCode
from tunemq_shared.protocol.messages import ExperimentResumed
from tunemq_shared.signing.key_files import journal_signer

#: The folder with the code of an experiment's trials, inside the experiment's folder.
BLOBS: Final = ".blobs"
#: How long trials and nodes get to end and report it when the search is interrupted.
INTERRUPT_GRACE_S: Final = 10.0


class FarmExperiment(Experiment):
    """One experiment, on the nodes of a farm.

    Args:
        prepared, storage, resume, keep: see `Experiment`.
        connection: to the farm's supervisor.
        job: how it is run this time.
        is_copy: whether the journal came from its copy, which may lack the last turns.
        lost: what else that copy lacked, for people.
        record: of the previous run, if there was one on a farm.
    """

    def __init__(
        self,
        prepared: PreparedSearch,
        storage: StorageLocation,
        resume: ResumeOptions | None,
        *,
        keep: KeepTuner,
        connection: SupervisorConnection,
        job: ExperimentJob,
        is_copy: bool,
        lost: str,
        record: RunRecord | None,
    ) -> None:
        super().__init__(prepared, storage, resume, keep=keep)
        self._settings = msgspec.structs.replace(self._settings, nodes_may_come=True)
        self._id = (job.prefix + self._id)[: len(self._id)]
        self._connection, self._job = connection, job
        self._message_signer = journal_signer(job.journal_keys)
        self._is_copy, self._lost = is_copy, lost
        self._record = record
        self._is_copied = record is not None and record.is_copied
        #: Whether nodes may have trials of the previous run, and whether this run has begun.
        self._is_warm = self._has_begun = False

    def run(self) -> ResultGrid:
        """Run the experiment on the farm; see `Experiment.run`.

        Raises:
            SchedulerSuperseded: another scheduler took over; nothing was done since.
        """
        opened = self._open()
        with opened.journal:
            opened.journal.guard = self._connection.check
            if self._event is not None and not has_work(opened, self._event, self.prepared):
                if self._is_warm:
                    self._end_search_late(opened)
                else:
                    self._note(is_over=True)  # no node knows this run
                    self._report_over(opened)
                with self._connection.alive():  # it may copy what the previous run did not
                    found = self._is_over_already(opened, self._event)
                self._note_copied()
                return found
            blobs = BlobFolder(Path(self.folder) / BLOBS)
            blobs.remove_leftovers()
            code = self._job.code
            plan = self._plan(
                CodePackage(
                    blobs=blobs,
                    store=self._job.code_store or self._store_address,
                    bundle=code.bundle,
                    script=code.script if isinstance(code, ScriptCode) else "",
                    keeps_first=True,
                )
            )
            executor = RelayedExecutor(self._connection)
            with self._copied(opened, executor.wake) as copy:
                releases = self._job.journal_release == "store"
                executor.follow(opened.journal, copy, releases=releases)
                search = self._search(plan, executor, opened, copy)
                self._run(search, executor, opened)
            self._note_copied()
            return search.results()

    def _run(self, search: SearchRun, executor: RelayedExecutor, opened: OpenExperiment) -> None:
        loop = search.loop
        loop.interrupt_grace_s = INTERRUPT_GRACE_S
        executor.watch(
            search, ExperimentView(loop, search.dispatcher, self.prepared, opened.elapsed)
        )

        def stop_now() -> None:
            search.drop()
            executor.wake()

        signals = StopSignals(search.interrupt, stop_now)
        with signals, search.shown(lambda: signals.received is not None):
            if self._lost:
                search.dispatcher.notices(self._lost)
            try:
                executor.open(loop.plan)
                self._begin(search)
                loop.run(until=lambda: search.is_killed)
            except SchedulerSuperseded:
                # The other scheduler now owns the files and the store.
                search.drop()
                executor.leave()
                raise
            except Exception as error:
                if lacks_threads(error):  # its next process continues it; nodes keep the trials
                    search.drop()
                    executor.leave()
                raise
            finally:
                if self._ends_the_search(executor):
                    executor.close(now=search.is_killed)
                else:
                    executor.leave()

    # --- the parts --------------------------------------------------------------------------------

    def _open(self) -> OpenExperiment:
        if self._resume is None:
            opened = super()._open()
        else:
            opened = take_up(
                *(Path(self.folder), self.prepared, self._outline, self._keep),
                after_turn=self._connection.say_alive,
            )
        try:
            if self._resume is not None:
                self._event = self._begun(opened, self._resume)
                self._run_number = self._event.run
            is_cold = self._event is not None and self._event.is_cold
            key = self._stream(opened, self._run_number if is_cold else None)
            # Each node chooses the place of its cache.
            self._outlined = msgspec.structs.replace(opened.plan, events_key=key, cache="")
            self._note(is_over=False)
        except BaseException:  # passed on: the command reports it
            opened.journal.close()
            raise
        return opened

    def _plan(self, code_package: CodePackage) -> ExperimentPlan:
        with self._connection.alive():  # an upload may take long
            return super()._plan(code_package)

    @staticmethod
    def _stream(opened: OpenExperiment, first: int | None = None) -> str:
        """Return the event key that all runs from ``first`` on share.

        Each of these runs took over from the previous one.

        Args:
            opened: the opened experiment.
            first: by default, the first run that the journal knows.
        """
        first = opened.runner.cold_run if first is None else first
        name = opened.plan.experiment_id
        return redis_keys.events(f"{name}.{first}" if first else name)

    def _begun(self, opened: OpenExperiment, options: ResumeOptions) -> ExperimentResumed:
        """Return the event with which this run resumes the experiment."""
        before = opened.runner.run
        if self._record is not None:
            self._is_warm = self._record.is_next_warm(before)
            key = self._stream(opened)
            if key != self._job.events_key:  # its nodes have given it up
                self._is_warm = False
            before = max(before, self._record.run)
        event = resumption(opened, options, self._settings, is_cold=not self._is_warm)
        run = before + 1
        # The journal has all attempts of the previous scheduler, but a copy of it may lack some.
        is_beyond = self._is_copy or event.attempts_from > 0
        beyond = run * ATTEMPTS_BEYOND if is_beyond else 0
        return msgspec.structs.replace(event, run=run, attempts_from=beyond)

    def _begin(self, search: SearchRun) -> None:
        super()._begin(search)
        if self._event is not None and self._is_warm:
            search.loop.reattach()
        self._has_begun = True

    def _note(self, *, is_over: bool) -> None:
        """Record who runs this experiment, for later runs and other machines.

        Raises:
            JournalError, StoreError: the record cannot be written.
            RunSuperseded: another run has the store.
        """
        self._write_record(
            RunRecord(
                holder=self._holder,
                term=self._job.term,
                run=self._run_number,
                is_warm=self._is_warm,
                is_over=is_over,
                events_key=self._outlined.events_key,
                experiment_id=self._id,
            )
        )

    def _note_copied(self) -> None:
        """Record in the folder whether the store has all of the search."""
        if self._own_record is not None:
            record = msgspec.structs.replace(self._own_record, is_copied=self._is_copied)
            with contextlib.suppress(JournalError):  # a full disk: a restart copies again
                write_record(self.folder, record)

    def _ends_the_search(self, executor: RelayedExecutor) -> bool:
        """Return whether to end the search on the nodes; only if its end could be recorded."""
        if executor.is_left or not self._has_begun:
            return False
        try:
            self._connection.check()
            self._note(is_over=True)
        except StoreError:
            pass  # the local record is written; for other machines, the expiring stream shows it
        except (JournalError, SchedulerSuperseded):
            return False  # nodes continue, and the next scheduler takes them over
        return True

    def _report_over(self, opened: OpenExperiment) -> None:
        """Report a search that has ended: the process that ended it may not have said all."""
        executor = RelayedExecutor(self._connection)
        search = self._search(self._outlined, executor, opened, None)
        executor.watch(
            search, ExperimentView(search.loop, search.dispatcher, self.prepared, opened.elapsed)
        )
        executor.report_over()

    def _end_search_late(self, opened: OpenExperiment) -> None:
        """Tell nodes that the search has ended, which the previous run did not.

        Raises:
            SchedulerSuperseded: another scheduler took over.
        """
        runner = opened.runner
        executor = RelayedExecutor(self._connection)
        with self._copied(opened, executor.wake) as copy:
            releases = self._job.journal_release == "store"
            executor.follow(opened.journal, copy, releases=releases)
            search = self._search(self._outlined, executor, opened, copy)
            view = ExperimentView(search.loop, search.dispatcher, self.prepared, opened.elapsed)
            try:
                executor.watch(search, view)
                executor.open(self._outlined)
                away = [node.joined for node in runner.away.values()]
                executor.reattach(runner.nodes.values(), away, runner.acknowledged)
                executor.poll(redis_keys.LEASE_PERIOD_S)  # nodes get orders to end trials
                self._connection.check()
                # This run is not in the journal: the previous one has ended.
                self._run_number, self._has_begun = runner.run, True
            finally:
                if self._ends_the_search(executor):
                    executor.close()
                else:
                    executor.leave()
        self._claim.check_known()
