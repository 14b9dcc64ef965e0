"""`BackgroundTransfer`: one function at work in a thread, with a timeout, cancelled and fenced."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from tunemq_shared.retrying import Cancel, TimedOut


class BackgroundTransfer:
    """Runs ``function`` in a thread of its own, once at a time.

    *Timeout.* It counts from the start, not from the call of `wait`. What takes longer is told so
    through its `Cancel`, which it checks between two pieces of work.

    *Fence.* A thread cannot be killed, so one that was given up may go on for a moment. Whatever
    comes after it, here or in a transfer that names this one as ``after``, does nothing before that
    thread has ended; its own timeout runs meanwhile.

    *Threads.* One thread uses it; the function runs in another, a daemon, that ends with the
    process.

    Args:
        function: called with the arguments of `start` and ``cancel=Cancel(timeout_s)``.
        timeout_s: seconds from the start.
        after: the transfer that this one must not run beside.
        on_end: called in the thread when the function has returned or raised.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        timeout_s: float,
        *,
        after: BackgroundTransfer | None = None,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self.timeout_s = timeout_s
        self.start_time = float("-inf")
        self._function = function
        self._on_end = on_end
        self._run: _Run | None = None
        self._given_up: list[threading.Thread] = after.threads() if after is not None else []

    @property
    def is_running(self) -> bool:
        """Whether it was started, has not ended, and was not given up."""
        return self._run is not None and not self._run.is_over

    @property
    def is_overdue(self) -> bool:
        """Whether it runs longer than it may."""
        return self.is_running and time.monotonic() - self.start_time >= self.timeout_s

    def threads(self) -> list[threading.Thread]:
        """Those in which something of it, or of what came before it, still runs."""
        running = [self._run.thread] if self._run is not None else []
        return [thread for thread in (*self._given_up, *running) if thread.is_alive()]

    def start(self, *args: Any, **kwargs: Any) -> bool:
        """Start it, unless it runs.

        Returns:
            Whether it was started.
        """
        if self.is_running:
            return False
        self._given_up = self.threads()
        self.start_time = time.monotonic()
        self._run = _Run(self, self._function, args, kwargs, self._given_up, self._on_end)
        self._run.thread.start()
        return True

    def wait(self, timeout: float | None = None) -> Any:
        """What the function returned; None where nothing runs or it was told already.

        Args:
            timeout: seconds from its start; those that it was made with by default.

        Raises:
            TimeoutError: it took longer. It is cancelled and given up: it can be started again.
            Exception: what the function raised, once.
        """
        run = self._run
        if run is None:
            return None
        allowed = self.timeout_s if timeout is None else min(timeout, self.timeout_s)
        run.thread.join(max(0.0, self.start_time + allowed - time.monotonic()))
        self._run = None
        if run.thread.is_alive():
            run.cancel.cancel()
            self._given_up.append(run.thread)
            raise _timed_out(allowed)
        if isinstance(run.error, TimedOut):
            raise _timed_out(allowed) from run.error
        if run.error is not None:
            raise run.error
        return run.result

    def cancel(self) -> None:
        """Ask it to end soon; `wait` then raises what it raised. Any thread may call this."""
        run = self._run
        if run is not None:
            run.cancel.cancel()

    def join(self) -> None:
        """Return when nothing of it runs any longer, whatever became of it."""
        for thread in self.threads():
            thread.join()


def _timed_out(allowed: float) -> TimeoutError:
    return TimeoutError(f"it took longer than {allowed:g} s and was cancelled")


class _Run:
    """One start: the thread, its token, and what came of it."""

    def __init__(
        self,
        transfer: BackgroundTransfer,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        before: list[threading.Thread],
        on_end: Callable[[], None],
    ) -> None:
        self.cancel = Cancel(transfer.timeout_s)
        self.is_over = False
        self.result: Any = None
        self.error: BaseException | None = None
        self._call = (function, args, kwargs)
        self._before = list(before)
        self._on_end = on_end
        name = getattr(function, "__name__", type(function).__name__)
        self.thread = threading.Thread(target=self._work, name=f"{name} (sync)", daemon=True)

    def _work(self) -> None:
        function, args, kwargs = self._call
        try:
            for thread in self._before:
                thread.join(max(0.0, self.cancel.left))
                if thread.is_alive():
                    raise TimeoutError("the transfer before it was cancelled and has not ended")
            self.cancel.check()
            self.result = function(*args, **kwargs, cancel=self.cancel)
        except BaseException as error:  # noqa: BLE001  the thread's edge: kept here, and raised and logged by who waits
            self.error = error
        finally:
            self.is_over = True
            self._on_end()
