"""A node's forkservers when a trial process cannot be started."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from tests.support.waiting import without_collections
from tunemq_shared.code.config_packing import pack_config
from tunemq_shared.protocol.messages import BlobRef, Environment, TrialOrder, TrialSpec
from tunemq_shared.protocol.result_conditions import TO_THE_END
from tunemq_shared.system.processes import children_of
from tunemq_workers.forkservers.forkserver_pool import ForkserverPool
from tunemq_workers.processes.memory_groups import MemoryCgroups
from tunemq_workers.runtime.reactor import Reactor

ENVIRONMENT = Environment(sys.executable, (), {"PATH": os.environ.get("PATH", "")}, ())


class UncalledListener:
    """A listener that must not be called."""

    def __getattr__(self, name: str) -> object:
        pytest.fail(f"a process that was never requested: {name}")


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[ForkserverPool]:
    (tmp_path / "logs").mkdir()
    pool = ForkserverPool(
        Reactor(),
        set(),
        folder=str(tmp_path),
        hostname="host",
        node_ip="127.0.0.1",
        groups=MemoryCgroups("x"),
    )
    yield pool
    pool.close()


def open_descriptors() -> set[str]:
    return {name for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")}


def lowest_free() -> int:
    descriptor = os.dup(2)
    os.close(descriptor)
    return descriptor


@contextmanager
def descriptors_left(number: int) -> Iterator[None]:
    """Lower the limit so that this process can open only this many more descriptors."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with without_collections():  # collecting another test's garbage would free some
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free() + number, limits[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def order(folder: Path) -> TrialOrder:
    start = TrialSpec(
        experiment="e",
        events_key="events",
        trial_name="t",
        trial_number=0,
        folder=str(folder),
        code=BlobRef("0", 1, "/code"),
        config=pack_config({}),
        resources={"cpu": 1.0},
        environment=ENVIRONMENT,
        store=str(folder),
    )
    return TrialOrder("t", 1, TO_THE_END, stop=False, start=start)


@pytest.mark.parametrize("variables", [{"A=B": "x"}, {"A": "\0"}, {"\0": "x"}])
def test_environment_that_no_process_can_have_is_refused(pool, tmp_path, variables):
    environment = Environment(sys.executable, (), variables, ())
    asked = order(tmp_path)
    start = msgspec.structs.replace(asked.start, environment=environment)
    with pytest.raises(OSError, match=r"environment variable name|null"):
        pool.start("h1", msgspec.structs.replace(asked, start=start), UncalledListener())
    assert not pool._servers


@pytest.mark.parametrize("left", [0, 1, 2])
def test_process_that_cannot_be_requested_leaves_nothing(pool, tmp_path, left):
    pool.prewarm(ENVIRONMENT)
    (first,) = pool._servers
    before = open_descriptors()
    with descriptors_left(left), pytest.raises(OSError, match="Too many open files"):
        pool.start("h1", order(tmp_path), UncalledListener())
    assert open_descriptors() <= before  # another test's garbage may be collected meanwhile
    # It has no trial process, so it gives way to a forkserver that is needed.
    pool.prewarm(Environment(sys.executable, (), {**ENVIRONMENT.variables, "OTHER": "1"}, ()))
    assert first not in pool._servers


def run_until(reactor: Reactor, condition: Callable[[], bool]) -> None:
    """Run a node's loop until the condition holds."""

    def look() -> None:
        if condition():
            reactor.stop()
        else:
            reactor.after(0.01, look)

    look()
    reactor.run(lambda: None)


def test_forkserver_that_does_not_exit_keeps_no_other_waiting(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "stays.py").write_text(
        "import os, time\n"
        "own, leave = os.getpid(), os._exit\n"
        "os._exit = lambda code: time.sleep(600) if os.getpid() == own else leave(code)\n"
    )
    reactor = Reactor()
    pool = ForkserverPool(
        reactor,
        set(children_of(os.getpid())),
        folder=str(tmp_path),
        hostname="host",
        node_ip="127.0.0.1",
        groups=MemoryCgroups("x"),
    )
    pool.prewarm(Environment(sys.executable, ("stays",), ENVIRONMENT.variables, (str(tmp_path),)))
    (first,) = pool._servers
    run_until(reactor, lambda: first.is_ready)

    pool.prewarm(ENVIRONMENT)

    assert first not in pool._servers
    assert not first.has_ended(), "nothing waited for its end"
    run_until(reactor, first.has_ended)
    pool.close()
