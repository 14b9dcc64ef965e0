"""`BackgroundSyncer`: runs its subclass's transfers in a thread, one at a time."""

from __future__ import annotations

import logging
import threading
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from tunemq_scheduler.output.syncing.background_transfer import BackgroundTransfer
from tunemq_scheduler.output.syncing.syncer import DEFAULT_SYNC_PERIOD, DEFAULT_SYNC_TIMEOUT, Syncer
from tunemq_shared.base.errors import TuneError

#: A function and its arguments; it also receives ``cancel``, and should check it regularly.
SyncCommand = tuple[Callable[..., Any], dict[str, Any]]

_log = logging.getLogger(__name__)


class BackgroundSyncer(Syncer):
    """A syncer whose transfers run in a thread, are cancelled when overdue, and never overlap.

    A subclass defines the transfers; see `Syncer` for the rest.
    """

    def __init__(
        self,
        sync_period: float = DEFAULT_SYNC_PERIOD,
        sync_timeout: float = DEFAULT_SYNC_TIMEOUT,
    ) -> None:
        super().__init__(sync_period, sync_timeout)
        self._command: SyncCommand | None = None
        self._transfer: BackgroundTransfer | None = None
        self._cancelled = threading.Event()

    @abstractmethod
    def _sync_up_command(self, local_path: str, uri: str, exclude: Sequence[str]) -> SyncCommand:
        """Return the command that copies the folder to the address."""

    @abstractmethod
    def _sync_down_command(self, uri: str, local_path: str, exclude: Sequence[str]) -> SyncCommand:
        """Return the command that copies from the address into the folder."""

    @abstractmethod
    def _delete_command(self, uri: str) -> SyncCommand:
        """Return the command that deletes everything at the address."""

    def sync_up(
        self, local_dir: str, remote_dir: str, exclude: Sequence[str] | None = None
    ) -> bool:
        """See `Syncer.sync_up`."""
        command = self._sync_up_command(local_dir, remote_dir, exclude or ())
        return self._launch(command, f"copying {local_dir} to {remote_dir}")

    def sync_down(
        self, remote_dir: str, local_dir: str, exclude: Sequence[str] | None = None
    ) -> bool:
        """See `Syncer.sync_down`."""
        command = self._sync_down_command(remote_dir, local_dir, exclude or ())
        return self._launch(command, f"copying {remote_dir} to {local_dir}")

    def delete(self, remote_dir: str) -> bool:
        """See `Syncer.delete`."""
        return self._launch(self._delete_command(remote_dir), f"deleting {remote_dir}")

    def wait(self, timeout: float | None = None) -> None:
        """See `Syncer.wait`."""
        if self._transfer is None:
            return
        try:
            self._transfer.wait(timeout)
        except TimeoutError:
            raise
        except Exception as error:  # may be the user's code; the caller logs it
            raise TuneError(f"the sync failed: {error}") from error

    def retry(self) -> None:
        """See `Syncer.retry`; it does not wait for the running transfer."""
        if self._command is None:
            raise TuneError("there is no operation to retry: nothing was synced or deleted before.")
        self._check_open()
        if self._transfer is not None and self._transfer.is_running:
            return
        function, arguments = self._command
        call = partial(function, **arguments)
        self._transfer = BackgroundTransfer(call, self.sync_timeout, after=self._transfer)
        if self._cancelled.is_set():  # another thread cancelled it during the launch
            self._transfer.cancel()

    def cancel(self) -> None:
        """See `Syncer.cancel`; launches nothing from now on."""
        self._cancelled.set()
        transfer = self._transfer
        if transfer is not None:
            transfer.cancel()

    def close(self) -> None:
        """See `Syncer.close`."""
        self.cancel()
        if self._transfer is not None:
            self._transfer.join()

    def pause(self, seconds: float) -> None:
        """See `Syncer.pause`."""
        self._cancelled.wait(seconds)
        self._check_open()

    def _check_open(self) -> None:
        if self._cancelled.is_set():
            raise TuneError("this syncer was cancelled or closed; it starts no operation any more.")

    def _launch(self, command: SyncCommand, what: str) -> bool:
        self._check_open()
        transfer = self._transfer
        if transfer is not None and transfer.is_running and not transfer.is_overdue:
            _log.warning("The last sync is still in progress: %s is left out.", what)
            return False
        try:
            self.wait()
        except Exception as error:  # noqa: BLE001  no caller waited for it, and the new sync replaces it
            _log.warning("The last sync failed: %s", error)
        self._command = command
        self.retry()
        return True

    def __getstate__(self) -> dict[str, Any]:
        """Return the settings, without the running transfer."""
        state = super().__getstate__()
        for name in ("_command", "_transfer", "_cancelled"):
            del state[name]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._command = None
        self._transfer = None
        self._cancelled = threading.Event()
