"""Trying again what a store may do later: growing, jittered pauses, a deadline, calling it off."""

from __future__ import annotations

import contextlib
import itertools
import math
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final, Self, TypeVar

from tunemq_shared.base.backoff import backoff_s
from tunemq_shared.base.errors import StoreError

#: Seconds before the second try, and the most before any; chance shortens each by up to half.
FIRST_PAUSE_S: Final = 0.2
LONGEST_PAUSE_S: Final = 5.0

_T = TypeVar("_T")
_R = TypeVar("_R")


class StoreUnavailable(StoreError):
    """The store did not answer, or cannot do it now; another try may succeed."""


class TransferCancelled(StoreError):
    """The transfer was called off."""


class TransferTimedOut(StoreError, TimeoutError):
    """The store did not do it in the time that was given."""


class CancelToken:
    """Ends what it was handed to: when its time is over, or when somebody calls `cancel`.

    **Threads.** Any may call anything.

    Args:
        timeout_s: Seconds from now until `TransferTimedOut`.
        deadline: When that is, on the monotonic clock, where it is not from now.
    """

    def __init__(self, timeout_s: float = math.inf, *, deadline: float | None = None) -> None:
        self.timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s if deadline is None else deadline
        self._called_off = threading.Event()
        self._children: list[Self] = []

    @property
    def left(self) -> float:
        """Seconds until its time is over, at least 0."""
        return max(0.0, self._deadline - time.monotonic())

    def cancel(self) -> None:
        """Call it off; `check` raises from now on."""
        self._called_off.set()
        for child in tuple(self._children):
            child.cancel()

    def check(self) -> None:
        """Return while it is to go on.

        Raises:
            Cancelled: it was called off.
            TimedOut: its time is over.
        """
        if self._called_off.is_set():
            raise TransferCancelled
        if not self.left:
            raise TransferTimedOut(f"it was not done within {self.timeout_s:g} s.")

    def pause(self, seconds: float) -> None:
        """Sleep so long, or until its time is over, or until it is called off."""
        self._called_off.wait(min(seconds, self.left, threading.TIMEOUT_MAX))

    @contextlib.contextmanager
    def child(self, timeout_s: float = math.inf) -> Iterator[Self]:
        """One that ends no later than this one and may be called off on its own.

        Args:
            timeout_s: Seconds from now until its own time is over, too.
        """
        if timeout_s < self.left:
            child = type(self)(timeout_s)
        else:
            child = type(self)(self.timeout_s, deadline=self._deadline)
        self._children.append(child)
        if self._called_off.is_set():
            child.cancel()
        try:
            yield child
        finally:
            self._children.remove(child)


def ignore(_trouble: str) -> None:
    """The ``on_trouble`` of those who need not know."""


def retried(
    call: Callable[[], _T], cancel: CancelToken, on_trouble: Callable[[str], None] = ignore
) -> _T:
    """What ``call`` returns, tried again as often as it raises `StoreUnavailable`.

    Args:
        on_trouble: Told what was wrong, before each pause; an empty text when it goes on.

    Raises:
        Cancelled: ``cancel`` was called off.
        TimedOut: its time is over; the message says what the last trouble was.
    """
    trouble: StoreUnavailable | None = None
    for tries in itertools.count():
        try:
            cancel.check()
            result = call()
        except StoreUnavailable as error:
            trouble = error
        except TransferTimedOut as error:  # in the middle of a try, perhaps
            if trouble is None or error.__cause__ is not None:  # nothing was wrong, or it says what
                raise
            raise _gave_up(trouble, cancel) from trouble
        else:
            if tries:
                on_trouble("")
            return result
        if cancel.left:
            on_trouble(str(trouble))
            longest = backoff_s(tries, FIRST_PAUSE_S, LONGEST_PAUSE_S)
            cancel.pause(longest * random.uniform(0.5, 1.0))
        if not cancel.left:
            raise _gave_up(trouble, cancel) from trouble
    raise AssertionError  # it counts for ever


def _gave_up(trouble: StoreUnavailable, cancel: CancelToken) -> TransferTimedOut:
    return TransferTimedOut(f"{trouble} Gave up after {cancel.timeout_s:g} s.")


def in_parallel(
    work: Callable[[_T, CancelToken], _R], items: Iterable[_T], cancel: CancelToken, *, at_once: int
) -> list[_R]:
    """What ``work`` makes of each item, in their order; the first failure stops the others.

    ``items`` is gone through in the calling thread. ``work`` is also given what ends it early.
    """
    failures: list[BaseException] = []

    def run(item: _T) -> _R:
        try:
            return work(item, child)
        except BaseException as error:
            failures.append(error)
            child.cancel()
            raise

    with cancel.child() as child, ThreadPoolExecutor(at_once) as pool:
        try:
            futures = []
            for item in items:
                futures.append(pool.submit(run, item))
                if failures:
                    break
            return [future.result() for future in futures]
        except BaseException as error:
            child.cancel()
            if failures and failures[0] is not error:
                # What the others raise because they were stopped explains nothing.
                raise failures[0] from None
            raise
