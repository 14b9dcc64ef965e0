"""A farm whose nodes can be cut off, stopped or killed one by one, and searches with checkpoints.

In `tests.support.farms.own_farm` all nodes share one connection to Redis; here each node has a
separate proxy.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.integration.farm_support import is_alive, process_tree_of
from tests.support.farms.own_farm import ChainRun, NodeProcess, OwnFarm, made_to_search_on
from tests.support.proxies.tcp_proxy import TcpProxy
from tests.support.searches.chain import executed
from tests.support.searches.killed_searches import JournalTail
from tests.support.waiting import eventually
from tunemq_scheduler.journal.journal_files import FILE_NAME
from tunemq_shared.protocol import messages as m

_E = TypeVar("_E", bound=m.Event)


class CutFarm(OwnFarm):
    """Nodes ``n0``, ``n1``, ... of one trial each, with a proxy each."""

    def __init__(self, *, nodes: int = 2) -> None:
        super().__init__(nodes=0)
        self.proxies = [TcpProxy(self.server.path) for _ in range(nodes)]
        self.nodes = [
            NodeProcess(proxy.url, f"n{n}", Path(self.folder, f"n{n}"), 1, {})
            for n, proxy in enumerate(self.proxies)
        ]

    def process_tree(self, node: int) -> list[int]:
        """All processes of a node."""
        return process_tree_of(self.nodes[node].process.pid)

    def stop(self, node: int) -> list[int]:
        """SIGSTOP a node and all that it started; returns them."""
        stopped: set[int] = set()
        # The kernel's list may leave out a child while another one ends.
        while found := set(self.process_tree(node)) - stopped:
            for pid in found:
                with contextlib.suppress(ProcessLookupError):  # it has ended since
                    os.kill(pid, signal.SIGSTOP)
            stopped |= found
        return list(stopped)

    def resume(self, process_tree: list[int]) -> None:
        """Send SIGCONT to the stopped processes that still exist."""
        for pid in process_tree:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def kill(self, node: int) -> float:
        """Kill a whole machine at once; returns when."""
        process_tree = self.stop(node)
        killed = time.monotonic()
        for pid in process_tree:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.nodes[node].process.wait()
        eventually(lambda: not any(map(is_alive, process_tree)))
        return killed

    def close(self) -> None:
        """End all of it."""
        try:
            super().close()
        finally:
            for proxy in self.proxies:
                proxy.close()


class CutRun(ChainRun):
    """A search of chains with checkpoints, whose nodes fail and return."""

    def __init__(self, farm: CutFarm, folder: Path, **how: Any) -> None:
        self.cut_farm = farm
        how = {"trials": 1, "step_s": 0.01, "save_every": 10, "lock_step": False, **how}
        super().__init__(farm, folder, **how)
        self._tail = JournalTail(folder / "search" / FILE_NAME)

    def all_of(self, kind: type[_E]) -> list[_E]:
        """The events of a kind in the journal."""
        return [one.event for one in self._tail.read() if isinstance(one.event, kind)]

    def wait_for(self, kind: type[_E], within: float = 60.0, count: int = 1) -> _E:
        """Wait until the journal has `count` events of a kind; return the last of them."""
        eventually(lambda: len(self.all_of(kind)) >= count, within=within, message=self.state)
        return self.all_of(kind)[count - 1]

    def node_of(self, trial: int, attempt: int = 1) -> int:
        """The number of the node that runs an attempt of a trial."""
        start = self.wait_for_start(trial, attempt)
        found: list[int] = []

        def is_found() -> bool:  # the kernel may leave out some children while others end
            nodes = range(len(self.cut_farm.nodes))
            found[:] = [n for n in nodes if start.pid in self.cut_farm.process_tree(n)]
            return bool(found)

        eventually(is_found, message=self.state)
        return found[0]

    def wait_for_start(self, trial: int, attempt: int, within: float = 60.0) -> m.TrialStarted:
        """Wait until an attempt of a trial has started; return its event."""
        found: list[m.TrialStarted] = []

        def has_started() -> bool:
            found[:] = [
                one
                for one in self.all_of(m.TrialStarted)
                if int(one.trial.rpartition("_")[2]) == trial and one.attempt == attempt
            ]
            return bool(found)

        eventually(has_started, within=within, message=self.state)
        return found[0]

    def wait_for_recorded(self, step: int, attempt: int, within: float = 60.0) -> None:
        """Wait until an attempt has reported a step as far as this."""
        eventually(
            lambda: any(
                one.attempt == attempt and one.step >= step for one in self.all_of(m.ResultReported)
            ),
            within=within,
            message=self.state,
        )

    def repeated(self) -> dict[int, int]:
        """By trial, how many steps were executed more than once."""
        return {
            number: sum(times > 1 for times in Counter(steps).values())
            for number, steps in executed(self._executed).items()
        }


@pytest.fixture
def cut_farm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., CutFarm]]:
    """Makes the farm on which the test's searches run; takes the arguments of `CutFarm`."""
    with made_to_search_on(CutFarm, monkeypatch) as make:
        yield make
