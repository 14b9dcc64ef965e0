"""A farm without problems, for tests that break one thing and run `tunemq doctor`.

    def test_it(farm):
        with farm.redis_says("maxmemory-policy", "allkeys-lru"):
            farm.has_only("redis-eviction", "maxmemory-policy noeviction")

The farm follows the documentation: keys, an append-only Redis, and a store with one user per role.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec
import pytest

from tests.support.farms.doctor_answers import Examination
from tests.support.farms.farm_processes import TcpRedis
from tests.support.farms.farm_service import FarmService
from tests.support.keys import key_folder
from tests.support.stores.object_servers import ObjectServer, running_minio
from tests.support.stores.store_roles import make_roles
from tests.support.waiting import eventually
from tunemq_scheduler.api.farm_answer_types import NodeList, NodeRow
from tunemq_scheduler.security.findings import Finding, FindingLevel
from tunemq_shared.broker import redis_keys

_SUBMITTER: Final = "ada"


class ExaminedFarm(FarmService):
    """A healthy farm on this machine.

    Args:
        folder: for all that it has.
        server: for its bucket.
    """

    def __init__(self, folder: Path, redis: TcpRedis, server: ObjectServer) -> None:
        super().__init__(folder, redis.url)
        self.redis, self.server = redis, server
        self.bucket = server.create_bucket()
        self.store = server.address(self.bucket, "farm")
        self._roles = make_roles(server, self.bucket)
        self.keys = key_folder(folder / "keys", _SUBMITTER).path

    def environ(self, home: str, variables: Mapping[str, str] | None = None) -> dict[str, str]:
        """See the base class; adds the role's store credentials and keys."""
        role = {"head": "scheduler", "laptop": "submitter"}.get(home, "worker")
        file = _SUBMITTER if role == "submitter" else role
        ours = {**self._roles[role], "TUNEMQ_KEYS": str(self.keys / f"{file}.toml")}
        return super().environ(home, ours | dict(variables or {}))

    def nodes(self) -> dict[str, NodeRow]:
        """See there."""
        done = self.run("nodes", "--json")
        if done.returncode != 0:
            return {}
        return {row.node: row for row in msgspec.json.decode(done.stdout, type=NodeList).nodes}

    def begin(self) -> None:
        """Have its scheduler and a worker begin."""
        self.start_scheduler("--store", self.store)
        self.add_worker("one")
        self.has_nodes("one")
        self.has_node_metrics(1)

    def role_environ(self, role: str) -> dict[str, str]:
        """The variables with a role's store credentials."""
        return dict(self._roles[role])

    def store_keys(
        self, role: str, *, secret: str = "", keys: Mapping[str, str] | None = None
    ) -> Path:
        """A credentials file with the store's keys of a role, or other keys, or another secret."""
        keys = keys or self._roles[role]
        file = self.folder / f"{role}{'-wrong' if secret else ''}.credentials"
        file.write_text(
            f"[default]\naws_access_key_id = {keys['AWS_ACCESS_KEY_ID']}\n"
            f"aws_secret_access_key = {secret or keys['AWS_SECRET_ACCESS_KEY']}\n"
        )
        file.chmod(0o600)
        return file

    @staticmethod
    def roles_on(server: ObjectServer, bucket: str) -> dict[str, str]:
        """The variables that the scheduler's user of another server needs."""
        return make_roles(server, bucket)["scheduler"]

    # --- the doctor -------------------------------------------------------------------------------

    def doctor(
        self, *more: str, variables: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run `tunemq doctor` on the farm's head."""
        environ = self.environ("head", {"TUNEMQ_RESULTS": str(self.results), **(variables or {})})
        return self._commands.run(("doctor", *more), environ, self.folder / "head")

    def doctor_process(self, variables: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
        """Run `tunemq doctor` in a separate process, with these variables' ``PYTHONPATH`` first."""
        environ = self._first(self.environ("head"), dict(variables))
        return subprocess.run(
            self.command("doctor"),
            env=environ,
            cwd=self.folder / "head",
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def examined(self, *more: str, variables: Mapping[str, str] | None = None) -> Examination:
        """The same, as programs read it."""
        done = self.doctor("--json", *more, variables=variables)
        assert done.stdout, done.stderr
        found = msgspec.json.decode(done.stdout, type=Examination)
        assert done.returncode == int(found.problems > 0), f"{done.returncode}\n{found}"
        return found

    def has_only(
        self,
        check: str,
        *fix: str,
        level: FindingLevel = FindingLevel.PROBLEM,
        more: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
    ) -> Finding:
        """Check that the doctor finds this problem only, and that the fix contains these texts."""
        found = self.examined(*more, variables=variables)
        wrong = [one for one in found.findings if one.level is not FindingLevel.OK]
        assert {(one.check, one.level) for one in wrong} == {(check, level)}, f"{found}{self}"
        for text in fix:
            assert text in wrong[0].fix, wrong
        return wrong[0]

    # --- faults that tests cause ------------------------------------------------------------------

    @contextlib.contextmanager
    def redis_says(self, setting: str, value: str) -> Iterator[None]:
        """Its Redis has another setting meanwhile."""
        before = self.redis.client.config_get(setting)[setting]
        self.redis.client.config_set(setting, value)
        try:
            yield
        finally:
            self.redis.client.config_set(setting, before)

    @contextlib.contextmanager
    def worker(
        self, name: str, *more: str, before: Sequence[str] = (), **variables: str
    ) -> Iterator[subprocess.Popen[bytes]]:
        """Run one more worker, accepted or rejected, with these variables' ``PYTHONPATH`` first.

        Args:
            before: the prefix of its command line.
        """
        home = self.folder / name
        home.mkdir(exist_ok=True)
        environ = self._first(self.environ(name), variables)
        number = len(self.node_metrics())
        line = [*before, *self.command("worker", "--name", name, "--cpus", "1", *more)]
        process = self.head.start(line, environ, home / "worker.log")
        try:
            self.has_node_metrics(number + 1)
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
            self.head.processes.remove(process)
            self.has_node_metrics(number)

    @staticmethod
    def _first(environ: dict[str, str], variables: Mapping[str, str]) -> dict[str, str]:
        paths = [one["PYTHONPATH"] for one in (variables, environ) if "PYTHONPATH" in one]
        return {**environ, **variables, "PYTHONPATH": os.pathsep.join(paths)}

    def node_metrics(self) -> list[bytes]:
        """The Redis keys of the nodes' metrics."""
        return sorted(
            set(self.redis.client.scan_iter(redis_keys.node_metrics("*")))
        )  # Redis may return a key twice

    def has_node_metrics(self, number: int) -> None:
        """Wait until `number` nodes have published their metrics and installed packages."""
        said = b"numpy"  # which every interpreter of tests has
        ready: dict[bytes, bool] = {}

        def are_there() -> bool:
            keys = self.node_metrics()
            ready.update({key: said in (self.redis.client.get(key) or b"") for key in keys})
            return len(keys) == number and all(ready[key] for key in keys)

        eventually(are_there, every=0.05, message=lambda: f"{number}: {ready}{self}")


@contextlib.contextmanager
def examined_farm(folder: Path) -> Iterator[ExaminedFarm]:
    """One that runs."""
    with running_minio(folder / "minio") as server, contextlib.ExitStack() as stack:
        redis = TcpRedis(folder, options=["--appendonly", "yes"])
        stack.callback(redis.end)
        farm = ExaminedFarm(folder, redis, server)
        stack.callback(farm.close)
        farm.begin()
        yield farm


@pytest.fixture(scope="module")
def farm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ExaminedFarm]:
    """One for all tests of a file: each leaves it as it was."""
    with examined_farm(tmp_path_factory.mktemp("examined")) as farm:
        yield farm


def shifted_library(folder: Path, library: str, version: str) -> str:
    """A folder with a copy of an installed package of another version, for ``PYTHONPATH``."""
    module = __import__(library)
    source = Path(str(module.__file__)).parent
    copy = folder / library
    shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__"))
    start = copy / "__init__.py"
    text = start.read_text()
    old = str(module.__version__)
    assert old in text, text
    start.write_text(text.replace(old, version))
    return str(folder)


def beginning_with(folder: Path, code: str) -> str:
    """A folder for ``PYTHONPATH``: programs do this before anything else."""
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(code)
    return str(folder)
