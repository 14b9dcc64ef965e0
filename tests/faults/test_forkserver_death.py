"""A forkserver that is killed alone leaves its hosts' families to the node, which ends them."""

from __future__ import annotations

import os
import signal

import pytest

from tests.integration.farm_support import (
    Node,
    Scheduler,
    children_of,
    is_alive,
    order,
)
from tests.integration.node_fixtures import node, scheduler, server
from tests.support import eventually
from tunemq_shared.messages import (
    FORKSERVER_LOST,
    HostDied,
    HostFreed,
    ResultReported,
    TrialFailed,
    TrialFinished,
    TrialStarted,
)

__all__ = ["node", "scheduler", "server"]

pytestmark = pytest.mark.faults

#: What is left of a forkserver is gone within a second; on a busy machine, within so many.
SOON = 40.0


def with_a_daemon(config):
    """A grandchild in a session of its own, without the mark, whose parent has ended."""
    import os
    import time

    from tunemq_shared.session import report

    reading, writing = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.write(writing, b"%d" % os.getpid())
            os.closerange(0, 64)
            os.execve("/bin/sleep", ["sleep", "60"], {})
        os._exit(0)
    report({"daemon": int(os.read(reading, 20))})
    while True:
        time.sleep(600)


def three_results(config):
    from tunemq_shared.session import report

    for n in range(3):
        report({"loss": n / 10})


def forkserver_and_family(node: Node, scheduler: Scheduler, trials: int) -> tuple[int, list[int]]:
    eventually(lambda: len(scheduler.said(ResultReported)) == trials, message=node.log)
    hosts = [event.pid for event in scheduler.said(TrialStarted)]
    daemons = [event.metrics["daemon"] for event in scheduler.said(ResultReported)]
    assert all(map(is_alive, hosts + daemons))
    return node.forkserver_of(hosts[0]), hosts + daemons


def test_everything_of_a_killed_forkserver_goes_before_its_slots_are_free(node, scheduler):
    scheduler.assign(
        node.incarnation,
        *(order(f"t{n}", scheduler.start(with_a_daemon, trial_number=n)) for n in range(2)),
    )
    forkserver, family = forkserver_and_family(node, scheduler, 2)
    ear = node.ear()
    os.kill(forkserver, signal.SIGKILL)
    eventually(lambda: len(scheduler.said(HostFreed)) == 2, within=SOON, message=node.log)

    assert not any(map(is_alive, family))
    lost = scheduler.said(TrialFailed)
    assert [event.kind for event in lost] == [FORKSERVER_LOST] * 2
    assert all(f"the forkserver {forkserver} was killed by SIGKILL" in e.error for e in lost)
    assert not scheduler.said(HostDied)
    assert node.ear() == ear
    assert children_of(node.process.pid) == [node.ears()], "no zombie is left either"


def test_the_node_goes_on_with_a_new_forkserver(node, scheduler):
    scheduler.assign(node.incarnation, order("t1", scheduler.start(with_a_daemon)))
    forkserver, _ = forkserver_and_family(node, scheduler, 1)
    os.kill(forkserver, signal.SIGKILL)
    eventually(lambda: scheduler.said(TrialFailed), within=SOON, message=node.log)
    scheduler.assign(node.incarnation, order("t1", scheduler.start(three_results), epoch=2))
    eventually(lambda: scheduler.said(TrialFinished), message=node.log)
    assert scheduler.said(HostFreed)[0].epoch == 1


def test_a_forkserver_that_was_killed_while_idle_is_no_news(node, scheduler):
    scheduler.assign(node.incarnation, order("t1", scheduler.start(three_results)))
    eventually(lambda: scheduler.said(HostFreed), message=node.log)
    (forkserver,) = set(children_of(node.process.pid)) - {node.ears()}
    os.kill(forkserver, signal.SIGKILL)
    eventually(lambda: "forkserver.lost" in node.log())
    scheduler.assign(node.incarnation, order("t1", scheduler.start(three_results), epoch=2))
    eventually(lambda: len(scheduler.said(TrialFinished)) == 2, message=node.log)
