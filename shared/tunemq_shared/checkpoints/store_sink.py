"""`StoreSink`: saves a trial's checkpoints directly into a store."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

from tunemq_shared.base.retrying import CancelToken, StoreUnavailable, ignore, retried
from tunemq_shared.checkpoints.checkpoint_sink import checkpoint_key
from tunemq_shared.checkpoints.manifest import CheckpointInfo
from tunemq_shared.checkpoints.staging import make_in_store
from tunemq_shared.checkpoints.store import CheckpointStore
from tunemq_shared.protocol.messages import CheckpointCommitted, CheckpointRef

#: The errors of a share while its server is away, or its file system is mounted again.
_OUTAGES: Final = {
    errno.EROFS,
    errno.EIO,
    errno.ESTALE,
    errno.ENOTCONN,
    errno.ETIMEDOUT,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
}
_T = TypeVar("_T")


class StoreSink:
    """The `CheckpointSink` of one trial.

    Args:
        store: The experiment's store.
        folder_name: The name of the trial's folder in it.
        timeout_s: The most seconds to wait while a store's folder is not mounted, or its server is
            away.
        say: Called with the reason when such a wait begins, and with an empty text when it ends.
    """

    def __init__(
        self,
        store: CheckpointStore,
        folder_name: str,
        *,
        timeout_s: float = 1.0,
        say: Callable[[str], None] = ignore,
    ) -> None:
        self._store = store
        self._folder_name = folder_name
        self._timeout_s = timeout_s
        self._say = say
        self._trouble = ""

    def make_folder(self, folder: str) -> None:
        """Make the trial's folder; see `CheckpointSink.make_folder`."""
        self._retried(lambda: make_in_store(folder))

    def when_available(self, call: Callable[[], None]) -> None:
        """Call a function that writes into the trial's folder; see `CheckpointSink`."""
        self._retried(call)

    def save(self, source: Path, info: CheckpointInfo) -> CheckpointCommitted:
        """Save the files below ``source``; they are committed at once."""
        key = checkpoint_key(self._folder_name, info.attempt, info.n)
        committed = self._retried(lambda: self._store.put_checkpoint(key, source, info))
        return CheckpointCommitted(
            trial=info.trial,
            attempt=info.attempt,
            n=info.n,
            step=info.step,
            key=committed.key,
            sha256=committed.sha256,
            size=committed.size,
        )

    def get(self, ref: CheckpointRef, target: Path) -> dict[str, Any]:
        """Copy the verified files of ``ref`` into ``target``; see `CheckpointSink.get`."""
        get = self._store.get_checkpoint
        return self._retried(lambda: get(ref.key, ref.sha256, target)).state

    def _retried(self, call: Callable[[], _T]) -> _T:
        def once() -> _T:
            try:
                return call()
            except OSError as error:  # StoreError is one
                cause = error.__cause__ or error
                if isinstance(cause, OSError) and cause.errno in _OUTAGES:
                    raise StoreUnavailable(str(error)) from cause
                raise

        return retried(once, CancelToken(self._timeout_s), self._tell)

    def _tell(self, trouble: str) -> None:
        if trouble != self._trouble:
            self._trouble = trouble
            self._say(trouble)
