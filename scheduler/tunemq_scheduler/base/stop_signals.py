"""`StopSignals`: the meaning of Ctrl-C and SIGTERM while a search runs."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Final, Self

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """Makes signals end the search instead of the script, within a ``with`` block.

    The first SIGINT or SIGTERM calls ``request_stop``; a second SIGINT calls ``stop_now``; a third
    raises KeyboardInterrupt in the script. After the block the user's own handlers are restored,
    and the signal gets its usual effect: KeyboardInterrupt is raised for SIGINT, SIGTERM is raised
    again.

    It does nothing outside the main thread (Python calls handlers only there), or for a signal that
    the script ignores or whose handler Python cannot restore.

    Args:
        request_stop: receives the signal's name; it runs in a signal handler, so it must not block,
            take a lock or raise.
        stop_now: the same restrictions apply.
    """

    def __init__(self, request_stop: Callable[[str], None], stop_now: Callable[[], None]) -> None:
        self._request_stop = request_stop
        self._stop_now = stop_now
        self._restored: dict[signal.Signals, Any] = {}
        self._interrupts = 0
        #: Whether everything was killed, which explains any error of the search.
        self._was_impatient = False
        #: The first signal that arrived, if any.
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
