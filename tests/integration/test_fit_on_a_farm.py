"""`Tuner.fit(address=...)` hands the search to a farm, attached or not."""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

import tunemq as tune
from tests.integration.farm_support import RedisServer
from tests.integration.node_fixtures import server
from tests.support.farms.farm_api_server import ServedApi, served
from tests.support.waiting import eventually
from tunemq_scheduler.api.farm_answer_types import ExperimentState as State
from tunemq_scheduler.api.farm_client import FarmClient
from tunemq_scheduler.api.pickled_tuner import load_tuner_parts
from tunemq_scheduler.journal.journal_files import FILE_NAME
from tunemq_scheduler.journal.journal_reader import read_header
from tunemq_shared.base.errors import ConfigError, RedisUnavailable, TrainableError, TuneError
from tunemq_shared.protocol.farm_requests import PickledCode

__all__ = ["server"]

pytestmark = pytest.mark.integration


@pytest.fixture
def api(server: RedisServer, tmp_path: Path) -> Iterator[ServedApi]:
    with served(server.url, server.client, tmp_path) as api:
        yield api


def search(config):
    tune.report({"loss": config["x"]})


def tuner(name: str | None = "exp", trainable=None, **run):
    return tune.Tuner(
        trainable or search,
        param_space={"x": tune.grid_search([1, 2])},
        tune_config=tune.TuneConfig(metric="loss", mode="min"),
        run_config=tune.RunConfig(name=name, **run),
    )


def blob(api: ServedApi, ref) -> bytes:
    return (api.folder / "store" / "blobs" / ref.sha256).read_bytes()


def test_detached_search_is_queued_and_its_handle_reports_on_it(api, server):
    handle = tuner().fit(address=server.url, detached=True, priority=2)

    entry = api.queue.get("exp")
    assert (handle.name, entry.priority) == ("exp", 2)
    assert isinstance(entry.code, PickledCode)
    assert entry.code.bundle is None
    loaded = load_tuner_parts(blob(api, entry.code.tuner))
    assert list(loaded.param_space) == ["x"]
    assert handle.status().state is State.QUEUED
    assert handle.pause() == "exp is paused"
    assert handle.resume() == "exp is queued again"
    assert handle.wait(timeout_s=0.01) is State.QUEUED
    assert handle.stop() == "exp is stopped"
    assert handle.wait() is State.STOPPED


def test_a_search_without_a_name_gets_that_of_its_trainable(api, server):
    handle = tuner(None).fit(address=server.url, detached=True)
    assert handle.name.startswith("search_20")


def test_secrets_in_the_folder_of_a_tuner_are_left_out_with_a_warning(
    api, server, tmp_path, monkeypatch
):
    """Also those that only the arguments and the store's address name."""
    credentials = "[lab]\naws_access_key_id = a\naws_secret_access_key = secret-of-the-lab\n"
    (tmp_path / "credentials").write_text(credentials)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "model.py").touch()
    (folder / ".env").touch()
    (folder / "lab.yaml").write_text("key: secret-of-the-lab\n")
    with FarmClient(server.url) as client:
        assert b"secret-of-the-lab" in client.secrets("s3://tune/farm?profile=lab")

    with pytest.warns(UserWarning, match=r"'\.env' \(it has the name of a file of secrets\)\. To"):
        tuner().fit(address=server.url, detached=True, folder=folder)

    data = blob(api, api.queue.get("exp").code.bundle)
    assert zipfile.ZipFile(io.BytesIO(data)).namelist() == ["lab.yaml", "model.py"]


def test_an_attached_search_shows_its_progress_and_returns_its_results(
    api, server, capsys, tmp_path
):
    # An experiment on a farm leaves the same files behind as one on an embedded farm.
    ran = Path(tuner(storage_path=str(tmp_path / "elsewhere"), verbose=0).fit().experiment_path)
    api.queue._ids = {"exp": read_header(ran / FILE_NAME).experiment_id[:5]}

    def live():
        eventually(lambda: api.queue.get("exp"))
        api.run("exp")
        shutil.copytree(ran, api.folder / "exp")
        (api.folder / "exp.log").write_text("2 trials have ended\n")
        api.end("exp", State.FINISHED)

    living = threading.Thread(target=live)
    living.start()
    results = tuner().fit(address=server.url)
    living.join()

    assert "2 trials have ended" in capsys.readouterr().out
    assert results.get_best_result().config == {"x": 1}


def test_a_search_that_fails_raises_with_why(api, server):
    def live():
        eventually(lambda: api.queue.get("exp"))
        api.run("exp")
        api.end("exp", State.FAILED, "its callback raised")

    living = threading.Thread(target=live)
    living.start()
    with pytest.raises(TuneError, match="exp failed: its callback raised"):
        tuner(verbose=0).fit(address=server.url)
    living.join()


def test_results_out_of_reach_are_an_error_that_names_their_place(api, server):
    handle = tuner().fit(address=server.url, detached=True)
    with pytest.raises(TuneError, match=r"exp on the scheduler's machine"):
        handle.get_results()


def test_results_in_the_farms_store_are_read_at_the_endpoint_of_the_farm(
    api, server, minio, bucket, tmp_path, monkeypatch
):
    """A script on another machine need not repeat in variables where the farm's store is."""
    for name, value in minio.environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TUNEMQ_S3_ENDPOINT", "http://127.0.0.1:1")
    own = tuner(storage_path=minio.address(bucket, "farm"), verbose=0).fit().experiment_path
    before = {path: path.read_bytes() for path in Path(own).rglob("*") if path.is_file()}
    identity = read_header(Path(own, FILE_NAME)).experiment_id[:5]
    handle = tuner().fit(address=server.url, detached=True)
    elsewhere = {"folder": str(tmp_path / "nowhere"), "store": f"s3://{bucket}/farm/exp"}
    detail = msgspec.structs.replace(handle._detail(), **elsewhere)
    monkeypatch.setattr(handle, "_detail", lambda: detail)
    farm = msgspec.structs.replace(
        FarmClient(server.url).farm(), store=minio.address(bucket, "farm")
    )
    monkeypatch.setattr(FarmClient, "farm", lambda _client: farm)
    with pytest.raises(
        TuneError, match=rf"the id of exp on the farm begins with '{detail.experiment.id}'"
    ):
        handle.get_results()

    row = msgspec.structs.replace(detail.experiment, id=identity)
    detail = msgspec.structs.replace(detail, experiment=row)
    results = handle.get_results()
    assert results.get_best_result().config == {"x": 1}
    assert results.experiment_path != own, "a run left that folder, and may continue there"
    assert handle.get_results().experiment_path == results.experiment_path
    assert before == {path: path.read_bytes() for path in Path(own).rglob("*") if path.is_file()}


def test_unsendable_trainable_is_refused_before_anything_is_queued(api, server):
    lock = threading.Lock()
    with pytest.raises(TrainableError, match="lock"):
        tuner(trainable=lambda config: lock).fit(address=server.url)
    with pytest.raises(ConfigError, match="use 'ab'"):
        tuner("a:b").fit(address=server.url)
    with pytest.raises(ConfigError, match="remove the address"):
        tuner().fit(address=server.url, debug=True)
    with pytest.raises(ConfigError, match="pass its address"):
        tuner().fit(detached=True)
    with pytest.raises(RedisUnavailable):
        tuner().fit(address="redis://localhost:1")
    assert api.queue.all() == []


def test_the_modules_beside_a_script_are_sent_along(api, server, tmp_path):
    project = tmp_path / "project"
    (project / "pkg").mkdir(parents=True)
    (project / "pkg" / "__init__.py").write_text("def train(config): ...\n")
    body = (
        "import tunemq as tune\nfrom pkg import train\n"
        "run = tune.RunConfig(name='{}')\n"
        f"tune.Tuner(train, run_config=run).fit(address={server.url!r}, detached=True)\n"
    )
    (project / "script.py").write_text(body.format("script"))
    (project / "pkg" / "main.py").write_text(body.format("module"))
    subprocess.run([sys.executable, "script.py"], cwd=project, check=True)
    subprocess.run([sys.executable, "-m", "pkg.main"], cwd=project, check=True)

    for name in ("script", "module"):
        code = api.queue.get(name).code
        assert code.bundle is not None
        assert b"pkg/__init__.py" in blob(api, code.bundle)
