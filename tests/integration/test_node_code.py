"""Code on a node that shares nothing with the scheduler but Redis and the store."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

import tunemq as tune
from tests.integration.code_support import (
    make_environment,
    put_bundle,
    start_apart,
)
from tests.integration.farm_support import Node, RedisServer, Scheduler, order
from tests.integration.node_fixtures import scheduler, server
from tests.support.searches.plans import PLAN
from tests.support.stores.object_servers import ObjectServer
from tests.support.waiting import eventually
from tunemq_scheduler.core.commands import StartTrial
from tunemq_scheduler.experiment.code_package import CodePackage, package_code
from tunemq_scheduler.experiment.start_checks import prepare
from tunemq_scheduler.farm.output.trial_output_files import TrialOutputFiles
from tunemq_scheduler.transport.redis.redis_connection import RedisConnection
from tunemq_scheduler.transport.scheduler_signing import SchedulerSigning
from tunemq_shared.checkpoints.open_store import open_objects
from tunemq_shared.code.blob_folder import BlobFolder
from tunemq_shared.code.bundles import remove
from tunemq_shared.code.config_packing import pack_config
from tunemq_shared.protocol.messages import (
    Environment,
    ResultReported,
    SlotFreed,
    TrialFailed,
    TrialFinished,
    TrialSpec,
)
from tunemq_shared.protocol.result_conditions import TO_THE_END
from tunemq_shared.trainable.parameters import with_parameters

__all__ = ["scheduler", "server"]

pytestmark = pytest.mark.integration


@pytest.fixture
def store(minio: ObjectServer, bucket: str) -> str:
    return minio.address(bucket, "farm")


@pytest.fixture
def node(
    server: RedisServer, scheduler: Scheduler, minio: ObjectServer, tmp_path: Path
) -> Iterator[Node]:
    node = Node(server, scheduler, tmp_path / "node")
    yield node
    node.end()


def ask_modules(config):
    """Report values from the user's modules, one imported at once and one later."""
    import helper

    from tunemq_shared.trial.session import report

    def later():
        from models import net

        return net.SIZE

    report({"value": helper.VALUE, "size": later()})


def ask_environment(config, data=()):
    import os
    import sys

    from tunemq_shared.trial.session import report

    secrets = ("TUNEMQ_S3", "TUNEMQ_REDIS", "AWS_ACCESS", "AWS_SECRET")
    keys = [name for name in os.environ if name.startswith(secrets)]
    report(
        {
            "folder": os.getcwd(),
            "python": sys.executable,
            "sum": sum(data),
            "keys": keys,
            "home": os.environ.get("HOME"),
            "mine": os.environ.get("MINE"),
        }
    )


def ask_version(config):
    import dummy

    from tunemq_shared.trial.session import report

    report({"version": dummy.VERSION})


def project(value: int, size: int) -> dict[str, str]:
    return {
        "train.py": "",
        "helper.py": f"VALUE = {value}\n",
        "models/__init__.py": "",
        "models/net.py": f"SIZE = {size}\n",
    }


def results(scheduler: Scheduler, count: int) -> dict[str, dict[str, object]]:
    """Wait until ``count`` trials have ended; return the trials' metrics."""
    ended = (TrialFinished, TrialFailed)
    eventually(lambda: sum(len(scheduler.said(kind)) for kind in ended) >= count, within=60)
    assert [failed.traceback for failed in scheduler.said(TrialFailed)] == []
    return {result.trial: result.metrics for result in scheduler.said(ResultReported)}


def failure(scheduler: Scheduler) -> TrialFailed:
    eventually(lambda: scheduler.said(SlotFreed), within=60)
    (failed,) = scheduler.said(TrialFailed)
    return failed


def blobs_in(folder: Path) -> list[str]:
    return sorted(name for name in os.listdir(folder) if not name.startswith("."))


def test_node_that_reads_only_the_store_runs_a_trial(node, scheduler, store, tmp_path):
    trainable = with_parameters(ask_environment, data=list(range(1000)))
    environment = Environment("", (), {"MINE": "yes"}, ())
    start = start_apart(scheduler, store, tmp_path / "a", trainable, environment=environment)
    scheduler.assign(node.instance_id, order("t", start))
    found = results(scheduler, 1)["t"]
    assert found["sum"] == sum(range(1000))
    assert found["folder"] == str(node.folder / "trials/exp/trial_0")
    assert found["keys"] == [], "trials have none of the farm's keys"
    assert (found["home"], found["mine"]) == (os.environ.get("HOME"), "yes")
    here = sorted([start.code.sha256, *(ref.sha256 for ref in start.blobs)])
    assert blobs_in(node.folder / "blobs") == here
    assert len(here) == 2


def test_modules_of_a_bundle_are_imported_at_any_time(node, scheduler, store, tmp_path):
    bundle = put_bundle(store, tmp_path / "project", project(7, 8))
    start = start_apart(scheduler, store, tmp_path / "a", ask_modules, bundle=bundle)
    scheduler.assign(node.instance_id, order("t", start))
    assert results(scheduler, 1)["t"] == {"value": 7, "size": 8}
    assert blobs_in(node.folder / "code") == [bundle.sha256]


def test_experiments_with_modules_of_the_same_name_have_each_their_own(
    node, scheduler, store, tmp_path
):
    starts: list[TrialSpec] = []
    for number, (value, size) in enumerate([(1, 10), (2, 20)]):
        bundle = put_bundle(store, tmp_path / f"project{number}", project(value, size))
        starts.append(
            start_apart(
                scheduler,
                store,
                tmp_path / f"a{number}",
                ask_modules,
                bundle=bundle,
                number=number,
                experiment=f"exp{number}",
                folder=f"exp{number}/trial",
                reuse=True,
            )
        )
    assert starts[0].code == starts[1].code, "only the bundles differ"
    first, second = (order(trial, start) for trial, start in zip("ab", starts, strict=True))
    scheduler.assign(node.instance_id, first, second)
    found = results(scheduler, 2)
    assert found["a"] == {"value": 1, "size": 10}
    assert found["b"] == {"value": 2, "size": 20}


def test_code_is_fetched_once_per_node_even_after_a_restart(
    node, server, scheduler, store, tmp_path
):
    bundle = put_bundle(store, tmp_path / "project", project(1, 2))
    starts = [
        start_apart(scheduler, store, tmp_path / "a", ask_modules, bundle=bundle, number=number)
        for number in range(2)
    ]
    orders = [order(f"t{start.trial_number}", start) for start in starts]
    scheduler.assign(node.instance_id, *orders)
    results(scheduler, 2)
    assert fetches(node) == 2, "the code and the bundle"
    node.end()
    with open_objects(store) as objects:
        objects.delete([found.key for found in objects.list("blobs/")])
    again = Node(server, scheduler, node.folder)
    try:
        scheduler.assign(again.instance_id, order("t9", starts[0]))
        eventually(lambda: scheduler.client.xlen(scheduler.key) and is_reported(scheduler, "t9"))
    finally:
        again.end()
    assert fetches(node) == 2


def fetches(node: Node) -> int:
    return (node.folder / "logs" / "transfers.log").read_text().count("transfer=FetchBlob")


def is_reported(scheduler: Scheduler, trial: str) -> bool:
    """Return whether any batch has the trial's end; each node numbers its events separately."""
    batches = (batch for _, batch in scheduler.batches())
    return any(
        isinstance(event, TrialFinished) and event.trial == trial
        for batch in batches
        for event in batch
    )


def test_code_missing_in_the_store_fails_its_trial_with_its_address(
    node, scheduler, store, tmp_path
):
    bundle = put_bundle(store, tmp_path / "project", project(1, 2))
    start = start_apart(scheduler, store, tmp_path / "a", ask_modules, bundle=bundle)
    with open_objects(store) as objects:
        objects.delete([f"blobs/{bundle.sha256}"])
    scheduler.assign(node.instance_id, order("t", start))
    failed = failure(scheduler)
    assert failed.kind == "fetch"
    assert f"the bundle with its code cannot be fetched from {store.partition('?')[0]}/blobs/" in (
        failed.error
    )
    assert "there is no blob" in failed.error


def test_a_store_that_is_away_for_too_long_fails_the_trial(node, scheduler, store, tmp_path, minio):
    start = start_apart(scheduler, store, tmp_path / "a", ask_environment, sync_timeout_s=1.0)
    away = store.replace(str(minio.port), "1")
    code = type(start.code)(start.code.sha256, start.code.size, "", away)
    values = {"code": code, "folder": "exp/t", "sync_timeout_s": 1.0}
    start = scheduler.start(ask_environment, **values)
    scheduler.assign(node.instance_id, order("t", start))
    failed = failure(scheduler)
    assert failed.kind == "fetch"
    assert "the trial's code cannot be fetched from s3://" in failed.error
    assert "given up after 1 s" in failed.error


def test_node_fetches_the_code_that_the_scheduler_uploaded(node, scheduler, store, tmp_path):
    bundle = put_bundle(store, tmp_path / "project", project(3, 4))
    prepared = prepare(
        with_parameters(ask_environment, data=[1, 2]),
        {},
        tune.TuneConfig(metric="sum", mode="max"),
        tune.RunConfig(env_vars={"MINE": "yes"}),
    )
    code_package = CodePackage(
        blobs=BlobFolder(tmp_path / "here"), store=store, bundle=bundle, script="train.py"
    )
    outline = msgspec.structs.replace(PLAN, events_key=scheduler.key, store=store)
    plan = package_code(outline, prepared, code_package)
    remove(tmp_path / "here")
    start = plan.trial_spec(
        StartTrial("t", 1, "n", 0, pack_config({}), {"cpu": 1.0}, TO_THE_END, 0, ())
    )
    scheduler.assign(node.instance_id, order("t", start))
    found = results(scheduler, 1)["t"]
    assert (found["sum"], found["mine"]) == (3, "yes")
    assert found["folder"] == str(node.folder / "trials/0/1/train_t")
    with open_objects(store) as objects:
        there = {found.key for found in objects.list()}
    refs = (plan.code, *plan.blobs, bundle)
    assert there == {f"blobs/{ref.sha256}" for ref in refs}


def print_and_draw(config):
    import time
    from pathlib import Path

    from tunemq_shared.trial.session import report

    print("hello from the trial")
    Path("plot.png").write_text("a plot")
    report({"printed": 1})
    while not Path(config["until"]).exists():
        time.sleep(0.02)
    print("bye")


def test_trial_output_is_shown_at_once_and_its_files_reach_the_store(
    node, server, scheduler, store, tmp_path
):
    until = tmp_path / "until"
    config = {"until": str(until)}
    start = start_apart(scheduler, store, tmp_path / "a", print_and_draw, config=config)
    scheduler.assign(node.instance_id, order("0", start))  # its folder is trial_0
    files = TrialOutputFiles(tmp_path, scheduler.key, SchedulerSigning().output)
    line = RedisConnection(server.url)
    line.connect()
    shown = tmp_path / "trial_0/stdout"
    shown.parent.mkdir()  # by the loggers, before the trial begins

    def shows(text: str) -> bool:
        (reply,) = line.ask([files.asks()])
        files.answered(reply)
        return shown.exists() and text in shown.read_text()

    eventually(lambda: shows("hello from the trial\n"))
    assert "bye" not in shown.read_text()
    until.touch()
    eventually(lambda: shows("bye\n"))
    line.close()
    assert shown.read_text() == "hello from the trial\nbye\n"
    eventually(lambda: not (node.folder / "trials/exp").exists())
    with open_objects(store) as objects:
        assert objects.get_bytes("trial_0/attempt_1/stdout", limit=99) == shown.read_bytes()
        assert objects.get_bytes("trial_0/attempt_1/plot.png", limit=99) == b"a plot"


# --- interpreters ---------------------------------------------------------------------------------


def test_experiments_have_each_their_interpreter_and_its_packages(node, scheduler, store, tmp_path):
    orders = []
    for number in range(2):
        files = {"dummy/__init__.py": f"VERSION = 'number {number}'\n"}
        python = make_environment(tmp_path / f"env{number}", files)
        start = start_apart(
            scheduler,
            store,
            tmp_path / f"a{number}",
            ask_version,
            number=number,
            environment=Environment(python, ("dummy",), {}, ()),
        )
        orders.append(order(f"t{number}", start))
    scheduler.assign(node.instance_id, *orders)
    found = results(scheduler, 2)
    assert found == {"t0": {"version": "number 0"}, "t1": {"version": "number 1"}}


def test_interpreter_that_cannot_run_trials_is_named_with_the_fix(node, scheduler, store, tmp_path):
    python = make_environment(tmp_path / "env", {}, has_ours=False)
    environment = Environment(python, (), {}, ())
    start = start_apart(scheduler, store, tmp_path / "a", ask_environment, environment=environment)
    scheduler.assign(node.instance_id, order("t", start))
    failed = failure(scheduler)
    assert failed.kind == "start"
    assert f"the interpreter {python} cannot host trials: " in failed.error
    assert "No module named" in failed.error
    assert "install TuneMQ" in failed.error


def test_missing_interpreter_is_named(node, scheduler, store, tmp_path):
    environment = Environment("/no/such/python", (), {}, ())
    start = start_apart(scheduler, store, tmp_path / "a", ask_environment, environment=environment)
    scheduler.assign(node.instance_id, order("t", start))
    failed = failure(scheduler)
    assert failed.kind == "start"
    assert "/no/such/python cannot host trials: it cannot be executed: No such file" in failed.error
