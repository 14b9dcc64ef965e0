"""`within`: what does not end by itself is waited for only so long."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

_T = TypeVar("_T")


def within(seconds: float, call: Callable[[], _T]) -> _T:
    """What ``call`` returns or raises.

    A server that sends a byte now and then, and a folder of a network that is gone, keep a thread
    for ever, whatever the timeouts of connections: its thread stays, and ends with the process.

    Raises:
        TimeoutError: it has not ended within this time.
    """
    ended: Future[_T] = Future()

    def run() -> None:
        try:
            ended.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            ended.set_exception(error)

    threading.Thread(target=run, name="bounded check", daemon=True).start()
    try:
        return ended.result(timeout=seconds)
    except TimeoutError:
        if ended.done():  # the call's own
            raise
        raise TimeoutError(f"it has not ended within {seconds:g} s") from None
