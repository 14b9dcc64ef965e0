"""How a supervisor handles an experiment process that ends or violates the protocol."""

from __future__ import annotations

import math
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.unit.scheduler.transport.test_desired_state import START
from tunemq_scheduler.api.farm_answer_types import (
    ExperimentDetail,
    ExperimentRow,
    ExperimentState,
    RequestRejection,
    TrialRow,
)
from tunemq_scheduler.core.shared_amounts import OfferUsage, ResourceAmounts, SlotDemand
from tunemq_scheduler.farm.common.scheduler_exit_codes import EXIT_AGAIN, EXIT_FAILED
from tunemq_scheduler.farm.ipc import ipc_messages as r
from tunemq_scheduler.farm.ipc import supervisor_side as link_module
from tunemq_scheduler.farm.ipc.nonblocking_frames import FrameSocket
from tunemq_scheduler.farm.ipc.supervisor_side import (
    ExperimentConnection,
    ExperimentExit,
    ExperimentOutcome,
    ExperimentReply,
)
from tunemq_scheduler.transport.desired_state import DesiredState
from tunemq_scheduler.transport.experiment_transport import TransportClient
from tunemq_scheduler.transport.nodes.registration_checks import check_known
from tunemq_shared.base.errors import TransportError
from tunemq_shared.broker import redis_keys
from tunemq_shared.objects.allowed_stores import StorePermissions
from tunemq_shared.objects.store_address import join
from tunemq_shared.objects.store_traffic import StoreTraffic
from tunemq_shared.protocol import messages as m
from tunemq_shared.protocol.message_limits import MOST_NODES
from tunemq_shared.protocol.result_conditions import Condition
from tunemq_shared.protocol.trial_limits import TrialLimitSpec


class Nodes:
    """A transport without any node."""

    is_full = False
    incomplete_node = ""

    def __init__(self) -> None:
        self.became = ""
        self.started: list[str] = []

    def add(self, _events_key: str) -> TransportClient:
        return self  # type: ignore[return-value]

    def hold(self, *, is_full: bool) -> None:
        pass

    def orders(self, _node: str) -> Nodes:
        return self

    def put(self, order: m.TrialOrder) -> None:
        self.started.append(order.trial)

    def take(self) -> list[object]:
        return []

    def close(self) -> None:
        self.became = "closed"

    def leave(self) -> None:
        self.became = "left"


class Experiment:
    """A fake experiment process and its supervisor's link."""

    pid = watched = -1
    is_aborted = False

    def __init__(self, folder: Path, stores: StorePermissions | None = None) -> None:
        self.nodes = Nodes()
        self.code: int | None = None
        job = r.ExperimentJob(
            name="x", results=str(folder), code="x.py", term=1, prefix="x", stores=stores
        )
        self.connection = ExperimentConnection(
            job, self.nodes, folder=folder, begin=self._begin, exit_within_s=0.05
        )

    def _begin(self, _folder: Path, sock: socket.socket, **_options: object) -> Experiment:
        self.frames = FrameSocket(sock)
        return self

    def returncode(self) -> int | None:
        return self.code

    def kill(self) -> None:
        self.code = -signal.SIGKILL

    def abort(self) -> None:
        self.is_aborted = True

    def close(self) -> None:
        self.frames.close()

    def last_output(self) -> str:
        return "its last words"

    def attach(self) -> None:
        self.say(r.encode(r.ExperimentAttached(redis_keys.events("x1"))))

    def say(self, payload: bytes) -> None:
        self.frames.put(payload)
        while True:
            self.frames.flush()
            self.connection.on_readable()
            if not self.frames.waiting or self.code is not None:
                break
        self.connection.on_readable()

    def ends(self, code: int) -> ExperimentExit:
        self.code = code
        self.connection.attend()
        assert self.connection.process_exit is not None
        return self.connection.process_exit


@pytest.fixture
def experiment(tmp_path: Path) -> Iterator[Experiment]:
    made = Experiment(tmp_path)
    yield made
    if made.connection.process_exit is None:
        made.ends(-9)


def test_failure_of_disk_or_store_leaves_trials_to_the_next_process(experiment):
    experiment.attach()
    assert experiment.ends(EXIT_AGAIN) == (
        ExperimentOutcome.LEFT,
        EXIT_AGAIN,
        "its last words",
        b"",
    )
    assert experiment.nodes.became == "left"


def test_code_of_the_user_that_raises_fails_the_experiment(experiment):
    assert experiment.ends(EXIT_FAILED).outcome is ExperimentOutcome.FAILED


def test_process_that_reports_why_it_ends_is_quoted_whatever_stderr_has(experiment):
    experiment.say(r.encode(r.ExperimentProblem("no space is left")))
    assert experiment.ends(EXIT_AGAIN).text == "no space is left"


def test_process_that_fails_silently_has_a_reason(experiment, monkeypatch):
    monkeypatch.setattr(experiment.connection._process, "last_output", str)
    assert "exit code 1" in experiment.ends(EXIT_FAILED).text


def test_process_that_exits_with_zero_before_the_search_has_ended_has_died(experiment):
    experiment.attach()
    process_exit = experiment.ends(0)
    assert process_exit.outcome is ExperimentOutcome.DIED
    assert "exit code 0 without saying that the search has ended" in process_exit.text
    assert experiment.nodes.became == "left"


def test_process_that_exits_with_zero_before_its_search_began_has_died(experiment):
    """As by ``os._exit(0)`` in a module that its script imports."""
    process_exit = experiment.ends(0)
    assert process_exit.outcome is ExperimentOutcome.DIED
    assert "without saying that the search has ended" in process_exit.text


def test_process_whose_child_writes_for_ever_ends(experiment, monkeypatch):
    experiment.attach()
    experiment.say(r.encode(r.SearchEnded("finished")))
    read, tries = experiment.connection.on_readable, iter(range(100))

    def read_beside_the_child() -> None:
        next(tries)  # raises if this does not end
        experiment.frames.put(r.encode(r.ExperimentAlive()))
        experiment.frames.flush()
        read()

    monkeypatch.setattr(experiment.connection, "on_readable", read_beside_the_child)
    assert experiment.ends(0) == (ExperimentOutcome.FINISHED, 0, "finished", b"")


def test_process_that_deregisters_has_ended(experiment):
    experiment.attach()
    experiment.say(r.encode(r.SearchEnded("finished")))
    assert experiment.ends(0) == (ExperimentOutcome.FINISHED, 0, "finished", b"")


@pytest.mark.parametrize(
    "payload",
    [
        b"\xc1",
        r.encode(r.ExperimentNotices(("text",))).replace(b"text", b"tex\xff"),
        r.encode(r.SearchStatus(counts={}))[:-1] + b"\x91" * 100_000,
    ],
)
def test_process_that_sends_unreadable_frames_is_killed(experiment, payload):
    experiment.attach()
    experiment.say(payload)
    process_exit = experiment.ends(-9)
    assert process_exit.outcome is ExperimentOutcome.FAILED
    assert "cannot be read" in process_exit.text


def test_s14_order_to_a_node_that_names_another_store_ends_its_search_and_is_not_sent(tmp_path):
    """The experiment process runs the submitter's code, which may send such an order."""
    ours = "s3://tunemq/farm?endpoint=http://store:7380"
    experiment = Experiment(tmp_path, StorePermissions((ours,)))
    experiment.attach()
    for number, store in enumerate((join(ours, "x"), "s3://tunemq/farm/x?endpoint=http://evil")):
        how = msgspec.structs.replace(START, events_key=redis_keys.events("x1"), store=store)
        start = r.PutTrialOrder("node", m.TrialOrder(f"x_{number}", 1, (), start=how))
        experiment.say(r.encode(r.TurnOrders((start,))))
    process_exit = experiment.ends(-9)
    assert process_exit.outcome is ExperimentOutcome.FAILED
    assert "it ordered what it may not" in process_exit.text
    assert "http://evil" in process_exit.text
    assert experiment.nodes.started == ["x_0"]


@pytest.mark.parametrize("number", [math.nan, math.inf, -1.0])
@pytest.mark.parametrize(
    "field", ["stop_grace_s", "sync_timeout_s", "time_spent_s", "resources", "devices", "limits"]
)
def test_s15_order_with_an_impossible_number_ends_its_search_and_is_not_sent(
    experiment, field, number
):
    """A node's timers have no order with NaN, so that none of any search would be due again."""
    experiment.attach()
    value = {"limits": TrialLimitSpec(number), "resources": {"cpu": number}}.get(field, number)
    value = {"x": number} if field == "devices" else value
    changes = {"events_key": redis_keys.events("x1"), field: value}
    order = m.TrialOrder("x_0", 1, (), start=msgspec.structs.replace(START, **changes))
    experiment.say(r.encode(r.TurnOrders((r.PutTrialOrder("node", order),))))
    process_exit = experiment.ends(-9)
    assert process_exit.outcome is ExperimentOutcome.FAILED
    assert "it sent what cannot be read" in process_exit.text
    assert experiment.nodes.started == []


@pytest.mark.parametrize("kind", ["put", "kill", "release"])
@pytest.mark.parametrize("trial", ["y_00000", "xy_00000", "x", ""])
def test_s02_order_for_a_trial_of_another_search_ends_its_own_and_is_not_sent(
    experiment, kind, trial
):
    """A node finds its orders by the trial's id and attempt, whichever search they are from."""
    experiment.attach()
    start = msgspec.structs.replace(START, events_key=redis_keys.events("x1"))
    order = m.TrialOrder(trial, 1, (), start=start, kill=kind == "kill")
    ordered = (
        r.ReleaseOrder("node", trial, 1) if kind == "release" else r.PutTrialOrder("node", order)
    )
    experiment.say(r.encode(r.TurnOrders((ordered,))))
    process_exit = experiment.ends(-9)
    assert process_exit.outcome is ExperimentOutcome.FAILED
    assert f"it gave an order for trial {trial!r}" in process_exit.text
    assert experiment.nodes.started == []


def test_s15_process_that_names_too_many_nodes_is_killed(experiment):
    node = m.NodeJoined("i", "n", "h", "127.0.0.1", {})
    nodes = (node,) * (MOST_NODES + 1)
    experiment.say(r.encode(r.ExperimentAttached(redis_keys.events("x1"), nodes)))
    process_exit = experiment.ends(-9)
    assert process_exit.outcome is ExperimentOutcome.FAILED
    assert "it named 4,097 nodes, and 4,096 are possible" in process_exit.text


@pytest.mark.parametrize("field", ["nodes", "away"])
def test_s15_process_that_names_a_node_with_an_impossible_number_of_gpus_is_killed(
    experiment, field
):
    node = m.NodeJoined("i", "n", "h", "127.0.0.1", {"gpu": 2.0**53})
    experiment.say(r.encode(r.ExperimentAttached(redis_keys.events("x1"), **{field: (node,)})))
    process_exit = experiment.ends(-9)
    assert process_exit.outcome is ExperimentOutcome.FAILED
    assert "it says that it has 9.0072e+15 GPUs, and 1,024 are possible" in process_exit.text


@pytest.mark.parametrize("amount", [math.nan, math.inf, -1.0])
def test_s15_process_that_names_a_node_with_an_impossible_amount_is_killed(experiment, amount):
    for node in (
        m.NodeJoined("i", "n", "h", "127.0.0.1", {"cpu": amount}),
        m.NodeJoined("i", "n", "h", "127.0.0.1", {}, (m.Gpu("u", "A100", amount),)),
    ):
        with pytest.raises(TransportError, match="it has an impossible amount"):
            check_known(node)
    experiment.say(r.encode(r.ExperimentAttached(redis_keys.events("x1"), (node,))))
    process_exit = experiment.ends(-9)
    assert process_exit.outcome is ExperimentOutcome.FAILED
    assert "it has an impossible amount" in process_exit.text


def test_s15_process_that_orders_more_than_a_node_can_take_is_killed(experiment, monkeypatch):
    """An assignment is that of all searches of a node: a node would refuse it as too long."""
    trials = DesiredState("node", term=1).orders(redis_keys.events("x1"))
    monkeypatch.setattr(experiment.nodes, "orders", lambda _node: trials)
    experiment.attach()
    start = msgspec.structs.replace(START, events_key=redis_keys.events("x1"))
    for number in range(30):
        order = m.TrialOrder(f"x_{number}", 1, (Condition("m" * 2**20, 1),), start=start)
        experiment.say(r.encode(r.TurnOrders((r.PutTrialOrder("node", order),))))
    process_exit = experiment.ends(-9)
    assert process_exit.outcome is ExperimentOutcome.FAILED
    assert "the orders of this search to one node have" in process_exit.text
    assert trials.is_empty


@pytest.mark.parametrize(
    "use",
    [
        r.StoreUse(StoreTraffic(-1)),
        r.StoreUse(StoreTraffic(failing_s=math.nan)),
        r.StoreUse(waiting=-1),
        r.StoreUse(copy_behind_s=math.nan),
        r.StoreUse(copy_behind_s=math.inf),
    ],
)
def test_impossible_store_use_is_left_out(experiment, use):
    honest = r.StoreUse(StoreTraffic(5, 1), waiting=2)
    experiment.attach()
    experiment.say(r.encode(honest))
    experiment.say(r.encode(use))
    assert experiment.connection.store_use == honest


def test_requester_is_told_of_an_unreadable_answer(experiment):
    replies: list[ExperimentReply] = []
    experiment.attach()
    experiment.connection.ask(r.ExplainTrial("a"), replies.append)
    experiment.say(r.encode(r.IpcReply(1)))
    experiment.ends(-9)
    assert [type(reply) for reply in replies] == [RequestRejection]


@pytest.mark.parametrize(
    ("threads", "named"),
    [
        (("upload-1", "upload-2"), "the threads upload-1, upload-2"),
        ((), "an exit handler (atexit)"),
    ],
)
def test_process_that_does_not_exit_after_its_search_is_killed_with_its_reported_outcome(
    experiment, threads, named
):
    experiment.attach()
    experiment.say(r.encode(r.SearchEnded("finished.")))
    experiment.say(r.encode(r.ExperimentExiting(0, threads)))
    deadline = time.monotonic() + 10
    while experiment.connection.process_exit is None and time.monotonic() < deadline:
        experiment.connection.attend()
    assert experiment.code == -signal.SIGKILL
    late = f"its process was killed: {named} had not ended 0.05 s after it"
    assert experiment.connection.process_exit == (
        ExperimentOutcome.FINISHED,
        0,
        f"finished; {late}",
        b"",
    )


def test_error_while_an_end_is_judged_ends_only_its_experiment(experiment, monkeypatch):
    experiment.attach()
    monkeypatch.setattr(experiment.connection, "_judged", lambda _code: 1 // 0)
    process_exit = experiment.ends(0)
    assert process_exit.outcome is ExperimentOutcome.FAILED
    assert "the scheduler failed on it (ZeroDivisionError" in process_exit.text


@pytest.mark.parametrize("code", [-1000, -(2**40), 2**40])
def test_impossible_exit_code_ends_only_its_experiment(experiment, code):
    experiment.attach()
    process_exit = experiment.ends(code)
    assert process_exit.outcome is ExperimentOutcome.DIED
    assert f"ended with exit code {code}" in process_exit.text


def test_process_that_exits_in_time_is_judged_by_its_last_report(experiment):
    experiment.attach()
    experiment.say(r.encode(r.ExperimentExiting(EXIT_AGAIN)))
    process_exit = experiment.ends(-signal.SIGSEGV)  # it died in an exit handler: all work was done
    assert (process_exit.outcome, process_exit.returncode) == (ExperimentOutcome.LEFT, EXIT_AGAIN)


def test_repeated_reports_of_an_end_delay_no_kill(experiment):
    experiment.attach()
    deadline = time.monotonic() + 10
    while experiment.code is None and time.monotonic() < deadline:
        experiment.say(r.encode(r.ExperimentExiting(0)))
        experiment.connection.attend()
    assert experiment.code == -signal.SIGKILL


def test_silence_of_a_process_is_counted_by_heartbeats_from_its_start(experiment, monkeypatch):
    clock = time.monotonic()
    monkeypatch.setattr(link_module.time, "monotonic", lambda: clock)
    experiment.connection.beat(0.0)
    for _ in range(2):
        clock += 1.0
        experiment.connection.beat(0.0)
    assert experiment.connection.silent_s >= 2.0  # its code is being loaded
    experiment.attach()
    assert experiment.connection.silent_s == 0.0
    for _ in range(3):
        clock += 1.0
        experiment.connection.beat(0.0)
    assert experiment.connection.silent_s == 3.0
    clock += 3600.0  # the supervisor, or its machine, was suspended
    experiment.connection.beat(0.0)
    assert experiment.connection.silent_s < 10.0
    experiment.say(r.encode(r.ExperimentAlive()))
    assert experiment.connection.silent_s == 0.0


def test_process_that_hangs_prints_its_stacks_and_is_killed_if_it_continues(
    experiment, monkeypatch
):
    monkeypatch.setattr(link_module, "_ABORT_WITHIN_S", 0.0)
    experiment.attach()
    experiment.connection.abort()
    assert experiment.is_aborted
    experiment.connection.attend()
    assert experiment.code == -signal.SIGKILL


@pytest.mark.parametrize(
    "message",
    [
        r.OfferUsageUpdate(OfferUsage(seen={"n.1": 2**64 - 1})),
        r.OfferUsageUpdate(OfferUsage(held={"n.1": ResourceAmounts({"cpu": math.nan})})),
        r.OfferUsageUpdate(OfferUsage(wants=(SlotDemand({"cpu": 1.0}, -1),))),
        r.OfferUsageUpdate(OfferUsage(wants=(SlotDemand({"cpu": 1.0}, 1),) * 101)),
        r.OfferUsageUpdate(OfferUsage(alone=("x" * 2**20,) * 5)),
        r.OfferUsageUpdate(OfferUsage(wants=(SlotDemand({}, 1),))),
        r.OfferUsageUpdate(OfferUsage(wants=(SlotDemand({f"{n}": 1.0 for n in range(65)}, 1),))),
        r.OfferUsageUpdate(OfferUsage(wants=(SlotDemand({"cpu": 0.0}, 1),))),
        r.OfferUsageUpdate(OfferUsage(wants=(SlotDemand({"cpu": 1e-12}, 2**53),))),
        r.OfferUsageUpdate(OfferUsage(wants=(SlotDemand({"cpu": 1.0, "gpu_memory": 1e-10}, 1),))),
        r.ExperimentExiting(-1000),
        r.ExperimentExiting(-(2**40)),
        r.ExperimentExiting(256),
        r.EventsAcknowledged(2**64 - 1),
        r.EventsAcknowledged(1, {"n.1": 2**63}),
        r.SearchStatus(counts={"RUNNING": 2**64 - 1}),
        r.SearchStatus(counts={}, total=2**63),
    ],
)
def test_process_with_impossible_numbers_ends_only_its_experiment(experiment, message):
    experiment.attach()
    experiment.say(r.encode(message))
    process_exit = experiment.ends(-9)
    assert process_exit.outcome is ExperimentOutcome.FAILED
    assert "it sent what cannot be read" in process_exit.text


@pytest.mark.parametrize(
    "message",
    [
        r.SearchEnded("x" * (r.MOST_CHARACTERS + 1)),
        r.SearchEnded(detail=bytes(r.ANSWER_BYTES + 1)),
        r.SearchStatus(counts={}, waits=("x" * 5000,)),
        r.SearchStatus(counts={}, waits=("x",) * (r.MOST_LINES + 1)),
        r.SearchStatus(counts={"x" * 300: 1}),
        r.SearchStatus(counts={f"state {number}": 1 for number in range(r.MOST_LINES + 1)}),
        r.ExperimentNotices(("x" * 5000,)),
        r.ExperimentNotices(("x",) * (r.MOST_LINES + 1)),
        r.ExperimentProblem("x" * (r.MOST_CHARACTERS + 1)),
    ],
)
def test_s15_process_with_too_long_texts_ends_only_its_experiment(experiment, message):
    """They would be in everyone's list of searches, which is then too long for Redis."""
    experiment.attach()
    experiment.say(r.encode(message))
    process_exit = experiment.ends(-9)
    assert process_exit.outcome is ExperimentOutcome.FAILED
    assert "it sent what cannot be read" in process_exit.text
    assert len(process_exit.text) < 1000
    assert process_exit.detail == b""


def test_s15_too_long_answer_is_not_passed_on(experiment):
    experiment.attach()
    replies: list[ExperimentReply] = []
    experiment.connection.ask(r.ShowTrials(10), replies.append)
    too_long = msgspec.Raw(msgspec.msgpack.encode("x" * r.ANSWER_BYTES))
    experiment.say(r.encode(r.IpcReply(1, too_long)))
    experiment.ends(-9)
    assert [type(reply) for reply in replies] == [RequestRejection]


def test_only_the_newest_incidents_wait_to_be_shown(experiment):
    experiment.attach()
    for number in range(3):
        lines = tuple(f"{number}: {line}" for line in range(r.MOST_LINES))
        experiment.say(r.encode(r.ExperimentNotices(lines)))
    assert experiment.connection.take_notices() == list(lines)


def test_answer_with_a_configuration_nested_too_deeply_ends_only_its_experiment(experiment):
    experiment.attach()
    replies: list[ExperimentReply] = []
    experiment.connection.ask(r.ShowTrials(10), replies.append)
    state = ExperimentState.RUNNING
    row = ExperimentRow(name="x", id="1", owner="alice", priority=0, state=state, submitted=0.0)
    trial = TrialRow(trial="a", name="a", status="RUNNING", config={"x": "MARK"})
    answer = msgspec.msgpack.encode(ExperimentDetail(experiment=row, trials=(trial,)))
    nested = b"\x91" * 500 + b"\xc0"  # 500 lists of one item around None
    answer = answer.replace(msgspec.msgpack.encode("MARK"), nested)
    experiment.say(r.encode(r.IpcReply(1, answer=msgspec.Raw(answer))))
    process_exit = experiment.ends(-9)
    assert process_exit.outcome is ExperimentOutcome.FAILED
    assert "nested more than 64 levels deep" in process_exit.text
    (reply,) = replies
    assert isinstance(reply, RequestRejection)
    assert "nested more than 64 levels deep" in reply.text


def test_experiment_that_makes_the_supervisor_fail_ends_alone(experiment, monkeypatch, capfd):
    experiment.attach()
    monkeypatch.setattr(experiment.nodes, "take", lambda: [object()])
    experiment.connection.attend()
    monkeypatch.undo()
    process_exit = experiment.ends(-9)
    assert process_exit.outcome is ExperimentOutcome.FAILED
    assert "the scheduler failed on it" in process_exit.text
    assert "Traceback" in capfd.readouterr().err
