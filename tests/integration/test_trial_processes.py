"""The environment of a trial in a trial process that was really forked."""

from __future__ import annotations

import os
import time

import msgspec
import pytest

from tests.support.forkserver_driver import alive, serve
from tests.support.waiting import eventually
from tunemq_shared.protocol.messages import (
    CheckpointCommitted,
    CheckpointDamaged,
    CheckpointRef,
    CheckpointWritten,
    ResultReported,
    TrialFailed,
    TrialFinished,
    TrialOrder,
    TrialPaused,
    TrialStarted,
    TrialWaits,
)
from tunemq_shared.protocol.result_conditions import Condition
from tunemq_workers.runtime import frames

__all__ = ["serve"]

pytestmark = pytest.mark.integration


def look_around(config):
    import os
    import sys
    from pathlib import Path

    from tunemq_shared.trial.session import report

    sys.stdout.write("printed\n")
    sys.stderr.write("complained\n")
    os.system("echo by a program")
    report(
        {
            "cwd": os.getcwd(),
            "argv": sys.argv,
            "variables": dict(os.environ),
            "leads_its_group": os.getpgrp() == os.getpid(),
            "stdin": sys.stdin.read(),
            "oom_score": Path("/proc/self/oom_score_adj").read_text(),
            "main": sorted(vars(sys.modules["__main__"])),
            "heavy": sorted(
                {"celery", "redis", "minio", "optuna", "numpy"}.intersection(sys.modules)
            ),
            "path": sys.path,
            "descriptors": sorted(int(fd) for fd in os.listdir("/proc/self/fd")),
        }
    )


@pytest.mark.parity(171)
def test_a_trial_finds_a_clean_process_in_its_folder(serve):
    server = serve(variables={"PATH": os.environ["PATH"], "MINE": "1", "TUNEMQ_OURS": "2"})
    process = server.start(look_around)
    seen = process.result()
    process.gone()

    folder = str(server.root / "trial_0")
    assert seen["cwd"] == folder
    assert seen["argv"] == ["trial_0"]
    assert seen["leads_its_group"]
    assert not seen["stdin"]
    assert seen["oom_score"] == "500\n"
    assert "main" not in seen["main"]
    assert seen["heavy"] == []
    assert seen["path"][: len(server.environment.sys_path)] == list(server.environment.sys_path)
    assert seen["variables"] == {
        "PATH": os.environ["PATH"],
        "MINE": "1",
        "TUNEMQ_HOST": "h0",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "BLIS_NUM_THREADS": "1",
        "NUMEXPR_NUM_THREADS": "1",
    }
    # Standard input, output and error, the channel to the node, the two ends of the pipe that notes
    # signals, and the listing itself.
    assert len(seen["descriptors"]) == 7


def test_changes_of_a_preloaded_module_reach_trials(serve, tmp_path):
    (tmp_path / "changing.py").write_text(
        "import os, sys\nos.environ['SET_AT_IMPORT'] = '1'\nsys.path.append('/added/at/import')\n"
    )
    process = serve(preload=["changing"], sys_path=[str(tmp_path)]).start(look_around)
    seen = process.result()
    process.gone()

    assert seen["variables"]["SET_AT_IMPORT"] == "1"
    assert "/added/at/import" in seen["path"]


def test_output_of_a_trial_and_its_programs_is_in_its_folder(serve):
    process = serve().start(look_around)
    process.gone()

    assert process.output("stdout") == "printed\nby a program\n"
    assert process.output("stderr") == "complained\n"


def test_events_come_in_order_and_the_last_is_marked(serve):
    process = serve().start(look_around)
    process.gone()

    started, _, finished = process.events
    assert isinstance(started, TrialStarted)
    assert (started.pid, started.hostname, started.node_ip) == (process.pid, "here", "127.0.0.1")
    assert isinstance(finished, TrialFinished)
    assert process.kinds == [frames.EVENT, frames.EVENT, frames.ENDING]


def test_trial_sees_only_its_gpus(serve):
    process = serve().start(look_around, gpus=["GPU-1", "GPU-2"], resources={"gpu": 2.0})

    assert process.result()["variables"]["CUDA_VISIBLE_DEVICES"] == "GPU-1,GPU-2"
    process.gone()


def fail(config):
    raise RuntimeError("diverged")


def test_an_error_of_the_trial_is_sent_with_its_traceback(serve):
    process = serve().start(fail)
    process.gone()

    failure = process.events[-1]
    assert isinstance(failure, TrialFailed)
    assert (failure.kind, failure.error) == ("user", "RuntimeError: diverged")
    assert "in fail" in failure.traceback
    assert process.exited().exit_code == 0


def count_threads(config):
    import numpy as np
    from threadpoolctl import threadpool_info

    from tunemq_shared.trial.session import report

    np.ones((64, 64)) @ np.ones((64, 64))
    report({library["user_api"]: library["num_threads"] for library in threadpool_info()})


@pytest.mark.parametrize("preload", [["numpy"], []])
def test_blas_has_as_many_threads_as_the_trial_has_cpus(serve, preload):
    server = serve(preload=preload)
    processes = [server.start(count_threads, n, resources={"cpu": n + 0.5}) for n in (1, 2)]

    assert [process.result()["blas"] for process in processes] == [1, 2]
    for process in processes:
        process.gone()


def test_thread_limit_of_the_user_takes_precedence(serve):
    variables = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "2"}
    process = serve(preload=["numpy"], variables=variables).start(count_threads)

    assert process.result()["blas"] == 2
    process.gone()


def draw(config):
    import random

    drawn = [random.random()]
    import numpy as np

    from tunemq_shared.trial.session import report

    drawn.append(float(np.random.random()))  # noqa: NPY002 - this one is seeded
    report({"drawn": drawn})


@pytest.mark.parametrize("preload", [[], ["numpy"], ["numpy.random"]])
def test_trials_draw_different_numbers_and_every_run_the_same(serve, preload):
    runs = []
    for _ in range(2):
        server = serve(preload=preload)
        processes = [server.start(draw, number, seed=7) for number in range(2)]
        runs.append([process.result()["drawn"] for process in processes])
        for process in processes:
            process.gone()

    assert runs[0] == runs[1]
    assert len({number for drawn in runs[0] for number in drawn}) == 4


def use_multiprocessing(config):
    import multiprocessing
    import operator

    from tunemq_shared.trial.session import report

    context = multiprocessing.get_context(config["method"])
    with context.Pool(2) as pool:
        report({"results": pool.map(operator.neg, [1, 2, 3])})


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_multiprocessing_works_in_a_trial(serve, method):
    process = serve().start(use_multiprocessing, config={"method": method})

    assert process.result() == {"results": [-1, -2, -3]}
    process.gone()
    assert isinstance(process.events[-1], TrialFinished), process.output()
    assert not process.output()


def report_in_a_child(config):
    import os
    import sys

    from tunemq_shared.base.errors import TuneError
    from tunemq_shared.trial.session import report

    pid = os.fork()
    if pid == 0:
        try:
            report({"loss": 1.0})
        except TuneError as error:
            sys.stdout.write(str(error))
            sys.stdout.flush()
        os._exit(0)
    os.waitpid(pid, 0)


def test_child_of_a_trial_cannot_report_and_gets_the_reason(serve):
    process = serve().start(report_in_a_child)
    process.gone()

    assert not process.results
    assert "a child of the trial's process" in process.output("stdout")


def count_to_three(config):
    from tunemq_shared.trial.session import report

    for step in range(3):
        report({"loss": step})


def test_trial_waits_at_its_horizon_until_it_is_extended(serve):
    server = serve()
    order = server.order(count_to_three)
    held = TrialOrder(order.trial, 1, (Condition("training_iteration", 1),), start=order.start)
    process = server.start_order(held)
    assert process.result() == {"loss": 0}
    assert len(process.results) == 1

    process.tell(frames.ORDER, TrialOrder(order.trial, 1, (Condition("training_iteration", 2),)))
    assert process.result(1) == {"loss": 1}
    process.tell(frames.ORDER, TrialOrder(order.trial, 1, ()))

    assert process.result(2) == {"loss": 2}
    process.gone()


def test_a_waiting_trial_ends_when_its_node_does(serve):
    server = serve()
    order = server.order(count_to_three)
    process = server.start_order(
        TrialOrder(order.trial, 1, (Condition("training_iteration", 1),), start=order.start)
    )
    process.result()

    pid = process.pid
    process.close()

    eventually(lambda: not alive(pid))


def test_reused_trial_process_runs_the_next_trial_as_a_new_one_would(serve):
    server = serve()
    first = server.start(draw, 0, reuse=True)
    fresh = server.start(draw, 1)
    first.until(lambda: frames.IDLE in first.kinds, "idle trial process")

    first.tell(frames.NEXT, server.order(draw, 1))

    assert first.result(1)["drawn"] == fresh.result()["drawn"]
    first.gone()
    fresh.gone()
    assert [event.trial for event in first.events] == ["t0"] * 3 + ["t1"] * 3
    assert {event.pid for event in first.events if isinstance(event, TrialStarted)} == {first.pid}
    assert (server.root / "trial_1" / "stdout").exists()


def test_trial_process_of_a_failed_trial_is_not_reused(serve):
    process = serve().start(fail, reuse=True)
    process.gone()

    assert frames.IDLE not in process.kinds


REMOTE = "s3://bucket/exp?endpoint=http://127.0.0.1:1&region=us-east-1&path_style=true"


def count_with_checkpoints(config):
    from tunemq_shared.checkpoints.checkpoint import Checkpoint
    from tunemq_shared.trial.session import get_checkpoint, report

    kept = get_checkpoint()
    first = 0 if kept is None else kept.to_dict()["n"]
    for n in range(first + 1, 4):
        report({"n": n}, checkpoint=Checkpoint.from_dict({"n": n}))
    report({"n": get_checkpoint().to_dict()["n"]})


def reference(event):
    if isinstance(event, CheckpointWritten):
        return CheckpointRef(event.key, "", event.step, written=event.sha256)
    return CheckpointRef(event.key, event.sha256, event.step)


def checkpoints(process):
    kinds = CheckpointWritten | CheckpointCommitted
    return [event for event in process.events if isinstance(event, kinds)]


def test_trial_process_asks_its_node_for_space_and_reports_its_checkpoint(serve):
    server = serve()
    process = server.start(count_with_checkpoints, store=REMOTE)
    process.gone()

    asks = [frames.SAVING, frames.SAVING, frames.ASK_SAVE, frames.SAVING]
    save = [frames.EVENT, *asks, frames.SAVING, frames.WRITTEN]
    expected = [frames.EVENT, *save * 3, frames.FETCH, frames.EVENT, frames.ENDING]
    assert process.kinds == expected, process.output()
    assert process.results == [{"n": n} for n in (1, 2, 3, 3)]
    keys = [f"trial_0/checkpoint_1-{n:06d}" for n in (1, 2, 3)]
    assert [event.key for event in checkpoints(process)] == keys
    assert all((server.cache / key / "manifest.json").exists() for key in keys)


def test_trial_process_writes_to_a_local_store_directly(serve):
    server = serve()
    process = server.start(count_with_checkpoints)
    process.gone()

    save = [frames.EVENT, frames.SAVING, frames.SAVING, frames.EVENT]
    expected = [frames.EVENT, *save * 3, frames.EVENT, frames.ENDING]
    assert process.kinds == expected, process.output()
    assert [type(event) for event in checkpoints(process)] == [CheckpointCommitted] * 3
    assert (server.root / checkpoints(process)[-1].key / "manifest.json").exists()
    assert not server.cache.exists()


def save_when_told(config):
    import time
    from pathlib import Path

    from tunemq_shared.checkpoints.checkpoint import Checkpoint
    from tunemq_shared.trial.session import report

    print("running", flush=True)
    while not Path(config["go"]).exists():
        time.sleep(0.01)
    report({"n": 1}, checkpoint=Checkpoint.from_dict({"n": 1}))


@pytest.mark.parametrize("begins_without", [True, False], ids=["begins", "saves"])
def test_trial_waits_while_the_folder_of_its_experiment_is_missing(serve, begins_without):
    server = serve()
    store, elsewhere = server.root / "store" / "experiment", server.root / "elsewhere"
    store.mkdir(parents=True)
    go = server.root / "go"
    order = server.order(save_when_told, config={"go": str(go)}, store=str(store))
    begin = msgspec.structs.replace(order.start, folder=str(store / "trial_0"))
    if begins_without:
        store.parent.rename(elsewhere)
    process = server.start_order(TrialOrder(order.trial, 1, (), start=begin))
    if not begins_without:
        output = store / "trial_0" / "stdout"
        eventually(lambda: output.exists() and "running" in output.read_text())
        store.parent.rename(elsewhere)

    def waited(count):
        def found():
            process.listen()
            return [event for event in process.events if isinstance(event, TrialWaits)]

        process.until(lambda: len(found()) >= count, "TrialWaits")
        return found()

    # As where a share was unmounted: its mount point is there.
    store.parent.mkdir()
    go.touch()
    (waits,) = waited(1)
    assert waits.what == "save"
    assert f"there is no folder {store} on this machine" in waits.reason
    # Fails if anything was made there.
    store.parent.rmdir()
    elsewhere.rename(store.parent)
    process.gone()
    (committed,) = checkpoints(process)
    assert (store / committed.key / "manifest.json").exists()
    assert isinstance(process.events[-1], TrialFinished)
    assert [event.what for event in waited(2)] == ["save", ""]


@pytest.mark.parametrize("store", [REMOTE, None], ids=["cache", "store"])
def test_trial_process_resumes_from_newest_intact_checkpoint_and_reports_the_damaged_one(
    serve, store
):
    server = serve()
    more = {} if store is None else {"store": store}
    first = server.start(count_with_checkpoints, **more)
    first.gone()
    written = checkpoints(first)
    root = server.root if store is None else server.cache
    manifest = root / written[-1].key / "manifest.json"
    manifest.write_bytes(manifest.read_bytes() + b" ")

    refs = tuple(reference(event) for event in reversed(written))
    order = server.order(count_with_checkpoints, restore=refs, last_step=4, **more)
    second = server.start_order(TrialOrder(order.trial, 2, (), start=order.start))
    second.gone()

    assert [result["n"] for result in second.results] == [3, 3]
    (damaged,) = (event for event in second.events if isinstance(event, CheckpointDamaged))
    assert (damaged.key, damaged.instead) == (written[2].key, written[1].key)
    assert "manifest.json is damaged" in damaged.reason
    asked = [kind for kind in second.kinds if kind == frames.FETCH]
    # Once for each copy, again for the damaged one, and for the newest at the end.
    assert len(asked) == (0 if store is None else 4)


@pytest.mark.parity(16)
def test_time_that_a_trial_process_waits_for_space_does_not_count(serve):
    process = serve().start(count_with_checkpoints, store=REMOTE)
    process.is_full = True
    process.until(lambda: frames.ASK_SAVE in process.kinds, "question")
    asked_at = time.monotonic()
    process.until(lambda: time.monotonic() > asked_at + 2.0, "two seconds")
    assert process.results == [{"n": 1}]

    waited_s = time.monotonic() - asked_at
    process.is_full = False
    process.allow_save()
    process.gone()

    results = [event for event in process.events if isinstance(event, ResultReported)]
    assert len(results) == 4
    between_s = results[1].timestamp - results[0].timestamp
    # Not less than two seconds: on a busy machine the step itself may take as long.
    assert results[1].time_this_iter_s < between_s - waited_s + 0.5


@pytest.mark.parametrize("store", [REMOTE, None], ids=["cache", "store"])
def test_paused_trial_process_ends_its_trial_and_is_reused(serve, store):
    server = serve()
    more = {} if store is None else {"store": store}
    order = server.order(count_with_checkpoints, reuse=True, **more)
    horizon = (Condition("training_iteration", 2),)
    process = server.start_order(TrialOrder(order.trial, 1, horizon, start=order.start))
    process.result(1)

    process.tell(frames.ORDER, TrialOrder(order.trial, 1, horizon, pause=True))
    process.until(lambda: frames.IDLE in process.kinds, "idle trial process")
    assert process.events[-1] == TrialPaused(order.trial, 1)
    assert process.kinds[-2:] == [frames.ENDING, frames.IDLE]

    refs = tuple(reference(event) for event in reversed(checkpoints(process)))
    following = server.order(count_with_checkpoints, restore=refs, last_step=2, **more)
    process.tell(frames.NEXT, TrialOrder(order.trial, 2, (), start=following.start))
    process.gone()

    assert [result["n"] for result in process.results] == [1, 2, 3, 3]
    assert isinstance(process.events[-1], TrialFinished)


def register_at_exit(config):
    import atexit

    atexit.register(print, "said at exit")


def test_handlers_at_exit_are_run(serve):
    process = serve().start(register_at_exit)
    process.gone()

    assert process.output("stdout") == "said at exit\n"


def test_a_configuration_larger_than_a_packet_arrives(serve):
    process = serve().start(measure, config={"large": "x" * 3_000_000})

    assert process.result() == {"size": 3_000_000}
    process.gone()


def measure(config):
    from tunemq_shared.trial.session import report

    report({"size": len(config["large"])})


@pytest.mark.soak
def test_a_hundred_starts_before_the_forkserver_is_ready_are_not_lost(serve):
    server = serve(preload=["sklearn.svm"])
    processes = [server.start(count_to_three, number) for number in range(100)]

    for process in processes:
        process.gone()

    assert all(isinstance(process.events[-1], TrialFinished) for process in processes)
