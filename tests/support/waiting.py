"""Helpers of several test tiers: waiting with a deadline, services that may be missing, ports."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import random
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Container, Iterator
from pathlib import Path
from typing import Final

import pytest

from tunemq_shared.system.processes import children_of

#: Ports outside the range from which the kernel by default assigns ephemeral ports.
_PORTS: Final = range(20_000, 32_768)
#: As many processes may run tests at the same time.
_SHARES: Final = 16
#: Seconds for the start of an interpreter on an idle machine of two cores.
_IDLE_START_S: Final = 0.02
#: Number of starts to measure.
_STARTS: Final = 10
#: Largest factor by which a limit grows.
_SLOWEST: Final = 8.0
#: Begins anywhere: other runs of the tests, on the same machine, have the same shares.
_turns = itertools.count(random.SystemRandom().randrange(len(_PORTS)))


def eventually(
    condition: Callable[[], object],
    *,
    within: float = 60.0,
    every: float = 0.005,
    message: str | Callable[[], str] = "the condition did not come true",
) -> None:
    """Return as soon as ``condition()`` is true; fail the test after ``within`` seconds.

    The limit grows with `slowness`, which is measured only where the condition is late. ``every``
    is for looks that cost a process each.
    """
    begin = time.monotonic()
    limit, is_scaled = within, False
    while not condition():
        if time.monotonic() > begin + limit:
            if not is_scaled:
                limit, is_scaled = within * slowness(), True
                continue
            text = message if isinstance(message, str) else message()
            pytest.fail(f"{text} (within {limit:g} s)")
        time.sleep(every)  # between two looks


def slowness() -> float:
    """How many times longer this machine takes now for a small piece of work than an idle one.

    The work is to start an interpreter; the answer is between 1 and `_SLOWEST`.
    """
    begin = time.monotonic()
    for _ in range(_STARTS):
        subprocess.run([sys.executable, "-I", "-S", "-c", ""], check=True)
    each = (time.monotonic() - begin) / _STARTS
    return min(max(1.0, each / _IDLE_START_S), _SLOWEST)


def need(service: str, present: object) -> None:
    """Skip the test where a service is missing; fail it in CI, where it must be there."""
    if present:
        return
    if os.environ.get("CI"):
        pytest.fail(f"{service} is missing, and CI runs every test")
    pytest.skip(f"{service} is missing")


def free_port() -> int:
    """Return a port without a listener, for a server that starts or restarts on it.

    Another test could take a port from the kernel's ephemeral range before the server does, so the
    port lies outside that range. Other pytest workers get other ports.
    """
    low = _PORTS.stop
    with contextlib.suppress(OSError):  # not all containers show it
        low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    share = int("".join(re.findall(r"\d+", os.environ.get("PYTEST_XDIST_WORKER", ""))) or 0)
    mine = range(_PORTS.start + share % _SHARES, min(_PORTS.stop, low), _SHARES)
    for turn in itertools.islice(_turns, len(mine)):
        with contextlib.suppress(OSError), socket.create_server(("", mine[turn % len(mine)])):
            return mine[turn % len(mine)]
    with socket.create_server(("127.0.0.1", 0)) as free:  # the kernel's range covers all
        port: int = free.getsockname()[1]
    return port


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Disable garbage collection meanwhile: finalizers of other objects would be counted, too."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def descendants(pid: int, besides: Container[int] = ()) -> set[int]:
    """The pids of all descendants of a process; quicker than a scan of all processes.

    Args:
        besides: pids to leave out, with all their descendants.
    """
    found: set[int] = set()
    waiting = [pid]
    while waiting:
        children = [child for child in children_of(waiting.pop()) if child not in besides]
        found.update(children)
        waiting += children
    return found
