"""`Tuner.restore` resumes finished, stopped and failed experiments."""

from __future__ import annotations

import fcntl
import importlib
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import tunemq as tune
from tests.acceptance import scripts
from tests.support.saved_tuners import changed_tuner, saved_fields
from tests.support.searches.searches import farm_processes
from tests.support.waiting import eventually
from tunemq.stopper import MaximumTrialsStopper, TargetStopper
from tunemq_scheduler.embedded import warm_farms
from tunemq_scheduler.settings.saved_tuner import TUNER_FILE
from tunemq_shared.base.errors import ConfigError, JournalLocked, SearchFailed

pytestmark = pytest.mark.integration


def train(config: dict[str, Any]) -> None:
    """Count; save after each step; fail as the configuration says."""
    step = 0
    if (checkpoint := tune.get_checkpoint()) is not None:
        step = int(Path(checkpoint.path, "step").read_text(encoding="ascii"))
    while step < config.get("steps", 1000):
        step += 1
        with open(config["executed"], "a", encoding="ascii") as file:
            file.write(f"{config['x']} {step}\n")
        if step == config.get("fails_at") and not os.path.exists(config["fixed"]):
            raise ValueError("it fails")
        while step >= config.get("held_at", step + 1) and not os.path.exists(config["fixed"]):
            time.sleep(0.005)  # between two looks
        Path("state").mkdir(exist_ok=True)
        Path("state", "step").write_text(str(step), encoding="ascii")
        checkpoint = tune.Checkpoint.from_directory("state") if config.get("saves") else None
        tune.report({"loss": config["x"] * step}, checkpoint=checkpoint)
        time.sleep(config.get("step_s", 0))


class Searched:
    """An experiment in a new folder, run and restored."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = str(folder / "search")
        self.executed_file = folder / "executed"
        self.space: dict[str, Any] = {
            "executed": str(self.executed_file),
            "fixed": str(folder / "fixed"),
            "x": tune.grid_search([1.0, 2.0, 3.0]),
        }

    def fit(self, tune_config=None, *, stop=None, name="search", **space: Any) -> tune.ResultGrid:
        return tune.Tuner(
            train,
            param_space={**self.space, **space},
            tune_config=tune_config or tune.TuneConfig(metric="loss", mode="min", seed=1),
            run_config=tune.RunConfig(
                name=name, storage_path=str(self.folder), stop=stop, verbose=0
            ),
        ).fit()

    def restore(self, **options: Any) -> tune.ResultGrid:
        return tune.Tuner.restore(self.path, train, **options).fit()

    def executed(self) -> list[tuple[float, int]]:
        lines = self.executed_file.read_text(encoding="ascii").splitlines()
        return [(float(x), int(step)) for x, step in map(str.split, lines)]


@pytest.fixture
def searched(tmp_path: Path) -> Searched:
    return Searched(tmp_path)


def steps_of(result: tune.Result) -> list[int]:
    return [line["training_iteration"] for line in result.history]


def rows_of(result: tune.Result) -> int:
    return len(Path(result.path, "progress.csv").read_text(encoding="utf-8").splitlines()) - 1


def told(grid: tune.ResultGrid) -> list[tuple[Any, ...]]:
    return [(one.config["x"], one.status, one.metrics.get("loss"), steps_of(one)) for one in grid]


def test_a_finished_experiment_gives_its_results_at_once_and_starts_nothing(searched):
    before = searched.fit(steps=3)
    warm_farms.stop_all()
    assert told(tune.Tuner.restore(searched.path, train).get_results()) == told(before)

    grid = searched.restore()

    assert farm_processes() == []
    assert told(grid) == told(before)
    assert [one.metrics for one in grid] == [one.metrics for one in before]
    assert grid.get_best_result().config["x"] == 1.0
    assert len(searched.executed()) == 9


def test_a_finished_experiment_continues_with_more_samples(searched):
    random = {"x": tune.uniform(0, 1), "steps": 2}
    four = tune.TuneConfig(metric="loss", mode="min", seed=1, num_samples=4)
    undisturbed = searched.fit(four, name="undisturbed", **random)
    searched.executed_file.unlink()
    searched.fit(tune.TuneConfig(metric="loss", mode="min", seed=1, num_samples=2), **random)

    grid = searched.restore(tune_config=four)

    assert told(grid) == told(undisturbed)
    assert len(searched.executed()) == 8, "nothing is done twice"
    assert told(searched.restore()) == told(grid), "settings given at a restore apply from then on"


def test_restore_with_a_smaller_stop_leaves_ended_trials_as_they_are(searched):
    before = searched.fit(stop={"training_iteration": 4}, saves=True)

    for most in (3, 1):
        run_config = tune.RunConfig(stop={"training_iteration": most}, verbose=0)
        assert told(searched.restore(run_config=run_config)) == told(before)

    assert [rows_of(one) for one in before] == [4] * 3


def test_trials_that_ended_by_a_criterion_continue_to_another_one(searched):
    searched.fit(stop={"training_iteration": 2}, saves=True)

    run_config = tune.RunConfig(stop={"training_iteration": 5}, verbose=0)
    grid = searched.restore(run_config=run_config)

    assert [steps_of(one) for one in grid] == [[1, 2, 3, 4, 5]] * 3
    assert [rows_of(one) for one in grid] == [5] * 3
    assert {one.status for one in grid} == {"TERMINATED"}
    # A trial may have begun the step after its last one.
    assert all(searched.executed().count((x, 1)) == 1 for x in (1.0, 2.0, 3.0))


class RaisesAtSetup(tune.Callback):
    def setup(self, **_: Any) -> None:
        raise ValueError("not reachable")


@pytest.mark.parametrize("then", [{"stop": {"training_iteration": 5}}, {}, None])
def test_restore_to_another_criterion_that_failed_before_its_first_turn_is_not_lost(searched, then):
    """Whether the next restore names the same criterion, none, or has no RunConfig at all."""
    searched.fit(stop={"training_iteration": 2}, saves=True, steps=5)
    failing = tune.RunConfig(stop={"training_iteration": 5}, verbose=0, callbacks=[RaisesAtSetup()])
    for _ in range(2):
        with pytest.raises(SearchFailed, match="not reachable"):
            searched.restore(run_config=failing)

    if then is None:
        with pytest.raises(SearchFailed, match="not reachable"):  # it is in the saved RunConfig
            searched.restore()
        then = {"stop": {"training_iteration": 5}}
    grid = searched.restore(run_config=tune.RunConfig(verbose=0, **then))

    assert [steps_of(one) for one in grid] == [[1, 2, 3, 4, 5]] * 3


def test_restore_keeps_trials_in_error_with_their_errors(searched):
    before = searched.fit(steps=4, fails_at=3)
    Path(searched.space["fixed"]).touch()

    grid = searched.restore()

    assert told(grid) == told(before)
    assert grid.num_errors == 3
    assert [str(one.error) for one in grid] == [str(one.error) for one in before]
    assert "ValueError: it fails" in str(grid[0].error)


def test_restore_resumes_trials_in_error_from_their_last_checkpoints(searched):
    searched.fit(steps=4, fails_at=3, saves=True)
    Path(searched.space["fixed"]).touch()

    grid = searched.restore(resume_errored=True)

    assert [steps_of(one) for one in grid] == [[1, 2, 3, 4]] * 3
    assert [rows_of(one) for one in grid] == [4] * 3
    assert not grid.errors
    assert sorted(set(searched.executed())) == sorted(
        (x, step) for x in (1.0, 2.0, 3.0) for step in (1, 2, 3, 4)
    )
    assert searched.executed().count((1.0, 1)) == searched.executed().count((1.0, 2)) == 1
    assert searched.executed().count((1.0, 3)) == 2, "the step that failed"


@pytest.mark.parametrize("how", ["resume_errored", "restart_errored"])
@pytest.mark.parametrize(
    ("stop", "more", "told_why"),
    [
        (TargetStopper("loss", 2.0, "max"), TargetStopper("loss", 99.0, "max"), "the target 2"),
        (MaximumTrialsStopper(2), MaximumTrialsStopper(3), "2 trials have ended"),
    ],
)
def test_trials_in_error_stay_so_where_the_whole_search_would_stop_at_once(
    searched, how, stop, more, told_why
):
    """They would end without an error and without a step, and could not be resumed again."""
    space = {"x": tune.grid_search([1.0, 2.0, 3.0]), "saves": True, "steps": 2}
    space["fails_at"] = tune.sample_from(lambda spec: 1 if spec.config.x == 1.0 else 99)
    settings = tune.TuneConfig(metric="loss", mode="min", seed=1, max_concurrent_trials=1)
    before = searched.fit(settings, stop=stop, **space)
    assert before.num_errors == 1
    Path(searched.space["fixed"]).touch()

    if how == "resume_errored" or "target" in told_why:
        with pytest.raises(ConfigError, match=f"1 of the trials in ERROR .*{told_why}"):
            searched.restore(**{how: True})
        assert told(searched.restore()) == told(before)

    again = searched.restore(**{how: True}, run_config=tune.RunConfig(verbose=0, stop=more))
    assert again.num_errors == 0
    assert steps_of(again[0]) == [1, 2]


@pytest.mark.parametrize("how", ["resume_errored", "restart_errored", "extended"])
def test_restored_trials_run_no_more_at_once_than_the_limit(searched, how):
    settings = tune.TuneConfig(metric="loss", mode="min", seed=1, max_concurrent_trials=1)
    stop = {"training_iteration": 3} if how == "extended" else None
    fails_at = None if how == "extended" else 3
    searched.fit(settings, stop=stop, steps=6, fails_at=fails_at, saves=True, step_s=0.02)
    Path(searched.space["fixed"]).touch()
    first = len(searched.executed())
    options = {how: True}
    if how == "extended":
        options = {"run_config": tune.RunConfig(verbose=0, stop={"training_iteration": 6})}
    grid = searched.restore(**options)
    assert grid.num_errors == 0
    order = [x for x, _ in searched.executed()[first:]]
    changes = [x for number, x in enumerate(order) if number == 0 or order[number - 1] != x]
    assert sorted(changes) == [1.0, 2.0, 3.0], "a trial was run beside another one"


def test_restore_restarts_trials_in_error_with_new_counts(searched):
    searched.fit(steps=4, fails_at=3, saves=True)
    Path(searched.space["fixed"]).touch()

    grid = searched.restore(restart_errored=True)

    assert [steps_of(one) for one in grid] == [[1, 2, 3, 4]] * 3
    assert [rows_of(one) for one in grid] == [4] * 3
    assert not grid.errors
    assert searched.executed().count((1.0, 1)) == 2
    first = [Path(one.path, "result.0.json").read_text(encoding="utf-8") for one in grid]
    assert [len(text.splitlines()) for text in first] == [2, 2, 2]
    assert told(searched.restore()) == told(grid)


def test_restarted_trials_are_not_compared_with_what_they_reported_before(searched, monkeypatch):
    """A bug made losses ten times too small; ASHA compares the corrected ones among themselves."""
    monkeypatch.setenv("TUNEMQ_CPUS", "1")  # one trial after the other, from the worst to the best

    def corrected(config):
        fixed = os.path.exists(config["fixed"])
        for step in range(1, 5):
            tune.report({"loss": config["x"] / step * (1 if fixed else 0.1)})
            if not fixed and step == 2:
                raise ValueError("the bug")

    def fit(name):
        asha = tune.schedulers.ASHAScheduler(max_t=4, grace_period=1, reduction_factor=2)
        return tune.Tuner(
            corrected,
            param_space={**searched.space, "x": tune.grid_search([3.0, 2.0, 1.0])},
            tune_config=tune.TuneConfig(metric="loss", mode="min", scheduler=asha),
            run_config=tune.RunConfig(name=name, storage_path=str(searched.folder), verbose=0),
        ).fit()

    assert fit("search").num_errors == 3
    Path(searched.space["fixed"]).touch()

    grid = tune.Tuner.restore(searched.path, corrected, restart_errored=True).fit()

    assert told(grid) == told(fit("undisturbed"))
    assert [steps_of(one) for one in grid] == [[1, 2, 3, 4]] * 3
    again = tune.Tuner.restore(searched.path, corrected).fit()
    assert told(again) == told(grid)


def test_restore_ends_unfinished_trials_if_asked_for(searched):
    budget = tune.TuneConfig(metric="loss", mode="min", seed=1)
    stopping = threading.Thread(target=interrupt_at, args=(searched, 5))
    stopping.start()
    with pytest.raises(KeyboardInterrupt):
        searched.fit(budget, steps=100, held_at=6, saves=True)
    stopping.join()
    Path(searched.space["fixed"]).touch()
    begun = {x for x, _ in searched.executed()}

    grid = searched.restore(resume_unfinished=False)

    assert {one.status for one in grid} == {"TERMINATED"}
    # Only trials that had begun are cut short; the search itself continues.
    assert all(len(steps_of(one)) < 100 for one in grid if one.config["x"] in begun)


def interrupt_at(searched: Searched, lines: int) -> None:
    """Press Ctrl-C once `lines` results are reported; trials wait so as not to end before."""

    def is_due() -> bool:
        told = [path for path in searched.folder.glob("search/*/result.json") if path.read_bytes()]
        return bool(told) and len(searched.executed()) >= lines

    eventually(is_due, within=60)
    os.kill(os.getpid(), signal.SIGINT)


def test_time_is_counted_over_all_runs(searched, monkeypatch, ended_searches):
    monkeypatch.setenv("TUNEMQ_CPUS", "2")
    searched.fit(steps=1, name="first")  # a farm that starts takes its time from the budget
    budget = tune.TuneConfig(metric="loss", mode="min", seed=1, time_budget_s=1.5)
    before = searched.fit(budget, step_s=0.05, saves=True)
    stopped = searched.restore()
    assert all(one.status == "TERMINATED" for one in stopped)
    assert told(stopped) == told(before), "its time is used up"
    # So much that a slow machine comes to something, too; the criterion ends it.
    more = tune.TuneConfig(metric="loss", mode="min", seed=1, time_budget_s=250, num_samples=2)

    run_config = tune.RunConfig(stop={"training_iteration": 2}, verbose=0)
    grid = searched.restore(tune_config=more, run_config=run_config)

    assert sum(len(steps_of(one)) for one in grid) > sum(len(steps_of(one)) for one in stopped)
    _, *times = [one.loop.runner.elapsed for one in ended_searches]
    assert 1.5 <= times[0] < times[-1] < 250, times
    assert times == sorted(times), "each run begins where the one before was"


def test_restore_with_a_setting_that_cannot_change_is_refused(searched):
    def another(config):
        tune.report({"loss": 1})

    searched.fit(steps=1)
    path = searched.path
    with pytest.raises(ConfigError, match=r"trainable 'train'.*'another'"):
        tune.Tuner.restore(path, another)
    config = tune.TuneConfig(metric="accuracy", mode="max")
    with pytest.raises(ConfigError, match=r"TuneConfig\(metric\) was 'loss'.*'accuracy'"):
        tune.Tuner.restore(path, train, tune_config=config)
    config = tune.TuneConfig(metric="loss", mode="max")
    with pytest.raises(ConfigError, match=r"TuneConfig\(mode\) was 'min'"):
        tune.Tuner.restore(path, train, tune_config=config)
    config = tune.TuneConfig(metric="loss", mode="min", scheduler="asha")
    with pytest.raises(ConfigError, match=r"TuneConfig\(scheduler\)"):
        tune.Tuner.restore(path, train, tune_config=config)
    config = tune.TuneConfig(metric="loss", mode="min", seed=2)
    with pytest.raises(ConfigError, match=r"TuneConfig\(seed\) was 1.* 2 now"):
        tune.Tuner.restore(path, train, tune_config=config)
    space = {**searched.space, "x": tune.grid_search([1.0, 2.0])}
    with pytest.raises(ConfigError, match="param_space: x"):
        tune.Tuner.restore(path, train, param_space=space)
    keep = tune.CheckpointConfig(num_to_keep=1)
    with pytest.raises(ConfigError, match=r"RunConfig\(checkpoint_config\)"):
        tune.Tuner.restore(path, train, run_config=tune.RunConfig(checkpoint_config=keep))
    with pytest.raises(ConfigError, match="choose one"):
        tune.Tuner.restore(path, train, resume_errored=True, restart_errored=True)
    assert tune.Tuner.restore(path, train, param_space=searched.space).fit().num_terminated == 3


SCRIPT_WITH_OBJECTS = """
    import functools
    import sys

    import tunemq as tune


    class Layer:
        def __init__(self, width):
            self.width = width

        def area(self):
            return self.width**2


    def train(config):
        tune.report({"loss": config["layer"].width})


    _, command, width = sys.argv
    space = {
        "layer": tune.choice([Layer(1), Layer(int(width))]),
        "area": tune.grid_search([functools.partial(pow, 2), Layer(3).area, lambda: 4]),
    }
    if command == "fit":
        config = tune.RunConfig(name="search", storage_path=".", verbose=0)
        tuner = tune.Tuner(train, param_space=space, run_config=config)
    else:
        tuner = tune.Tuner.restore("search", train, param_space=space)
    print(len(tuner.fit()))
    """


def test_restore_accepts_the_same_space_of_objects_and_functions(tmp_path):
    scripts.write(tmp_path, {"search.py": SCRIPT_WITH_OBJECTS})

    assert scripts.run(tmp_path, "search.py", "fit", "2").stdout == "3\n"
    restored = scripts.run(tmp_path, "search.py", "restore", "2")
    assert restored.stdout == "3\n", restored.stderr
    assert "param_space: layer was" in scripts.run(tmp_path, "search.py", "restore", "3").stderr


class Locked(tune.Callback):
    """A callback that cannot be pickled."""

    def __init__(self) -> None:
        self.lock = threading.Lock()


def test_restore_needs_unpicklable_settings_again(searched):
    tuner = tune.Tuner(
        train,
        param_space={**searched.space, "steps": 1},
        tune_config=tune.TuneConfig(metric="loss", mode="min", seed=1),
        run_config=tune.RunConfig(
            name="search", storage_path=str(searched.folder), callbacks=[Locked()], verbose=0
        ),
    )
    tuner.fit()

    with pytest.raises(ConfigError, match=r"run_config .*lock.*pass it again: .*run_config="):
        searched.restore()
    grid = searched.restore(run_config=tune.RunConfig(callbacks=[Locked()], verbose=0))
    assert grid.num_terminated == 3


def test_trials_continue_to_another_criterion_though_the_saved_settings_cannot_be_pickled(searched):
    def run_config(steps: int) -> tune.RunConfig:
        return tune.RunConfig(
            name="search",
            storage_path=str(searched.folder),
            callbacks=[Locked()],
            stop={"training_iteration": steps},
            verbose=0,
        )

    space = {**searched.space, "saves": True}
    tune.Tuner(train, param_space=space, run_config=run_config(2)).fit()
    for steps in (4, 5):
        grid = searched.restore(run_config=run_config(steps))
        assert [steps_of(one) for one in grid] == [[*range(1, steps + 1)]] * 3


def test_new_settings_replace_those_whose_module_is_gone(searched, monkeypatch, caplog):
    module = searched.folder / "gone_later.py"
    module.write_text(
        "import tunemq as tune\n"
        "class Quiet(tune.Callback): pass\n"
        "class First(tune.schedulers.FIFOScheduler): pass\n"
        "def draw(spec): return 1.0\n"
    )
    monkeypatch.syspath_prepend(str(searched.folder))
    gone = importlib.import_module("gone_later")
    tune.Tuner(
        train,
        param_space={**searched.space, "drawn": tune.sample_from(gone.draw), "steps": 1},
        tune_config=tune.TuneConfig(scheduler=gone.First()),
        run_config=tune.RunConfig(
            name="search", storage_path=str(searched.folder), callbacks=[gone.Quiet()], verbose=0
        ),
    ).fit()
    module.unlink()
    monkeypatch.delitem(sys.modules, "gone_later")

    class First(tune.schedulers.FIFOScheduler):
        pass

    with pytest.raises(ConfigError, match="No module named 'gone_later'"):
        searched.restore()
    grid = searched.restore(
        param_space={**searched.space, "drawn": tune.sample_from(lambda _: 1.0), "steps": 1},
        tune_config=tune.TuneConfig(scheduler=First()),
        run_config=tune.RunConfig(verbose=0),
    )
    assert grid.num_terminated == 3
    assert caplog.text.count("cannot be loaded (No module named 'gone_later')") == 3


def test_fit_of_a_restored_tuner_continues_its_search_however_often(searched):
    searched.fit(steps=3, fails_at=2, saves=True)
    Path(searched.space["fixed"]).touch()
    tuner = tune.Tuner.restore(searched.path, train, resume_errored=True)
    with Path(searched.path, "journal", "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(JournalLocked):
            tuner.fit()

    for _ in range(2):
        grid = tuner.fit()
        assert grid.experiment_path == searched.path
        assert [steps_of(one) for one in grid] == [[1, 2, 3]] * 3


def test_search_that_began_with_a_checkpoint_can_be_restored_again_and_again(searched):
    begins = searched.folder / "begins"
    begins.mkdir()
    (begins / "step").write_text("1", encoding="ascii")
    run_config = tune.RunConfig(
        name="search",
        storage_path=str(searched.folder),
        resume_from_checkpoint=str(begins),
        verbose=0,
    )
    tune_config = tune.TuneConfig(metric="loss", mode="min", seed=1)
    space = {**searched.space, "steps": 3}
    tune.Tuner(train, param_space=space, tune_config=tune_config, run_config=run_config).fit()

    for samples in (2, 3):
        more = tune.TuneConfig(metric="loss", mode="min", seed=1, num_samples=samples)
        grid = searched.restore(tune_config=more, run_config=run_config)
        assert [len(one.history) for one in grid] == [2] * (3 * samples)


def test_can_restore_tells_whether_there_is_an_experiment(searched):
    assert not tune.Tuner.can_restore(searched.path)
    with pytest.raises(ConfigError, match=r"no tuner\.pkl"):
        searched.restore()
    searched.fit(steps=1)
    assert tune.Tuner.can_restore(searched.path)
    assert tune.Tuner.can_restore(f"file://{searched.path}")


@pytest.mark.parametrize(
    ("field", "said"), [("python", "Python 2.7"), ("cloudpickle", "cloudpickle 0.1"),
                        ("tunemq", "TuneMQ 0.0.0")]
)  # fmt: skip
def test_restore_of_another_version_is_refused_and_both_are_named(searched, field, said):
    searched.fit(steps=1)
    ours = write_version(searched, field, said.split()[1])

    with pytest.raises(ConfigError, match=f"{said}.*{ours}.*Install {said}"):
        searched.restore()


@pytest.mark.parametrize("patch", ["{}.0.dev9", "{}.0rc1", "{}.17"])
def test_restore_reads_what_another_patch_of_the_same_minor_version_wrote(searched, patch):
    searched.fit(steps=1)
    minor = ".".join(tune.__version__.split(".")[:2])
    write_version(searched, "tunemq", patch.format(minor))

    assert len(searched.restore()) == 3


def write_version(searched, field: str, version: str) -> str:
    """Replace a version in the saved tuner; the one before."""
    path = Path(searched.path, TUNER_FILE)
    content = path.read_bytes()
    path.write_bytes(changed_tuner(content, **{field: version}))
    return saved_fields(content)[field]


def test_changed_bit_in_the_saved_tuner_is_found(searched):
    searched.fit(steps=1)
    path = Path(searched.path, TUNER_FILE)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"is damaged: its checksum .* from a backup"):
        searched.restore()


def test_an_experiment_that_runs_cannot_be_opened_a_second_time(searched):
    running = threading.Thread(target=lambda: searched.fit(steps=60, held_at=2))
    running.start()
    try:
        eventually(searched.executed_file.exists, within=60)
        with pytest.raises(JournalLocked, match=str(os.getpid())):
            searched.restore()
    finally:
        Path(searched.space["fixed"]).touch()
        running.join()


class Rejects(tune.stopper.Stopper):
    def __call__(self, trial_id, result):
        return False

    def stop_all(self):
        raise ValueError("no")


def test_failed_restore_succeeds_after_its_cause_is_fixed(searched):
    searched.fit(tune.TuneConfig(metric="loss", mode="min", seed=1, num_samples=1), steps=2)
    two = tune.TuneConfig(metric="loss", mode="min", seed=1, num_samples=2)
    with pytest.raises(SearchFailed, match="ValueError: no"):
        searched.restore(tune_config=two, run_config=tune.RunConfig(stop=Rejects(), verbose=0))

    grid = searched.restore(tune_config=two, run_config=tune.RunConfig(verbose=0))

    assert [steps_of(one) for one in grid] == [[1, 2]] * 6


def test_restore_keeps_callbacks_and_algorithms_of_the_first_run(searched):
    class Notes(tune.Callback):
        def __init__(self, path: str) -> None:
            self.path = path

            self.seen = 0

        def get_state(self):
            return {"seen": self.seen}

        def set_state(self, state):
            self.seen = state["seen"]

        def on_experiment_end(self, trials, **info):
            Path(self.path).with_suffix(".seen").write_text(str(self.seen), encoding="ascii")

        def on_trial_result(self, iteration, trials, trial, result, **info):
            self.seen += 1
            with open(self.path, "a", encoding="ascii") as file:
                file.write(f"{result['training_iteration']}\n")

    notes = searched.folder / "notes"
    tuner = tune.Tuner(
        train,
        param_space={**searched.space, "steps": 4, "fails_at": 3, "saves": True},
        tune_config=tune.TuneConfig(
            metric="loss",
            mode="min",
            scheduler=tune.schedulers.ASHAScheduler(max_t=9, grace_period=4),
        ),
        run_config=tune.RunConfig(
            name="search",
            storage_path=str(searched.folder),
            callbacks=[Notes(str(notes))],
            verbose=0,
        ),
    )
    assert tuner.fit().num_errors == 3
    Path(searched.space["fixed"]).touch()

    grid = searched.restore(resume_errored=True)

    assert {one.status for one in grid} == {"TERMINATED"}
    steps = [int(line) for line in notes.read_text(encoding="ascii").split()]
    recorded = [step for one in grid for step in steps_of(one)]
    assert sorted(steps) == sorted(recorded), "each result was reported once"
    seen = notes.with_suffix(".seen").read_text(encoding="ascii")
    assert int(seen) == len(recorded), "the second run's callback knows what the first one's knew"


def test_restore_that_finishes_no_trial_starts_nothing(searched):
    stopping = threading.Thread(target=interrupt_at, args=(searched, 5))
    stopping.start()
    with pytest.raises(KeyboardInterrupt):
        searched.fit(steps=100, held_at=6, x=tune.grid_search([1.0]))
    stopping.join()
    warm_farms.stop_all()

    (ended,) = searched.restore(resume_unfinished=False)

    assert farm_processes() == []
    assert ended.status == "TERMINATED"
    assert 0 < len(steps_of(ended)) < 100
    assert told(searched.restore()) == told([ended])
