"""How a trial pauses and resumes: its checkpoints and its messages."""

from __future__ import annotations

import pytest

from tests.unit.shared.counting import Counter, log
from tests.unit.shared.fakes import World, up_to
from tunemq_shared.base.errors import StoreError
from tunemq_shared.checkpoints.checkpoint import Checkpoint
from tunemq_shared.protocol.result_conditions import Condition
from tunemq_shared.trainable.run_trial import TrainableRunner, run_trial
from tunemq_shared.trainable.trainable import Trainable
from tunemq_shared.trial.control_flow import TrialPauseExit, TrialStopExit
from tunemq_shared.trial.session import get_checkpoint, report

__all__ = ["log"]


@pytest.fixture(params=[False, True], ids=["store", "cache"])
def world(tmp_path, request):
    return World(tmp_path, has_cache=request.param)


def paused_at(world, step, **changes):
    """Return a session that waits at ``step`` and gets the order to pause there."""
    session = world.session(run_until=up_to(step), **changes)
    world.channel.waited_for.append(world.order(up_to(step), pause=True))
    return session


def kinds(world):
    """Return the kinds of the messages, whichever process stored a checkpoint."""
    return [kind.replace("Written", "Committed") for kind in world.channel.kinds]


def test_pause_order_ends_a_wait_saves_and_is_reported_last(world, log):
    run_trial(Counter, paused_at(world, 2))

    assert kinds(world) == ["ResultReported"] * 2 + ["CheckpointCommitted", "TrialPaused"]
    assert [kept.step for kept in world.channel.checkpoints] == [2]
    assert log == ["setup", "cleanup"]


def test_paused_class_continues_with_its_counts(world):
    run_trial(Counter, paused_at(world, 3))
    run_trial(Counter, world.restored(stop=(Condition("training_iteration", 5),)))

    results = [
        (event.attempt, event.step, event.metrics["total"]) for event in world.channel.results
    ]
    assert results == [(1, 1, 1), (1, 2, 2), (1, 3, 3), (2, 4, 4), (2, 5, 5)]


def test_checkpoint_of_this_step_is_not_saved_again(world):
    run_trial(Counter, paused_at(world, 2, checkpoint_frequency=2))

    assert [kept.step for kept in world.channel.checkpoints] == [2]
    assert world.channel.kinds[-1] == "TrialPaused"


def test_trial_paused_where_it_was_restored_saves_nothing(world):
    run_trial(Counter, paused_at(world, 2))
    session = world.restored()
    world.channel.sent.clear()
    world.channel.notices.append(world.order(pause=True))

    run_trial(Counter, session)

    assert world.channel.kinds == ["TrialPaused"]


def test_trial_paused_before_its_first_step_has_nothing_to_save(world):
    session = world.session()
    world.channel.notices.append(world.order(pause=True))

    run_trial(Counter, session)

    assert world.channel.kinds == ["TrialPaused"]


def test_class_that_cannot_be_saved_fails_with_the_reason(world):
    class Forgetful(Trainable):
        def step(self):
            return {}

    run_trial(Forgetful, paused_at(world, 1))

    assert world.channel.kinds == ["ResultReported", "TrialFailed"]
    assert world.channel.failure.kind == "user"
    assert "Forgetful cannot be saved" in world.channel.failure.error
    assert "use no scheduler that pauses trials" in world.channel.failure.error


def test_checkpoint_that_cannot_be_kept_is_a_failure_in_a_pause_too(world, log):
    world.sink.error = StoreError("no room within 1800 s")

    run_trial(Counter, paused_at(world, 1, reuse=True))

    assert world.channel.kinds == ["ResultReported", "TrialFailed"]
    assert world.channel.failure.kind == "storage"
    assert log == ["setup", "cleanup"]


def test_stop_during_the_save_of_a_pause_takes_precedence(world, monkeypatch):
    session = paused_at(world, 1)
    save = world.sink.save

    def save_and_be_stopped(*args, **kwargs):
        world.channel.notices.append(world.order(stop=True))
        return save(*args, **kwargs)

    monkeypatch.setattr(world.sink, "save", save_and_be_stopped)
    run_trial(Counter, session)

    assert kinds(world) == ["ResultReported", "CheckpointCommitted", "TrialPaused"]
    assert session.ended is TrialStopExit


def test_stop_takes_precedence_over_a_pause_in_one_order(world):
    session = world.session(run_until=up_to(1))
    world.channel.waited_for.append(world.order(stop=True, pause=True))

    run_trial(Counter, session)

    assert world.channel.kinds == ["ResultReported", "TrialPaused"]
    assert session.ended is TrialStopExit


def test_trial_that_is_done_is_finished_not_paused(world):
    session = world.session(stop=(Condition("training_iteration", 1),))
    world.channel.notices += [world.order(), world.order(pause=True)]

    run_trial(Counter, session)

    assert world.channel.kinds == ["ResultReported", "TrialFinished"]


def test_pause_for_another_attempt_is_ignored(world):
    before = world.session()
    late = world.order(pause=True)
    session = world.session(stop=(Condition("training_iteration", 2),))
    world.channel.notices.append(late)

    run_trial(Counter, session)

    assert before.attempt != session.attempt
    assert world.channel.kinds[-1] == "TrialFinished"


def test_paused_object_runs_another_trial_and_then_continues(world, log):
    program = TrainableRunner()
    program.run(Counter, paused_at(world, 2, reuse=True))
    newest = world.channel.checkpoints[-1]
    stop_at_one = (Condition("training_iteration", 1),)
    program.run(Counter, world.session(stop=stop_at_one, reuse=True))
    program.run(Counter, world.restored(stop=(Condition("training_iteration", 3),), reuse=True))
    program.close()

    totals = [event.metrics["total"] for event in world.channel.results]
    assert newest.step == 2
    assert totals == [1, 2, 1, 3]
    assert log == ["setup", "reset", "reset", "cleanup"]


@pytest.mark.parity(42, 45)
def test_paused_trials_state_can_be_passed_on_in_memory(world, tmp_path):
    run_trial(Counter, paused_at(world, 2))
    path = world.restored().restore()
    first = Counter(logdir=str(tmp_path / "first"))
    first.restore(path)
    second = Counter(logdir=str(tmp_path))
    second.restore_from_object(first.save_to_object())

    result = second.train()
    second.stop()

    assert (result["total"], result["training_iteration"]) == (3, 3)
    assert result["iterations_since_restore"] == 1


# --- functions ---


def count(config):
    kept = get_checkpoint()
    for n in range(0 if kept is None else kept.to_dict()["n"], 4):
        report({"n": n + 1}, checkpoint=Checkpoint.from_dict({"n": n + 1}))


def test_paused_function_keeps_its_reports_and_continues(world):
    run_trial(count, paused_at(world, 2))
    assert kinds(world)[-2:] == ["CheckpointCommitted", "TrialPaused"]

    run_trial(count, world.restored())

    assert [event.metrics["n"] for event in world.channel.results] == [1, 2, 3, 4]
    assert world.channel.kinds[-1] == "TrialFinished"


def test_paused_function_unwinds_even_if_it_catches_every_exception(world):
    ran = []

    def train(config):
        try:
            while True:
                try:
                    report({})
                except Exception:  # noqa: BLE001  what training code does
                    ran.append("swallowed")
        finally:
            ran.append("finally")

    run_trial(train, paused_at(world, 2))

    assert ran == ["finally"]
    assert world.channel.kinds == ["ResultReported"] * 2 + ["TrialPaused"]


def test_checkpoint_of_a_function_during_its_pause_is_kept(world):
    def train(config, reporter):
        try:
            for n in range(5):
                reporter(n=n)
        except TrialPauseExit:
            reporter.set_checkpoint({"n": n})
            raise

    run_trial(train, paused_at(world, 3))

    assert kinds(world)[-2:] == ["CheckpointCommitted", "TrialPaused"]
    assert [kept.step for kept in world.channel.checkpoints] == [3]
    assert Checkpoint(world.restored().restore()).to_dict() == {"n": 2}


def test_failed_checkpoint_of_a_paused_function_is_a_failure(world):
    def train(config, reporter):
        try:
            reporter(n=1)
        finally:
            reporter.set_checkpoint({"n": 1})

    world.sink.error = StoreError("full")
    run_trial(train, paused_at(world, 1))

    assert world.channel.failure.kind == "storage"


def test_error_of_a_function_that_is_being_paused_is_only_logged(world, caplog):
    def train(config):
        try:
            report({})
        finally:
            raise ValueError("the file is closed already")

    run_trial(train, paused_at(world, 1))

    assert world.channel.kinds == ["ResultReported", "TrialPaused"]
    assert "the file is closed already" in caplog.text


def test_function_that_is_paused_at_once_is_not_called(world):
    session = world.session()
    world.channel.notices.append(world.order(pause=True))
    called = []

    run_trial(called.append, session)

    assert not called
    assert world.channel.kinds == ["TrialPaused"]


def test_horizon_that_grew_with_the_pause_does_not_matter(world):
    session = world.session(run_until=up_to(1))
    world.channel.waited_for.append(world.order(up_to(9), pause=True))

    run_trial(count, session)

    assert len(world.channel.results) == 1
    assert world.channel.kinds[-1] == "TrialPaused"


# --- preemption, with time to save ----------------------------------------------------------------


def test_preempted_function_runs_to_its_next_checkpoint(world):
    def train(config):
        for n in range(1, 9):
            report({"n": n}, checkpoint=Checkpoint.from_dict({"n": n}) if n % 3 == 0 else None)

    session = world.session(run_until=up_to(1))
    world.channel.waited_for.append(world.order(pause=True, at_checkpoint=True))
    run_trial(train, session)

    assert [event.metrics["n"] for event in world.channel.results] == [1, 2, 3]
    assert kinds(world)[-2:] == ["CheckpointCommitted", "TrialPaused"]


def test_preempted_function_is_still_told_its_horizon(world):
    session = world.session(run_until=up_to(1))
    world.channel.waited_for += [
        world.order(up_to(1), pause=True, at_checkpoint=True),
        world.order(up_to(2), pause=True, at_checkpoint=True),
        world.order(up_to(2), stop=True, pause=True, at_checkpoint=True),
    ]
    run_trial(lambda config: [report({}) for _ in range(9)], session)

    assert world.channel.kinds == ["ResultReported"] * 2 + ["TrialPaused"]
    assert session.ended is TrialStopExit


def test_preempted_function_that_has_just_saved_pauses_at_once(world):
    run_trial(count, paused_at(world, 2))
    session = world.restored()
    world.channel.sent.clear()
    world.channel.notices.append(world.order(pause=True, at_checkpoint=True))
    run_trial(count, session)

    assert world.channel.kinds == ["TrialPaused"]


def test_preempted_class_saves_at_once(world):
    session = world.session(run_until=up_to(2))
    world.channel.waited_for.append(world.order(up_to(2), pause=True, at_checkpoint=True))
    run_trial(Counter, session)

    assert kinds(world) == ["ResultReported"] * 2 + ["CheckpointCommitted", "TrialPaused"]
