"""People's own projects: whatever their modules are called, they run unchanged."""

from __future__ import annotations

import json

import pytest

from tests.acceptance.scripts import run, write

pytestmark = pytest.mark.integration

SEARCH = """
    results = tune.Tuner(
        train,
        param_space={"a": tune.grid_search([1, 2])},
        tune_config=tune.TuneConfig(metric="score", mode="max"),
        run_config=tune.RunConfig(verbose=0),
    ).fit()
    import json
    print(json.dumps([result.metrics["score"] for result in results]))
    for result in results:
        if result.error:
            print(result.error)
"""
SCRIPT = 'if __name__ == "__main__":' + SEARCH


def scores(done):
    assert done.returncode == 0, done.stderr + done.stdout
    return json.loads(done.stdout.splitlines()[0])


def test_f25_a_project_with_its_own_shared_workers_and_scheduler_runs_unchanged(tmp_path):
    project = write(
        tmp_path,
        {
            "shared/losses.py": "def loss(a, step): return a * step",
            "workers/__init__.py": "SCALE = 10",
            "workers/loader.py": "from workers import SCALE\ndef load(): return SCALE",
            "scheduler.py": "class Warmup:\n    def rate(self, step): return step + 1",
            "train.py": """
            import tunemq as tune
            from scheduler import Warmup
            from shared.losses import loss
            from workers.loader import load

            def train(config):
                import scheduler, shared.losses, workers.loader
                warmup = Warmup()
                for step in range(3):
                    score = loss(config["a"], warmup.rate(step)) + load()
                    tune.report({"score": score})
        """,
        },
    )
    with (project / "train.py").open("a") as file:
        file.write("\n" + SCRIPT)

    assert scores(run(project, "train.py")) == [13, 16]


def test_trainable_class_of_a_project_runs_unchanged(tmp_path):
    project = write(
        tmp_path,
        {
            "shared/losses.py": "def loss(a, step): return a * step",
            "workers/base.py": """
            import tunemq as tune
            from shared.losses import loss
            from scheduler import RATE

            class Base(tune.Trainable):
                def step(self):
                    score = loss(self.config["a"], self.iteration + 1) + RATE
                    return {"score": score, "done": self.iteration == 2}
        """,
            "scheduler.py": "RATE = 10",
            "search.py": """
            import tunemq as tune
            from workers.base import Base as train
        """,
        },
    )
    with (project / "search.py").open("a") as file:
        file.write("\n" + SCRIPT)

    assert scores(run(project, "search.py")) == [13, 16]


def test_modules_named_redis_and_celery_beside_the_script_do_no_harm(tmp_path):
    project = write(
        tmp_path,
        {
            "redis.py": "SECRET = 1",
            "celery.py": "SECRET = 2",
            "kombu.py": "raise ImportError('not this one')",
            "train.py": """
                import tunemq as tune

                def train(config):
                    import redis, celery
                    return {"score": redis.SECRET + celery.SECRET + config["a"]}
            """,
        },
    )
    with (project / "train.py").open("a") as file:
        file.write("\n" + SCRIPT)

    assert scores(run(project, "train.py")) == [4, 5]


def test_a_package_run_with_m_finds_its_own_modules(tmp_path):
    project = write(
        tmp_path,
        {
            "pkg/__init__.py": "",
            "pkg/model.py": "from . import parts\ndef score(a): return a + parts.ONE",
            "pkg/parts.py": "ONE = 1",
            "pkg/train.py": """
            import tunemq as tune
            from .model import score

            def train(config):
                from pkg import parts
                return {"score": score(config["a"]) + parts.ONE}
        """,
        },
    )
    with (project / "pkg" / "train.py").open("a") as file:
        file.write("\n" + SCRIPT)

    assert scores(run(project, "-m", "pkg.train")) == [3, 4]


def test_a_script_without_a_main_guard_runs_once(tmp_path):
    project = write(tmp_path, {"train.py": "import tunemq as tune\n"})
    with (project / "train.py").open("a") as file:
        file.write("def train(config):\n    return {'score': config['a']}\n")
        file.write(SEARCH.replace("\n    ", "\n"))

    done = run(project, "train.py")

    assert scores(done) == [1, 2]
    assert len(done.stdout.splitlines()) == 1


def test_a_script_on_standard_input_works(tmp_path):
    code = "import tunemq as tune\ndef train(config):\n    return {'score': config['a']}\n"

    assert scores(run(tmp_path, "-c", code + SEARCH.replace("\n    ", "\n"))) == [1, 2]


def test_a_file_that_a_trial_opens_relative_to_the_script_is_found_by_the_usual_means(tmp_path):
    project = write(
        tmp_path,
        {
            "train.py": """
            import os, pathlib
            import tunemq as tune

            HERE = pathlib.Path(__file__).resolve().parent

            def train(config):
                return {"score": int((HERE / "data.txt").read_text()) + config["a"]}
        """,
        },
    )
    (project / "data.txt").write_text("40")
    with (project / "train.py").open("a") as file:
        file.write("\n" + SCRIPT)

    assert scores(run(project, "train.py")) == [41, 42]
