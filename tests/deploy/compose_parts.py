"""The services of docker-compose.yml as plain processes, with the secrets that its `setup` makes.

farm = Secrets(folder)                      # made by deploy/compose/setup.sh
with running_store(farm) as store: ...      # a MinIO, and nginx in front of it
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from tests.support.farms.farm_processes import free_port, redis_program
from tests.support.farms.secured_redis import speaks_tls
from tests.support.proxies.tls_proxy import proxy_command
from tests.support.stores.object_servers import minio_program
from tests.support.waiting import eventually, need

REPOSITORY: Final = Path(__file__).parents[2]
DEPLOY: Final = REPOSITORY / "deploy"
SETUP: Final = DEPLOY / "compose" / "setup.sh"


class Secrets:
    """A folder like the volumes of `setup`, with one subfolder per role."""

    def __init__(self, folder: Path, **variables: str) -> None:
        need("openssl", shutil.which("openssl"))
        self.path = folder
        self.variables = variables
        self.made = self.run()

    def run(self, *arguments: str, **variables: str) -> str:
        """Run setup.sh again; return its output."""
        done = self.tried(*arguments, **variables)
        assert done.returncode == 0, f"{done.stdout}{done.stderr}"
        return done.stdout

    def tried(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """The same, where it may fail."""
        self.variables |= variables
        beside = sysconfig.get_path("scripts")
        return subprocess.run(
            ["sh", str(SETUP), *arguments],
            check=False,
            capture_output=True,
            text=True,
            env={
                "PATH": f"{beside}:{os.environ['PATH']}",
                "HOME": str(self.path),
                # Any user may run a test, so the files keep that user as their owner.
                "TUNEMQ_OWNER": "",
                "TUNEMQ_GRAFANA_OWNER": "",
                "TUNEMQ_SECRETS": str(self.path),
                **self.variables,
            },
        )

    def text(self, name: str) -> str:
        """The contents of a file."""
        return (self.path / name).read_text().strip()

    def contents(self) -> dict[str, bytes]:
        """All files, by name."""
        files = sorted(path for path in self.path.rglob("*") if path.is_file())
        return {str(path.relative_to(self.path)): path.read_bytes() for path in files}

    def keys(self, role: str) -> tuple[str, str]:
        """The keys of a role for the store."""
        lines = dict(
            line.split(" = ") for line in self.text(f"{role}/credentials").splitlines()[1:]
        )
        return lines["aws_access_key_id"], lines["aws_secret_access_key"]


class Store(NamedTuple):
    """Addresses of the store: MinIO itself, the proxy, and the proxy's health check."""

    minio: str
    proxy: str
    health: str
    ca_file: Path
    errors: Path


@contextlib.contextmanager
def running_store(secrets: Secrets, folder: Path) -> Iterator[Store]:
    """A MinIO with the root user of `setup`, and nginx with the shipped configuration."""
    nginx = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin")
    program = minio_program()
    if not nginx:
        import pytest

        pytest.skip("nginx is missing (Debian's package nginx-light)")
    need("minio (`make minio` builds it)", program)
    folder.mkdir()
    ports = free_port(), free_port(), free_port()
    text = (secrets.path / "proxy" / "nginx.conf").read_text()
    changes = {
        "/etc/tunemq/": f"{secrets.path}/proxy/",
        "/tmp/nginx": f"{folder}/nginx",
        "/dev/stderr": f"{folder}/access.log",
        "http://minio:9000": f"http://127.0.0.1:{ports[0]}",
        "listen 9000": f"listen 127.0.0.1:{ports[1]}",
        "127.0.0.1:9001": f"127.0.0.1:{ports[2]}",
        "worker_processes 4;": "worker_processes 1;",
    }
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    if os.getuid() == 0:
        text = f"user root;\n{text}"
    configuration = folder / "nginx.conf"
    configuration.write_text(text)
    environ = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "MINIO_ROOT_USER_FILE": str(secrets.path / "minio" / "root-user"),
        "MINIO_ROOT_PASSWORD_FILE": str(secrets.path / "minio" / "root-password"),
        "MINIO_BROWSER": "off",
        "MINIO_UPDATE": "off",
    }
    options = ["--address", f"127.0.0.1:{ports[0]}", "--quiet", "--anonymous"]
    lines = [
        [str(program), "server", *options, str(folder / "data")],
        [nginx, "-e", "stderr", "-g", "daemon off;", "-c", str(configuration)],
    ]
    log = folder / "log"
    with log.open("ab") as output, _running(lines, output.fileno(), environ):
        for port in ports:
            eventually(lambda port=port: _is_open(port), message=log.read_text)
        places = (f"127.0.0.1:{port}" for port in ports)
        yield Store(*places, secrets.path / "worker" / "ca.crt", folder / "access.log")


@contextlib.contextmanager
def running_redis(secrets: Secrets, folder: Path) -> Iterator[int]:
    """A Redis with the files of `setup`, encrypted; its port."""
    folder.mkdir(exist_ok=True)
    program, port = _redis_7(), free_port()
    has_tls = speaks_tls(program)
    changes = {
        "/etc/redis": str(secrets.path / "redis"),
        "/var/lib/redis": str(folder),
        "tls-port 6379": f"tls-port {port}",
        "bind * -::*": "bind 127.0.0.1",
        "maxmemory 2gb": "maxmemory 256mb",
    }
    text = (secrets.path / "redis" / "redis.conf").read_text()
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    if not has_tls:
        kept = [line for line in text.splitlines() if not line.startswith("tls-")]
        text = "\n".join([*kept, f"unixsocket {folder}/redis.sock", ""])
    (folder / "redis.conf").write_text(text)
    lines = [[program, str(folder / "redis.conf")]]
    if not has_tls:
        place = (folder / "redis.sock", "127.0.0.1", port, secrets.path / "redis" / "tls")
        lines.append(proxy_command(*place))
    log = folder / "log"
    with log.open("ab") as output, _running(lines, output.fileno(), dict(os.environ)):
        eventually(lambda: _is_open(port), message=log.read_text)
        yield port


def _redis_7() -> str:
    """A redis-server that knows all rules of the users, as the image's does."""
    program = ""
    for found in filter(None, (redis_program(), shutil.which("redis-server"))):
        said = subprocess.run([found, "--version"], check=True, capture_output=True, text=True)
        program = program if " v=6." in said.stdout else found
    need("Redis 7 (Debian's package redis-server)", program)
    return program


def run_store_setup(secrets: Secrets, store: Store, redis_port: int) -> str:
    """Run deploy/compose/store_setup.py; return its output."""
    done = subprocess.run(
        [sys.executable, str(DEPLOY / "compose" / "store_setup.py")],
        check=False,
        capture_output=True,
        text=True,
        env={
            "PATH": os.environ["PATH"],
            "TUNEMQ_SECRETS": str(secrets.path),
            "TUNEMQ_MINIO": store.minio,
            "TUNEMQ_REDIS_PLACE": f"127.0.0.1:{redis_port}",
        },
    )
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    assert not done.stderr
    return done.stdout


@contextlib.contextmanager
def _running(lines: list[list[str]], log: int, environ: dict[str, str]) -> Iterator[None]:
    started = [subprocess.Popen(line, env=environ, stdout=log, stderr=log) for line in lines]
    try:
        yield
    finally:
        for process in reversed(started):
            process.terminate()
        for process in started:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _is_open(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), 1):
            return True
    except OSError:
        return False
