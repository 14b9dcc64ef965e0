"""`BackgroundTransfer`: one function call in a thread, with a timeout, cancellation and a fence."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from tunemq_shared.base.retrying import CancelToken, TransferTimedOut


class BackgroundTransfer:
    """Call ``function`` once, in a new thread.

    *Timeout.* It counts from the start, not from the call of `wait`. A function that exceeds it
    learns this from its `CancelToken`, which it checks between two pieces of work.

    *Fence.* A thread cannot be killed, so one that was given up may run for another moment. A
    transfer that names it as ``after`` does nothing before that thread has ended; its own timeout
    runs meanwhile.

    *Threads.* One thread uses it; the function runs in a daemon thread, which ends with the
    process.

    Args:
        function: called with ``cancel=CancelToken(timeout_s)``.
        timeout_s: seconds from the start.
        after: the transfer with which this one must not overlap.
        on_end: called in the thread when the function has returned or raised.
    """

    def __init__(
        self,
        function: Callable[..., object],
        timeout_s: float,
        *,
        after: BackgroundTransfer | None = None,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self.timeout_s = timeout_s
        self._function, self._on_end = function, on_end
        self._before = after.threads() if after is not None else []
        self._started_at = time.monotonic()
        self._cancel = CancelToken(timeout_s)
        self._error: BaseException | None = None
        self._is_over = self._is_waited_for = False
        self._thread = threading.Thread(target=self._work, name="sync", daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Whether it has neither ended nor been given up."""
        return not (self._is_over or self._is_waited_for)

    @property
    def is_overdue(self) -> bool:
        """Whether it exceeds its timeout."""
        return self.is_running and time.monotonic() - self._started_at >= self.timeout_s

    def threads(self) -> list[threading.Thread]:
        """Return the running threads of this transfer and of those before it."""
        return [thread for thread in (*self._before, self._thread) if thread.is_alive()]

    def wait(self, timeout: float | None = None) -> None:
        """Return when the function has ended; immediately if another call has waited for it.

        Args:
            timeout: seconds from its start. Default: ``timeout_s``.

        Raises:
            TimeoutError: it took longer. It is cancelled and given up.
            Exception: the function's own, once.
        """
        if self._is_waited_for:
            return
        allowed = self.timeout_s if timeout is None else min(timeout, self.timeout_s)
        self._thread.join(max(0.0, self._started_at + allowed - time.monotonic()))
        self._is_waited_for = True
        if self._thread.is_alive():
            self._cancel.cancel()
            raise _timed_out(allowed)
        if isinstance(self._error, TransferTimedOut):
            raise _timed_out(allowed) from self._error
        if self._error is not None:
            raise self._error

    def cancel(self) -> None:
        """Ask it to end soon; `wait` then raises its error. Any thread may call this."""
        self._cancel.cancel()

    def join(self) -> None:
        """Return when all of its threads have ended, with or without an error."""
        for thread in self.threads():
            thread.join()

    def _work(self) -> None:
        try:
            for thread in self._before:
                thread.join(max(0.0, self._cancel.left))
                if thread.is_alive():
                    raise TimeoutError("the transfer before it was cancelled and has not ended")
            self._cancel.check()
            self._function(cancel=self._cancel)
        except BaseException as error:  # noqa: BLE001  the thread's edge: kept here, and raised and logged by who waits
            self._error = error
        finally:
            self._is_over = True
            self._on_end()


def _timed_out(allowed: float) -> TimeoutError:
    return TimeoutError(f"it took longer than {allowed:g} s and was cancelled")
