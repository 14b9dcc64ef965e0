"""`Syncer`: the interface for copying folders to a destination and back.

Every implementation passes the suite in ``tests/contracts/test_syncer.py``.
"""

from __future__ import annotations

import logging
import math
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Final

from tunemq_shared.base.errors import ConfigError, TuneError

#: Seconds between two syncs of the same folder.
DEFAULT_SYNC_PERIOD: Final = 300
#: Seconds after which a transfer is cancelled.
DEFAULT_SYNC_TIMEOUT: Final = 1800
#: The most seconds between two attempts.
LONGEST_PAUSE_S: Final = 60.0

_log = logging.getLogger(__name__)


class Syncer(ABC):
    """Base class of syncers: copy folders to a destination and back, and delete folders there.

    *Order.* A syncer does one operation at a time. ``sync_up``, ``sync_down`` and ``delete`` may
    work immediately, or launch the work and return; `wait` returns when it is done. The next launch
    waits for an operation that has not been waited for, or returns False because of it.

    *Errors.* The call itself or `wait` raises an error, once. `retry` repeats the last operation.

    *Copied files.* The files below a folder under their relative names; files that exist only at
    the destination stay there. Excludes are patterns of relative paths, in which ``*`` also matches
    slashes; everything below an excluded folder is excluded, too.

    *Threads.* A syncer belongs to one thread at a time, except `cancel`, which any thread may call.

    *Copies.* A search works with copies (`copy.deepcopy`) of the user's syncer, one for each
    folder. So a syncer must support pickling, which omits running transfers.

    Args:
        sync_period: seconds between two syncs for ``sync_up_if_needed`` and
            ``sync_down_if_needed``.
        sync_timeout: seconds after which `wait` gives up a launched transfer.
    """

    def __init__(
        self,
        sync_period: float = DEFAULT_SYNC_PERIOD,
        sync_timeout: float = DEFAULT_SYNC_TIMEOUT,
    ) -> None:
        self.sync_period = sync_period
        self.sync_timeout = sync_timeout
        self.last_sync_up_time = -math.inf
        self.last_sync_down_time = -math.inf

    # --- required of implementations --------------------------------------------------------------

    @abstractmethod
    def sync_up(
        self, local_dir: str, remote_dir: str, exclude: Sequence[str] | None = None
    ) -> bool:
        """Copy a local folder to the destination.

        Returns:
            Whether it was launched; False if another operation is running.
        """

    @abstractmethod
    def sync_down(
        self, remote_dir: str, local_dir: str, exclude: Sequence[str] | None = None
    ) -> bool:
        """Copy from the destination into a local folder, which is created if necessary.

        Returns:
            Whether it was launched; False if another operation is running.
        """

    @abstractmethod
    def delete(self, remote_dir: str) -> bool:
        """Delete everything below an address at the destination; an empty address is no error.

        Returns:
            Whether it was launched; False if another operation is running.
        """

    # --- required of implementations that launch their work ---------------------------------------

    def wait(self, timeout: float | None = None) -> None:  # noqa: B027  it was all done at once
        """Return when the launched operation is done; immediately if there is none.

        Args:
            timeout: seconds since the launch after which it is cancelled. Default:
                ``sync_timeout``.

        Raises:
            TimeoutError: it took longer; it has no effect on later operations.
            TuneError: it failed.
        """

    def retry(self) -> None:  # noqa: B027  likewise
        """Launch the last operation again.

        Raises:
            TuneError: there was none.
        """

    def cancel(self) -> None:  # noqa: B027  likewise
        """Ask the running operation to end soon; returns at once, and any thread may call it."""

    def close(self) -> None:  # noqa: B027  likewise
        """Cancel the running operation and wait for its end; the syncer is not used again."""

    @classmethod
    def validate_upload_dir(cls, upload_dir: str | None) -> bool:
        """Check that the syncer supports the destination (or None); return True.

        Raises:
            ConfigError: it does not; the message names supported destinations.
        """
        if upload_dir and "://" not in upload_dir and not upload_dir.startswith(("/", "~")):
            raise ConfigError(
                f"upload_dir={upload_dir!r} is neither an address nor an absolute path; give "
                f"s3://bucket/prefix, file:///folder or /folder."
            )
        return True

    # --- shared by all implementations ------------------------------------------------------------

    def sync_up_if_needed(
        self, local_dir: str, remote_dir: str, exclude: Sequence[str] | None = None
    ) -> bool:
        """Call `sync_up`, unless one was launched less than ``sync_period`` ago.

        Returns:
            Whether it was launched. Only a launch starts a new period.
        """
        now = time.monotonic()
        is_due = now - self.last_sync_up_time >= self.sync_period
        launched = is_due and self.sync_up(local_dir, remote_dir, exclude)
        if launched:
            self.last_sync_up_time = now
        return launched

    def sync_down_if_needed(
        self, remote_dir: str, local_dir: str, exclude: Sequence[str] | None = None
    ) -> bool:
        """Call `sync_down`, unless one was launched less than ``sync_period`` ago.

        Returns:
            Whether it was launched. Only a launch starts a new period.
        """
        now = time.monotonic()
        is_due = now - self.last_sync_down_time >= self.sync_period
        launched = is_due and self.sync_down(remote_dir, local_dir, exclude)
        if launched:
            self.last_sync_down_time = now
        return launched

    def wait_or_retry(self, max_retries: int = 3, backoff_s: float = 5) -> None:
        """Call `wait`, and after a failure retry up to ``max_retries`` times.

        The pauses start at ``backoff_s`` seconds, double each time, and vary at random, so that
        syncers that failed together do not retry together. The last attempt is waited for, too.

        Raises:
            ConfigError: ``max_retries`` is below 1.
            TuneError: the last attempt failed, too; its error is the cause.
        """
        if max_retries < 1:
            raise ConfigError(
                f"wait_or_retry(max_retries={max_retries!r}) is invalid: give a whole number "
                f"from 1, or call wait()."
            )
        for attempt in range(max_retries + 1):
            try:
                if attempt:
                    self.retry()
                self.wait()
            except Exception as error:  # a user's syncer may raise anything; log it here
                if attempt == max_retries:
                    raise TuneError(f"given up after {max_retries} retries: {error}") from error
                longest = min(LONGEST_PAUSE_S, backoff_s * 2.0**attempt)
                pause_s = random.uniform(longest / 2, longest)
                self.pause(pause_s)
                # Log after the pause: a cancelled syncer has no next attempt.
                _log.warning("A sync failed, and is tried again after %.1f s: %s", pause_s, error)
            else:
                return

    def pause(self, seconds: float) -> None:
        """Pause between two attempts of `wait_or_retry`.

        Raises:
            TuneError: this syncer was cancelled meanwhile; there is no next attempt.
        """
        time.sleep(seconds)

    def reset(self) -> None:
        """Forget the time of the last sync: the next ``sync_..._if_needed`` launches one."""
        self.last_sync_up_time = -math.inf
        self.last_sync_down_time = -math.inf

    def __getstate__(self) -> dict[str, Any]:
        """Return the settings, without times, which are meaningless in another process."""
        infinitely = -math.inf
        return {
            **self.__dict__,
            "last_sync_up_time": infinitely,
            "last_sync_down_time": infinitely,
        }
