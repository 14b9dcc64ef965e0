"""The order of a report's messages, and how a trial waits, stops, ends and resumes."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from tests.unit.shared.fakes import World, up_to
from tunemq_shared.base.errors import BugError, CheckpointError, MetricError, StoreError, TuneError
from tunemq_shared.checkpoints.checkpoint import Checkpoint
from tunemq_shared.protocol.messages import ResultReported, TrialOrder
from tunemq_shared.protocol.result_conditions import Condition
from tunemq_shared.trial import trial_session as trial_session_module
from tunemq_shared.trial.control_flow import TrialDoneExit, TrialStopExit
from tunemq_shared.trial.session import active, get_checkpoint, get_context, report
from tunemq_shared.trial.trial_session import TrialSession


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


class Clock:
    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(trial_session_module.time, "monotonic", lambda: self.now)


@pytest.mark.parity(29)
def test_reports_are_numbered_from_one_and_timed(world, monkeypatch):
    clock = Clock(monkeypatch)
    with active(world.session()):
        clock.now += 2
        report({"loss": 1.0})
        clock.now += 3
        report(loss=0.5)

    first, second = world.channel.results
    assert (first.step, first.metrics, first.time_this_iter_s) == (1, {"loss": 1.0}, 2.0)
    assert (second.step, second.metrics, second.time_total_s) == (2, {"loss": 0.5}, 5.0)


@pytest.mark.parity(16)
def test_waiting_and_saving_do_not_count_into_the_next_iteration(world, monkeypatch, tmp_path):
    clock = Clock(monkeypatch)
    session = world.session(run_until=up_to(1))
    world.channel.waited_for.append(world.order(up_to(5)))
    wait, save = world.channel.wait, world.sink.save

    def slow_wait():
        clock.now += 50
        return wait()

    def slow_save(*args, **kwargs):
        clock.now += 30
        return save(*args, **kwargs)

    monkeypatch.setattr(world.channel, "wait", slow_wait)
    monkeypatch.setattr(world.sink, "save", slow_save)
    clock.now += 1
    session.report({}, Checkpoint.from_dict({"a": 1}))
    clock.now += 2
    session.report({})

    assert [result.time_this_iter_s for result in world.channel.results] == [1.0, 2.0]
    assert clock.now == 183.0


@pytest.mark.parity(15)
def test_trial_runs_to_its_horizon_and_waits_there(world):
    session = world.session(run_until=up_to(3))
    session.report({})
    session.report({})
    with pytest.raises(EOFError):
        session.report({})

    assert [result.step for result in world.channel.results] == [1, 2, 3]


@pytest.mark.parity(129)
def test_trial_continues_only_when_the_horizon_is_beyond_its_result(world):
    session = world.session(run_until=up_to(1))
    world.channel.waited_for += [world.order(up_to(1)), world.order(up_to(2))]

    session.report({})

    assert not world.channel.waited_for


def test_horizon_may_be_a_metric(world):
    session = world.session(run_until=(Condition("eval/acc", 0.9),))
    session.report({"eval": {"acc": 0.5}})

    with pytest.raises(EOFError):
        session.report({"eval": {"acc": 0.95}})


def test_order_for_another_attempt_is_ignored(world):
    session = world.session()
    world.channel.notices.append(TrialOrder("t1", 77, (), stop=True))

    session.report({})

    assert session.ended is None


@pytest.mark.parity(18)
def test_stop_order_unwinds_and_runs_finally_blocks(world):
    session = world.session()
    world.channel.notices.append(world.order(stop=True))
    ran = []

    def train():
        try:
            try:
                session.report({})
            except Exception:  # noqa: BLE001  what training code does
                ran.append("swallowed")
        finally:
            ran.append("finally")

    with pytest.raises(TrialStopExit):
        train()

    assert ran == ["finally"]


@pytest.mark.parity(18)
def test_stop_order_ends_a_wait(world):
    session = world.session(run_until=up_to(1))
    world.channel.waited_for.append(world.order(stop=True))

    with pytest.raises(TrialStopExit):
        session.report({})


def test_swallowed_stop_is_raised_again_and_nothing_more_is_sent(world):
    session = world.session()
    world.channel.notices.append(world.order(stop=True))
    for _ in range(3):
        with pytest.raises(TrialStopExit):
            session.report({})

    assert world.channel.kinds == ["ResultReported"]


@pytest.mark.parity(98)
def test_stop_criterion_ends_the_trial_at_the_exact_step(world):
    session = world.session(stop=(Condition("acc", 0.9), Condition("training_iteration", 100)))
    session.report({"acc": 0.5})
    with pytest.raises(TrialDoneExit):
        session.report({"acc": 0.9})
    with pytest.raises(TrialDoneExit):
        session.report({"acc": 1.0})

    assert [result.done for result in world.channel.results] == [False, True]


@pytest.mark.parity(54, 100)
@pytest.mark.parametrize(
    ("criterion", "metrics"),
    [
        (Condition("training_iteration", 1), {}),
        (Condition("time_total_s", 5.0), {"time_this_iter_s": 6}),
        (Condition("timesteps_total", 10), {"timesteps_this_iter": 10}),
        (Condition("neg_mean_loss", -0.5), {"mean_loss": 0.25}),
        (Condition("info/eval/acc", 0.5), {"info": {"eval": {"acc": 0.75}}}),
    ],
)
def test_automatic_and_nested_keys_can_be_stop_criteria(world, criterion, metrics):
    session = world.session(stop=(criterion,))

    with pytest.raises(TrialDoneExit):
        session.report(metrics)


@pytest.mark.parity(17)
def test_done_in_a_report_ends_the_trial(world):
    with pytest.raises(TrialDoneExit):
        world.session().report({"done": True})

    assert world.channel.results[0].done


@pytest.mark.parity(99)
def test_stop_criterion_missing_in_results_causes_one_warning(world, caplog):
    session = world.session(stop=(Condition("accuracy", 0.9),))
    with caplog.at_level(logging.WARNING):
        session.report({"acc": 1.0})
        session.report({"acc": 1.0})

    (record,) = caplog.records
    assert "accuracy >= 0.9" in record.getMessage()
    assert "'acc'" in record.getMessage()


@pytest.mark.parity(33, 69, 136)
def test_result_precedes_the_checkpoint_that_contains_it(world, tmp_path):
    session = world.session(stop=(Condition("training_iteration", 1),))
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "model").write_text("weights")

    with pytest.raises(TrialDoneExit):
        session.report({"loss": 1.0}, Checkpoint.from_directory(tmp_path / "made"))

    assert world.channel.kinds == ["ResultReported", "CheckpointCommitted"]
    (kept,) = world.channel.checkpoints
    assert (kept.n, kept.step) == (1, 1)
    assert (world.sink.root / kept.key / "model").read_text() == "weights"
    assert world.sink.metrics[kept.key]["loss"] == 1.0
    assert world.sink.metrics[kept.key]["training_iteration"] == 1


@pytest.mark.parity(106)
def test_checkpoint_that_cannot_be_kept_raises_after_its_result(world):
    session = world.session()
    world.sink.error = StoreError("the disk is full")

    with pytest.raises(StoreError):
        session.report({}, Checkpoint.from_dict({}))

    assert world.channel.kinds == ["ResultReported"]


def test_value_in_place_of_a_checkpoint_is_rejected_before_anything_is_sent(world):
    with active(world.session()), pytest.raises(CheckpointError, match="from_directory"):
        report({}, checkpoint="/some/where")

    assert not world.channel.sent


def test_rejected_report_counts_nothing(world):
    session = world.session(finite_metrics=("loss",), stop=(Condition("acc", 1.0),))
    for bad in ({"loss": float("nan")}, {}, {"loss": 1.0, "acc": "x"}, {"loss": 1, "done": "x"}):
        with pytest.raises(MetricError):
            session.report(bad)

    session.report({"loss": 1.0})

    assert [result.step for result in world.channel.results] == [1]


def test_automatic_keys_can_be_required(world):
    names = ("training_iteration", "time_total_s", "timesteps_total", "neg_mean_loss")
    session = world.session(required_metrics=names, finite_metrics=("neg_mean_loss",))
    session.report({"timesteps_this_iter": 5, "mean_loss": 1.0})
    session.report({"mean_loss": 1.0})

    with pytest.raises(MetricError, match=r"'neg_mean_loss' is missing"):
        session.report({"loss": 1.0})
    with pytest.raises(MetricError, match=r"'neg_mean_loss' is nan"):
        session.report({"mean_loss": float("nan")})


def test_restored_trial_continues_its_counts_and_finds_its_checkpoint(world):
    before = world.session()
    before.report({"timesteps_this_iter": 7, "time_this_iter_s": 2})
    before.report({"time_this_iter_s": 2}, Checkpoint.from_dict({"attempt": 2}))

    after = world.restored()
    after.restore()
    with active(after):
        restored = get_checkpoint()
        report({"time_this_iter_s": 1})

    assert restored is not None
    assert restored.to_dict() == {"attempt": 2}
    last = world.channel.results[-1]
    assert (last.attempt, last.step, last.iterations_since_restore) == (2, 3, 1)
    assert (last.time_total_s, last.time_since_restore, last.timesteps_total) == (5.0, 1.0, 7)
    assert len(world.channel.checkpoints) == 1


def test_get_checkpoint_returns_the_newest_one(world):
    with active(world.session()):
        assert get_checkpoint() is None
        for attempt in (1, 2):
            report({}, checkpoint=Checkpoint.from_dict({"attempt": attempt}))
        newest = get_checkpoint()

    assert newest is not None
    assert newest.to_dict() == {"attempt": 2}


@pytest.mark.parity(88)
def test_context_names_the_trial(world):
    with active(world.session(trial_number=3)):
        context = get_context()

    assert context.get_experiment_name() == "exp"
    assert context.get_trial_id() == "t1"
    assert context.get_trial_name() == "train_00000"
    assert context.get_trial_number() == 3
    assert context.get_trial_dir() == str(world.folder / "trial")
    assert context.get_trial_resources() == {"cpu": 1.0}
    assert (context.get_world_size(), context.get_local_world_size()) == (1, 1)
    ranks = (context.get_world_rank(), context.get_local_rank(), context.get_node_rank())
    assert ranks == (0, 0, 0)


@pytest.mark.parity(13)
def test_functions_outside_a_trial_say_what_to_do():
    for function in (lambda: report({}), get_context, get_checkpoint):
        with pytest.raises(TuneError, match=r"outside of a trial.*Tuner"):
            function()


def test_report_accepts_a_number_or_keywords(world):
    with active(world.session()):
        report(0.5)
        report({"a": 1}, b=2)
        report()

    assert [r.metrics for r in world.channel.results] == [{"_metric": 0.5}, {"a": 1, "b": 2}, {}]


def test_forked_child_cannot_report_for_its_trial(world, monkeypatch):
    session = world.session()
    monkeypatch.setattr(os, "getpid", lambda: 1)

    with pytest.raises(TuneError, match="a child of the trial's process"):
        session.report({})


def test_order_without_a_start_makes_no_session(world):
    with pytest.raises(BugError):
        TrialSession(world.order(), {}, world.channel, world.sink)


def test_session_is_current_only_while_it_is_active(world):
    outer, inner = world.session(), world.session()
    with active(outer):
        with active(inner):
            report({})
        report({})

    assert [result.attempt for result in world.channel.results] == [2, 1]


def test_imports_of_the_trial_runner_load_no_library():
    heavy = {"numpy", "torch", "celery", "redis", "minio", "optuna", "pandas"}
    modules = "tunemq_shared.trial.session, tunemq_shared.trainable.run_trial"
    code = f"import sys, {modules}; print(*sys.modules)"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}

    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environment
    )

    assert not {name.partition(".")[0] for name in done.stdout.split()} & heavy


def test_trial_does_not_wait_at_a_step_that_an_earlier_attempt_reported(world, monkeypatch):
    """No scheduler would release it: the result is dropped, whatever horizon its times reach."""
    clock = Clock(monkeypatch)
    ten_seconds = (Condition("time_total_s", 10.0),)
    session = world.session(run_until=ten_seconds, last_step=2)
    with active(session):
        clock.now += 20
        report({"loss": 1.0})
        report({"loss": 0.5})
        with pytest.raises(EOFError):
            report({"loss": 0.2})
    assert [result.step for result in world.channel.results] == [1, 2, 3]


def test_stop_criterion_does_not_end_a_trial_at_a_step_that_an_earlier_attempt_reported(world):
    """The scheduler drops that result, so the trial would end without one that meets it."""
    session = world.session(stop=(Condition("acc", 0.8),), last_step=2)
    with suppress(TrialDoneExit):
        for acc in (0.5, 0.9, 0.7, 0.8, 0.7):
            session.report({"acc": acc})
    assert [result.done for result in world.channel.results] == [False, False, False, True]


def test_trial_that_says_done_at_a_repeated_step_ends(world):
    session = world.session(last_step=2)
    with pytest.raises(TrialDoneExit):
        session.report({"done": True})


@pytest.mark.timeout(120)
def test_reports_of_several_threads_are_serialized(world, tmp_path):
    (tmp_path / "files").mkdir()
    checkpoint = Checkpoint.from_directory(str(tmp_path / "files"))

    def count() -> None:
        for number in range(50):
            report({"number": number}, checkpoint=None if number % 10 else checkpoint)
            if number % 10 == 0:
                get_checkpoint()

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with active(world.session()), ThreadPoolExecutor(4) as threads:
            for done in [threads.submit(count) for _ in range(4)]:
                done.result()
    finally:
        sys.setswitchinterval(before)

    assert [result.step for result in world.channel.results] == list(range(1, 201))
    steps = [sent.step for sent in world.channel.sent if not isinstance(sent, ResultReported)]
    assert len(steps) == 20
    for at, sent in enumerate(world.channel.sent):
        if not isinstance(sent, ResultReported):  # a checkpoint contains the result before it
            assert world.channel.sent[at - 1].step == sent.step


def test_report_by_a_signal_handler_within_a_report_says_what_to_do_instead(world, monkeypatch):
    session = world.session()
    save = world.sink.save

    def interrupted_save(*args, **kwargs):
        signal.raise_signal(signal.SIGUSR1)
        return save(*args, **kwargs)

    monkeypatch.setattr(world.sink, "save", interrupted_save)
    before = signal.signal(signal.SIGUSR1, lambda *_: session.report({"loss": 2.0}))
    try:
        signal.raise_signal(signal.SIGUSR1)  # outside of a report it may
        with pytest.raises(TuneError, match="set a flag in the handler"):
            session.report({"loss": 1.0}, Checkpoint.from_dict({"a": 1}))
    finally:
        signal.signal(signal.SIGUSR1, before)
    monkeypatch.undo()
    session.report({"loss": 0.0})
    assert [result.metrics["loss"] for result in world.channel.results] == [2.0, 1.0, 0.0]


def test_thread_that_reports_after_its_trial_has_ended_is_ended_and_sends_nothing(world):
    session = world.session()
    with active(session):
        report(loss=1.0)
        assert session.settled() is None
        with pytest.raises(TrialDoneExit):
            report(loss=0.5)
    assert len(world.channel.results) == 1
