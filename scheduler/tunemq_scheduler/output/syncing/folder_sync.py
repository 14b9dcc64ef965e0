"""`SyncQueue`: copies one folder to the store, one transfer at a time."""

from __future__ import annotations

import copy
import logging
import math
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from tunemq_scheduler.output.syncing.background_transfer import BackgroundTransfer
from tunemq_scheduler.output.syncing.destinations import join
from tunemq_scheduler.output.syncing.mirroring import FilesLeftOut
from tunemq_scheduler.output.syncing.syncer import Syncer
from tunemq_shared.base.errors import TuneError
from tunemq_shared.base.retrying import CancelToken

#: The most attempts to launch, before a syncer's refusal or error counts as a failure.
_ASKED: Final = 3
#: The most seconds before the second attempt; doubled for each later one.
PAUSE_S: Final = 1.0

_log = logging.getLogger(__name__)


@dataclass(kw_only=True, eq=False)
class SyncQueue:
    """The transfers of one folder that is copied to the destination.

    One thread uses it; the transfers run in others.

    Attributes:
        title: the folder's name in messages.
        local, remote: the folder, and its address.
        syncer: a copy of it does the work.
        timeout_s: seconds that one transfer may take, including all retries.
        exclude: returns the patterns to leave out; called in the transfer's thread.
        check: called in the transfer's thread first; raises if the transfer must not begin.
        on_end: called in the transfer's thread at its end.
        progress: the newest iteration of its trial, and its seconds of training.
        changed_at: when a file of it was last written for sure.
        synced_at: when a transfer was last launched.
        copied_at: when the last transfer that copied the folder was launched.
        wants_copy: whether the next transfer copies the folder; otherwise it only deletes
            checkpoints.
        is_last: whether no transfer follows once none is due.
    """

    title: str
    local: str
    remote: str
    syncer: Syncer
    timeout_s: float
    exclude: Callable[[str], Sequence[str]]
    on_end: Callable[[], None]
    check: Callable[[CancelToken], None] = lambda _cancel: None
    progress: tuple[float, float] = (0, 0.0)
    changed_at: float = -math.inf
    synced_at: float = -math.inf
    copied_at: float = -math.inf
    wants_copy: bool = False
    is_last: bool = False

    def __post_init__(self) -> None:
        """Begin without a transfer."""
        self._syncer: Syncer | None = None
        self._work: _Work | None = None
        self._transfer: BackgroundTransfer | None = None
        self._expected: set[str] = set()
        self._condemned: list[str] = []
        self._going: set[str] = set()

    @property
    def is_busy(self) -> bool:
        """Whether a transfer is launched and its outcome not collected."""
        return self._work is not None

    @property
    def is_ready(self) -> bool:
        """Whether an outcome can be collected."""
        transfer = self._transfer
        return self.is_busy and (transfer is None or not transfer.is_running or transfer.is_overdue)

    def expect(self, name: str) -> None:
        """Require that the subfolder ``name`` exists when the next transfer has copied."""
        self._expected.add(name)

    def condemn(self, name: str) -> None:
        """Stop copying the subfolder ``name``; the next transfer deletes its copy."""
        self._expected.discard(name)
        self._condemned.append(name)
        self._going.add(name)

    def launch(self) -> None:
        """Start a transfer; none may be running."""
        if self._syncer is None:
            self._syncer = copy.deepcopy(self.syncer)
        self._going = {name for name in self._going if os.path.isdir(self._path(name))}
        self._work = _Work(
            self,
            self._syncer,
            expected=tuple(self._expected) if self.wants_copy else (),
            condemned=self._condemned,
            left_out=tuple(self._going),
            copies=self.wants_copy,
            is_closing=self.is_last,
        )
        self._condemned, self.wants_copy = [], False
        self._transfer = BackgroundTransfer(
            self._work.sync_folder, self.timeout_s, after=self._transfer, on_end=self.on_end
        )
        self.synced_at = time.monotonic()

    def collect(self) -> Exception | None:
        """Return the error of a transfer that ended or is overdue; None for success."""
        work, transfer = self._work, self._transfer
        if work is None or transfer is None:
            return None
        self._work = None
        if work.is_closing:
            self._syncer = None
        try:
            transfer.wait()
        except Exception as error:  # noqa: BLE001  a syncer may be the user's; logged by who asks
            self._condemned = [*work.condemned, *self._condemned]
            if transfer.threads():
                self._abandon(work)
            if work.copies and isinstance(error.__cause__ or error, FilesLeftOut):
                self.copied_at = self.synced_at  # those are the trial's: its results are copied
            return error
        for name in work.expected:
            if name in self._expected and not os.path.isdir(self._path(name)):
                self._expected.discard(name)
                return TuneError(f"{self._path(name)} did not exist when it was to be copied")
        self._expected.difference_update(work.expected)
        if work.copies:
            self.copied_at = self.synced_at
        return None

    def has_copied(self, until: float) -> bool:
        """Whether all that was written until then has been copied."""
        return self.copied_at >= min(self.changed_at, until)

    def cancel(self) -> None:
        """Ask the running transfer to end soon; returns immediately."""
        work, transfer = self._work, self._transfer
        if work is not None and transfer is not None:
            transfer.cancel()
            self._abandon(work)

    def _abandon(self, work: _Work) -> None:
        """Close a syncer that is still busy; the next transfer gets another."""
        work.is_closing = True
        self._syncer = None
        try:
            work.syncer.cancel()
        except Exception:  # noqa: BLE001  it may be the user's, and must not end the search
            _log.exception("%s: its syncer could not be cancelled", self.title)

    def _path(self, name: str) -> str:
        return os.path.join(self.local, name)


@dataclass(eq=False)
class _Work:
    """One transfer of a queue, as run by its thread.

    Attributes:
        expected: the subfolders that must exist when it has copied.
        condemned: the copies still to delete.
        left_out: the subfolders that it does not copy.
        copies: whether it copies the folder.
        is_closing: whether to close the syncer after this transfer.
    """

    sync_queue: SyncQueue
    syncer: Syncer
    expected: tuple[str, ...]
    condemned: list[str]
    left_out: tuple[str, ...]
    copies: bool
    is_closing: bool

    def sync_folder(self, *, cancel: CancelToken) -> None:
        """Delete the copies of condemned subfolders, and copy changed files."""
        sync_queue, syncer = self.sync_queue, self.syncer
        try:
            sync_queue.check(cancel)
            while self.condemned:
                address = join(sync_queue.remote, self.condemned[0])
                self._do(partial(syncer.delete, address), cancel)
                self.condemned.pop(0)
            if self.copies:
                exclude = [*sync_queue.exclude(sync_queue.local), *self.left_out]
                self._do(
                    partial(syncer.sync_up, sync_queue.local, sync_queue.remote, exclude), cancel
                )
        finally:
            if self.is_closing:
                syncer.close()

    def _do(self, begin: Callable[[], bool], cancel: CancelToken) -> None:
        """Launch an operation and wait for it; retry a failed launch after a growing pause."""
        for tries in range(_ASKED):
            if tries:
                cancel.pause(PAUSE_S * 2.0**tries * random.uniform(0.5, 1.0))
            cancel.check()
            try:
                begun = begin()
            except Exception as error:
                if tries == _ASKED - 1:
                    raise
                _log.warning(
                    "%s: a sync failed and is tried again: %s", self.sync_queue.title, error
                )
                continue
            self.syncer.wait_or_retry()  # for this operation, or an earlier one
            if begun:
                return
        raise TuneError(f"the syncer was asked {_ASKED} times and started no transfer")
