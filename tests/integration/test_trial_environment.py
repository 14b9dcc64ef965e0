"""The environment of a trial: seeds, threads, shared memory, a node that no step can block."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

import tunemq as tune
from tests.support.searches.journals import ended_searches
from tests.support.searches.searches import farm_processes, fit, tuner
from tests.support.waiting import eventually
from tunemq_scheduler.embedded import warm_farms
from tunemq_shared.broker import redis_keys

__all__ = ["ended_searches"]

pytestmark = pytest.mark.integration

ARRAY_BYTES = 500 * 2**20


def draws(config):
    import random

    return {"numpy": np.random.rand(), "python": random.random()}  # noqa: NPY002  as people do


def test_trials_draw_different_numbers_and_the_same_ones_again_with_the_same_seed():
    def drawn(seed):
        results = fit(draws, num_samples=3, seed=seed)
        return [(result.metrics["numpy"], result.metrics["python"]) for result in results]

    first = drawn(11)

    assert len({number for pair in first for number in pair}) == 6
    assert drawn(11) == first
    assert not set(drawn(12)) & set(first)


@pytest.mark.parametrize("preload", [("numpy", "sklearn.utils"), ()])
@pytest.mark.parametrize("cpus", [1, 2])
def test_blas_and_openmp_have_as_many_threads_as_the_trial_has_cpus(preload, cpus):
    def train(config):
        import sys

        was_preloaded = "numpy" in sys.modules
        import sklearn.utils  # noqa: F401  brings OpenMP
        import threadpoolctl

        pools = threadpoolctl.threadpool_info()
        tune.report(
            {
                "threads": {pool["filepath"]: pool["num_threads"] for pool in pools},
                "apis": sorted({pool["user_api"] for pool in pools}),
                "was_preloaded": was_preloaded,
            }
        )

    trainable = tune.with_resources(train, {"cpu": cpus})
    (result,) = fit(trainable, preload=preload)

    assert result.error is None
    assert result.metrics["was_preloaded"] == bool(preload)
    assert result.metrics["apis"] == ["blas", "openmp"]
    assert set(result.metrics["threads"].values()) == {cpus}


def test_eight_trials_share_an_array_of_with_parameters(tmp_path):
    """The last of the eight measures all of them, while they wait for its result."""

    def train(config, data):
        total = float(data.sum())  # touches every page
        (tmp_path / f"here_{os.getpid()}").touch()
        trial_pids = []
        while len(trial_pids) < 8:
            trial_pids = [path.name.removeprefix("here_") for path in tmp_path.glob("here_*")]
            time.sleep(0.01)
        pss = 0
        if config["n"] == 0:
            for pid in trial_pids:
                lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
                pss += sum(int(line.split()[1]) * 1024 for line in lines if line[:4] == "Pss:")
            (tmp_path / "measured").touch()
        while not (tmp_path / "measured").exists():
            time.sleep(0.01)
        tune.report({"pss": pss, "total": total, "writeable": data.flags.writeable})

    data = np.ones(ARRAY_BYTES, dtype=np.uint8)
    trainable = tune.with_resources(tune.with_parameters(train, data=data), {"cpu": 0.25})
    results = fit(trainable, {"n": tune.grid_search(range(8))}, time_budget_s=150)

    assert results.num_errors == 0
    assert results[0].metrics["pss"] < 1.3 * ARRAY_BYTES
    for result in results:
        assert result.metrics["total"] == ARRAY_BYTES
        assert result.metrics["writeable"] is False


def test_step_that_holds_the_gil_keeps_its_node_alive():
    held_s = redis_keys.LEASE_TTL_S + 2

    def train(config):
        import ctypes

        if config["holds"]:
            ctypes.PyDLL(None).usleep(int(held_s * 1e6))
            tune.report({"x": 1})
            return
        for _ in range(20):
            time.sleep(held_s / 20)
            tune.report({"x": 2})

    began = time.monotonic()
    results = fit(train, {"holds": tune.grid_search([True, False])})

    assert time.monotonic() - began >= held_s
    assert [result.metrics["training_iteration"] for result in results] == [1, 20]
    assert [result.status for result in results] == ["TERMINATED"] * 2
    assert not any(Path(result.path, "error.txt").exists() for result in results)


def test_trial_process_imports_no_client_library():
    def train(config):
        import sys

        tops = {name.partition(".")[0] for name in sys.modules}
        tune.report({"found": sorted(tops & {"celery", "kombu", "redis", "minio", "optuna"})})

    (result,) = fit(train)

    assert result.metrics["found"] == []


@pytest.mark.parity(18)
def test_stopped_trial_that_catches_every_exception_is_gone_soon():
    def train(config):
        while True:
            try:
                tune.report({"x": 1})
            except BaseException:  # noqa: BLE001  as careless as it gets
                time.sleep(0.01)

    began = time.monotonic()
    (result,) = fit(train, stop=lambda trial_id, result: True)

    assert result.status == "TERMINATED"
    assert time.monotonic() - began < 60  # the grace period of 5 s, and then some
    eventually(lambda: not psutil.pid_exists(result.metrics["pid"]))


def test_a_trial_finds_the_limits_the_variables_and_the_folder_that_it_was_given(monkeypatch):
    def train(config):
        import resource
        import subprocess

        def soft(kind):
            return resource.getrlimit(kind)[0]

        mask = os.umask(0)
        os.umask(mask)
        shown = subprocess.run(["env", "-0"], capture_output=True, text=True, check=True).stdout
        variables = dict(line.split("=", 1) for line in shown.split("\0") if line)
        tune.report(
            {
                "files": soft(resource.RLIMIT_NOFILE),
                "core": soft(resource.RLIMIT_CORE),
                "mask": mask,
                "folder": os.getcwd(),
                "given": variables.get("GIVEN"),
                "ours": sorted(name for name in variables if name.startswith("TUNEMQ_")),
            }
        )

    monkeypatch.setenv("TUNEMQ_S3_ENDPOINT", "not for trials")
    limits = tune.TrialLimits(open_files=200)
    (result,) = fit(train, trial_limits=limits, env_vars={"GIVEN": "a b"})

    assert result.error is None
    found = {name: result.metrics[name] for name in ("files", "core", "given", "ours")}
    assert found == {"files": 200, "core": 0, "given": "a b", "ours": ["TUNEMQ_HOST"]}
    assert result.metrics["folder"] == result.path
    mask = os.umask(0)
    os.umask(mask)
    assert result.metrics["mask"] == mask


TELLS = """
import os, json
import tunemq as tune

def train(config):
    names = ("MINE", "AWS_SECRET_ACCESS_KEY", "TUNEMQ_S3_ENDPOINT")
    tune.report({"found": [os.environ.get(name, "") for name in names], "user": os.geteuid()})

(result,) = tune.Tuner(train, run_config=tune.RunConfig(storage_path="results", verbose=0)).fit()
print(json.dumps([*result.metrics["found"], result.metrics["user"]]))
"""


def test_embedded_trial_has_the_scripts_environment_with_its_keys_and_its_user(tmp_path):
    given = {"MINE": "a", "AWS_SECRET_ACCESS_KEY": "b", "TUNEMQ_S3_ENDPOINT": "c"}
    done = subprocess.run(
        [sys.executable, "-c", TELLS],
        cwd=tmp_path,
        env={**os.environ, **given},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == ["a", "b", "", os.geteuid()]


def test_a_trial_may_leave_a_core_file_where_that_is_asked_for():
    def train(config):
        import resource

        tune.report({"core": resource.getrlimit(resource.RLIMIT_CORE)})

    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    most = 2**20 if hard == resource.RLIM_INFINITY else min(2**20, hard)
    (result,) = fit(train, trial_limits=tune.TrialLimits(core_bytes="1MiB"))

    assert result.metrics["core"] == [most, most]


def test_children_that_a_trial_forgets_are_gone_when_it_has_ended():
    def train(config):
        import subprocess

        child = subprocess.Popen(["sleep", "600"], start_new_session=True)
        tune.report({"child": child.pid})

    (result,) = fit(train)

    eventually(lambda: not psutil.pid_exists(result.metrics["child"]))


def test_the_farm_stays_warm_for_the_next_search_and_holds_no_trial():
    def names():
        found = []
        for process in farm_processes():
            with contextlib.suppress(psutil.NoSuchProcess):  # it ends just now
                found.append(process.name())
        return found

    def trials():
        return [name for name in names() if name.startswith("draws_")]

    warm_farms.stop_all()  # of searches before something may be left that ends just now
    tuner(draws).fit()
    eventually(lambda: not trials())
    before = {process.pid for process in farm_processes()}
    tuner(draws).fit()

    eventually(lambda: not trials())
    assert {p.pid for p in farm_processes()} >= before
    assert any("redis-server" in name for name in names())
