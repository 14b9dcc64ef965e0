"""The ways in which a search is run: warm, in this process, in a thread, by a script."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

import tunemq as tune
from tests.acceptance.scripts import run, write
from tests.support.searches.searches import farm_processes, fit, results_of
from tests.support.waiting import eventually
from tunemq_scheduler.embedded import warm_farms

pytestmark = pytest.mark.integration


def says_pid(config):
    tune.report({"pid": os.getpid()})


def test_a_second_search_finds_the_farm_warm_and_is_quicker():
    def timed():
        began = time.monotonic()
        fit(says_pid)
        return time.monotonic() - began

    def watchdogs():
        found = set()
        for process in farm_processes():
            with contextlib.suppress(psutil.NoSuchProcess):  # a trial process may have just ended
                found |= {process.pid} if process.name() == "tunemq-watchdog" else set()
        return found

    warm_farms.stop_all()
    cold = timed()
    before = watchdogs()
    assert min(timed() for _ in range(8)) < cold  # a busy machine slows down some of them

    assert watchdogs() == before
    assert len(before) == 1


def test_a_debug_run_is_one_trial_in_this_process_and_thread():
    warm_farms.stop_all()

    def train(config):
        for _ in range(3):
            tune.report({"pid": os.getpid(), "thread": threading.get_ident()})

    results = fit(train, {"a": tune.grid_search([1, 2])}, debug=True)

    (result,) = results
    assert (result.status, result.config) == ("TERMINATED", {"a": 1})
    assert result.metrics["pid"] == os.getpid()
    assert result.metrics["thread"] == threading.get_ident()
    assert [line["training_iteration"] for line in results_of(result)] == [1, 2, 3]
    assert farm_processes() == []


def test_a_debug_run_stops_where_a_trial_would():
    def train(config):
        while True:
            tune.report({"x": 1})

    (result,) = fit(train, debug=True, stop={"training_iteration": 4})

    assert result.metrics["training_iteration"] == 4


def test_a_debug_run_shows_what_the_trial_raised():
    def train(config):
        raise ValueError("look here")

    (result,) = fit(train, debug=True)

    assert "ValueError: look here" in str(result.error)


def test_a_debug_run_takes_breakpoints(tmp_path):
    project = write(
        tmp_path,
        {
            "train.py": """
                import tunemq as tune

                def train(config):
                    secret = 41
                    breakpoint()
                    tune.report({"x": secret})

                if __name__ == "__main__":
                    results = tune.Tuner(train).fit(debug=True)
                    print("reported", results[0].metrics["x"])
            """
        },
    )
    done = run(project, "train.py", given="p secret + 1\nsecret = 7\nc\n")

    assert done.returncode == 0, done.stderr
    assert "42" in done.stdout
    assert "reported 7" in done.stdout


def test_fit_works_in_a_thread_and_beside_another_search():
    found = {}

    def search(name):
        found[name] = fit(says_pid, num_samples=2)

    threads = [threading.Thread(target=search, args=(name,)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)

    pids = [result.metrics["pid"] for results in found.values() for result in results]
    assert len(set(pids)) == 4


def test_signal_handlers_of_the_user_are_restored_after_fit():
    def mine(number, frame):
        pass

    before = {number: signal.signal(number, mine) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        fit(says_pid)
        assert [signal.getsignal(number) for number in before] == [mine, mine]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_trial_sees_the_variables_of_the_script_and_no_internal_ones(monkeypatch):
    monkeypatch.setenv("MY_DATA", "/data")

    def train(config):
        ours = sorted(name for name in os.environ if name.startswith("TUNEMQ_RESULTS"))
        tune.report({"data": os.environ["MY_DATA"], "ours": ours})

    (result,) = fit(train)

    assert (result.metrics["data"], result.metrics["ours"]) == ("/data", [])


REUSES = """
    import time
    import tunemq as tune

    class Counts(tune.Trainable):
        def setup(self, config):
            self.n = 0
        def step(self):
            return {"n": 1}
        def reset_config(self, config):
            return True
        def cleanup(self):
            print("cleaned up", flush=True)

    if __name__ == "__main__":
        results = tune.Tuner(
            Counts,
            param_space={"a": tune.grid_search([1, 2])},
            tune_config=tune.TuneConfig(reuse_actors=True, max_concurrent_trials=1),
            run_config=tune.RunConfig(stop={"training_iteration": 1}, verbose=0, name="reuses"),
        ).fit()
        deadline = time.monotonic() + 60  # a script that ends ends its farm, too
        while not open(results[1].path + "/stdout").read() and time.monotonic() < deadline:
            time.sleep(0.01)  # the script's own way to wait, as a user would write it
"""


def test_a_reused_object_is_cleaned_up_when_its_search_has_ended(tmp_path, monkeypatch):
    monkeypatch.setenv("TUNEMQ_CPUS", "1")  # the second trial waits for the first trial's process
    done = run(write(tmp_path, {"train.py": REUSES}), "train.py")

    assert done.returncode == 0, done.stderr
    printed = sorted((tmp_path / "tunemq_results" / "reuses").glob("Counts_*/stdout"))
    assert [path.read_text() for path in printed] == ["", "cleaned up\n"]


def test_progress_without_a_terminal_is_a_line_for_each_event(tmp_path):
    project = write(
        tmp_path,
        {
            "train.py": """
                import tunemq as tune

                def train(config):
                    if config["a"] == 2:
                        raise ValueError("two is too many")
                    tune.report({"loss": config["a"]})

                if __name__ == "__main__":
                    tune.Tuner(
                        train,
                        param_space={"a": tune.grid_search([1, 2, 3])},
                        tune_config=tune.TuneConfig(metric="loss", mode="min"),
                    ).fit()
            """
        },
    )
    done = run(project, "train.py")
    shown = done.stdout + done.stderr

    assert done.returncode == 0
    assert "started" in shown
    assert "ValueError: two is too many" in shown
    assert "2 TERMINATED" in shown
    assert "1 ERROR" in shown
    assert str(tmp_path / "tunemq_results") in shown


@pytest.mark.parity(174)
def test_the_results_of_a_script_are_read_from_its_folder(tmp_path):
    run(write(tmp_path, {"train.py": REUSES}), "train.py")

    (folder,) = (tmp_path / "tunemq_results").iterdir()
    trials = sorted(folder.glob("Counts_*"))
    assert [json.loads((path / "params.json").read_text()) for path in trials] == [
        {"a": 1},
        {"a": 2},
    ]
    eventually(lambda: all((path / "result.json").exists() for path in trials))


SEARCH_THAT_PRINTS = """
    import ctypes
    import json
    import os
    import sys
    import warnings

    import tunemq as tune

    def train(config):
        for step in range(3):
            tune.report({"loss": config["a"] + step})

    if __name__ == "__main__":
        run = tune.RunConfig(name="search", storage_path=os.getcwd(), verbose=int(sys.argv[1]))
        tuner = tune.Tuner(train, param_space={"a": tune.grid_search([1, 2])}, run_config=run)
        grid = tuner.fit()
        ctypes.CDLL(None).puts(b"printed by C")
        found = [[row["loss"] for row in one.history] for one in grid]
        descriptors = [os.readlink(f"/proc/self/fd/{number}") for number in range(3)]
        with open("found.json", "w") as file:
            json.dump([found, descriptors], file)
"""


@pytest.mark.parametrize("verbose", [1, 2])
@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_search_of_script_with_closed_streams_runs_to_its_end(tmp_path, closed, verbose):
    write(tmp_path, {"script.py": SEARCH_THAT_PRINTS})
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "script.py", str(verbose)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found, descriptors = json.loads((tmp_path / "found.json").read_text())
    assert found == [[1, 2, 3], [2, 3, 4]]
    is_closed = [mark in closed.split() for mark in ("<&-", ">&-", "2>&-")]
    for is_null, was_closed in zip(map(os.devnull.__eq__, descriptors), is_closed, strict=True):
        assert is_null or not was_closed
    assert tune.Tuner.can_restore(tmp_path / "search")


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_command_with_closed_streams_has_its_exit_code(tmp_path, closed):
    for arguments, code in ((["--version"], 0), (["journal", "check", str(tmp_path)], 64)):
        command = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-m", "tunemq"]
        done = subprocess.run([*command, *arguments], capture_output=True, timeout=60, check=False)
        assert done.returncode == code, done
