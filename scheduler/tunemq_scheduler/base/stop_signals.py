"""`StopSignals`: what Ctrl-C and SIGTERM mean while a search runs."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Final, Self

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """While its ``with`` block runs, signals ask the search to end instead of ending the script.

    The first SIGINT or SIGTERM calls ``request_stop``; a second SIGINT calls ``stop_now``; a third
    one raises KeyboardInterrupt where the script is. Behind the block the user's own handlers are
    back, and the signal has its usual meaning: KeyboardInterrupt is raised for SIGINT, SIGTERM is
    raised again.

    Nothing is done outside the main thread (Python calls handlers there only), about a signal that
    the script ignores, or whose handler Python cannot restore.

    Args:
        request_stop: gets the signal's name; runs in a signal handler: it must not block, take a
            lock or raise.
        stop_now: likewise.
    """

    def __init__(self, request_stop: Callable[[str], None], stop_now: Callable[[], None]) -> None:
        self._request_stop = request_stop
        self._stop_now = stop_now
        self._restored: dict[signal.Signals, Any] = {}
        self._interrupts = 0
        #: Whether everything was killed; an error of the search is then no news.
        self._was_impatient = False
        #: The first signal that came, if any.
        self.received: signal.Signals | None = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                if signal.getsignal(number) not in {signal.SIG_IGN, None}:
                    self._restored[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._restored.items():
            signal.signal(number, handler)
        self._restored.clear()
        if self.received is signal.SIGTERM:
            signal.raise_signal(signal.SIGTERM)
        elif self.received is signal.SIGINT and (error is None or self._was_impatient):
            raise KeyboardInterrupt from error

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        received = signal.Signals(number)
        if received is signal.SIGINT:
            self._interrupts += 1
        if self.received is None:
            self.received = received
            self._request_stop(received.name)
        elif received is signal.SIGINT:
            # After a SIGTERM the first Ctrl-C is a second request, and so means "now".
            impatience = self._interrupts + (self.received is signal.SIGTERM)
            if impatience > 2:
                raise KeyboardInterrupt
            self._was_impatient = True
            self._stop_now()
