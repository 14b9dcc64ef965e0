"""Messages of a trial process from first step to end, and what it keeps for the next trial."""

from __future__ import annotations

import sys

import pytest

from tests.unit.shared.counting import Counter, log
from tests.unit.shared.fakes import World, up_to
from tunemq_shared.base.errors import CheckpointCorrupt, CheckpointError, StoreError
from tunemq_shared.base.failure_text import one_line, traceback_text
from tunemq_shared.checkpoints.checkpoint import Checkpoint
from tunemq_shared.protocol.messages import TrialFailed
from tunemq_shared.protocol.result_conditions import Condition
from tunemq_shared.trainable.function_runner import wrap_function
from tunemq_shared.trainable.run_trial import TrainableRunner, run_trial
from tunemq_shared.trial.session import get_checkpoint, report

__all__ = ["log"]

THREE_STEPS = (Condition("training_iteration", 3),)


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


def steps(world):
    return [(event.step, event.metrics.get("total")) for event in world.channel.results]


def test_class_is_stepped_until_its_stop_criterion(world, log):
    run_trial(Counter, world.session({"from": 10}, stop=THREE_STEPS))

    assert steps(world) == [(1, 11), (2, 12), (3, 13)]
    assert world.channel.kinds == ["ResultReported"] * 3 + ["TrialFinished"]
    assert log == ["setup", "cleanup"]


@pytest.mark.parity(101, 176)
def test_checkpoints_are_kept_at_their_frequency_and_at_the_end(world):
    session = world.session(stop=THREE_STEPS, checkpoint_frequency=2, checkpoint_at_end=True)
    run_trial(Counter, session)

    assert [(kept.n, kept.step) for kept in world.channel.checkpoints] == [(1, 2), (2, 3)]
    assert world.channel.kinds[-3:] == ["ResultReported", "CheckpointCommitted", "TrialFinished"]
    assert list((world.folder / "trial").iterdir()) == []


def test_last_step_is_not_kept_twice(world):
    session = world.session(stop=THREE_STEPS, checkpoint_frequency=3, checkpoint_at_end=True)
    run_trial(Counter, session)

    assert [kept.step for kept in world.channel.checkpoints] == [3]


@pytest.mark.parity(102)
def test_result_can_ask_for_a_checkpoint(world):
    class Asking(Counter):
        def step(self):
            return super().step() | {"should_checkpoint": self.total == 2}

    run_trial(Asking, world.session(stop=THREE_STEPS))

    assert [kept.step for kept in world.channel.checkpoints] == [2]


def test_restored_class_continues(world):
    run_trial(Counter, world.session(stop=THREE_STEPS, checkpoint_at_end=True))
    run_trial(Counter, world.restored(stop=(Condition("training_iteration", 5),)))

    assert steps(world)[-2:] == [(4, 4), (5, 5)]


def test_stopped_class_saves_if_a_save_is_due_and_ends(world, log):
    session = world.session(run_until=up_to(2), checkpoint_at_end=True)
    world.channel.waited_for.append(world.order(stop=True))

    run_trial(Counter, session)

    assert world.channel.kinds == ["ResultReported"] * 2 + ["CheckpointCommitted", "TrialPaused"]
    assert world.channel.saving == [True, False]
    assert log == ["setup", "cleanup"]


def test_restored_class_that_is_stopped_at_once_saves_nothing(world):
    run_trial(Counter, world.session(stop=THREE_STEPS, checkpoint_at_end=True))
    sent = len(world.channel.sent)
    session = world.restored(checkpoint_at_end=True)
    world.channel.notices.append(world.order(stop=True))

    run_trial(Counter, session)

    assert world.channel.kinds[sent:] == ["TrialPaused"]


@pytest.mark.parity(32, 175, 182)
def test_function_that_returns_is_finished_without_another_result(world):
    def train(config):
        report({"loss": 1.0})

    run_trial(train, world.session())
    run_trial(wrap_function(train), world.session())

    assert world.channel.kinds == ["ResultReported", "TrialFinished"] * 2
    assert not world.channel.results[0].done


@pytest.mark.parity(48)
def test_function_continues_from_its_checkpoint(world):
    def train(config):
        kept = get_checkpoint()
        first = 0 if kept is None else kept.to_dict()["epoch"]
        for epoch in range(first + 1, 4):
            report({"epoch": epoch}, checkpoint=Checkpoint.from_dict({"epoch": epoch}))
            if first == 0 and epoch == 2:
                raise ValueError("the machine is on fire")

    run_trial(train, world.session())
    run_trial(train, world.restored())

    assert [(event.step, event.metrics["epoch"]) for event in world.channel.results] == [
        (1, 1),
        (2, 2),
        (3, 3),
    ]
    assert world.channel.kinds[-1] == "TrialFinished"


def test_stopped_function_sends_only_that_it_ended(world):
    session = world.session()
    world.channel.notices.append(world.order(stop=True))

    run_trial(lambda config: report({}), session)

    assert world.channel.kinds == ["TrialPaused"]


def test_checkpoint_of_a_stopped_trial_that_cannot_be_kept_is_logged_and_sent(world, caplog):
    session = world.session(run_until=up_to(1), checkpoint_at_end=True)
    world.channel.waited_for.append(world.order(stop=True))
    world.sink.error = StoreError("full")

    run_trial(Counter, session)

    assert world.channel.kinds == ["ResultReported", "TrialFailed"]
    assert world.channel.failure.kind == "storage"
    assert "raised while it was stopped" in caplog.text


@pytest.mark.parity(24, 177)
def test_exception_is_reported_with_the_users_traceback_first(world):
    def train(config):
        raise ValueError("lr must\nbe positive")

    run_trial(train, world.session())

    failure = world.channel.failure
    assert world.channel.kinds == ["TrialFailed"]
    assert (failure.kind, failure.error) == ("user", "ValueError: lr must be positive")
    lines = failure.traceback.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert "test_run_trial.py" in lines[1]
    assert "in train" in lines[1]
    assert lines[-1] == "be positive"


@pytest.mark.parity(25)
@pytest.mark.parametrize("code", [0, None])
def test_exit_with_code_zero_is_a_clean_end(world, code):
    run_trial(lambda config: sys.exit(code), world.session())

    assert world.channel.kinds == ["TrialFinished"]


@pytest.mark.parity(23, 25)
@pytest.mark.parametrize(
    ("error", "line"),
    [
        (SystemExit(3), "SystemExit: 3"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (StopIteration("no more batches"), "StopIteration: no more batches"),
        (GeneratorExit(), "GeneratorExit"),
    ],
)
def test_any_other_exception_is_a_failure_that_names_it(world, error, line):
    def train(config):
        raise error

    run_trial(train, world.session())

    assert (world.channel.failure.kind, world.channel.failure.error) == ("user", line)


@pytest.mark.parametrize(
    ("error", "kind"),
    [(MemoryError(), "memory"), (RuntimeError("CUDA out of memory. Tried"), "cuda_memory")],
)
def test_memory_error_is_a_failure_of_a_separate_kind(world, error, kind):
    def train(config):
        raise error

    run_trial(train, world.session())

    assert world.channel.failure.kind == kind


def test_unusable_metric_is_a_failure_of_kind_metric(world):
    run_trial(lambda config: report({"x": 1}), world.session(required_metrics=("loss",)))

    assert world.channel.failure.kind == "metric"
    assert "'loss' is missing" in world.channel.failure.error


@pytest.mark.parity(106)
def test_checkpoint_that_cannot_be_kept_is_a_failure_of_kind_storage(world):
    world.sink.error = StoreError("no space left on /data")
    run_trial(Counter, world.session(stop=THREE_STEPS, checkpoint_at_end=True))

    assert world.channel.kinds == ["ResultReported"] * 3 + ["TrialFailed"]
    assert world.channel.failure.kind == "storage"
    assert world.channel.failure.error == "StoreError: no space left on /data"


@pytest.mark.parametrize(
    ("error", "kind"),
    [(StoreError("no space left"), "storage"), (CheckpointError("a link leads out"), "user")],
)
def test_run_trial_last_checkpoint_of_a_function_that_cannot_be_kept_is_a_failure(
    world, error, kind
):
    def train(config):
        for _ in range(3):
            report({"x": 1}, checkpoint=Checkpoint.from_dict({}))

    world.sink.error = error
    run_trial(train, world.session(stop=(Condition("training_iteration", 1),)))

    assert world.channel.kinds == ["ResultReported", "TrialFailed"]
    assert world.channel.failure.kind == kind
    assert str(error) in world.channel.failure.error


@pytest.mark.parity(135)
@pytest.mark.parametrize("trainable", [Counter, lambda config: report({})])
def test_checkpoint_that_cannot_be_read_is_a_failure_of_kind_restore(world, trainable):
    run_trial(Counter, world.session(stop=THREE_STEPS, checkpoint_at_end=True))
    session = world.restored()
    world.sink.error = CheckpointCorrupt("model does not match its hash")

    run_trial(trainable, session)

    assert world.channel.failure.kind == "restore"
    assert "model does not match" in world.channel.failure.error


@pytest.mark.parity(135)
def test_load_checkpoint_that_raises_is_a_failure_of_kind_restore(world, log):
    class Broken(Counter):
        def load_checkpoint(self, checkpoint):
            raise KeyError("optimizer")

    run_trial(Counter, world.session(stop=THREE_STEPS, checkpoint_at_end=True))
    run_trial(Broken, world.restored())

    failure = world.channel.failure
    assert (failure.kind, failure.error) == ("restore", "KeyError: 'optimizer'")
    assert "in load_checkpoint" in failure.traceback
    assert log[-1] == "cleanup"


def test_value_that_is_no_trainable_is_a_failure(world):
    run_trial(dict, world.session())

    assert "dict is not a trainable" in world.channel.failure.error


def test_cleanup_that_raises_is_only_logged(world, caplog):
    class Untidy(Counter):
        def cleanup(self):
            raise RuntimeError("already closed")

    run_trial(Untidy, world.session(stop=THREE_STEPS))

    assert world.channel.kinds[-1] == "TrialFinished"
    assert "already closed" in caplog.text


@pytest.mark.parity(169)
def test_log_result_sees_each_complete_result(world):
    seen = []

    class Watched(Counter):
        def log_result(self, result):
            seen.append((result["training_iteration"], result["total"], result["trial_id"]))

    run_trial(Watched, world.session(stop=THREE_STEPS))

    assert seen == [(1, 1, "t1"), (2, 2, "t1"), (3, 3, "t1")]


# --- reuse ---


def test_reusable_object_runs_the_next_trial(world, log):
    program = TrainableRunner()
    program.run(Counter, world.session({"from": 0}, stop=THREE_STEPS, reuse=True))
    program.run(Counter, world.session({"from": 50}, stop=THREE_STEPS, reuse=True))
    program.close()
    program.close()

    assert steps(world) == [(1, 1), (2, 2), (3, 3), (1, 51), (2, 52), (3, 53)]
    assert world.channel.kinds.count("TrialFinished") == 2
    assert log == ["setup", "reset", "cleanup"]


def test_reused_object_can_be_restored(world):
    program = TrainableRunner()
    session = world.session(stop=THREE_STEPS, reuse=True, checkpoint_at_end=True)
    program.run(Counter, session)
    program.run(Counter, world.restored(stop=(Condition("training_iteration", 4),), reuse=True))
    program.close()

    assert steps(world)[-1] == (4, 4)


def test_object_that_rejects_a_reset_is_replaced(world, log):
    program = TrainableRunner()
    program.run(Counter, world.session(stop=THREE_STEPS, reuse=True))
    program.run(Counter, world.session({"refuse": True}, stop=THREE_STEPS))

    assert log == ["setup", "reset", "cleanup", "setup", "cleanup"]
    assert world.channel.kinds.count("TrialFinished") == 2


def test_object_of_another_class_or_of_a_failed_trial_is_not_reused(world, log):
    class Failing(Counter):
        def step(self):
            raise ValueError

    program = TrainableRunner()
    program.run(Counter, world.session(stop=THREE_STEPS, reuse=True))
    program.run(Failing, world.session(reuse=True))
    program.run(Counter, world.session(stop=THREE_STEPS))

    assert log == ["setup", "cleanup"] * 3


def test_reset_that_raises_fails_the_trial_and_drops_the_object(world, log):
    class Fragile(Counter):
        def reset_config(self, new_config):
            raise ValueError("cannot")

    program = TrainableRunner()
    program.run(Fragile, world.session(stop=THREE_STEPS, reuse=True))
    program.run(Fragile, world.session(stop=THREE_STEPS, reuse=True))
    program.run(Fragile, world.session(stop=THREE_STEPS))

    assert world.channel.failure.error == "ValueError: cannot"
    assert log == ["setup", "cleanup"] * 2


# --- the text of a failure ------------------------------------------------------------------------


def test_line_of_an_error_is_short_and_can_be_sent():
    class Mute(Exception):
        def __str__(self):
            raise RuntimeError

    assert one_line(Mute()) == "Mute: (its message cannot be read)"
    assert one_line(ValueError("\ud800")) == r"ValueError: \ud800"
    long = one_line(ValueError("x" * 10**6))
    assert len(long) <= 1000
    assert "characters ..." in long


def test_traceback_is_bounded():
    assert len(traceback_text(ValueError("x" * 10**6))) <= 64 * 1024


class Leaving(Counter):
    """Ends its process before its first result."""

    def setup(self, config):
        sys.exit(0)


def leaves(config):
    sys.exit(0)


@pytest.mark.parametrize(
    ("trainable", "who"), [(Leaving, "class Leaving"), (leaves, "function leaves")]
)
def test_run_trial_sys_exit_before_a_result_fails_where_a_metric_is_expected(world, trainable, who):
    run_trial(trainable, world.session({"from": 0}, required_metrics=("total",)))

    (failed,) = [event for event in world.channel.sent if isinstance(event, TrialFailed)]
    assert failed.kind == "metric"
    assert f"The {who} ended without a result that has 'total'" in failed.error
