"""A trial that searches for the farm's keys wherever it can look finds none of them.

Each search proves that it can find: a key that was planted in all these places turns up in each.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.integration.farm_support import RedisServer, Scheduler, family_of, order
from tests.object_servers import ObjectServer
from tests.other_users import NOBODY, open_folder, reachable
from tests.security.key_search import halves_of, saving, searching
from tests.support import eventually
from tunemq_shared.messages import (
    CheckpointCommitted,
    Environment,
    HostStart,
    ResultReported,
    TrialFailed,
)

__all__ = ["open_folder"]

pytestmark = pytest.mark.security

#: Where a key that is planted is found.
EVERYWHERE = {
    "file",
    "os.environ",
    "other cmdline",
    "other descriptor",
    "other environ",
    "other memory",
    "own descriptor",
    "own memory",
}


class GuardedFarm:
    """A Redis with a password, and a worker that was given it and the store's keys."""

    def __init__(self, folder: Path, minio: ObjectServer, store: str) -> None:
        self.keys = {
            "redis": secrets.token_hex(20),
            "token": secrets.token_hex(20),
            "root": secrets.token_hex(20),
            "s3": minio.secret_key,
        }
        self.folder, self._store = folder, store
        (folder / "redis").mkdir()
        socket = ("--unixsocketperm", "777")
        self.redis = RedisServer(folder / "redis", *socket, password=self.keys["redis"])
        self.scheduler = Scheduler(self.redis, folder)
        self._variables = {
            **{n: v for n, v in os.environ.items() if n in {"PATH", "LANG"}},
            **minio.environ,
            "HOME": str(folder),
            "TUNEMQ_REDIS": self.redis.url,
            "TUNEMQ_STORE_TOKEN": self.keys["token"],
            "MINIO_ROOT_PASSWORD": self.keys["root"],
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        self.worker: subprocess.Popen[bytes] | None = None

    def start(self, before: Sequence[str], *options: str, owner: int = 0) -> str:
        """Start the worker; its incarnation."""
        self._give(self.folder, owner)
        line = [*before, sys.executable, "-P", "-m", "tunemq", "worker", "--name", "node"]
        line += ["--workdir", str(self.folder / "node"), "--cpus", "2", *options]
        with (self.folder / "said").open("wb") as said:
            self.worker = subprocess.Popen(
                line,
                env=self._variables,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                start_new_session=True,
            )
        eventually(self.scheduler.hellos, within=60, message=self.story)
        return self.scheduler.hellos()[-1].incarnation

    def order(self, trainable: object, number: int, **config: object) -> HostStart:
        """How to host a trial, which may read its code."""
        start = self.scheduler.start(
            trainable,
            dict(config),
            store=self._store,
            trial_number=number,
            folder=f"exp/trial_{number}",
            environment=Environment("", (), {}, (), inherits=True),
        )
        self._give(Path(start.code.path).parent, NOBODY)
        self._give(Path(start.code.path), NOBODY)
        return start

    def story(self) -> str:
        """What the worker said."""
        log = self.folder / "node" / "node.log"
        said = (self.folder / "said").read_text(errors="replace")
        failed = self.scheduler.said(TrialFailed)
        return f"{said}\n{log.read_text() if log.exists() else ''}\n{failed}"

    def family(self) -> list[int]:
        """The node and all below it."""
        assert self.worker is not None
        return family_of(self.worker.pid)

    def end(self) -> None:
        """End all of it."""
        if self.worker is not None:
            self.worker.send_signal(signal.SIGTERM)
            self.worker.wait(60)
        self.redis.end()

    def _give(self, path: Path, owner: int) -> None:
        if os.geteuid() == 0:
            os.chown(path, owner, owner)


@pytest.fixture
def farm(open_folder: Path, minio: ObjectServer, bucket: str) -> Iterator[GuardedFarm]:
    farm = GuardedFarm(open_folder, minio, minio.address(bucket, "runs/exp"))
    yield farm
    farm.end()


def test_a_trial_that_runs_as_another_user_than_the_worker_finds_no_key_of_the_farm(farm):
    found = searched(farm, reachable(), "--trial-user", f"{NOBODY}:{NOBODY}")
    assert found["user"] == NOBODY
    assert found["groups"] == [NOBODY]
    assert found["rights"] == {
        "CapEff": "0" * 16,
        "CapPrm": "0" * 16,
        "NoNewPrivs": "1",
        "Uid": "\t".join([str(NOBODY)] * 4),
    }


def test_a_trial_that_runs_as_the_workers_own_user_finds_no_key_of_the_farm(farm):
    found = searched(farm, reachable(NOBODY), owner=NOBODY)
    assert found["user"] == NOBODY


def environ_of(pid):
    """A process's environment; nothing of a host that has just ended with its trial."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def searched(farm, before, *options, owner=0):
    """What a trial finds that runs on a node which has all keys at hand; no key is among it."""
    incarnation = farm.start(before, *options, owner=owner)
    first = order("saving", farm.order(saving, 0))
    farm.scheduler.assign(incarnation, first)
    said = farm.scheduler.said
    eventually(lambda: said(CheckpointCommitted), within=60, message=farm.story)
    # All keys are in use, and in this moment in the memory of processes of the node.
    held = b"".join(map(environ_of, farm.family()))
    assert all(key.encode() in held for key in farm.keys.values())

    planted = secrets.token_hex(20)
    config = {
        "keys": {name: halves_of(key) for name, key in farm.keys.items()},
        "planted": halves_of(planted),
        "folders": [str(farm.folder)],
    }
    farm.scheduler.assign(incarnation, first, order("t", farm.order(searching, 1, **config)))

    def results():
        return [event for event in said(ResultReported) if event.trial == "t"]

    eventually(lambda: results() or said(TrialFailed), within=120, message=farm.story)
    assert not said(TrialFailed), farm.story()
    found = results()[0].metrics
    assert set(found["found"].pop("planted")) >= EVERYWHERE
    assert found["found"] == {}
    # It was not let in; it did not just look elsewhere.
    own = {"mem", "environ", "pidfd_getfd"}
    assert all(found["refused"].get(kind) for kind in own), found
    return found
