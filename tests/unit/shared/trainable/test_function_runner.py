"""Function trainables: signatures, reporter, checkpoints, end."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import numpy as np
import pytest

from tests.unit.shared.fakes import World, up_to
from tunemq_shared.base.errors import BugError, CheckpointError, MetricError, TrainableError
from tunemq_shared.checkpoints.checkpoint import Checkpoint
from tunemq_shared.checkpoints.checkpoint_markers import CheckpointForm, is_null, read_notes
from tunemq_shared.protocol.result_conditions import Condition
from tunemq_shared.trainable.function_runner import FunctionRunner, wrap_function
from tunemq_shared.trainable.reporter_argument import StatusReporter, checkpoint_dir
from tunemq_shared.trainable.run_trial import run_trial
from tunemq_shared.trial.control_flow import TrialDoneExit, TrialStopExit
from tunemq_shared.trial.session import active, get_checkpoint, report
from tunemq_shared.trial.trial_session import SavedCheckpoint


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


def run(world, function, session=None, config=None):
    """Run a function as the trial of ``session`` and return its runner."""
    with active(session or world.session()) as current:
        current.restore()
        runner = wrap_function(function)(config or {})
        runner.run()
    return runner


def reported(world):
    return [result.metrics for result in world.channel.results]


@pytest.mark.parity(47, 49)
def test_each_form_of_function_is_called_by_its_signature(world):
    calls = []

    def plain(config):
        calls.append(config)

    def older(config, checkpoint_dir="untouched"):
        calls.append(checkpoint_dir)

    def oldest(config, reporter):
        calls.append(type(reporter))

    def bound(data, config, *, checkpoint_dir=None):
        calls.append((data, checkpoint_dir))

    for function in (plain, older, oldest, functools.partial(bound, "data")):
        run(world, function, config={"lr": 1})

    assert calls == [{"lr": 1}, None, StatusReporter, ("data", None)]


@pytest.mark.parity(47)
def test_unknown_argument_is_named_with_the_accepted_forms():
    def train(config, dataset): ...

    with pytest.raises(TrainableError, match=r"train takes \(config, dataset\).*f\(config, report"):
        wrap_function(train)


@pytest.mark.parity(50)
def test_mixins_come_first_and_the_name_is_the_functions():
    class Mixin:
        pass

    def train(config): ...

    train.__mixins__ = (Mixin,)
    wrapped = wrap_function(train)

    assert wrapped.__bases__ == (Mixin, FunctionRunner)
    assert wrapped._name == wrapped.__name__ == "train"
    assert wrap_function(functools.partial(train))._name == "func"


def test_function_may_change_its_config(world):
    config = {"layers": [1]}

    run(world, lambda config: config["layers"].append(2), config=config)

    assert config == {"layers": [1]}


@pytest.mark.parity(51)
def test_returned_value_is_a_last_result_and_kept(world):
    def train(config):
        report({"loss": 1.0})
        return {"loss": 0.5}

    runner = run(world, train)
    run(world, lambda config: np.float32(0.25))
    run(world, lambda config: 3)

    assert runner.output == {"loss": 0.5}
    assert reported(world) == [{"loss": 1.0}, {"loss": 0.5}, {"_metric": 0.25}, {"_metric": 3}]


def test_yielded_values_are_reported(world):
    def train(config):
        yield {"loss": 1.0}
        yield 0.5

    run(world, train)

    assert reported(world) == [{"loss": 1.0}, {"_metric": 0.5}]


@pytest.mark.parity(18)
def test_stopped_generator_unwinds_its_finally_blocks(world):
    ran = []

    def train(config):
        try:
            while True:
                yield {"loss": 1.0}
        finally:
            ran.append("finally")

    with pytest.raises(TrialDoneExit):
        run(world, train, world.session(stop=(Condition("training_iteration", 3),)))

    assert len(reported(world)) == 3
    assert ran == ["finally"]


def test_other_returned_value_is_rejected(world):
    with pytest.raises(TrainableError, match="returned or yielded list; return a number"):
        run(world, lambda config: [1, 2])


@pytest.mark.parity(30)
def test_function_without_results_fails_only_if_a_metric_is_expected(world):
    run(world, lambda config: None)

    session = world.session(required_metrics=("loss",))
    with pytest.raises(MetricError, match=r"without a result that has 'loss'"):
        run(world, lambda config: None, session)


@pytest.mark.parity(28)
def test_trial_that_was_stopped_early_never_calls_the_function(world):
    session = world.session()
    world.channel.notices.append(world.order(stop=True))
    called = []

    with pytest.raises(TrialStopExit):
        run(world, called.append, session)

    assert not called


def test_function_that_swallows_its_end_has_ended_all_the_same(world):
    def train(config):
        while True:
            try:
                report({})
            except BaseException:  # noqa: BLE001  what some training code does
                break

    with pytest.raises(TrialDoneExit):
        run(world, train, world.session(stop=(Condition("training_iteration", 2),)))

    assert len(reported(world)) == 2


@pytest.mark.parity(46)
def test_error_while_the_end_unwinds_is_only_logged(world, caplog):
    def train(config):
        try:
            report({"done": True})
        finally:
            raise ValueError("the file is closed already")

    with pytest.raises(TrialDoneExit):
        run(world, train)

    assert "the file is closed already" in caplog.text


@pytest.mark.parity(34)
def test_function_cannot_be_stepped():
    with pytest.raises(TrainableError, match="as a whole"):
        wrap_function(lambda config: None)({}).train()


@pytest.mark.parity(27)
def test_bare_runner_wraps_nothing(world):
    with active(world.session()), pytest.raises(TrainableError, match="wraps no function"):
        FunctionRunner({}).run()


@pytest.mark.parity(27)
def test_subclass_of_the_runner_defines_one_method(world):
    class Own(FunctionRunner):
        def _trainable_func(self, config, reporter, checkpoint_dir):
            reporter(loss=config["lr"])

    run_trial(Own, world.session({"lr": 0.5}))

    assert reported(world) == [{"loss": 0.5}]
    assert world.channel.kinds[-1] == "TrialFinished"


@pytest.mark.parity(26)
def test_module_level_report_works_from_setup_on(world):
    class Early:
        def setup(self, config):
            report({"said": "in setup"})

    def train(config):
        report({"said": "in the function"})

    train.__mixins__ = (Early,)
    run_trial(train, world.session())
    run_trial(wrap_function(train), world.session())

    said = [result.metrics["said"] for result in world.channel.results]
    assert said == ["in setup", "in the function"] * 2


@pytest.mark.parity(35)
def test_execute_calls_with_the_runner():
    runner = wrap_function(lambda config: None)({})

    assert runner.execute(lambda given: given) is runner


# --- the reporter ---


@pytest.mark.parity(12, 22)
def test_reporter_reports_and_knows_the_trial(world):
    known = []

    def train(config, reporter):
        known.extend([reporter.trial_name, reporter.trial_id, reporter.logdir])
        reporter(loss=1.0)
        reporter(loss=0.5, done=True)
        reporter(loss=0.0)

    with pytest.raises(TrialDoneExit):
        run(world, train)

    assert reported(world) == [{"loss": 1.0}, {"loss": 0.5, "done": True}]
    assert known == ["train_00000", "t1", str(world.folder / "trial")]


@pytest.mark.parity(19, 20, 21, 33, 39)
def test_path_set_as_checkpoint_goes_with_the_next_result_and_comes_back(world):
    seen = []

    def train(config, reporter):
        seen.append(reporter.get_checkpoint())
        folder = reporter.make_checkpoint_dir(step=1)
        Path(folder, "model").write_text("weights")
        reporter.set_checkpoint(os.path.join(folder, "model"))
        seen.append(reporter.has_new_checkpoint())
        seen.append(reporter.get_checkpoint() == os.path.join(folder, "model"))
        reporter(loss=1.0)
        seen.append(reporter.has_new_checkpoint())
        seen.append(os.path.exists(folder))
        seen.append(Path(reporter.get_checkpoint()).read_text())

    run(world, train)
    run(
        world,
        lambda config, checkpoint_dir=None: seen.append(Path(checkpoint_dir).read_text()),
        world.restored(),
    )

    assert seen == [None, True, True, False, False, "weights", "weights"]
    assert world.channel.kinds == ["ResultReported", "CheckpointCommitted"]


@pytest.mark.parity(38, 44)
def test_dict_set_as_checkpoint_comes_back_as_a_dict(world):
    seen = []

    def train(config, reporter):
        reporter.set_checkpoint({"epoch": 1})
        seen.append(reporter.get_checkpoint())
        reporter(loss=1.0)
        seen.append(reporter.get_checkpoint())

    run(world, train)
    run(world, lambda config, checkpoint_dir=None: seen.append(checkpoint_dir), world.restored())

    assert seen == [{"epoch": 1}] * 3


@pytest.mark.parity(43)
def test_restored_checkpoint_is_not_reported_again(world):
    def train(config):
        report({}, checkpoint=Checkpoint.from_dict({"epoch": 1}))

    def resumed(config, reporter):
        assert not reporter.has_new_checkpoint()
        reporter.set_checkpoint(reporter.get_checkpoint(), is_new=False)
        assert not reporter.has_new_checkpoint()
        assert reporter.get_checkpoint() is not None
        reporter(loss=1.0)

    run(world, train)
    run(world, resumed, world.restored())

    assert world.channel.kinds == ["ResultReported", "CheckpointCommitted", "ResultReported"]


@pytest.mark.parity(20, 40)
def test_other_checkpoints_are_rejected(world, tmp_path):
    reporter = StatusReporter(world.session())

    with pytest.raises(CheckpointError, match=r"not in a checkpoint folder.*make_checkpoint_dir"):
        reporter.set_checkpoint(str(tmp_path))
    with pytest.raises(CheckpointError, match=r"path \(str\) or a dict, not int"):
        reporter.set_checkpoint(3)
    folder = reporter.make_checkpoint_dir(1)
    with pytest.raises(CheckpointError, match="is not in"):
        reporter.set_checkpoint(os.path.join(folder, "never-written"))


def test_newest_of_two_checkpoints_before_a_report_is_kept(world):
    def train(config, reporter):
        for step in (1, 2):
            with checkpoint_dir(step=step) as folder:
                Path(folder, "model").write_text(str(step))
        report({})

    run(world, train)

    (kept,) = world.channel.checkpoints
    assert (world.sink.root / kept.key / "model").read_text() == "2"
    assert list((world.folder / "trial").iterdir()) == []


def test_files_of_a_save_that_was_killed_are_not_in_the_next_attempts_checkpoint(world):
    killed = world.session().make_checkpoint_folder(1)
    Path(killed, "shard-of-first").write_text("1")

    def train(config, reporter):
        Path(reporter.make_checkpoint_dir(1), "model").write_text("2")
        reporter.set_checkpoint(reporter.make_checkpoint_dir(1))  # the same folder
        reporter(loss=1.0)

    run(world, train)

    (kept,) = world.channel.checkpoints
    assert (world.sink.root / kept.key / "model").read_text() == "2"
    assert not (world.sink.root / kept.key / "shard-of-first").exists()


def test_folder_of_the_user_that_is_named_like_a_checkpoint_keeps_its_files(world):
    named = world.folder / "trial" / "checkpoint_000001"
    named.mkdir(parents=True)
    (named / "mine").write_text("1")
    assert world.session().make_checkpoint_folder(1) == str(named)
    assert (named / "mine").exists()


@pytest.mark.parity(46)
def test_checkpoint_set_after_the_last_report_is_kept_at_the_end(world):
    def train(config, reporter):
        reporter(loss=1.0)
        reporter.set_checkpoint({"epoch": 1})

    run(world, train)

    assert world.channel.kinds == ["ResultReported", "CheckpointCommitted"]


def test_folder_of_the_user_is_never_removed(world):
    def train(config, reporter):
        with checkpoint_dir(step=1) as folder:
            Path(folder, "model").write_text("1")
        report({})
        kept = reporter.get_checkpoint()
        reporter.set_checkpoint(kept)
        report({})
        assert os.path.exists(kept)

    run(world, train)

    assert len(world.channel.checkpoints) == 2


# --- saving and restoring a runner ---


@pytest.mark.parity(4, 5, 6, 37)
def test_saving_before_the_first_checkpoint_makes_a_null_one(world):
    with active(world.session()) as session:
        runner = wrap_function(lambda config: None)({})
        session.report({"timesteps_this_iter": 5, "episodes_this_iter": 1})
        folder = runner.save()

    assert is_null(folder)
    assert os.path.basename(folder) == "checkpoint_-00001"
    assert not any(read_notes(folder).values())

    with active(world.session()) as session:
        runner = wrap_function(lambda config: report({"start": get_checkpoint()}))({})
        runner.restore(folder)
        runner.run()
    assert world.channel.results[-1].metrics == {"start": None}


@pytest.mark.parity(38, 39, 41)
def test_saved_runner_can_be_restored(world):
    seen = []

    def train(config, checkpoint_dir=None):
        seen.append(checkpoint_dir)

    with active(world.session()) as session:
        session.report({})
        session.offer(Checkpoint.from_dict({"epoch": 2}), CheckpointForm(as_dict=True))
        session.report({})
        session.report({})
        folder = wrap_function(train)({}).save()
    with active(world.session()) as session:
        runner = wrap_function(train)({})
        runner.restore(Checkpoint.from_directory(folder))
        runner.run()

    assert os.path.basename(folder) == "checkpoint_000002"
    assert seen == [{"epoch": 2}]
    assert session.progress.iteration == 2


@pytest.mark.parity(36)
def test_function_is_not_saved_to_a_given_path():
    with pytest.raises(TrainableError, match="give no path"):
        wrap_function(lambda config: None)({}).save("/some/where")


@pytest.mark.parity(6, 43)
def test_null_checkpoint_in_the_store_means_a_fresh_start(world):
    with active(world.session()) as session:
        folder = wrap_function(lambda config: None)({}).save()
        session.report({}, Checkpoint.from_directory(folder))

    session = world.restored()

    assert session.restore() is None
    assert session.newest_checkpoint() is None
    assert session.progress.iteration == 0


def test_unexpected_files_are_a_bug():
    with pytest.raises(BugError):
        SavedCheckpoint(None, {}, None).given_back()


def test_report_waits_inside_the_function(world):
    def train(config):
        for _ in range(5):
            report({})

    session = world.session(run_until=up_to(2))
    world.channel.waited_for += [world.order(up_to(4)), world.order(stop=True)]

    with pytest.raises(TrialStopExit):
        run(world, train, session)

    assert len(reported(world)) == 4
