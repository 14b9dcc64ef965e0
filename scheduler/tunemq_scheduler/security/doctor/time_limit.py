"""`within`: limits the time of calls that have no reliable timeout."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

_T = TypeVar("_T")


def within(seconds: float, call: Callable[[], _T]) -> _T:
    """Run ``call`` in a thread for at most ``seconds``; returns or raises what it does.

    A server that sends a byte now and then, or a dead network folder, can block a thread for ever,
    whatever the timeouts of connections. Then the thread stays until the process ends.

    Raises:
        TimeoutError: ``call`` did not end in time.
    """
    ended: Future[_T] = Future()

    def run() -> None:
        try:
            ended.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised in the waiting thread
            ended.set_exception(error)

    threading.Thread(target=run, name="bounded check", daemon=True).start()
    try:
        return ended.result(timeout=seconds)
    except TimeoutError:
        if ended.done():  # `call` itself raised it
            raise
        raise TimeoutError(f"it has not ended within {seconds:g} s") from None
