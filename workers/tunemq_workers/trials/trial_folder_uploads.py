"""`TrialFiles`: uploads the folders of trials on this node when their processes have ended.

Each attempt of a trial has a folder. It is removed when its files were sent. A folder whose files
could not be sent stays for a while, below another name.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from typing import Final

from tunemq_shared.base.retrying import ignore
from tunemq_shared.checkpoints.checkpoint_markers import remove_copies
from tunemq_shared.objects.store_address import is_remote
from tunemq_shared.protocol.messages import NodeWarned, TrialSpec, encode
from tunemq_shared.system.folder_trees import names_in, remove_tree, statuses
from tunemq_workers.broker.publisher_messages import SendOutput
from tunemq_workers.checkpoints.checkpoint_cache import CacheLimits
from tunemq_workers.runtime.disk_jobs import DiskJobs
from tunemq_workers.runtime.reactor import Reactor, do_nothing
from tunemq_workers.runtime.transfer_messages import UploadTrialFiles
from tunemq_workers.runtime.trial_process_state import AttemptId, Emit
from tunemq_workers.transfers.transfer_client import TransferClient
from tunemq_workers.trials.localize_order import TRIALS, place_of_shared_names
from tunemq_workers.trials.output_streamer import OutputSource, OutputStreamer

#: The prefix of folders that are being removed.
_TRASH: Final = ".trash-"
#: The prefix of folders that could not be sent; then nanoseconds, and the trial's folder.
_UNSENT: Final = "unsent-"
#: How long they stay if a tenth of the disk holds them; and the most characters of a folder's name.
_KEPT_DAYS: Final = 7
_NAME_CHARACTERS: Final = 100
#: The most folders of an earlier worker that the log names.
_LOGGED: Final = 20
#: What an entry counts at least: empty files take inodes, of which ext4 has one for each 16 KiB.
_ENTRY_BYTES: Final = 2**14

_log = logging.getLogger(__name__)


class TrialFiles:
    """Uploads, streams and removes the folders below ``trials``. Used by the node's loop only.

    Args:
        timers, send, may_send: see `OutputStreamer`.
        disk: reads and removes files.
        transfers: uploads folders.
        emit: takes (events stream, encoded event).
        folder: the node's working folder.
        node: the node's name, for warnings.
        limits: how much folders that could not be sent may take of their disk.
    """

    def __init__(
        self,
        timers: Reactor,
        disk: DiskJobs,
        transfers: TransferClient,
        emit: Emit,
        *,
        send: Callable[[SendOutput], None],
        may_send: Callable[[], bool],
        folder: str,
        node: str,
        limits: CacheLimits,
    ) -> None:
        #: Return the trials that have a process.
        self.running_trials: Callable[[], Iterable[tuple[AttemptId, TrialSpec]]] = tuple
        self._transfers, self._disk, self._emit = transfers, disk, emit
        self._streamer = OutputStreamer(timers, disk, send, may_send, self._printing)
        self._root, self._node, self._limits = os.path.join(folder, TRIALS), node, limits
        self._names = place_of_shared_names(folder)
        #: The place of jobs that delete, for which nothing waits.
        self._trash = os.path.join(self._root, _TRASH)
        #: The event streams of folders that are being sent.
        self._sending: dict[str, str] = {}

    def start(self) -> None:
        """Start; keep the folders of an earlier node, whose store is no longer known, as unsent."""

        def put_aside(number_of_others: int) -> None:
            # One job, and one thread, however many folders there are: a trial may make them.
            if number_of_others:
                self._disk.run(self._trash, partial(_empty_trash, self._root), do_nothing)
                self._make_room()

        self._disk.run(self._names, partial(_put_aside, self._root), put_aside)
        self._streamer.start()

    def close(self) -> None:
        """Stop waiting for uploads; the next node here keeps their folders as unsent."""
        for folder, events_key in self._sending.items():
            self._warn(events_key, folder, folder, "the node ends")
        self._sending.clear()

    def output_sent(self) -> None:
        """Note that the publisher sent the last output."""
        self._streamer.sent()

    def unsettled(self) -> set[str]:
        """Return the event streams of experiments with uploads on their way."""
        return set(self._sending.values())

    def left(self, trial: AttemptId, start: TrialSpec) -> None:
        """Upload a folder whose trial process has ended, if it is below ``trials``."""
        folder, attempt = start.folder, trial[1]
        if not self._is_ours(folder):
            return
        self._streamer.complete(OutputSource(start.events_key, *trial, folder))
        if not is_remote(start.store) or folder in self._sending:
            return
        self._sending[folder] = start.events_key
        send = UploadTrialFiles(
            start.store, os.path.basename(folder), folder, attempt, start.sync_timeout_s
        )
        failed = partial(self._failed, folder, start.events_key)
        self._transfers.start(
            send, lambda _: self._settle(folder, _discard, self._delete), failed, ignore
        )

    def cut_off(self, trial: AttemptId, start: TrialSpec) -> None:
        """Remove the copies of checkpoints that a killed trial process could not remove."""
        self._disk.run(start.folder, partial(remove_copies, start.folder, trial[1]), do_nothing)

    def _failed(self, folder: str, events_key: str, reason: str, _is_corrupt: bool) -> None:
        def kept(path: str) -> None:
            self._warn(events_key, folder, path, reason.rstrip("."))
            self._make_room()

        self._settle(folder, _keep, kept)

    def _warn(self, events_key: str, folder: str, kept: str, reason: str) -> None:
        """Report that files were not sent, and where they are now."""
        _log_unsent(kept, reason)
        text = (
            f"Not all files of {os.path.basename(folder)} are in the store: {reason}. "
            f"They are in {kept} on node {self._node} for {_KEPT_DAYS} days, or until it needs the "
            "space."
        )
        self._emit(events_key, encode(NodeWarned(text)))

    def _settle(
        self, folder: str, move: Callable[[str, str], str], then: Callable[[str], object]
    ) -> None:
        """Move the folder of an upload that has ended; pass its path on."""

        def moved(path: str) -> None:
            self._sending.pop(folder, None)  # the node may have stopped waiting
            then(path)

        self._streamer.forget(folder)
        self._disk.run(self._names, partial(move, self._root, folder), moved)

    def _delete(self, path: str) -> None:
        if os.path.basename(path).startswith(_TRASH):
            self._disk.run(self._trash, partial(_remove, path), do_nothing)

    def _make_room(self) -> None:
        self._disk.run(self._root, partial(_make_room, self._root, self._limits), do_nothing)

    def _printing(self) -> Iterator[OutputSource]:
        for trial, start in self.running_trials():
            if self._is_ours(start.folder):
                yield OutputSource(start.events_key, *trial, start.folder)

    def _is_ours(self, folder: str) -> bool:
        return folder.startswith(f"{self._root}/")


def _put_aside(root: str) -> int:
    """Keep the folders of an earlier node, whose store is no longer known; return their number."""
    names = names_in(root)
    left = [name for name in names if not name.startswith((_TRASH, _UNSENT))]
    for number, name in enumerate(left):
        kept = _move(root, os.path.join(root, name), _unsent(name))
        if number < _LOGGED:
            _log_unsent(kept, "an earlier worker here ended")
    if len(left) > _LOGGED:
        _log.warning("files.not_sent more=%d", len(left) - _LOGGED)
    return len(names)


def _log_unsent(kept: str, reason: str) -> None:
    _log.warning("files.not_sent folder=%s reason=%r days=%d", kept, reason, _KEPT_DAYS)


def _unsent(name: str) -> str:
    return f"{_UNSENT}{time.time_ns()}-{name[:_NAME_CHARACTERS]}"


def _keep(root: str, folder: str) -> str:
    """Move a folder that was not sent out of the way of new trial processes."""
    return _leave(root, folder, _unsent(os.path.basename(folder)))


def _discard(root: str, folder: str) -> str:
    """Move a folder that was sent out of the way of new trial processes."""
    return _leave(root, folder, f"{_TRASH}{os.urandom(6).hex()}")


def _leave(root: str, folder: str, name: str) -> str:
    path = _move(root, folder, name)
    with suppress(OSError):  # other folders of its attempts, or of its experiment, are there
        while (folder := os.path.dirname(folder)) != root:
            os.rmdir(folder)
    return path


def _move(root: str, folder: str, name: str) -> str:
    """Rename a folder; return its path, which is the old one if that failed."""
    path = os.path.join(root, name)
    try:
        os.rename(folder, path)
    except FileNotFoundError:  # nothing was ever written
        return folder
    except OSError as problem:  # the trial may have changed its permissions
        _log.warning("files.not_removed folder=%s problem=%r", folder, str(problem))
        return folder
    return path


def _remove(trash: str) -> None:
    """Remove a folder with any permissions in it, with the trials' rights; follows no link."""
    remove_tree(trash)


def _empty_trash(root: str) -> None:
    for name in names_in(root):
        if name.startswith(_TRASH):
            _remove(os.path.join(root, name))


def _make_room(root: str, limits: CacheLimits) -> None:
    """Remove folders that were not sent if they are too old or do not fit beside newer ones."""
    room = limits.share_of(shutil.disk_usage(root).total)
    oldest = f"{_UNSENT}{time.time_ns() - _KEPT_DAYS * 86_400 * 10**9}"
    for name in sorted(names_in(root), reverse=True):
        if not name.startswith(_UNSENT):
            continue
        path = os.path.join(root, name)
        size = sum(max(one.st_blocks * 512, _ENTRY_BYTES) for one in statuses(path))
        if size <= room and name >= oldest:
            room -= size
        else:
            _log.warning("files.removed folder=%s", path)
            remove_tree(path)
