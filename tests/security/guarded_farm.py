"""A worker that root starts; its trials run as another user or as the worker's user.

A test module imports `farm` and `open_folder` and names them in its ``__all__``.
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

from tests.integration.farm_support import RedisServer, Scheduler, process_tree_of
from tests.support.other_users import NOBODY, open_folder
from tests.support.stores.object_servers import ObjectServer
from tests.support.waiting import eventually
from tunemq_shared.protocol.messages import Environment, TrialFailed, TrialSpec

__all__ = ["farm", "open_folder"]

_INHERITS = Environment("", (), {}, (), inherits=True)


class GuardedFarm:
    """A Redis with a password, and a worker that was given it and the store's keys."""

    def __init__(self, folder: Path, minio: ObjectServer, store: str) -> None:
        self.keys = {
            "redis": secrets.token_hex(20),
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
            "MINIO_ROOT_PASSWORD": self.keys["root"],
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        self.worker: subprocess.Popen[bytes] | None = None

    def start(self, before: Sequence[str], *options: str, owner: int = 0) -> str:
        """Start the worker; its instance."""
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
        eventually(self.scheduler.registrations, within=60, message=self.story)
        return self.scheduler.registrations()[-1].instance_id

    def order(
        self,
        trainable: object,
        number: int,
        environment: Environment = _INHERITS,
        **config: object,
    ) -> TrialSpec:
        """The order to run a trial, which may read its code."""
        start = self.scheduler.start(
            trainable,
            dict(config),
            store=self._store,
            trial_number=number,
            folder=f"exp/trial_{number}",
            environment=environment,
        )
        self._give(Path(start.code.path).parent, NOBODY)
        self._give(Path(start.code.path), NOBODY)
        return start

    def story(self) -> str:
        """The worker's output, log and failures."""
        log = self.folder / "node" / "logs" / "node.log"
        said = (self.folder / "said").read_text(errors="replace")
        failed = self.scheduler.said(TrialFailed)
        return f"{said}\n{log.read_text() if log.exists() else ''}\n{failed}"

    def process_tree(self) -> list[int]:
        """The node and all below it."""
        assert self.worker is not None
        return process_tree_of(self.worker.pid)

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
