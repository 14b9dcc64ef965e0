"""`SyncerCallback`: keeps copies of the experiment's and the trials' folders at a destination."""

from __future__ import annotations

import contextlib
import glob
import logging
import math
import os
import queue
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from tunemq_scheduler.journal.journal_layout import FILE_NAME as JOURNAL
from tunemq_scheduler.journal.journal_layout import LOCK, PART_SUFFIX
from tunemq_scheduler.output.loggers import LoggerCallback
from tunemq_scheduler.output.syncing.destinations import join
from tunemq_scheduler.output.syncing.excludes import (
    CHECKPOINTS,
    NEVER_COPIED,
    excluding,
    in_folders_but,
)
from tunemq_scheduler.output.syncing.sync_queue import SyncQueue
from tunemq_scheduler.output.syncing.syncer import DEFAULT_SYNC_PERIOD, DEFAULT_SYNC_TIMEOUT, Syncer
from tunemq_scheduler.storage.folders import (
    ERROR_FILE,
    PARAMS_JSON,
    PARAMS_PICKLE,
    PROGRESS_CSV,
    RESULT_JSON,
)
from tunemq_shared.base.errors import ConfigError, TuneError
from tunemq_shared.base.retrying import CancelToken
from tunemq_shared.objects.store_address import without_settings

if TYPE_CHECKING:
    from tunemq_scheduler.results.trial_view import TrialView

#: A trial's folder is first synced after so many iterations, or so many seconds of training.
MIN_ITERATIONS_VARIABLE: Final = "TUNE_NODE_SYNCING_MIN_ITER_THRESHOLD"
MIN_TIME_VARIABLE: Final = "TUNE_NODE_SYNCING_MIN_TIME_S_THRESHOLD"
_MIN_ITERATIONS: Final = 2.0
_MIN_TIME_S: Final = 10.0
#: So many transfers run at once; the others wait their turn.
TRANSFERS: Final = 4
#: A folder rests so many seconds between two transfers, but for the last: checkpoints that come
#: fast must not have it copied all the time.
REST_S: Final = 1.0
#: Where nodes upload the checkpoints themselves it is in no hurry.
ARTIFACTS_REST_S: Final = 10.0
#: After so many seconds of waiting for the last syncs the person at the terminal is told.
_SILENT_S: Final = 5.0

#: What the scheduler writes into a trial's folder; the rest are the trial's own artifacts.
_RECORDS: Final = frozenset({RESULT_JSON, PARAMS_JSON, PARAMS_PICKLE, PROGRESS_CSV, ERROR_FILE})
#: Of the experiment's folder only its own files and its journal: other folders are those of trials.
_IN_FOLDERS: Final = (*in_folders_but(JOURNAL), f"{JOURNAL}/{LOCK}", f"{JOURNAL}/*{PART_SUFFIX}")
#: What `SyncerCallback` begins anew in another process.
_IN_FLIGHT: Final = {
    *("_bell", "_condemned", "_given_up", "_sync_queues"),
    *("_experiment", "_waiting", "_running", "_failures", "check"),
}

_log = logging.getLogger(__name__)


class SyncerCallback(LoggerCallback):
    """Copies what a search writes to a destination, beside it and after it.

    *What.* The files that stand in the experiment's folder itself (the journal above all), and each
    trial's folder: results, output, artifacts, and with ``carries_checkpoints`` its checkpoints.

    *When.* The experiment's files every ``sync_period`` seconds. A trial's folder likewise, from
    its second iteration or its tenth second of training on (`MIN_ITERATIONS_VARIABLE` and
    `MIN_TIME_VARIABLE` in the environment change that); and whenever it has to be: at its end, and
    on checkpoints (``sync_on_checkpoint``, or because they are carried). Everything at the end.

    *How.* Hooks note what is due, and the end of the loop's turn launches it, when loggers have
    written; hooks never wait, except the last. A folder has one transfer at a time. What has to be
    synced while one runs, or right after it, waits its turn, is done once for all that was due
    meanwhile, and is never left out.

    *Errors.* A transfer that failed, or was cancelled after ``sync_timeout``, is logged with its
    folder, ends nothing, and counts as mended by the next that succeeds. `wait_for_all` raises what
    is left of them.

    *Threads.* The loop's thread calls the hooks, each transfer's thread calls `check`; any thread
    and any signal handler may call `delete_checkpoint` and `give_up`.

    Args:
        syncer: whose copies do the work, one for each folder.
        local_dir, remote_dir: the experiment's folder, and its address at the destination.
    """

    def __init__(
        self,
        syncer: Syncer,
        local_dir: str,
        remote_dir: str,
        *,
        sync_period: float = DEFAULT_SYNC_PERIOD,
        sync_timeout: float = DEFAULT_SYNC_TIMEOUT,
        sync_artifacts: bool = True,
        sync_on_checkpoint: bool = True,
        carries_checkpoints: bool = False,
    ) -> None:
        self.local_dir = local_dir
        self.remote_dir = remote_dir
        self.carries_checkpoints = carries_checkpoints
        self._syncer = syncer
        self._sync_period = sync_period
        self._sync_timeout = sync_timeout
        self._sync_artifacts = sync_artifacts
        self._sync_on_checkpoint = sync_on_checkpoint
        self._min_iterations = _threshold(MIN_ITERATIONS_VARIABLE, _MIN_ITERATIONS)
        self._min_time_s = _threshold(MIN_TIME_VARIABLE, _MIN_TIME_S)
        self._begin()

    def _begin(self) -> None:
        #: Rung by each transfer that ends.
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._condemned: deque[str] = deque()
        self._given_up = False
        #: Called before each transfer; raises where the destination is not ours any more.
        self.check: Callable[[CancelToken], None] = lambda _cancel: None
        #: The trials' folders by their names.
        self._sync_queues: dict[str, SyncQueue] = {}
        self._experiment: SyncQueue | None = None
        self._waiting: dict[int, SyncQueue] = {}
        self._running: list[SyncQueue] = []
        #: What went wrong last with a folder, and was not mended; by its title.
        self._failures: dict[str, str] = {}

    # --- hooks ------------------------------------------------------------------------------------

    def log_trial_start(self, trial: TrialView) -> None:
        """Begin to keep account of the trial."""
        self._sync_queue(os.path.basename(trial.local_path))

    def log_trial_result(self, iteration: int, trial: TrialView, result: dict[str, Any]) -> None:
        """Its folder is due if it ran long enough and was last synced a period ago."""
        del iteration
        sync_queue = self._sync_queue(os.path.basename(trial.local_path))
        # What a result does not say does not hold its trial back.
        sync_queue.progress = (
            result.get("training_iteration", self._min_iterations),
            result.get("time_total_s", self._min_time_s),
        )
        if self._is_due(sync_queue):
            self._want(sync_queue)

    def on_checkpoint(
        self,
        iteration: int,
        trials: Sequence[TrialView],
        trial: TrialView,
        checkpoint: Any,
        **info: Any,
    ) -> None:
        """Its folder is due: at once if checkpoints are carried or sync it, else if it is time."""
        del iteration, trials, info
        folder, _, name = checkpoint.key.partition("/")
        sync_queue = self._sync_queue(os.path.basename(trial.local_path))
        if self.carries_checkpoints and os.path.basename(sync_queue.local) == folder:
            sync_queue.expect(name)
        if self.carries_checkpoints or self._sync_on_checkpoint or self._is_due(sync_queue):
            self._want(sync_queue)

    def log_trial_end(self, trial: TrialView, failed: bool = False) -> None:
        """Its folder is due for the last time."""
        del failed
        sync_queue = self._sync_queue(os.path.basename(trial.local_path))
        sync_queue.is_last = True
        self._want(sync_queue)

    def flush(self) -> None:
        """The end of a turn: look at what has ended, and launch what is due."""
        own = self._experiment_queue()
        if not own.is_last and time.monotonic() - own.synced_at >= self._sync_period:
            self._want(own)
        self._turn()

    def on_experiment_end(self, trials: Sequence[TrialView], **info: Any) -> None:
        """Sync everything once more and wait for it, at most ``sync_timeout`` seconds.

        What could not be synced is logged.
        """
        del trials, info
        for sync_queue in (self._experiment_queue(), *self._sync_queues.values()):
            sync_queue.is_last = True
            self._want(sync_queue)
        try:
            self.wait_for_all()
        except TuneError as error:
            _log.error("%s", error)

    # --- what others call -------------------------------------------------------------------------

    def delete_checkpoint(self, key: str) -> None:
        """A checkpoint is not kept: its copy, if there is one, is removed with the next transfer.

        May be called before or after its local files are removed.

        Args:
            key: ``<trial's folder>/<checkpoint>``.
        """
        if self.carries_checkpoints:
            self._condemned.append(key)

    def copy_again(self, folders: Iterable[str]) -> None:
        """Copy these folders of trials at the end, whether or not their trials continue."""
        for folder in folders:
            self._sync_queue(os.path.basename(folder))

    def give_up(self) -> None:
        """Let `on_experiment_end` return now, with what has been synced."""
        self._given_up = True
        self._bell.put(None)

    def wait_for_all(self, timeout_s: float | None = None) -> None:
        """Return when nothing is in flight or due.

        Args:
            timeout_s: after which the rest is cancelled; ``sync_timeout`` by default.

        Raises:
            TuneError: something failed, since the last call, and was not mended; names each folder
                and its error.
        """
        begun = time.monotonic()
        deadline = begun + (self._sync_timeout if timeout_s is None else timeout_s)
        is_told = False
        while self._turn():
            now = time.monotonic()
            if self._given_up or now >= deadline:
                self._cancel_all()
                break
            if now - begun >= _SILENT_S and not is_told:
                is_told = True
                left = len({*map(id, self._running), *self._waiting})
                amount = "1 folder" if left == 1 else f"{left} folders"
                _log.warning(
                    "Waiting for %s to reach %s.", amount, without_settings(self.remote_dir)
                )
            with contextlib.suppress(queue.Empty):
                self._bell.get(timeout=min(deadline - now, REST_S))
        failures, self._failures = self._failures, {}
        if failures:
            listed = "".join(f"\n  {title}: {error}" for title, error in failures.items())
            amount = "1 folder was" if len(failures) == 1 else f"{len(failures)} folders were"
            place = without_settings(self.remote_dir)
            raise TuneError(f"{amount} not wholly copied to {place}:{listed}")

    def __getstate__(self) -> dict[str, Any]:
        """Its settings; what is in flight stays with this process."""
        return {name: value for name, value in vars(self).items() if name not in _IN_FLIGHT}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    # --- a turn -----------------------------------------------------------------------------------

    def _turn(self) -> bool:
        """Look at what has ended, launch what is due; whether anything is left."""
        while not self._bell.empty():
            self._bell.get()
        while self._condemned:
            self._condemn(self._condemned.popleft())
        for sync_queue in [one for one in self._running if one.is_ready]:
            self._running.remove(sync_queue)
            self._record(sync_queue, sync_queue.collect())
        now = time.monotonic()
        for sync_queue in [one for one in self._waiting.values() if not one.is_busy]:
            rest_s = REST_S if self.carries_checkpoints else ARTIFACTS_REST_S
            if not sync_queue.is_last and now - sync_queue.synced_at < rest_s:
                continue
            if self._given_up or len(self._running) >= TRANSFERS:
                break
            del self._waiting[id(sync_queue)]
            self._running.append(sync_queue)
            sync_queue.launch()
        return bool(self._running or self._waiting)

    def _record(self, sync_queue: SyncQueue, error: Exception | None) -> None:
        if error is None:
            self._failures.pop(sync_queue.title, None)
        else:
            self._failures[sync_queue.title] = str(error) or type(error).__name__
            place = without_settings(sync_queue.remote)
            _log.error("%s was not wholly copied to %s: %s", sync_queue.title, place, error)
        if sync_queue.is_last and id(sync_queue) not in self._waiting:
            self._sync_queues.pop(os.path.basename(sync_queue.local), None)

    def _cancel_all(self) -> None:
        for sync_queue in [*self._running, *self._waiting.values()]:
            sync_queue.cancel()
            self._failures.setdefault(
                sync_queue.title, "it was not done in time, and was cancelled"
            )
        self._running.clear()
        self._waiting.clear()

    def _condemn(self, key: str) -> None:
        folder, _, name = key.partition("/")
        sync_queue = self._sync_queues.get(folder)
        if sync_queue is None:  # its trial is over: nothing but this is left to do
            sync_queue = self._sync_queue(folder)
            sync_queue.is_last = True
        sync_queue.condemn(name)
        self._waiting.setdefault(id(sync_queue), sync_queue)

    def _want(self, sync_queue: SyncQueue) -> None:
        sync_queue.wants_copy = True
        self._waiting.setdefault(id(sync_queue), sync_queue)

    def _is_due(self, sync_queue: SyncQueue) -> bool:
        iteration, trained_s = sync_queue.progress
        if iteration < self._min_iterations and trained_s < self._min_time_s:
            return False
        return time.monotonic() - sync_queue.synced_at >= self._sync_period

    # --- lanes ------------------------------------------------------------------------------------

    def _sync_queue(self, folder: str) -> SyncQueue:
        sync_queue = self._sync_queues.get(folder)
        if sync_queue is None:
            sync_queue = self._sync_queues[folder] = self._new_lane(
                f"trial {folder}",
                os.path.join(self.local_dir, folder),
                join(self.remote_dir, folder),
                self._not_of_trial,
            )
        return sync_queue

    def _experiment_queue(self) -> SyncQueue:
        if self._experiment is None:
            self._experiment = self._new_lane(
                "the experiment", self.local_dir, self.remote_dir, lambda _: _IN_FOLDERS
            )
        return self._experiment

    def _new_lane(
        self, title: str, local: str, remote: str, exclude: Callable[[str], Sequence[str]]
    ) -> SyncQueue:
        return SyncQueue(
            title,
            local,
            remote,
            syncer=self._syncer,
            timeout_s=self._sync_timeout,
            exclude=exclude,
            check=self.check,
            on_end=partial(self._bell.put, None),
        )

    def _not_of_trial(self, folder: str) -> list[str]:
        """What is not copied of a trial's folder."""
        left_out = [*NEVER_COPIED]
        if not self.carries_checkpoints:
            left_out.append(CHECKPOINTS)
        if not self._sync_artifacts:
            is_checkpoint = excluding([CHECKPOINTS])
            left_out += [
                glob.escape(name)
                for name in os.listdir(folder)
                if name not in _RECORDS and not is_checkpoint(name)
            ]
        return left_out


def _threshold(variable: str, default: float) -> float:
    """A number in the environment.

    Raises:
        ConfigError: it is none.
    """
    text = os.environ.get(variable)
    try:
        value = default if text is None else float(text)
    except ValueError:
        value = math.nan
    if not value >= 0:
        raise ConfigError(f"the variable {variable}={text!r} is not usable: give a number from 0.")
    return value
