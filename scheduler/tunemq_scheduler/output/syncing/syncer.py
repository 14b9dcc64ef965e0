"""`Syncer`: copies folders to a destination and back, whatever the destination.

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
#: Seconds at most between two attempts.
LONGEST_PAUSE_S: Final = 60.0

_log = logging.getLogger(__name__)


class Syncer(ABC):
    """Copies folders to a destination and back, and deletes what is there.

    *Order.* One syncer does one thing at a time. ``sync_up``, ``sync_down`` and ``delete`` may do
    their work at once, or launch it and return; `wait` returns when it is done. What was not waited
    for is waited for by the next launch, or makes that return False.

    *Errors.* What goes wrong is raised by the call itself or by `wait`, once. `retry` does the last
    of the three again.

    *What is copied.* The files below a folder under their relative names; files that are at the
    destination and not in the source stay there. Excludes are patterns of relative paths, in which
    ``*`` also stands for slashes; what lies below an excluded folder is excluded too.

    *Threads.* A syncer belongs to one thread at a time, except `cancel`, which any thread may call.

    *Copies.* A search works with copies (`copy.deepcopy`) of the syncer that it is given, one for
    each folder; so a syncer can be pickled, and what is in flight stays behind.

    Args:
        sync_period: seconds between two syncs for ``sync_up_if_needed`` and
            ``sync_down_if_needed``.
        sync_timeout: seconds after which `wait` gives a launched transfer up.
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

    # --- what an implementation has to do ---------------------------------------------------------

    @abstractmethod
    def sync_up(
        self, local_dir: str, remote_dir: str, exclude: Sequence[str] | None = None
    ) -> bool:
        """Copy a local folder to the destination.

        Returns:
            Whether it was launched; False where something else is in flight.
        """

    @abstractmethod
    def sync_down(
        self, remote_dir: str, local_dir: str, exclude: Sequence[str] | None = None
    ) -> bool:
        """Copy from the destination into a local folder, which is made if need be.

        Returns:
            Whether it was launched; False where something else is in flight.
        """

    @abstractmethod
    def delete(self, remote_dir: str) -> bool:
        """Remove everything below an address at the destination; nothing there is no error.

        Returns:
            Whether it was launched; False where something else is in flight.
        """

    # --- what an implementation that launches its work has to do ----------------------------------

    def wait(self, timeout: float | None = None) -> None:  # noqa: B027  it was all done at once
        """Return when what was launched is done; at once where nothing was.

        Args:
            timeout: seconds since the launch, after which it is cancelled; ``sync_timeout`` by
                default.

        Raises:
            TimeoutError: it took longer; it does nothing more beside what is launched next.
            TuneError: it failed.
        """

    def retry(self) -> None:  # noqa: B027  likewise
        """Launch the last command again.

        Raises:
            TuneError: there was none.
        """

    def cancel(self) -> None:  # noqa: B027  likewise
        """Ask what is in flight to end soon; returns at once, and may be called by any thread."""

    def close(self) -> None:  # noqa: B027  likewise
        """Cancel what is in flight and return when it has ended; the syncer is not used again."""

    @classmethod
    def validate_upload_dir(cls, upload_dir: str | None) -> bool:
        """Say that the destination is of a kind that this syncer knows; none at all is fine too.

        Raises:
            ConfigError: it is not; says what would be.
        """
        if upload_dir and "://" not in upload_dir and not upload_dir.startswith(("/", "~")):
            raise ConfigError(
                f"upload_dir={upload_dir!r} is neither an address nor an absolute path; give "
                f"s3://bucket/prefix, file:///folder or /folder."
            )
        return True

    # --- what all have ----------------------------------------------------------------------------

    def sync_up_if_needed(
        self, local_dir: str, remote_dir: str, exclude: Sequence[str] | None = None
    ) -> bool:
        """`sync_up`, unless one was launched less than ``sync_period`` ago.

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
        """`sync_down`, unless one was launched less than ``sync_period`` ago.

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
        """`wait`, and after a failure try again up to ``max_retries`` times.

        The pauses grow from ``backoff_s`` seconds, twofold each, and vary, so that many who failed
        together do not come back together. The last attempt is waited for like the others.

        Raises:
            ConfigError: ``max_retries`` is below 1.
            TuneError: the last attempt failed too; its error is the cause.
        """
        if max_retries < 1:
            raise ConfigError(
                f"wait_or_retry(max_retries={max_retries!r}) is not usable: give a whole number "
                f"from 1, or call wait()."
            )
        for attempt in range(max_retries + 1):
            try:
                if attempt:
                    self.retry()
                self.wait()
            except Exception as error:  # a syncer may be the user's: what it raises is told here
                if attempt == max_retries:
                    raise TuneError(f"given up after {max_retries} retries: {error}") from error
                longest = min(LONGEST_PAUSE_S, backoff_s * 2.0**attempt)
                pause_s = random.uniform(longest / 2, longest)
                self.pause(pause_s)
                # Told now: had it been cancelled, there were no next attempt.
                _log.warning("A sync failed, and is tried again after %.1f s: %s", pause_s, error)
            else:
                return

    def pause(self, seconds: float) -> None:
        """What `wait_or_retry` does between two attempts.

        Raises:
            TuneError: this syncer was cancelled meanwhile; there is no next attempt.
        """
        time.sleep(seconds)

    def reset(self) -> None:
        """Forget when it last synced: the next ``sync_..._if_needed`` is needed."""
        self.last_sync_up_time = -math.inf
        self.last_sync_down_time = -math.inf

    def __getstate__(self) -> dict[str, Any]:
        """Its settings; times of this process's clock mean nothing elsewhere."""
        infinitely = -math.inf
        return {
            **self.__dict__,
            "last_sync_up_time": infinitely,
            "last_sync_down_time": infinitely,
        }
