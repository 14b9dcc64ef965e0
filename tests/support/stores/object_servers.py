"""Real S3 servers for tests: MinIO, and `tunemq store serve`.

    with running_minio(folder) as server:       a separate one, to kill, freeze and restart
        server.create_bucket("mine")

    def test_it(minio, bucket): ...             the shared one, with a new bucket for each test

A server that restarts keeps its data, its port and its keys.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import sysconfig
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlencode

import pytest
import urllib3

from tests.support.waiting import descendants, eventually, free_port, need
from tunemq_scheduler.cli.store_serve_command import INCOMPLETE
from tunemq_shared.objects.s3_address import parse_address

if TYPE_CHECKING:  # loaded by the tests that use it, not by every run
    from minio import Minio

    from tunemq_shared.objects.s3_objects import S3Objects

#: Where `make minio` puts the server; read before tests/conftest.py clears the variable.
CACHE = Path(
    os.environ.get("TUNEMQ_CACHE")
    or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "tunemq")
)
#: ``rclone``: `tunemq store serve` in MinIO's place, as `make test` wants it.
WANTED = os.environ.get("TUNEMQ_TEST_STORE", "")


#: Pids of the running servers, for tests that look at all other processes.
SERVER_PIDS: set[int] = set()


class ObjectServer(ABC):
    """One server process with new keys, a free port and a new data folder."""

    def __init__(self, folder: Path, *, region: str = "", certificate: Certificate | None = None):
        self.folder = folder
        self.data = folder / "data"
        self.data.mkdir(parents=True, exist_ok=True)
        self.region = region
        self.certificate = certificate
        self.access_key, self.secret_key = secrets.token_hex(10), secrets.token_hex(20)
        self.port = free_port()
        self.url = f"{'https' if certificate else 'http'}://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    @abstractmethod
    def command(self) -> list[str]:
        """The command line of the server."""

    def variables(self) -> Mapping[str, str]:
        """Its environment variables."""
        return {}

    @property
    def environ(self) -> dict[str, str]:
        """The variables with which a client finds it and is let in."""
        variables = {
            "TUNEMQ_S3_ENDPOINT": self.url,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_REGION": self.region or "us-east-1",
        }
        if self.certificate:
            variables["AWS_CA_BUNDLE"] = str(self.certificate.file)
        return variables

    def address(self, bucket: str, prefix: str = "", **settings: str) -> str:
        """The address of a prefix there, with all that is no secret."""
        if self.certificate:
            settings = {"ca_file": str(self.certificate.file), **settings}
        query = {"endpoint": self.url, "region": self.region or "us-east-1", **settings}
        return f"s3://{bucket}/{prefix}".rstrip("/") + "?" + urlencode(query, safe=":/")

    def client(self) -> Minio:
        """A client with full rights, which gives up at once instead of trying again."""
        from minio import Minio

        certificate = str(self.certificate.file) if self.certificate else None
        return Minio(
            self.url.partition("//")[2],
            access_key=self.access_key,
            secret_key=self.secret_key,
            secure=self.certificate is not None,
            region=self.region or "us-east-1",
            http_client=urllib3.PoolManager(
                timeout=urllib3.Timeout(connect=30, read=30), retries=False, ca_certs=certificate
            ),
        )

    def objects(self, bucket: str, prefix: str = "") -> S3Objects:
        """The objects below a prefix, as TuneMQ sees them; close it."""
        from tunemq_shared.objects.s3_objects import S3Objects

        return S3Objects(parse_address(self.address(bucket, prefix), {}), self.environ)

    def create_bucket(self, name: str = "") -> str:
        """Make a bucket; a new name where none is given."""
        name = name or f"bucket-{secrets.token_hex(6)}"
        self.client().make_bucket(name)
        return name

    def start(self) -> None:
        """Start the server on its earlier data, and wait until it answers."""
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                self.command(),
                env={"PATH": os.environ["PATH"], "HOME": str(self.folder), **self.variables()},
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        SERVER_PIDS.add(self.process.pid)
        eventually(self.answers, message=self._story)

    def answers(self) -> bool:
        """Whether it can be reached and lets its owner in."""
        assert self.process is not None
        if self.process.poll() is not None:
            pytest.fail(self._story())
        try:
            self.client().list_buckets()
        except Exception:  # noqa: BLE001 - whatever keeps it from answering, it does not
            return False
        return True

    def stop(self) -> None:
        """End it in good order."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """End it like a power cut."""
        self._end(signal.SIGKILL)

    def freeze(self) -> None:
        """Let it keep its connections and answer nothing (SIGSTOP) until `thaw`."""
        for pid in self._signal(signal.SIGSTOP):
            # A thread on another CPU may answer one more request before the signal reaches it.
            tasks = Path(f"/proc/{pid}/task")
            eventually(lambda tasks=tasks: all(map(_is_stopped, tasks.glob("*/stat"))))

    def thaw(self) -> None:
        """Resume the stopped process."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> list[int]:
        assert self.process is not None
        pids = [self.process.pid, *descendants(self.process.pid)]
        for pid in pids:
            os.kill(pid, number)
        return pids

    def _end(self, how: signal.Signals) -> None:
        if self.process is None:
            return
        self.process.send_signal(how)
        self.process.send_signal(signal.SIGCONT)
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        SERVER_PIDS.discard(self.process.pid)
        self.process = None

    def _story(self) -> str:
        return f"{self.command()[0]} does not answer: {(self.folder / 'log').read_text()[-2000:]}"


class MinioServer(ObjectServer):
    """MinIO, as `make minio` built it."""

    def command(self) -> list[str]:
        """See `ObjectServer.command`."""
        program = minio_program()
        need("minio (`make minio` builds it)", program)
        certs = self.certificate.folder if self.certificate else self.folder / "certs"
        address = f"127.0.0.1:{self.port}"
        options = ["--address", address, "--certs-dir", str(certs), "--quiet", "--anonymous"]
        return [str(program), "server", *options, str(self.data)]

    def variables(self) -> Mapping[str, str]:
        """See `ObjectServer.variables`."""
        variables = {
            "MINIO_ROOT_USER": self.access_key,
            "MINIO_ROOT_PASSWORD": self.secret_key,
            "MINIO_BROWSER": "off",
            "MINIO_UPDATE": "off",
        }
        return variables | ({"MINIO_SITE_REGION": self.region} if self.region else {})


class ServedFolder(ObjectServer):
    """`tunemq store serve`: rclone, whose buckets are folders below `data`."""

    host = "127.0.0.1"
    options: Sequence[str] = ()

    def __init__(self, folder: Path, *, certificate: Certificate | None = None) -> None:
        super().__init__(folder, certificate=certificate)
        self.served = folder / "served"
        self.data = self.served / "buckets"
        self.keys = folder / "keys"
        keys = {"aws_access_key_id": self.access_key, "aws_secret_access_key": self.secret_key}
        lines = [f"{name} = {value}\n" for name, value in keys.items()]
        self.keys.touch(0o600)
        self.keys.write_text("".join(["[default]\n", *lines]))

    def command(self) -> list[str]:
        """See `ObjectServer.command`."""
        need("rclone", rclone_program())
        options = ["--listen", f"{self.host}:{self.port}", "--keys", str(self.keys), *self.options]
        if self.certificate:
            options += ["--cert", str(self.certificate.file), "--key", str(self.certificate.key)]
        return [sys.executable, "-m", "tunemq", "store", "serve", str(self.served), *options]

    def start(self) -> None:
        """See `ObjectServer.start`."""
        (self.folder / "log").unlink(missing_ok=True)
        super().start()

    def answers(self) -> bool:
        """See `ObjectServer.answers`; it must have printed its instructions, too."""
        return super().answers() and "machines:" in self.said()

    def said(self) -> str:
        """The output of the server."""
        return (self.folder / "log").read_text()

    def incomplete(self, bucket: str = "") -> list[Path]:
        """Files of objects whose upload is in progress, or whose writer or server died.

        ``bucket``: only of this one; other tests may use the same server.
        """
        return list((self.data / bucket).rglob(f"{INCOMPLETE}*"))

    def _end(self, how: signal.Signals) -> None:
        below = descendants(self.process.pid) if self.process is not None else set()
        super()._end(how)
        eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in below))


def _is_stopped(stat: Path) -> bool:
    return stat.read_text().rpartition(")")[2].split()[0] == "T"


class Certificate:
    """A key and a certificate for 127.0.0.1 that no one else trusts."""

    def __init__(self, folder: Path, *, days: int = 2) -> None:
        need("openssl", shutil.which("openssl"))
        folder.mkdir(parents=True)
        self.folder = folder
        self.file = folder / "public.crt"
        self.key = folder / "private.key"
        key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        name = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
        name += ["-days", str(days)]
        files = ["-keyout", str(self.key), "-out", str(self.file)]
        command = ["openssl", "req", "-x509", *key, *name, *files]
        subprocess.run(command, check=True, capture_output=True)


def rclone_program() -> str | None:
    """The server that is installed beside this Python, or another one."""
    beside = Path(sysconfig.get_path("scripts"), "rclone")
    return str(beside) if beside.exists() else shutil.which("rclone")


def minio_program() -> str | None:
    """The newest server that `make minio` built, or one that is installed."""
    built = sorted(CACHE.glob("minio-*"))
    return str(built[-1]) if built else shutil.which("minio")


@contextlib.contextmanager
def running_minio(
    folder: Path, *, region: str = "", certificate: Certificate | None = None
) -> Iterator[ObjectServer]:
    """Run a MinIO that keeps its data below the folder.

    `tunemq store serve` takes its place in `make test`, and where there is no Go to build MinIO
    with (in CI it must be there).
    """
    has_minio = WANTED != "rclone" and (minio_program() or os.environ.get("CI"))
    has_minio = has_minio or region or certificate
    server: ObjectServer = (
        MinioServer(folder, region=region, certificate=certificate)
        if has_minio
        else ServedFolder(folder)
    )
    with _running(server):
        yield server


@contextlib.contextmanager
def serving(
    folder: Path,
    *options: str,
    host: str = "127.0.0.1",
    certificate: Certificate | None = None,
) -> Iterator[ServedFolder]:
    """Serve a new folder; the server keeps its data below ``folder``."""
    server = ServedFolder(folder, certificate=certificate)
    server.host, server.options = host, options
    with _running(server):
        yield server


@contextlib.contextmanager
def _running(server: ObjectServer) -> Iterator[None]:
    server.start()
    try:
        yield
    finally:
        server.kill()
        shutil.rmtree(server.folder, ignore_errors=True)


@pytest.fixture(scope="session")
def shared_minio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectServer]:
    """A MinIO for tests that do it no harm."""
    with running_minio(tmp_path_factory.mktemp("minio") / "server") as server:
        yield server


@pytest.fixture(scope="session")
def shared_served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedFolder]:
    """A served folder for tests that do it no harm."""
    with serving(tmp_path_factory.mktemp("served") / "server") as server:
        yield server


@pytest.fixture
def served(shared_served: ServedFolder, monkeypatch: pytest.MonkeyPatch) -> ServedFolder:
    """The shared served folder, which this test and its children find in their environment."""
    for name, value in shared_served.environ.items():
        monkeypatch.setenv(name, value)
    return shared_served


@pytest.fixture
def minio(shared_minio: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> ObjectServer:
    """The shared MinIO, which this test and its children find through their environment."""
    for name, value in shared_minio.environ.items():
        monkeypatch.setenv(name, value)
    return shared_minio


@pytest.fixture
def bucket(minio: ObjectServer) -> str:
    """The name of a new, empty bucket in the shared MinIO."""
    return minio.create_bucket()
