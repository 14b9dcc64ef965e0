"""`SyncerCallback`: copies the experiment's and the trials' folders to a destination."""

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
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from tunemq_scheduler.journal.journal_files import FILE_NAME as JOURNAL
from tunemq_scheduler.journal.journal_files import LOCK, PART_SUFFIX
from tunemq_scheduler.output.loggers import LoggerCallback
from tunemq_scheduler.output.syncing.destinations import join
from tunemq_scheduler.output.syncing.excludes import (
    CHECKPOINTS,
    NEVER_COPIED,
    excluding,
    in_folders_but,
)
from tunemq_scheduler.output.syncing.folder_sync import SyncQueue
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

#: Iterations, or seconds of training, before the first sync of a trial's folder.
MIN_ITERATIONS_VARIABLE: Final = "TUNE_NODE_SYNCING_MIN_ITER_THRESHOLD"
MIN_TIME_VARIABLE: Final = "TUNE_NODE_SYNCING_MIN_TIME_S_THRESHOLD"
_MIN_ITERATIONS: Final = 2.0
_MIN_TIME_S: Final = 10.0
#: The most parallel transfers; others wait.
TRANSFERS: Final = 4
#: Seconds between two transfers of a folder, except the last: frequent checkpoints must not cause
#: continuous copying.
REST_S: Final = 1.0
#: The same where nodes upload the checkpoints themselves, so that copies are less urgent.
ARTIFACTS_REST_S: Final = 10.0
#: The most seconds until a transfer that failed is repeated.
_RETRY_S: Final = 60.0
#: Seconds of waiting for the last syncs before a message says so.
_SILENT_S: Final = 5.0

#: Files that the scheduler writes into a trial's folder; all others are artifacts of the trial.
_RECORDS: Final = frozenset({RESULT_JSON, PARAMS_JSON, PARAMS_PICKLE, PROGRESS_CSV, ERROR_FILE})
#: Excludes all of the experiment's folder but its files and journal: other folders are trials'.
_WITH_JOURNAL: Final = (*in_folders_but(JOURNAL), f"{JOURNAL}/{LOCK}", f"{JOURNAL}/*{PART_SUFFIX}")
#: Attributes of `SyncerCallback` that are reset in another process.
_IN_FLIGHT: Final = {
    *("_bell", "_condemned", "_given_up", "_sync_queues", "is_complete"),
    *("_experiment", "_waiting", "_running", "_failures", "check"),
}

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class SyncerCallback(LoggerCallback):
    """Copy a search's files to a destination, during the search and at its end.

    *What.* The files in the experiment's folder itself, and each trial's folder: results, output
    and artifacts. With ``carries_checkpoints`` also the journal and the checkpoints; otherwise the
    destination is the search's store, which has both.

    *When.* The experiment's files every ``sync_period`` seconds. A trial's folder likewise, from
    its second iteration or its tenth second of training on (`MIN_ITERATIONS_VARIABLE` and
    `MIN_TIME_VARIABLE` in the environment change that). In addition a trial's folder at its end,
    and on checkpoints (``sync_on_checkpoint``, or because they are carried). Everything at the end.

    *How.* Hooks note which folders are due. The end of the loop's turn launches the transfers,
    after the loggers have written; hooks never wait, except the last. A folder has one transfer at
    a time. A sync that is required during a transfer, or right after one, waits; one transfer
    serves all that became due meanwhile, and none is left out.

    *Errors.* A transfer that failed, or was cancelled after ``sync_timeout``, is logged with its
    folder and ends nothing. The next successful transfer resolves it. `wait_for_all` raises the
    unresolved ones.

    *Threads.* The loop's thread calls the hooks, each transfer's thread calls `check`; any thread
    and any signal handler may call `delete_checkpoint` and `give_up`.

    Attributes:
        syncer: its copies do the work, one for each folder.
        local_dir, remote_dir: the experiment's folder, and its address at the destination.
        sync_period, sync_timeout, sync_artifacts, sync_on_checkpoint: see `SyncConfig`.
        carries_checkpoints: whether it copies checkpoints, too.
    """

    syncer: Syncer
    local_dir: str
    remote_dir: str
    _: KW_ONLY
    sync_period: float = DEFAULT_SYNC_PERIOD
    sync_timeout: float = DEFAULT_SYNC_TIMEOUT
    sync_artifacts: bool = True
    sync_on_checkpoint: bool = True
    carries_checkpoints: bool = False

    def __post_init__(self) -> None:
        """Read the thresholds from the environment."""
        self._min_iterations = _threshold(MIN_ITERATIONS_VARIABLE, _MIN_ITERATIONS)
        self._min_time_s = _threshold(MIN_TIME_VARIABLE, _MIN_TIME_S)
        self._begin()

    def _begin(self) -> None:
        #: Receives an item from each transfer that ends.
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._condemned: deque[str] = deque()
        self._given_up = False
        #: Whether `on_experiment_end` has copied everything.
        self.is_complete = False
        #: Called before each transfer; raises if the destination now belongs to another run.
        self.check: Callable[[CancelToken], None] = lambda _cancel: None
        #: The trials' folders by their names.
        self._sync_queues: dict[str, SyncQueue] = {}
        self._experiment: SyncQueue | None = None
        self._waiting: dict[int, SyncQueue] = {}
        self._running: list[SyncQueue] = []
        #: The last unresolved error of each folder.
        self._failures: dict[SyncQueue, str] = {}

    # --- hooks ------------------------------------------------------------------------------------

    def log_trial_start(self, trial: TrialView) -> None:
        """Create the trial's queue."""
        self._sync_queue(os.path.basename(trial.local_path))

    def log_trial_result(self, iteration: int, trial: TrialView, result: dict[str, Any]) -> None:
        """Mark the folder as due if the trial ran long enough and its last sync is a period ago."""
        del iteration
        sync_queue = self._sync_queue(os.path.basename(trial.local_path))
        sync_queue.changed_at = time.monotonic()
        # A result without these keys does not delay its trial's sync.
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
        """Mark the folder as due: now if checkpoints sync it, otherwise by its period."""
        del iteration, trials, info
        folder, _, name = checkpoint.key.partition("/")
        sync_queue = self._sync_queue(os.path.basename(trial.local_path))
        if self.carries_checkpoints and os.path.basename(sync_queue.local) == folder:
            sync_queue.expect(name)
        if self.carries_checkpoints or self.sync_on_checkpoint or self._is_due(sync_queue):
            self._want(sync_queue)

    def log_trial_end(self, trial: TrialView, failed: bool = False) -> None:
        """Mark the folder as due for the last time."""
        del failed
        sync_queue = self._sync_queue(os.path.basename(trial.local_path))
        sync_queue.is_last = True
        sync_queue.changed_at = time.monotonic()
        self._want(sync_queue)

    def flush(self) -> None:
        """Collect ended transfers and launch due ones, at the end of a turn."""
        own = self._experiment_queue()
        if not own.is_last and time.monotonic() - own.synced_at >= self.sync_period:
            self._want(own)
        for failed in self._failures:
            is_due = time.monotonic() - failed.synced_at >= _RETRY_S
            if is_due and not failed.has_copied(math.inf):
                self._want(failed)
        self._turn()

    def on_experiment_end(self, trials: Sequence[TrialView], **info: Any) -> None:
        """Sync everything once more and wait for it, at most ``sync_timeout`` seconds.

        Files that could not be synced are logged.
        """
        del trials, info
        for sync_queue in (self._experiment_queue(), *self._sync_queues.values()):
            sync_queue.is_last = True
            self._want(sync_queue)
        try:
            self.wait_for_all()
            self.is_complete = True
        except TuneError as error:
            _log.error("%s", error)

    # --- called by other modules ------------------------------------------------------------------

    def delete_checkpoint(self, key: str) -> None:
        """Delete a checkpoint's copy, if there is one, with the next transfer.

        May be called before or after its local files are deleted.

        Args:
            key: ``<trial's folder>/<checkpoint>``.
        """
        if self.carries_checkpoints:
            self._condemned.append(key)

    def copy_again(self, folders: Iterable[str], *, are_ended: bool = False) -> None:
        """Copy these trials' folders, whether or not their trials continue; see `has_copied`.

        Args:
            folders: the folders.
            are_ended: whether their trials have ended, so that nothing more comes.
        """
        for folder in folders:
            sync_queue = self._sync_queue(os.path.basename(folder))
            sync_queue.is_last |= are_ended
            sync_queue.changed_at = time.monotonic()
            self._want(sync_queue)

    def copy_changed(self) -> float:
        """Copy the folders with new results soon; return the time for `has_copied`."""
        for sync_queue in self._sync_queues.values():
            if sync_queue.copied_at < sync_queue.changed_at:
                self._want(sync_queue)
        return time.monotonic()

    def has_copied(self, until: float) -> bool:
        """Whether all results of trials until then are at the destination."""
        return all(sync_queue.has_copied(until) for sync_queue in self._sync_queues.values())

    def give_up(self) -> None:
        """Make `on_experiment_end` return now, with the files synced so far."""
        self._given_up = True
        self._bell.put(None)

    def wait_for_all(self, timeout_s: float | None = None) -> None:
        """Return when no transfer is running or due.

        Args:
            timeout_s: seconds after which the rest is cancelled. Default: ``sync_timeout``.

        Raises:
            TuneError: a transfer failed since the last call and was not repeated successfully; the
                message names each folder and its error.
        """
        begun = time.monotonic()
        deadline = begun + (self.sync_timeout if timeout_s is None else timeout_s)
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
            listed = "".join(f"\n  {one.title}: {error}" for one, error in failures.items())
            amount = "1 folder was" if len(failures) == 1 else f"{len(failures)} folders were"
            place = without_settings(self.remote_dir)
            raise TuneError(f"{amount} not wholly copied to {place}:{listed}")

    def __getstate__(self) -> dict[str, Any]:
        """Return the settings, without running transfers."""
        return {name: value for name, value in vars(self).items() if name not in _IN_FLIGHT}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    # --- a turn -----------------------------------------------------------------------------------

    def _turn(self) -> bool:
        """Collect ended transfers and launch due ones; return whether any are left."""
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
            for failed in [one for one in self._failures if one.local == sync_queue.local]:
                del self._failures[failed]
        else:
            place = without_settings(sync_queue.remote)
            if (text := str(error) or type(error).__name__) != self._failures.get(sync_queue):
                _log.error("%s was not wholly copied to %s: %s", sync_queue.title, place, text)
            self._failures[sync_queue] = text
        is_over = sync_queue.is_last and id(sync_queue) not in self._waiting
        if is_over and sync_queue.has_copied(math.inf):
            self._sync_queues.pop(os.path.basename(sync_queue.local), None)

    def _cancel_all(self) -> None:
        for sync_queue in [*self._running, *self._waiting.values()]:
            sync_queue.cancel()
            self._failures.setdefault(sync_queue, "it was not done in time, and was cancelled")
        self._running.clear()
        self._waiting.clear()

    def _condemn(self, key: str) -> None:
        folder, _, name = key.partition("/")
        sync_queue = self._sync_queues.get(folder)
        if sync_queue is None:  # its trial has ended: only this is left to do
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
        return time.monotonic() - sync_queue.synced_at >= self.sync_period

    # --- queues -----------------------------------------------------------------------------------

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
            excluded = _WITH_JOURNAL if self.carries_checkpoints else ("*/*",)
            self._experiment = self._new_lane(
                "the experiment", self.local_dir, self.remote_dir, lambda _: excluded
            )
        return self._experiment

    def _new_lane(
        self, title: str, local: str, remote: str, exclude: Callable[[str], Sequence[str]]
    ) -> SyncQueue:
        return SyncQueue(
            title=title,
            local=local,
            remote=remote,
            syncer=self.syncer,
            timeout_s=self.sync_timeout,
            exclude=exclude,
            check=self.check,
            on_end=partial(self._bell.put, None),
        )

    def _not_of_trial(self, folder: str) -> list[str]:
        """Return the patterns of a trial's folder that are not copied."""
        left_out = [*NEVER_COPIED]
        if not self.carries_checkpoints:
            left_out.append(CHECKPOINTS)
        if not self.sync_artifacts:
            is_checkpoint = excluding([CHECKPOINTS])
            left_out += [
                glob.escape(name)
                for name in os.listdir(folder)
                if name not in _RECORDS and not is_checkpoint(name)
            ]
        return left_out


def _threshold(variable: str, default: float) -> float:
    """Return a number from the environment.

    Raises:
        ConfigError: the value is not a number.
    """
    text = os.environ.get(variable)
    try:
        value = default if text is None else float(text)
    except ValueError:
        value = math.nan
    if not value >= 0:
        raise ConfigError(f"the variable {variable}={text!r} is invalid: give a number from 0.")
    return value
