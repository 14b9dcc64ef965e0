"""A process of an experiment is killed at each failpoint outside checkpoints and the journal.

`test_store_failpoints` covers the failpoints of checkpoints, `test_journal_kills` those of the
journal, and `test_farm_request_kills` those of users' requests.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.test_farm_request_kills import OF_REQUESTS
from tests.faults.test_journal_kills import JOURNALS
from tests.faults.test_store_failpoints import OF_CHECKPOINTS
from tests.integration.farm_support import CACHES, Node, RedisServer, Scheduler, is_alive, order
from tests.integration.node_fixtures import scheduler, server
from tests.support.failpoints import FAILPOINTS
from tests.support.searches.chain_searches import ChainSearch
from tests.support.searches.killed_searches import NODE
from tests.support.waiting import eventually
from tunemq_shared.base.failpoints import VARIABLE
from tunemq_shared.broker import redis_keys
from tunemq_shared.protocol.messages import ResultReported

__all__ = ["scheduler", "server"]

pytestmark = [pytest.mark.faults, pytest.mark.integration]

#: The pass at which a process dies there: late enough for its successors to make progress.
OF_A_SEARCH = {
    "consumer.before_handover": 2,
    "consumer.after_handover": 2,
    "orders.before_obey": 2,
    "orders.after_obey": 2,
    "events.before_send": 20,
    "events.after_send": 20,
    "events.before_release": 1,
    "events.after_release": 1,
    "lease.before_send": 5,
    "lease.after_send": 5,
}
#: Failpoints that a node reaches with time: its trials wait for that, else they might finish first.
IN_TIME = {"events.before_release", "events.after_release", "lease.before_send", "lease.after_send"}
#: Failpoints at which the script dies and is started again.
OF_A_SCRIPT = {
    "tuner.before_rename": 1,
    "tuner.after_rename": 1,
    "orders.before_send": 2,
    "orders.after_send": 2,
}
#: The script's message after the death of its node.
DIED = b"The embedded node ended"
#: A node reaches these once in its life, or only while no scheduler journals its events.
OF_A_NODE = (
    "hello.before_send",
    "hello.after_send",
    "deregistration.before_send",
    "deregistration.after_send",
)
OF_AN_OUTBOX = ("events.before_spill", "events.after_spill")


def _after(names: Iterable[str]) -> list[Any]:
    """Run the ``.after_`` failpoints in each run of the suite, and the others only in soak runs.

    After a step, no other process knows yet that the step took effect.
    """
    soak = pytest.mark.soak
    return [pytest.param(name, marks=() if ".after_" in name else soak) for name in names]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., ChainSearch]]:
    """A function that runs the script, always in the same folder."""
    begun: list[ChainSearch] = []

    def start(**options: Any) -> ChainSearch:
        begun.append(ChainSearch(tmp_path, storage=str(tmp_path), **options))
        return begun[-1]

    yield start
    for one in begun:
        one.close()


def test_each_failpoint_is_used_by_a_test() -> None:
    here = [*OF_A_SEARCH, *OF_A_SCRIPT, *OF_A_NODE, *OF_AN_OUTBOX]
    everywhere = sorted([*here, *JOURNALS, *OF_CHECKPOINTS, *OF_REQUESTS])
    assert everywhere == FAILPOINTS


@pytest.mark.parametrize("name", _after(OF_A_SEARCH))
def test_f01_f12_search_survives_a_kill_at_each_step_between_node_and_scheduler(run, name):
    search = run(
        trials=4,
        steps=16,
        payload=1000,
        step_s=0.06,
        # Each node dies there: in the timed cases its successors get only one wave of trials.
        cpus=4 if name in IN_TIME else 2,
        gate=7 if name in IN_TIME else None,
        variables={VARIABLE: f"{name}=kill@{OF_A_SEARCH[name]}"},
    )
    if name in IN_TIME:
        # Output only after the gate opens: before, each node's successor would die, too.
        node = search.one(NODE).pid
        eventually(lambda: not is_alive(node), within=60, message=lambda: str(search))
        search.open_gate(16)
    assert search.ends(within=100) == 0, str(search)
    search.is_undisturbed()
    search.journal_gives_the_state()
    search.leaves_nothing()
    if not name.startswith("consumer."):  # of which the embedded node starts another by itself
        assert DIED in search.said, str(search)


@pytest.mark.parametrize("name", _after(OF_A_SCRIPT))
def test_f03_a_script_that_is_killed_continues_where_it_was(run, name):
    options = {"trials": 3, "steps": 12, "payload": 1000, "cpus": 1}
    search = run(variables={VARIABLE: f"{name}=kill@{OF_A_SCRIPT[name]}"}, **options)
    assert search.ends(within=90) == -signal.SIGKILL, str(search)
    search.leaves_nothing()
    if name == "tuner.before_rename":
        # Nothing was saved to restore, and the next search of that name takes another name.
        assert not (search.folder / "search" / "tuner.pkl").exists()
        return
    again = run(**options)
    assert again.ends(within=90) == 0, str(again)
    again.is_undisturbed()
    again.leaves_nothing()


def large_results(config):
    from tunemq_shared.trial.session import report

    for step in range(40):
        report({"step": step, "padding": "x" * 2**18})


def started(server: RedisServer, folder: Path, failpoints: str) -> subprocess.Popen[bytes]:
    line = ["--redis", server.url, "--name", "node", "--workdir", str(folder), "--cpus", "2"]
    environ = {**os.environ, VARIABLE: failpoints}
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "tunemq_workers.node.node_process", *line], env=environ
    )


def the_next_one_works(server: RedisServer, scheduler: Scheduler, folder: Path) -> None:
    """Check that the next node in the same place registers, runs a trial, and ends."""
    node = Node(server, scheduler, folder)
    try:
        scheduler.journal(node.instance_id, redis_keys.EVERYTHING)
        scheduler.assign(node.instance_id, order("b", scheduler.start(large_results)))
        eventually(
            lambda: any(
                isinstance(event, ResultReported) and event.trial == "b"
                for _, batch in scheduler.batches()
                for event in batch
            ),
            within=60,
            message=node.log,
        )
    finally:
        node.end()
    left = {path.name for path in folder.iterdir() if not path.name.endswith(".log")}
    assert left <= CACHES


@pytest.mark.parametrize("name", _after(OF_A_NODE))
def test_f01_node_that_dies_while_it_starts_or_stops_is_replaced(server, scheduler, tmp_path, name):
    process = started(server, tmp_path / "node", f"{name}=kill")
    if name.startswith("deregistration"):
        eventually(scheduler.registrations)
        process.terminate()
    assert process.wait(90) == -signal.SIGKILL
    # The scheduler sees the deregistration only if the node sent it before it died.
    assert len(scheduler.deregistrations()) == (name == "deregistration.after_send")
    the_next_one_works(server, scheduler, tmp_path / "node")


@pytest.mark.parametrize("name", OF_AN_OUTBOX)
def test_f01_node_that_dies_while_its_outbox_moves_to_disk_leaves_no_file(
    server, scheduler, tmp_path, name
):
    process = started(server, tmp_path / "node", f"{name}=kill@3")
    eventually(scheduler.registrations)
    (registration,) = scheduler.registrations()
    scheduler.assign(registration.instance_id, order("a", scheduler.start(large_results)))
    assert process.wait(90) == -signal.SIGKILL
    eventually(lambda: not is_alive(process.pid))
    the_next_one_works(server, scheduler, tmp_path / "node")
