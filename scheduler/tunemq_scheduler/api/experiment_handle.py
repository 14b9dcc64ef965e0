"""`ExperimentHandle`: controls an experiment on a farm from the script that submitted it."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any, Final

from tunemq_scheduler.api.farm_answer_types import (
    ExperimentDetail,
    ExperimentRow,
    ExperimentState,
    RequestDone,
)
from tunemq_scheduler.api.farm_client import FarmClient
from tunemq_scheduler.api.log_following import follow
from tunemq_scheduler.core.trials.trial import FINISHED as OVER
from tunemq_scheduler.experiment.restore import can_restore, foreign_results
from tunemq_scheduler.journal.journal_files import FILE_NAME
from tunemq_scheduler.journal.journal_reader import read_header
from tunemq_scheduler.output.terminal.harmless import write_output
from tunemq_scheduler.results.result_grid import ResultGrid
from tunemq_shared.base.errors import JournalError, NoScheduler, RedisUnavailable, TuneError
from tunemq_shared.objects.s3_address import parse_address, parse_beside
from tunemq_shared.objects.store_address import is_remote
from tunemq_shared.protocol.farm_requests import (
    FarmRequest,
    PauseExperiment,
    ResumeExperiment,
    ShowExperiment,
    StopExperiment,
)
from tunemq_shared.system.standard_streams import tell

_PAUSE_S: Final = 0.5


class ExperimentHandle:
    """An experiment that a farm runs, independently of this script.

    Args:
        address: the URL of the farm's Redis.
        name: the experiment's name on the farm.
        trainable: the experiment's trainable.
        identity: the experiment's id, which a later one of this name does not have; empty accepts
            any experiment of this name.
        metric, mode: those of the experiment's ``TuneConfig``, for its results.
    """

    def __init__(
        self,
        address: str,
        name: str,
        trainable: Any,
        identity: str = "",
        *,
        metric: str | None = None,
        mode: str | None = None,
    ) -> None:
        self.address = address
        self.name = name
        self._id = identity
        self._trainable = trainable
        self._metric, self._mode = metric, mode

    def __repr__(self) -> str:
        return f"ExperimentHandle({self.name!r})"

    def status(self) -> ExperimentRow:
        """Return the experiment's current status.

        Raises:
            TuneError: the farm cannot be reached, or no longer has the experiment.
        """
        return self._detail().experiment

    def stop(self) -> str:
        """Stop the experiment after saving its trials; return a message that says what happens."""
        return self._have(StopExperiment(name=self.name, id=self._id))

    def pause(self) -> str:
        """Pause the experiment and free its slots; return a message that says what happens."""
        return self._have(PauseExperiment(name=self.name, id=self._id))

    def resume(self) -> str:
        """Resume the experiment; return a message that says what happens."""
        return self._have(ResumeExperiment(name=self.name, id=self._id))

    def wait(self, timeout_s: float | None = None) -> ExperimentState:
        """Wait until the experiment has ended, across restarts of the farm's scheduler.

        Args:
            timeout_s: seconds to wait at most; None waits without limit.

        Returns:
            FINISHED, STOPPED or FAILED; another state after the timeout.

        Raises:
            TuneError: the farm no longer has the experiment.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        state = None
        while True:
            try:
                state = self.status().state
            except (NoScheduler, RedisUnavailable):
                if deadline is not None and time.monotonic() > deadline:
                    raise
            if state is not None and state.is_over:
                return state
            if deadline is not None and time.monotonic() > deadline and state is not None:
                return state
            time.sleep(_PAUSE_S)

    def get_results(self) -> ResultGrid:
        """Return the results of the experiment's trials so far.

        On another machine than the scheduler's, each call fetches them from the farm's store into
        the results folder, without checkpoints. Nothing that stands there is executed: values of a
        configuration that are more than plain data, tuples, sets and numbers are shown as
        ``<pickled, N bytes>``. `Tuner.restore` loads them, as it trusts the store.

        Raises:
            TuneError: this machine cannot read the results; the message says where they are. Or
                the experiment failed and has none.
        """
        with FarmClient(self.address) as client:
            store = client.farm().store
        detail = self._detail()
        place = self._readable(detail, store)
        if place is None and detail.experiment.state is ExperimentState.FAILED:
            raise TuneError(f"{self.name} failed: {detail.experiment.reason}")
        if place is None:
            raise TuneError(
                f"the results of {self.name} are in {detail.folder} on the scheduler's machine, "
                "which this machine cannot read. Give the farm a store, or run `tunemq show "
                f"{self.name}`."
            )
        results = foreign_results(
            place, detail.experiment.id, self._trainable, metric=self._metric, mode=self._mode
        )
        is_finished = detail.experiment.state is ExperimentState.FINISHED
        if is_finished and any(result.status not in OVER for result in results):
            raise TuneError(
                f"{self.name} is FINISHED, and {place} has an earlier state of it, as after a "
                f"backup of the store was put back. Run `tunemq journal copy {detail.folder}` on "
                f"the scheduler's machine and call this again, or run `tunemq show {self.name}`."
            )
        return results

    def attach(self, *, shows: bool) -> ResultGrid:
        """Wait until the experiment has ended, and return its results.

        Args:
            shows: whether to print the experiment's output here.

        Raises:
            KeyboardInterrupt: the user pressed Ctrl-C; a message says that the experiment
                continues.
            TuneError: the experiment failed, or this machine cannot read its results.
        """
        try:
            with FarmClient(self.address) as client:
                page = follow(
                    client,
                    self.name,
                    identity=self._id,
                    show=_show if shows else lambda _data: None,
                    tell=_tell,
                )
        except KeyboardInterrupt:
            _tell(
                f"{self.name} continues without this script; stop it with: tunemq stop {self.name}"
            )
            raise
        if page.state is ExperimentState.FAILED:
            raise TuneError(f"{self.name} failed: {page.reason}")
        return self.get_results()

    def _have(self, request: FarmRequest) -> str:
        with FarmClient(self.address) as client:
            return client.ask(request, RequestDone).text

    def _detail(self) -> ExperimentDetail:
        with FarmClient(self.address) as client:
            request = ShowExperiment(name=self.name, id=self._id, trials=0)
            return client.ask(request, ExperimentDetail)

    def _readable(self, detail: ExperimentDetail, store: str) -> str | None:
        """Return the folder if it exists here and holds the same experiment; else the store.

        Args:
            detail: of the experiment.
            store: the farm's address, whose settings the experiment's lacks.
        """
        if self._is_of(detail.folder, detail.experiment.id):
            return detail.folder
        address = detail.store
        if is_remote(address) and is_remote(store):
            address = str(parse_beside(address, parse_address(store, {}), os.environ))
        return address if is_remote(address) and can_restore(address) else None

    @staticmethod
    def _is_of(folder: str, identity: str) -> bool:
        try:
            return read_header(Path(folder) / FILE_NAME).experiment_id.startswith(identity)
        except JournalError:
            return False


def _show(data: bytes) -> None:
    if sys.stdout is not None:
        write_output(sys.stdout, data)


def _tell(text: str) -> None:
    tell(f"tunemq: {text}")
