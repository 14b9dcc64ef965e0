"""A node process with a real Redis, a real consumer and real trial processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import msgspec
import pytest

from tests.integration.farm_support import (
    Node,
    children_of,
    is_alive,
    order,
    process_tree_of,
)
from tests.integration.node_fixtures import node, scheduler, server
from tests.support.waiting import eventually
from tunemq_shared.broker import redis_keys
from tunemq_shared.protocol.messages import (
    FORKSERVER_LOST,
    Environment,
    NodeWarned,
    ResultReported,
    SlotFreed,
    TrialFailed,
    TrialFinished,
    TrialProcessDied,
    TrialStarted,
)
from tunemq_shared.protocol.result_conditions import next_result
from tunemq_shared.protocol.trial_limits import TrialLimitSpec
from tunemq_workers import work_folder

__all__ = ["node", "scheduler", "server"]

pytestmark = pytest.mark.integration


def three_results(config):
    from tunemq_shared.trial.session import report

    for n in range(3):
        report({"loss": n / 10})


def without_end(config):
    import time

    from tunemq_shared.trial.session import report

    while True:
        report({"loss": 0.5})
        time.sleep(0.01)


def is_sent_until_taken(node, scheduler, version, *orders):
    """Send an assignment again and again, as the executor does.

    While Redis still knows a dead or hung consumer, it sends messages to that consumer.
    """
    sent_at = 0.0

    def is_taken() -> bool:
        nonlocal sent_at
        if time.monotonic() > sent_at + 1:
            sent_at = time.monotonic()
            scheduler.assign(node.instance_id, *orders, version=version)
        return scheduler.confirmed(node.instance_id)[1:] == (version,)

    eventually(is_taken, message=node.log)


def test_node_announces_its_resources_once_its_consumer_listens(node, scheduler):
    assert node.registration.node == "node"
    assert node.registration.pid == node.process.pid
    assert node.registration.resources["cpu"] == 2
    assert node.consumer() is not None
    eventually(lambda: scheduler.confirmed(node.instance_id) == (0, 0))


def test_events_of_a_trial_arrive_in_order(node, scheduler):
    scheduler.assign(node.instance_id, order("t1", scheduler.start(three_results)))
    eventually(lambda: scheduler.said(SlotFreed), message=node.log)
    kinds = [type(event) for event in scheduler.events()]
    assert kinds == [TrialStarted, *[ResultReported] * 3, TrialFinished, SlotFreed]
    assert [event.step for event in scheduler.said(ResultReported)] == [1, 2, 3]


def test_lease_is_renewed_and_names_the_accepted_assignment(node, scheduler):
    scheduler.assign(node.instance_id, order("t1", scheduler.start(without_end)))
    eventually(lambda: scheduler.confirmed(node.instance_id) == (1, 1))
    before = scheduler.renewals(node.instance_id)
    eventually(lambda: scheduler.renewals(node.instance_id) > before)


def test_an_assignment_that_comes_twice_or_late_changes_nothing(node, scheduler):
    start = scheduler.start(without_end)
    scheduler.assign(node.instance_id, order("t1", start), version=2)
    scheduler.assign(node.instance_id, order("t1", start), version=2)
    scheduler.assign(node.instance_id, version=1)
    scheduler.assign(node.instance_id, order("t1", None), version=3)
    eventually(lambda: scheduler.confirmed(node.instance_id) == (1, 3))
    eventually(lambda: len(scheduler.said(ResultReported)) > 5, message=node.log)
    assert len(scheduler.said(TrialStarted)) == 1
    assert not scheduler.said(SlotFreed)


@pytest.mark.parity(34)
def test_a_trial_that_ended_is_not_started_again_while_it_is_listed(node, scheduler):
    start = scheduler.start(three_results)
    scheduler.assign(node.instance_id, order("t1", start))
    eventually(lambda: scheduler.said(SlotFreed), message=node.log)
    version = scheduler.assign(node.instance_id, order("t1", start))
    eventually(lambda: scheduler.confirmed(node.instance_id)[1:] == (version,))
    assert len(scheduler.said(TrialStarted)) == 1


def test_a_trial_waits_at_its_horizon_until_it_grows(node, scheduler):
    start = scheduler.start(three_results)
    scheduler.assign(node.instance_id, order("t1", start, run_until=next_result(0)))
    eventually(lambda: scheduler.said(ResultReported), message=node.log)
    scheduler.assign(node.instance_id, order("t1", None, run_until=next_result(1)))
    eventually(lambda: len(scheduler.said(ResultReported)) == 2, message=node.log)
    assert not scheduler.said(TrialFinished)
    scheduler.assign(node.instance_id, order("t1", None))
    eventually(lambda: scheduler.said(TrialFinished), message=node.log)


def test_stopped_trial_exits_and_frees_its_slot(node, scheduler):
    start = scheduler.start(without_end)
    scheduler.assign(node.instance_id, order("t1", start))
    eventually(lambda: scheduler.said(ResultReported), message=node.log)
    scheduler.assign(node.instance_id, order("t1", None, stop=True))
    eventually(lambda: scheduler.said(SlotFreed), message=node.log)
    assert not scheduler.said(TrialProcessDied)
    assert not scheduler.said(TrialFailed)


def test_a_trial_that_ignores_its_stop_is_killed_after_its_grace(node, scheduler):
    def hung(config):
        import signal
        import time

        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            time.sleep(600)

    start = scheduler.start(hung, stop_grace_s=0.1)
    scheduler.assign(node.instance_id, order("t1", start))
    eventually(lambda: scheduler.said(TrialStarted), message=node.log)
    scheduler.assign(node.instance_id, order("t1", None, stop=True))
    eventually(lambda: scheduler.said(SlotFreed), message=node.log)
    assert not scheduler.said(TrialProcessDied)


def test_trial_missing_from_the_assignment_is_killed(node, scheduler):
    scheduler.assign(node.instance_id, order("t1", scheduler.start(without_end)))
    eventually(lambda: scheduler.said(TrialStarted), message=node.log)
    scheduler.assign(node.instance_id)
    eventually(lambda: scheduler.said(SlotFreed), message=node.log)
    assert not is_alive(scheduler.said(TrialStarted)[0].pid)


def test_killed_trial_process_is_reported_after_its_last_events(node, scheduler):
    scheduler.assign(node.instance_id, order("t1", scheduler.start(without_end)))
    eventually(lambda: scheduler.said(ResultReported), message=node.log)
    pid = scheduler.said(TrialStarted)[0].pid
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: scheduler.said(SlotFreed), message=node.log)
    died, freed = scheduler.events()[-2:]
    assert (died.trial, died.pid, died.signal, died.exit_code) == ("t1", pid, 9, None)
    assert isinstance(freed, SlotFreed)


def test_a_trial_whose_interpreter_is_missing_fails_with_the_reason(node, scheduler):
    environment = Environment("/no/such/python", (), {}, ())
    start = scheduler.start(three_results, environment=environment)
    scheduler.assign(node.instance_id, order("t1", start))
    eventually(lambda: scheduler.said(SlotFreed), message=node.log)
    failed = scheduler.said(TrialFailed)[0]
    assert failed.kind == "start"
    assert "/no/such/python" in failed.error


def test_trial_process_is_reused_for_the_next_trial_of_the_same_code(node, scheduler):
    first = scheduler.start(three_results, reuse=True)
    scheduler.assign(node.instance_id, order("t1", first))
    eventually(lambda: scheduler.said(SlotFreed), message=node.log)
    second = scheduler.start(three_results, reuse=True, trial_number=1)
    scheduler.assign(node.instance_id, order("t2", second))
    eventually(lambda: len(scheduler.said(SlotFreed)) == 2, message=node.log)
    one, two = scheduler.said(TrialStarted)
    assert (one.trial, two.trial) == ("t1", "t2")
    assert one.pid == two.pid
    assert len(scheduler.said(ResultReported)) == 6


def test_parked_trial_process_makes_room_for_a_trial_of_other_code(node, scheduler):
    scheduler.assign(node.instance_id, order("t1", scheduler.start(three_results, reuse=True)))
    eventually(lambda: scheduler.said(SlotFreed), message=node.log)
    scheduler.assign(
        node.instance_id, order("t2", scheduler.start(without_end, reuse=True, trial_number=1))
    )
    eventually(lambda: len(scheduler.said(TrialStarted)) == 2, message=node.log)
    one, two = scheduler.said(TrialStarted)
    assert one.pid != two.pid
    assert not is_alive(one.pid)


def test_killed_consumer_disturbs_no_trial(node, scheduler):
    scheduler.assign(node.instance_id, order("t1", scheduler.start(without_end)))
    eventually(lambda: scheduler.said(ResultReported), message=node.log)
    consumer = node.consumer()
    os.kill(consumer, signal.SIGKILL)
    grown = order("t1", None, run_until=next_result(10**6))
    version = scheduler.assign(node.instance_id, grown)
    eventually(lambda: node.consumer() not in {None, consumer})
    is_sent_until_taken(node, scheduler, version, grown)
    assert not scheduler.said(TrialProcessDied)


def test_killed_forkserver_of_consumers_disturbs_no_trial(node, scheduler):
    scheduler.assign(node.instance_id, order("t1", scheduler.start(without_end)))
    eventually(lambda: scheduler.said(ResultReported), message=node.log)
    consumer, consumers = node.consumer(), node.consumers()
    os.kill(consumers, signal.SIGKILL)
    eventually(lambda: not is_alive(consumer) and not is_alive(consumers))
    is_sent_until_taken(node, scheduler, 2, order("t1", None, run_until=next_result(10**6)))
    eventually(lambda: {consumer, consumers}.isdisjoint(children_of(node.process.pid)))
    assert not scheduler.said(TrialProcessDied)


def test_order_that_a_node_cannot_read_fails_its_trial_and_no_other(node, scheduler):
    wrong = msgspec.structs.replace(scheduler.start(three_results), trial_number="five")
    fine = order("fine", scheduler.start(three_results, trial_number=1))
    scheduler.assign(node.instance_id, order("wrong", wrong), fine)
    eventually(lambda: len(scheduler.said(SlotFreed)) == 2, message=node.log)
    (failed,) = scheduler.said(TrialFailed)
    assert (failed.trial, failed.kind) == ("wrong", "start")
    assert "its node cannot read the order for it: Expected `int`, got `str`" in failed.error
    assert [event.trial for event in scheduler.said(TrialFinished)] == ["fine"]


def test_hanging_consumer_is_replaced_when_a_message_is_overdue(node, scheduler):
    consumer = node.consumer()
    os.kill(consumer, signal.SIGSTOP)
    scheduler.announce(node.instance_id, 7)
    eventually(lambda: node.consumer() not in {None, consumer}, message=node.log)
    is_sent_until_taken(node, scheduler, 7)


@pytest.mark.faults
def test_events_are_not_lost_while_redis_is_dead(node, scheduler, server):
    scheduler.assign(node.instance_id, order("t1", scheduler.start(without_end)))
    eventually(lambda: len(scheduler.said(ResultReported)) > 5, message=node.log)
    pid = scheduler.said(TrialStarted)[0].pid
    server.kill()
    time.sleep(0.5)  # an outage, during which the trial continues
    server.start()
    scheduler.create_generation()
    eventually(scheduler.registrations, message=node.log)
    eventually(lambda: len(scheduler.said(ResultReported)) > 60, message=node.log)
    steps = [event.step for event in scheduler.said(ResultReported)]
    assert steps == list(range(1, len(steps) + 1))
    assert is_alive(pid)
    version = scheduler.assign(node.instance_id)
    eventually(lambda: scheduler.confirmed(node.instance_id)[1:] == (version,), message=node.log)


@pytest.mark.faults
def test_events_not_journalled_are_sent_again_after_a_wipe(node, scheduler):
    scheduler.assign(node.instance_id, order("t1", scheduler.start(three_results)))
    eventually(lambda: scheduler.said(SlotFreed), message=node.log)
    before = scheduler.events()
    scheduler.client.flushall()
    scheduler.create_generation()
    eventually(lambda: len(scheduler.events()) == len(before), message=node.log)
    assert scheduler.events() == before
    # The node says so again if Redis answered late.
    assert {registration.instance_id for registration in scheduler.registrations()} == {
        node.instance_id
    }


@pytest.mark.faults
def test_events_that_are_journalled_are_not_sent_again(node, scheduler):
    scheduler.assign(node.instance_id, order("t1", scheduler.start(three_results)))
    eventually(lambda: scheduler.said(SlotFreed), message=node.log)
    scheduler.journal(node.instance_id, len(scheduler.events()))
    renewals = scheduler.renewals(node.instance_id)
    eventually(lambda: scheduler.renewals(node.instance_id) > renewals + 1)
    scheduler.client.flushall()
    scheduler.create_generation()
    eventually(scheduler.registrations, message=node.log)
    scheduler.assign(node.instance_id, order("t2", scheduler.start(three_results)))
    eventually(scheduler.batches, message=node.log)
    assert scheduler.batches()[0][0] == 7


def test_events_wait_while_the_stream_is_missing(node, scheduler):
    scheduler.client.delete(scheduler.key)
    scheduler.assign(node.instance_id, order("t1", scheduler.start(three_results)))
    eventually(lambda: "redis.not_appended" in node.log(), message=node.log)
    assert not scheduler.client.exists(scheduler.key)
    scheduler.create_generation()
    eventually(lambda: scheduler.said(SlotFreed), message=node.log)


def test_node_without_a_generation_delays_its_registration(server, scheduler, tmp_path):
    scheduler.client.delete(redis_keys.GENERATION)
    folder = tmp_path / "early"
    command = [
        sys.executable,
        "-P",
        "-m",
        "tunemq_workers.node.node_process",
        "--redis",
        server.url,
    ]
    process = subprocess.Popen([*command, "--name", "early", "--workdir", str(folder)])
    try:
        eventually(lambda: scheduler.client.keys("tunemq:lease:*"))
        assert not scheduler.registrations()
        scheduler.client.set(redis_keys.GENERATION, "late")
        eventually(scheduler.registrations)
    finally:
        process.terminate()
        process.wait(60)


def test_terminated_node_kills_its_trial_processes_and_returns_its_lease(node, scheduler):
    scheduler.assign(node.instance_id, order("t1", scheduler.start(without_end)))
    eventually(lambda: scheduler.said(TrialStarted), message=node.log)
    process_tree = process_tree_of(node.process.pid)
    node.process.terminate()
    assert node.process.wait(60) == 0
    assert not scheduler.said(SlotFreed)  # nor the end of a trial: the deregistration implies it
    assert scheduler.deregistrations() == [node.instance_id]
    assert scheduler.lease(node.instance_id) == []
    eventually(lambda: not any(map(is_alive, process_tree)))


@pytest.mark.faults
def test_killed_node_leaves_no_process(node, scheduler):
    scheduler.assign(node.instance_id, order("t1", scheduler.start(without_end)))
    eventually(lambda: scheduler.said(TrialStarted), message=node.log)
    process_tree = process_tree_of(node.process.pid)
    assert len(process_tree) >= 4
    node.process.kill()
    node.process.wait()
    eventually(lambda: not any(map(is_alive, process_tree)))


@pytest.mark.faults
def test_dead_forkserver_ends_its_trial_processes_and_is_replaced(node, scheduler):
    scheduler.assign(node.instance_id, order("t1", scheduler.start(without_end)))
    eventually(lambda: scheduler.said(ResultReported), message=node.log)
    process = scheduler.said(TrialStarted)[0].pid
    os.kill(node.forkserver_of(process), signal.SIGKILL)
    eventually(lambda: scheduler.said(SlotFreed), message=node.log)
    assert [failed.kind for failed in scheduler.said(TrialFailed)] == [FORKSERVER_LOST]
    assert not is_alive(process)
    scheduler.assign(node.instance_id, order("t1", scheduler.start(three_results), attempt=2))
    eventually(lambda: scheduler.said(TrialFinished), message=node.log)


@pytest.mark.faults
def test_a_preload_that_ends_its_process_fails_the_trial_with_the_reason(node, scheduler, tmp_path):
    (tmp_path / "deadly_module.py").write_text("import os; os._exit(3)")
    environment = Environment(sys.executable, ("deadly_module",), {}, (str(tmp_path),))
    start = scheduler.start(three_results, environment=environment)
    scheduler.assign(node.instance_id, order("t1", start))
    eventually(lambda: scheduler.said(SlotFreed), message=node.log)
    failed = scheduler.said(TrialFailed)[0]
    assert failed.kind == "start"
    assert "deadly_module" in failed.error


@pytest.mark.faults
def test_preload_that_hangs_fails_its_trial_with_the_modules_name(node, scheduler, tmp_path):
    (tmp_path / "hanging_module.py").write_text("import time; time.sleep(1000)")
    environment = Environment(sys.executable, ("hanging_module",), {}, (str(tmp_path),))
    limits = TrialLimitSpec(stall_s=8)
    start = scheduler.start(three_results, environment=environment, limits=limits)
    scheduler.assign(node.instance_id, order("t1", start))
    eventually(lambda: scheduler.said(NodeWarned), within=120, message=node.log)
    assert "the import of hanging_module" in scheduler.said(NodeWarned)[0].text
    assert not scheduler.said(TrialFailed)
    eventually(lambda: scheduler.said(SlotFreed), within=120, message=node.log)
    (failed,) = scheduler.said(TrialFailed)
    assert failed.kind == "start"
    assert "was not ready after" in failed.error
    assert "while it preloaded hanging_module" in failed.error


def test_a_prewarmed_forkserver_serves_the_first_trial(server, scheduler, tmp_path):
    start = scheduler.start(three_results)
    prewarm = tmp_path / "environment"
    prewarm.write_bytes(msgspec.json.encode(start.environment))
    node = Node(server, scheduler, tmp_path / "warm", "--prewarm", str(prewarm))
    try:
        assert not prewarm.exists()
        eventually(lambda: "forkserver.ready" in node.log())
        scheduler.assign(node.instance_id, order("t1", start))
        eventually(lambda: scheduler.said(TrialFinished), message=node.log)
        assert node.log().count("forkserver.started") == 1
    finally:
        node.end()


def test_prewarm_file_that_was_already_read_is_no_error(server, scheduler, tmp_path):
    node = Node(server, scheduler, tmp_path / "again", "--prewarm", str(tmp_path / "gone"))
    assert "forkserver.started" not in node.log()
    node.end()


SMALL_CAPS = """
from tunemq_workers.node import node_loop
from tunemq_workers.node.node_process import main
from tunemq_workers.logs.output_caps import OutputCaps
node_loop.OutputCaps = lambda *of: OutputCaps(*of, period_s=0.05, limit_bytes=1_000)
raise SystemExit(main())
"""


def test_output_of_trials_is_kept_below_a_size(server, scheduler, tmp_path):
    def prints(config):
        for _ in range(10_000):
            print("one more line")

    node = Node(server, scheduler, tmp_path / "node", program=("-c", SMALL_CAPS))
    try:
        scheduler.assign(node.instance_id, order("t1", scheduler.start(prints)))
        eventually(lambda: scheduler.said(TrialFinished), message=node.log)
        eventually(lambda: (tmp_path / "trial_0" / "stdout").stat().st_size <= 1_000)
    finally:
        node.end()


def test_logs_of_a_node_are_kept_below_a_size(server, scheduler, tmp_path):
    logs = [tmp_path / "node" / "logs" / name for name in ("node.log", "transfers.log")]
    (tmp_path / "node" / "logs").mkdir(parents=True)
    for log in logs:
        log.write_bytes(b"an old line\n" * (work_folder.LIMIT_BYTES // 10))
    node = Node(server, scheduler, tmp_path / "node")
    try:
        eventually(lambda: all(log.stat().st_size < work_folder.LIMIT_BYTES for log in logs))
        assert "node.started" in node.log()
    finally:
        node.end()


def test_a_node_ends_with_the_process_that_it_watches(server, scheduler, tmp_path):
    owner = subprocess.Popen(["sleep", "600"])
    node = Node(server, scheduler, tmp_path / "owned", "--watch-pid", str(owner.pid))
    try:
        scheduler.assign(node.instance_id, order("t1", scheduler.start(without_end)))
        eventually(lambda: scheduler.said(TrialStarted), message=node.log)
        process_tree = process_tree_of(node.process.pid)
        owner.kill()
        owner.wait()
        assert node.process.wait(60) == 0
        eventually(lambda: not any(map(is_alive, process_tree)))
    finally:
        owner.kill()
        node.end()


def test_fenced_node_kills_its_trial_processes_and_ends(node, scheduler):
    scheduler.assign(node.instance_id, order("t1", scheduler.start(without_end)))
    eventually(lambda: scheduler.said(TrialStarted), message=node.log)
    process_tree = process_tree_of(node.process.pid)
    scheduler.reply(node.instance_id, "f", "1")
    assert node.process.wait(60) == 75
    eventually(lambda: not any(map(is_alive, process_tree)))


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--redis", "http://somewhere", "write redis://user:password@host:6379/0"),
        ("--cpus", "-1", "--cpus is -1.0"),
        ("--resources", '{"gpu": -2}', "offers -2.0 of 'gpu'"),
        ("--resources", "gpu=2", "give a JSON object"),
        ("--prewarm", "/", "--prewarm is '/': Is a directory"),
    ],
)
def test_a_bad_option_is_refused_with_its_name_and_the_fix(tmp_path, option, value, message):
    command = [sys.executable, "-P", "-m", "tunemq_workers.node.node_process", "--name", "n"]
    if option != "--redis":
        command += ["--redis", f"unix://{tmp_path}/none.sock"]
    command += ["--workdir", str(tmp_path), option, value]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 64
    assert message in ended.stderr
