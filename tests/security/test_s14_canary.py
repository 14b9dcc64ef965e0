"""S14: a farm leaves its secrets in no output: a run with canaries.

The test searches all traces of a farm with TLS, users, keys and a bucket for its secrets: files of
all machines, the traffic through Redis, the bucket, command lines, the output of commands, the
metrics, and the core files of processes that crash. Each search is shown to find a planted canary.
"""

from __future__ import annotations

import base64
import secrets
import tomllib
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.security.canaries import Canaries, CommandLines, files_below
from tests.security.recorded_redis import Overheard
from tests.support.farms.farm_service import FarmService, Search
from tests.support.farms.secured_redis import SecuredRedis, secured_redis
from tests.support.keys import key_folder
from tests.support.stores.object_servers import (
    Certificate,
    ObjectServer,
    minio_program,
    running_minio,
)
from tests.support.stores.store_roles import make_roles
from tests.support.waiting import eventually, need

pytestmark = [
    pytest.mark.integration,
    pytest.mark.security,
    pytest.mark.slow,
    pytest.mark.timeout(600),
]

OWNER = "ann"
#: The variable that a search requests; see SECURITY.md, "Secrets".
GIVEN = "WANDB_API_KEY"
RAISES = """
def fails(config):
    import os
    tune.report({"score": 1})
    raise RuntimeError("no luck with " + ", ".join(sorted(os.environ)))
"""


class CanaryFarm:
    """A farm in which each role has separate secrets; see the module."""

    def __init__(self, folder: Path, server: SecuredRedis, store: ObjectServer) -> None:
        self.folder, self.server, self.store = folder, server, store
        self.bucket = store.create_bucket()
        roles = make_roles(store, self.bucket)
        self.keys = key_folder(folder / "keys", OWNER).path
        self.given, self.unused = secrets.token_hex(20), secrets.token_hex(20)
        (folder / "farm").mkdir()
        self.farm = FarmService(folder / "farm", server.url("scheduler"))
        files = {"head": "scheduler.toml", "laptop": f"{OWNER}.toml", "one": "worker.toml"}
        users = {"head": "scheduler", "laptop": "submitter", "one": "worker"}
        self.farm.of_home = {
            home: {
                **roles[user],
                "TUNEMQ_REDIS": server.url(user),
                "TUNEMQ_KEYS": str(self.keys / files[home]),
            }
            for home, user in users.items()
        }
        self.secrets: dict[str, bytes | str] = {
            **{f"Redis password of {user}": server.password(user) for user in users.values()},
            **{f"store key of {user}": roles[user]["AWS_SECRET_ACCESS_KEY"] for user in roles},
            "store's root key": store.secret_key,
            **dict(_secrets_in(self.keys / "scheduler.toml")),
            GIVEN: self.given,
            "key in an address": self.unused,
        }
        self.canaries = Canaries(self.secrets)

    def start(self) -> None:
        """Start its scheduler, which may leave core files, and its worker."""
        self.farm.start_scheduler(
            "--store",
            self.store.address(self.bucket, "farm"),
            *("--metrics", "127.0.0.1:0"),
        )
        self.farm.add_worker("one")
        self.farm.has_nodes("one")

    def metrics(self) -> bytes:
        """The metrics that Prometheus reads."""
        told = next(line for line in self.farm.said().splitlines() if "Metrics are at" in line)
        with urllib.request.urlopen(told.split()[-1], timeout=60) as answer:
            return answer.read()

    def look_at_redis(self) -> None:
        """Search all keys and values that are in Redis now."""
        client = self.server.client
        for key in client.scan_iter():
            self.canaries.look("Redis", f"the key {key!r}", key)
            value = client.dump(key)
            if value is not None:  # else it has just expired
                self.canaries.look("Redis", f"the value of {key!r}", value)

    def look_at_the_bucket(self) -> None:
        """Search all objects and their names."""
        client = self.store.client()
        for found in client.list_objects(self.bucket, recursive=True):
            name = found.object_name
            self.canaries.look("bucket", name, name.encode())
            answer = client.get_object(self.bucket, name)
            try:
                self.canaries.look("bucket", name, answer.read())
            finally:
                answer.close()
                answer.release_conn()

    def close(self) -> None:
        """End it."""
        self.farm.close()


def _secrets_in(path: Path) -> Iterator[tuple[str, bytes]]:
    tables = tomllib.loads(path.read_text())
    submitters = tables.pop("submitters")
    for name, table in (*tables.items(), *submitters.items()):
        for number, secret in table.items():
            yield f"key {number} of {name}", base64.b64decode(secret)


@pytest.fixture
def farm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CanaryFarm]:
    need("minio (`make minio` builds it)", minio_program())
    for name in ("redis", "farm-of"):
        (tmp_path / name).mkdir()
    certificate = Certificate(tmp_path / "certificate")
    # Nothing that it keeps is compressed, so that all of it can be searched.
    kept = ("rdbcompression no", "save 3600 1", "appendonly yes")
    with (
        secured_redis(tmp_path / "redis", kept) as server,
        running_minio(tmp_path / "minio", certificate=certificate) as store,
    ):
        farm = CanaryFarm(tmp_path / "farm-of", server, store)
        monkeypatch.setenv("TUNEMQ_KEYS", str(farm.keys / f"{OWNER}.toml"))
        farm.farm.url = server.url("submitter")
        try:
            yield farm
        finally:
            farm.close()


def test_s14_no_artefact_of_a_full_run_has_a_secret_in_it(farm: CanaryFarm, tmp_path: Path) -> None:
    canaries = farm.canaries
    seen, overheard = CommandLines(), Overheard(farm.server.client)
    seen.start()
    overheard.start()
    assert overheard.is_there.wait(60)
    farm.start()
    service = farm.farm

    service.submit(Search(name="good", steps=6, save_every=2))
    service.wait_for("good", "FINISHED")
    script = service.write(
        Search(name="bad", code=RAISES, trainable="fails", failures=0, trials=1, steps=2)
    )
    given = {**service.of_home["laptop"], GIVEN: farm.given}
    handed = service.run(
        *("submit", str(script), "--name", "bad", "--env", GIVEN, "--detach"), variables=given
    )
    assert handed.returncode == 0, handed.stderr
    service.wait_for("bad", "FINISHED")
    farm.look_at_redis()
    print_all(farm, canaries)
    provoke_errors(farm, canaries)

    # Killed while it works, and taken over: the traces of processes are searched, too. The gate
    # keeps the search from ending, however long that takes.
    service.submit(Search(name="late", steps=500, step_s=0.05, has_gate=True))
    service.open_gate("late", 499)
    service.wait_for_steps("late", trials=1, steps=2)
    farm.look_at_redis()
    canaries.look("metrics", "the metrics", farm.metrics())
    service.kill_scheduler()
    service.start_scheduler("--store", farm.store.address(farm.bucket, "farm"))
    service.wait_for("late", "RUNNING")
    service.tunemq("stop", "late")
    service.wait_for("late", "STOPPED")
    farm.server.client.bgsave()
    farm.look_at_redis()
    farm.look_at_the_bucket()
    service.close()

    canaries.look("ps", "a command line", seen.stop())
    canaries.look("monitor", "what was said to Redis", overheard.stop())
    canaries.look_into("machines", files_below(service.folder))
    eventually((farm.server.folder / "dump.rdb").exists)
    kept = ("appendonly.aof", "appendonlydir", "dump.rdb", "redis.log")
    files = [path for name in kept for path in _all_in(farm.server.folder / name)]
    assert len(files) >= 3
    canaries.look_into("disk of Redis", files)
    canaries.look_into("log of the store", [farm.store.folder / "log"])
    where_given(farm, canaries.found.pop(GIVEN))
    assert canaries.found == {}, service
    # It was all there to be looked at.
    least = {"machines": 10**5, "monitor": 10**5, "disk of Redis": 10**4, "bucket": 1000, "ps": 500}
    assert {kind for kind, size in least.items() if canaries.seen.get(kind, 0) < size} == set()


def print_all(farm: CanaryFarm, canaries: Canaries) -> None:
    """Search the output of commands."""
    lines = [
        *(["ls"], ["show", "good"], ["show", "bad"], ["nodes"], ["logs", "good"], ["logs", "bad"]),
        *(["why", "good"], ["ls", "--json"], ["show", "bad", "--json"], ["nodes", "--json"]),
        *(["--help"], ["scheduler", "--help"], ["worker", "--help"], ["submit", "--help"]),
        *(["journal", "show", str(farm.farm.results / "good")], ["doctor"], ["doctor", "--json"]),
        *(["checkpoints", "list", farm.store.address(farm.bucket, "farm/good")],),
    ]
    for line in lines:
        done = farm.farm.run(*line)
        said = (done.stdout + done.stderr).encode()
        assert said, line
        canaries.look("prints", " ".join(line), said)


def provoke_errors(farm: CanaryFarm, canaries: Canaries) -> None:
    """Search the error messages about wrong passwords, keys and addresses."""
    password = farm.server.password("submitter")
    url = farm.server.url("submitter")
    odd = f"{password}/#?:x"  # which would have to be quoted
    ask, place = ["ls"], ["checkpoints", "list", farm.store.address(farm.bucket, "farm/good")]
    serve = ["scheduler", "--results", str(farm.folder / "results-of-none")]
    work = ["worker", "--name", "none", "--workdir", str(farm.folder / "workdir-of-none")]
    wrong: list[tuple[str, str, list[list[str]]]] = [
        ("TUNEMQ_REDIS", url.replace(password, password[:-1]), [ask]),
        ("TUNEMQ_REDIS", f"redis://:{password}@127.0.0.1:1/0", [ask]),
        ("TUNEMQ_REDIS", url.replace(password, odd), [ask, serve, work]),
        ("TUNEMQ_REDIS", f"redis://:{password}:x@h", [ask, serve, work]),
        ("TUNEMQ_REDIS", f"http://:{password}@h", [ask, serve, work]),
        ("TUNEMQ_REDIS", f"redis://:{password}@[::1/0", [ask, serve, work]),
        ("TUNEMQ_REDIS", f"redis://:{password}@h:port/zero", [ask, serve, work]),
        ("TUNEMQ_REDIS", f"redis://h:1/0?password={password}", [ask, serve, work]),
        ("TUNEMQ_KEYS", str(farm.keys / "worker.toml"), [ask]),
        ("TUNEMQ_KEYS", str(farm.keys / "missing.toml"), [ask, serve, work]),
        ("AWS_SECRET_ACCESS_KEY", str(farm.secrets["store key of worker"]), [place]),
    ]
    unquoted = Canaries({"odd": odd})
    for name, value, lines in wrong:
        for line in lines:
            done = farm.farm.run(*line, variables={**farm.farm.of_home["laptop"], name: value})
            assert done.returncode, (line, name)
            said = (done.stdout + done.stderr).encode()
            assert said, (line, name)
            canaries.look("errors", f"{line[0]}, {name}", said)
            unquoted.look("errors", f"{line[0]}, {name}", said)
    for text in (f"s3://{farm.unused}@b/p", f"s3://b/p?secret_key={farm.unused}", _IN_ENDPOINT):
        line = ["checkpoints", "list", text.replace("SECRET", farm.unused)]
        canaries.look("errors", text[:9], farm.farm.run(*line).stderr.encode())
    assert unquoted.found == {}


#: Of a bucket, with keys where none belong.
_IN_ENDPOINT = "s3://bucket/p?endpoint=https://key:SECRET@h:1"


def where_given(farm: CanaryFarm, found: set[str]) -> None:
    """A search's requested variable may be in Redis and in the queue, readable by its owner."""
    kinds = {place.partition(": ")[0] for place in found}
    assert kinds <= {"Redis", "monitor", "disk of Redis", "machines"}, found
    assert "machines" in kinds
    for place in found:
        kind, _, path = place.partition(": ")
        if kind == "machines":
            assert Path(path).is_relative_to(farm.farm.folder / "head"), path
            assert not path.endswith((".log", ".out", ".err")), path
            assert not Path(path).stat().st_mode & 0o077, path


def _all_in(path: Path) -> list[Path]:
    return list(files_below(path)) if path.is_dir() else [path] if path.exists() else []
