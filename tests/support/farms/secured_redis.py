"""A Redis as `deploy/redis` ships it: TLS, a user for each role, the default user off.

    with secured_redis(folder) as redis:
        redis.url("worker")         # rediss://worker:...@127.0.0.1:...
        redis.refused()             # what was refused to whom

Only paths, ports and the memory are this machine's, and there is an administrator, for tests. A
redis-server that was built without TLS gets a proxy before it that has it.
"""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import redis

from tests.support.farms.farm_processes import redis_program
from tests.support.proxies.tls_proxy import proxy_command
from tests.support.waiting import eventually, free_port, need

SHIPPED: Final = Path(__file__).parents[3] / "deploy" / "redis"
ROLES: Final = ("scheduler", "worker", "submitter", "exporter")
_ADMIN: Final = "user admin on #sha256-of-the-password-of-admin ~* &* +@all\n"


class SecuredRedis:
    """A Redis as shipped; see the module.

    Args:
        folder: for all its files.
        settings: lines of its configuration that replace the shipped ones.
        program: a redis-server; by default the one of all tests.
    """

    def __init__(
        self, folder: Path, settings: Sequence[str] = (), program: str | None = None
    ) -> None:
        program = program or redis_program()
        need("openssl", shutil.which("openssl"))
        self.folder = folder
        self.certificates = make_certificates(folder / "tls")
        self._make_users(program)
        self.port = free_port()
        has_tls = speaks_tls(program)
        self._configure(has_tls=has_tls, settings=settings)
        lines = [[program, str(folder / "redis.conf")]]
        if not has_tls:
            is_strict = "tls-auth-clients yes" in settings
            place = (folder / "redis.sock", "127.0.0.1", self.port, self.certificates)
            lines.append(proxy_command(*place, is_strict=is_strict))
        with (folder / "processes.log").open("ab") as log:
            self._processes = [
                subprocess.Popen(line, cwd=folder, stdout=log, stderr=log) for line in lines
            ]
        self.client = redis.Redis(
            unix_socket_path=str(folder / "redis.sock"),
            username="admin",
            password=self.password("admin"),
        )
        eventually(self._answers, message=self._said)

    def password(self, user: str) -> str:
        """Of one of its users."""
        return (self.folder / "passwords" / f"{user}.password").read_text().strip()

    def url(self, user: str, *, shows_certificate: bool = False, password: str = "") -> str:
        """Its address for a user."""
        query = f"ssl_ca_certs={self.certificates / 'ca.crt'}"
        if shows_certificate:
            query += f"&ssl_certfile={self.certificates / 'client.crt'}"
            query += f"&ssl_keyfile={self.certificates / 'client.key'}"
        password = password or self.password(user)
        return f"rediss://{user}:{password}@127.0.0.1:{self.port}/0?{query}"

    def plain_url(self, user: str) -> str:
        """The URL of the unix socket for a user, who has the same rights as over TLS."""
        return f"unix://{user}:{self.password(user)}@{self.folder / 'redis.sock'}?db=0"

    def rejected(self) -> list[tuple[str, str]]:
        """The calls that Redis rejected since the last call: the user and the command or key."""
        log: list[dict[str, Any]] = self.client.acl_log()
        self.client.acl_log_reset()
        return [(entry["username"], entry["object"]) for entry in log]

    def close(self) -> None:
        """End it for good."""
        self.client.close()
        for process in self._processes:
            process.kill()
            process.wait()

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port)):
                return bool(self.client.ping())
        except (OSError, redis.ConnectionError, redis.TimeoutError):
            return False

    def _said(self) -> str:
        return "".join(path.read_text() for path in self.folder.glob("*.log"))

    def _make_users(self, program: str) -> None:
        users = self.folder / "users.acl"
        users.write_text(shipped_users(program) + _ADMIN)
        _run(SHIPPED / "passwords.sh", str(users), str(self.folder / "passwords"))

    def _configure(self, *, has_tls: bool, settings: Sequence[str]) -> None:
        text = (SHIPPED / "redis.conf").read_text()
        text = text.replace("/etc/redis", str(self.folder))
        changed = [
            *("bind 127.0.0.1", f"dir {self.folder}", f"tls-port {self.port}", *settings),
            *("maxmemory 256mb", f"unixsocket {self.folder}/redis.sock", "unixsocketperm 700"),
            *(f"logfile {self.folder}/redis.log", "loglevel notice"),
        ]
        for line in changed:
            name = line.split()[0]
            text = re.sub(rf"(?m)^{name} .*\n", "", text) + f"{line}\n"
        if not has_tls:
            text = re.sub(r"(?m)^tls-.*\n", "", text)
        (self.folder / "redis.conf").write_text(text)


def shipped_users(program: str | None = None) -> str:
    """The shipped users, without rules that need Redis 7 if the program is older."""
    said = subprocess.run(
        [program or redis_program(), "--version"], capture_output=True, check=True
    )
    users = (SHIPPED / "users.acl").read_text()
    return users.replace("%R~", "~") if b" v=6." in said.stdout else users


@contextmanager
def secured_redis(
    folder: Path, settings: Sequence[str] = (), program: str | None = None
) -> Iterator[SecuredRedis]:
    """One that ends with the block."""
    server = SecuredRedis(folder, settings, program)
    try:
        yield server
    finally:
        server.close()


def make_certificates(folder: Path) -> Path:
    """The certificates of 127.0.0.1, made as a user would make them."""
    _run(SHIPPED / "certificates.sh", "127.0.0.1", str(folder))
    return folder


def speaks_tls(program: str) -> bool:
    """Whether a redis-server was built with TLS."""
    wrong = "tls-port 0\nno-such-setting 1\n"  # it reports the first unknown line
    done = subprocess.run([program, "-"], check=False, input=wrong, capture_output=True, text=True)
    return "no-such-setting" in done.stdout + done.stderr


def _run(script: Path, *arguments: str) -> None:
    done = subprocess.run(
        ["sh", str(script), *arguments], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{script}: {done.stdout}{done.stderr}"
