"""Retry store operations: growing, jittered pauses, a deadline, and cancellation."""

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

#: Seconds before the second try, and the longest pause; jitter shortens each by up to half.
FIRST_PAUSE_S: Final = 0.2
LONGEST_PAUSE_S: Final = 5.0

_T = TypeVar("_T")
_R = TypeVar("_R")


class StoreUnavailable(StoreError):
    """The store did not answer, or cannot do it now; another try may succeed."""


def not_mounted(folder: object) -> StoreUnavailable:
    """The error for a folder that exists wherever its store is mounted."""
    return StoreUnavailable(
        f"there is no folder {folder} on this machine; see that the store is mounted."
    )


class TransferCancelled(StoreError):
    """The transfer was called off."""


class TransferTimedOut(StoreError, TimeoutError):
    """The store did not do it in the time that was given."""


class CancelToken:
    """Cancels an operation at its deadline, or when a thread calls `cancel`.

    **Threads.** Any thread may call any method.

    Args:
        timeout_s: Seconds from now until `check` raises `TransferTimedOut`.
        deadline: That time on the monotonic clock, if it is not ``timeout_s`` from now.
    """

    def __init__(self, timeout_s: float = math.inf, *, deadline: float | None = None) -> None:
        self.timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s if deadline is None else deadline
        self._called_off = threading.Event()
        self._children: list[Self] = []

    @property
    def left(self) -> float:
        """Seconds until the deadline, at least 0."""
        return max(0.0, self._deadline - time.monotonic())

    def cancel(self) -> None:
        """Cancel this token and its children; `check` raises from now on."""
        self._called_off.set()
        for child in tuple(self._children):
            child.cancel()

    def check(self) -> None:
        """Return if the operation may continue.

        Raises:
            TransferCancelled: A thread called `cancel`.
            TransferTimedOut: The deadline has passed.
        """
        if self._called_off.is_set():
            raise TransferCancelled
        if not self.left:
            raise TransferTimedOut(f"it was not done within {self.timeout_s:g} s.")

    def pause(self, seconds: float) -> None:
        """Sleep for ``seconds``, or until the deadline or cancellation if that is sooner."""
        self._called_off.wait(min(seconds, self.left, threading.TIMEOUT_MAX))

    @contextlib.contextmanager
    def child(self, timeout_s: float = math.inf) -> Iterator[Self]:
        """Make a token that ends no later than this one and can be cancelled separately.

        Args:
            timeout_s: Seconds from now until the child's own deadline.
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
    """No-op ``on_trouble`` callback."""


def retried(
    call: Callable[[], _T], cancel: CancelToken, on_trouble: Callable[[str], None] = ignore
) -> _T:
    """Call ``call`` until it does not raise `StoreUnavailable`, and return its result.

    Args:
        call: The operation; safe to repeat.
        cancel: Bounds all tries and pauses together.
        on_trouble: Called with the problem before each pause, and with an empty text on recovery.

    Raises:
        TransferCancelled: A thread cancelled ``cancel``.
        TransferTimedOut: Its deadline passed; the message names the last problem.
    """
    trouble: StoreUnavailable | None = None
    for tries in itertools.count():
        try:
            cancel.check()
            result = call()
        except StoreUnavailable as error:
            trouble = error
        except TransferTimedOut as error:  # perhaps in the middle of a try
            if trouble is None or error.__cause__ is not None:  # no problem, or named already
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
    """Apply ``work`` to each item in threads and return the results in the items' order.

    The first failure cancels the others. The calling thread iterates ``items``; it also does the
    work if the system refuses another thread.

    Args:
        work: Called with an item and a token that ends it early.
        items: The inputs.
        cancel: Cancels all work.
        at_once: The number of threads.
    """
    failures: list[BaseException] = []
    results: dict[int, _R] = {}

    def run(index: int, item: _T) -> None:
        try:
            results[index] = work(item, child)
        except BaseException as error:  # noqa: BLE001  raised by the calling thread, below
            failures.append(error)
            child.cancel()

    with cancel.child() as child, ThreadPoolExecutor(at_once) as pool:
        try:
            has_thread = True
            pool.submit(ignore, "")
        except RuntimeError:
            has_thread = False
        try:
            for index, item in enumerate(items):
                if not has_thread:
                    run(index, item)
                else:
                    # If it refuses a further thread, the item is in the queue of the others.
                    with contextlib.suppress(RuntimeError):
                        pool.submit(run, index, item)
                if failures:
                    break
        except BaseException:
            child.cancel()
            raise
    if failures:  # the errors of cancelled items explain nothing
        raise failures[0]
    return [results[index] for index in range(len(results))]
