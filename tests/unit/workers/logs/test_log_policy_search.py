"""The node reports a trial's failure only after it has scanned the trial's last output."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import msgspec
import pytest

from tests.support.transfers import run_until
from tests.unit.workers.fakes import Clock, start
from tunemq_shared.protocol.messages import (
    LogMatched,
    NodeEvent,
    ResultReported,
    SlotFreed,
    TrialFailed,
    TrialFinished,
    TrialPaused,
    TrialProcessDied,
    TrialSpec,
    TrialStarted,
    decode_node_event,
    encode,
)
from tunemq_workers.logs import log_policy_search, output_files
from tunemq_workers.logs.log_policy_search import TIMEOUT_S, LogWatch
from tunemq_workers.logs.scanner_messages import (
    FinishOutput,
    FollowOutput,
    ForgetOutput,
    LineMatched,
    LogAnswer,
    LogOrder,
    OutputFinished,
    PatternDropped,
    decode_order,
)
from tunemq_workers.logs.scanner_messages import encode as encode_answer
from tunemq_workers.node.node_loop import _ENDING_S, NodeLoop
from tunemq_workers.processes import child_supervisor
from tunemq_workers.processes.child_process import start_child
from tunemq_workers.runtime.reactor import Reactor
from tunemq_workers.runtime.trial_process_state import AttemptId

EVENTS = "events:x"
ECC = "uncorrectable ECC"
RESULT = ResultReported("a", 1, 1, {"x": 1}, 0.0, 1.0, 1.0, 1.0, 1)


def started(trial: str = "a", attempt: int = 1) -> TrialStarted:
    return TrialStarted(trial, attempt, 7, "process", "127.0.0.1", 0.0, printed=(3, 5))


def failed(kind: str = "user", error: str = "ValueError: x") -> TrialFailed:
    return TrialFailed("a", 1, kind, error, "", 0.0)


DIED = TrialProcessDied("a", 1, 7, None, 1, 0.0)
FREED = SlotFreed("a", 1)


class Watchdog:
    """A supervisor of a scanner process that answers when a test says so."""

    def __init__(self, *_: Any, on_up: Any, decode: Any, on_answer: Any, on_end: Any) -> None:
        self.on_up, self._on_answer, self.on_end = on_up, on_answer, on_end
        self._decode = decode
        self.is_up = self.is_wanted = False
        self.orders: list[LogOrder] = []
        self.ends: list[str] = []

    def start_if_none(self) -> None:
        self.is_wanted = True

    def come_up(self) -> None:
        assert self.is_wanted
        self.is_up, self.is_wanted = True, False
        self.on_up()

    def send(self, order: bytes) -> None:
        assert self.is_up
        self.orders.append(decode_order(order))

    def answer(self, answer: LogAnswer) -> None:
        self._on_answer(self._decode(encode_answer(answer)))

    def end(self, why: str = "") -> None:
        self.ends.append(why)
        self.is_up = False

    def close(self) -> None:
        self.end("closed")


class World:
    """A log watch, the events that it passes on, and trial processes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(log_policy_search, "ChildSupervisor", Watchdog)
        self.clock = Clock()
        self.emitted: list[NodeEvent] = []
        self.warned: list[str] = []
        self.processes: dict[AttemptId, TrialSpec] = {}
        reactor: Any = self.clock
        self.watch = LogWatch(
            reactor,
            start=lambda: pytest.fail("it is a fake"),
            children=set(),
            emit=lambda _key, event: self.emitted.append(decode_node_event(event)),
            warn=lambda _key, text: self.warned.append(text),
        )
        self.watch.running_trials = lambda: list(self.processes.items())
        self.supervisor: Any = self.watch._child

    def process(self, *patterns: str, trial: str = "a", **resources: float) -> None:
        self.processes[trial, 1] = msgspec.structs.replace(
            start(), events_key=EVENTS, folder="/t", log_patterns=patterns, resources=resources
        )
        self.say(started(trial))

    def say(self, *events: NodeEvent) -> None:
        for event in events:
            self.watch.emit(EVENTS, encode(event))

    def take(self) -> list[NodeEvent]:
        emitted = self.emitted[:]
        self.emitted.clear()
        return emitted


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


@pytest.fixture
def follows(world: World) -> World:
    """Return a watch that follows trial ``a`` for a pattern."""
    world.process(ECC)
    world.supervisor.come_up()
    [followed] = world.supervisor.orders
    assert isinstance(followed, FollowOutput)
    assert (followed.output.folder, followed.output.printed) == ("/t", (3, 5))
    assert followed.output.patterns == (ECC,)
    world.supervisor.orders.clear()
    world.take()
    return world


def test_without_patterns_all_events_pass_and_no_process_is_started(
    world: World,
) -> None:
    world.process()
    world.say(RESULT, failed(), FREED)
    assert world.take() == [started(), RESULT, failed(), FREED]
    assert not world.supervisor.is_wanted
    assert not world.watch.is_holding


@pytest.mark.parametrize("failure", [failed(), DIED])
def test_f23_failure_and_later_events_come_after_the_output(
    follows: World, failure: NodeEvent
) -> None:
    follows.say(RESULT, failure, FREED)
    assert follows.take() == [RESULT]
    assert follows.watch.is_holding
    [finish] = follows.supervisor.orders
    assert isinstance(finish, FinishOutput)
    follows.supervisor.answer(LineMatched(finish.id, ECC, "an uncorrectable ECC error"))
    follows.supervisor.answer(OutputFinished(finish.id, is_cuda_memory=False))
    matched, *rest = follows.take()
    assert isinstance(matched, LogMatched)
    assert (matched.trial, matched.attempt, matched.pattern) == ("a", 1, ECC)
    assert matched.line == "an uncorrectable ECC error"
    assert rest == [failure, FREED]
    assert not follows.watch.is_holding


def test_output_match_is_reported_at_once_and_only_once(follows: World) -> None:
    for _ in range(2):
        follows.supervisor.answer(LineMatched(1, ECC, "ECC"))
    assert len(follows.take()) == 1
    follows.say(DIED)
    follows.supervisor.answer(LineMatched(1, ECC, "ECC again, by another process"))
    follows.supervisor.answer(OutputFinished(1, is_cuda_memory=False))
    assert follows.take() == [DIED]


@pytest.mark.parametrize("end", [TrialFinished("a", 1), TrialPaused("a", 1), FREED])
def test_trial_that_ends_well_is_not_delayed(follows: World, end: NodeEvent) -> None:
    follows.say(end)
    assert follows.take() == [end]
    assert follows.supervisor.orders == [ForgetOutput(1)]
    follows.supervisor.answer(LineMatched(1, ECC, "too late"))
    assert follows.take() == []


def test_other_trials_are_not_delayed(follows: World) -> None:
    follows.process(trial="b")
    other = TrialProcessDied("b", 1, 8, 9, None, 0.0)
    follows.take()
    follows.say(DIED, RESULT, other)
    assert follows.take() == [RESULT, other]


def test_process_that_does_not_answer_is_replaced_and_the_failure_reported(follows: World) -> None:
    follows.process(ECC, trial="b")
    follows.take()
    follows.say(DIED, FREED)
    follows.clock.advance(TIMEOUT_S)
    assert follows.take() == [DIED, FREED]
    assert "no log policy was applied" in follows.warned[0]
    assert len(follows.supervisor.ends) == 1
    follows.supervisor.on_end("it did not answer")
    follows.supervisor.orders.clear()
    follows.supervisor.come_up()
    assert [type(one) for one in follows.supervisor.orders] == [FollowOutput]


def test_delayed_events_are_reported_before_the_node_ends(
    follows: World,
) -> None:
    follows.process(ECC, trial="b")
    follows.take()
    follows.say(DIED, FREED)
    follows.watch.hold_no_more()
    assert follows.take() == [DIED, FREED]
    assert not follows.watch.is_holding
    other = [TrialProcessDied("b", 1, 8, 9, None, 0.0), SlotFreed("b", 1)]
    follows.say(*other)
    assert follows.take() == other
    follows.clock.advance(TIMEOUT_S)
    assert follows.take() == []
    assert follows.warned == []


def test_node_that_ends_reports_matches_before_its_deregistration() -> None:
    clock, node = Clock(), MagicMock()
    node._reactor = clock
    NodeLoop._end_trial_processes(node)
    clock.advance(_ENDING_S / 2)
    node._logs.hold_no_more.assert_called_once_with()
    node._deregister.assert_not_called()
    clock.advance(_ENDING_S / 2)
    node._deregister.assert_called_once_with()


def test_process_that_dies_while_a_failure_waits_is_replaced_and_asked_again(
    follows: World,
) -> None:
    follows.say(DIED)
    follows.supervisor.orders.clear()
    follows.supervisor.is_up = False
    follows.supervisor.on_end("it was killed")
    follows.supervisor.come_up()
    [finish] = follows.supervisor.orders
    assert isinstance(finish, FinishOutput)
    assert finish.output.patterns == (ECC,)
    follows.supervisor.answer(OutputFinished(finish.id, is_cuda_memory=False))
    assert follows.take() == [DIED]


def test_dropped_pattern_is_reported_once_to_each_experiment(follows: World) -> None:
    for _ in range(2):
        follows.supervisor.answer(PatternDropped(1, ECC, "it took more than 0.25 s"))
    [warning] = follows.warned
    assert warning == (
        "The log policy 'uncorrectable ECC' is not applied on this node: it took more than 0.25 s."
    )


def test_idle_process_is_ended(follows: World) -> None:
    follows.say(FREED)
    follows.clock.advance(1000)
    assert follows.supervisor.ends == ["it had nothing to do"]
    follows.supervisor.on_end("it had nothing to do")
    assert not follows.supervisor.is_wanted


@pytest.mark.parametrize(
    ("failure", "told"),
    [
        (DIED, msgspec.structs.replace(DIED, cause="cuda_memory")),
        (
            failed(error="CalledProcessError: 'torchrun' returned 1"),
            failed("cuda_memory", "CalledProcessError: 'torchrun' returned 1"),
        ),
    ],
)
@pytest.mark.parametrize("resources", [{"gpu": 0.5}, {"gpu_memory": 1e9}])
def test_f23_gpu_memory_error_in_a_child_is_the_cause_of_the_failure(
    world: World, failure: NodeEvent, told: NodeEvent, resources: dict[str, float]
) -> None:
    world.process(**resources)
    assert not world.supervisor.is_wanted, "nothing is read before it fails"
    world.take()
    world.say(failure, FREED)
    assert world.take() == []
    world.supervisor.come_up()
    [finish] = world.supervisor.orders
    assert finish.asks_memory
    world.supervisor.answer(OutputFinished(finish.id, is_cuda_memory=True))
    assert world.take() == [told, FREED]


@pytest.mark.parametrize(
    "failure",
    [
        failed(),
        failed("cuda_memory", "CUDA out of memory"),
        failed("time_limit", "DataLoader worker"),
        msgspec.structs.replace(DIED, cause="memory"),
    ],
)
def test_failure_with_a_known_cause_is_reported_at_once(world: World, failure: NodeEvent) -> None:
    world.process(gpu=1.0)
    world.take()
    world.say(failure, FREED)
    assert world.take() == [failure, FREED]


# --- with a real process --------------------------------------------------------------------------


@pytest.fixture
def real(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Reactor, Callable[..., None], list[NodeEvent]]]:
    # A busy machine needs time to start a process, and to kill it.
    monkeypatch.setattr(log_policy_search, "TIMEOUT_S", 60.0)
    monkeypatch.setattr(child_supervisor, "_CLOSE_S", 60.0)
    reactor, children = Reactor(), set[int]()
    emitted: list[NodeEvent] = []
    log = str(tmp_path / "log")
    watch = LogWatch(
        reactor,
        start=partial(start_child, "tunemq_workers.logs.log_policy_scanner", (), log),
        children=children,
        emit=lambda _key, event: emitted.append(decode_node_event(event)),
        warn=lambda _key, text: pytest.fail(text),
    )
    running_trials = msgspec.structs.replace(
        start(), events_key=EVENTS, folder=str(tmp_path), log_patterns=(ECC,)
    )
    watch.running_trials = lambda: [(("a", 1), running_trials)]

    def say(*events: NodeEvent) -> None:
        for event in events:
            watch.emit(EVENTS, encode(event))

    yield reactor, say, emitted
    watch.close()
    assert not children
    assert Path(log).read_text() == ""


def test_f23_last_line_before_a_death_is_reported_before_it(real: Any, tmp_path: Path) -> None:
    reactor, say, emitted = real
    (tmp_path / output_files.STDERR).write_text(f"{ECC}, of the attempt before\n")
    began = msgspec.structs.replace(started(), printed=output_files.sizes(str(tmp_path)))
    say(began)
    with (tmp_path / output_files.STDERR).open("a") as stderr:
        stderr.write(f"fatal: {ECC}")
    say(DIED, FREED)
    run_until(reactor, lambda: len(emitted) == 4)
    assert [type(one) for one in emitted] == [TrialStarted, LogMatched, TrialProcessDied, SlotFreed]
    assert emitted[1].line == f"fatal: {ECC}"
