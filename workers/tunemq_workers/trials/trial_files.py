"""`TrialFiles`: uploads the folders of trials on this node when their processes have ended.

The trial's next attempt may start in the same folder meanwhile. So a folder is removed when its
files were sent and no trial process uses it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from typing import Final

from tunemq_shared.base.retrying import ignore
from tunemq_shared.checkpoints.checkpoint_folders import remove_copies
from tunemq_shared.objects.store_address import is_remote
from tunemq_shared.protocol.messages import NodeWarned, TrialSpec, encode
from tunemq_shared.system.folder_trees import remove_tree
from tunemq_workers.broker.publisher_messages import SendOutput
from tunemq_workers.runtime.disk_jobs import DiskJobs
from tunemq_workers.runtime.reactor import Reactor, do_nothing
from tunemq_workers.runtime.transfer_messages import UploadTrialFiles
from tunemq_workers.runtime.trial_process_state import AttemptId, Emit
from tunemq_workers.system.trial_user import own_files
from tunemq_workers.transfers.transfer_client import TransferClient
from tunemq_workers.trials.local_start_order import TRIALS
from tunemq_workers.trials.output_streamer import OutputSource, OutputStreamer

#: A node that ends waits this long for one folder, and longer only while bytes are transferred.
_TIMEOUT_S: Final = 600.0

#: The prefix of folders that are being removed.
_TRASH: Final = ".trash-"

_log = logging.getLogger(__name__)


class TrialFiles:
    """Uploads, streams and removes the folders below ``trials``. Used by the node's loop only.

    Args:
        timers, send, may_send: see `OutputStreamer`.
        disk: reads and removes files.
        transfers: uploads folders.
        emit: takes (events stream, encoded event).
        folder: the node's working folder.
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
    ) -> None:
        #: Return the trials that have a process, and those that will get one.
        self.running_trials: Callable[[], Iterable[tuple[AttemptId, TrialSpec]]] = tuple
        self.expected: Callable[[], Iterable[TrialSpec]] = tuple
        self._transfers, self._disk, self._emit = transfers, disk, emit
        self._streamer = OutputStreamer(timers, disk, send, may_send, self._printing)
        self._root = os.path.join(folder, TRIALS)
        self._sending: dict[tuple[str, int], str] = {}

    def start(self) -> None:
        """Start; remove the folders of an earlier node, whose store is no longer known."""
        with suppress(FileNotFoundError):
            for name in os.listdir(self._root):
                self._discard(os.path.join(self._root, name))
        self._streamer.start()

    def close(self) -> None:
        """Stop waiting for uploads."""
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
        key = (folder, attempt)
        if not is_remote(start.store) or key in self._sending:
            return
        self._sending[key] = start.events_key
        send = UploadTrialFiles(start.store, os.path.basename(folder), folder, attempt, _TIMEOUT_S)
        self._transfers.start(send, lambda _: self._settle(key), partial(self._failed, key), ignore)

    def cut_off(self, trial: AttemptId, start: TrialSpec) -> None:
        """Remove the copies of checkpoints that a killed trial process could not remove."""
        self._disk.run(start.folder, partial(remove_copies, start.folder, trial[1]), do_nothing)

    def _failed(self, key: tuple[str, int], reason: str, _is_corrupt: bool) -> None:
        folder, _ = key
        text = f"Not all files of {os.path.basename(folder)} are in the store: {reason}"
        _log.warning("files.not_sent folder=%s reason=%r", folder, reason)
        self._emit(self._sending[key], encode(NodeWarned(text)))
        self._settle(key)

    def _settle(self, key: tuple[str, int]) -> None:
        del self._sending[key]
        folder, _ = key
        running_trials = {start.folder for _, start in self.running_trials()}
        expected = {os.path.join(self._root, start.folder) for start in self.expected()}
        if folder not in {*running_trials, *expected, *(other for other, _ in self._sending)}:
            self._streamer.forget(folder)
            self._discard(folder)
            with suppress(OSError):  # other folders of its experiment are there
                os.rmdir(os.path.dirname(folder))

    def _discard(self, folder: str) -> None:
        """Move a folder out of the way of new trial processes at once, then delete it."""
        trash = os.path.join(self._root, f"{_TRASH}{os.urandom(6).hex()}")
        try:
            os.rename(folder, trash)
        except FileNotFoundError:  # nothing was ever written
            return
        except OSError as problem:  # the trial may have changed its permissions
            _log.warning("files.not_removed folder=%s problem=%r", folder, str(problem))
            return
        self._disk.run(folder, partial(_remove, trash), do_nothing)

    def _printing(self) -> Iterator[OutputSource]:
        for trial, start in self.running_trials():
            if self._is_ours(start.folder):
                yield OutputSource(start.events_key, *trial, start.folder)

    def _is_ours(self, folder: str) -> bool:
        return folder.startswith(f"{self._root}/")


def _remove(trash: str) -> None:
    """Remove a folder with any permissions in it; follows no link."""
    with own_files():
        remove_tree(trash)
