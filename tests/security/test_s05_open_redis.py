"""S05: no scheduler and no worker starts on a Redis that others of its network can use, or read."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.support.farms.farm_processes import TcpRedis, redis_program
from tests.support.farms.farm_service import FarmService
from tests.support.farms.network_namespaces import Host, Hosts
from tests.support.farms.secured_redis import SHIPPED, make_certificates, shipped_users
from tests.support.proxies.lying_redis import WITH_THE_CVE
from tests.support.proxies.tls_proxy import proxy_command
from tests.support.waiting import eventually, need

pytestmark = [pytest.mark.integration, pytest.mark.security]

_ROOT: Final = Path(__file__).parents[2]
_OPEN, _ONE_PASSWORD, _USERS, _TLS, _BESIDE, _UNASKED = range(7001, 7007)
_LYING: Final = Path(__file__).parents[1] / "support" / "proxies" / "lying_redis.py"
#: Texts of the error message.
_IS_OPEN: Final = "lets everybody in, without a password"
_IS_DEFAULT: Final = "default user, who may do everything"
_IS_PLAIN: Final = "is not encrypted, the password included"
_IS_WEAK: Final = "CVE-2026-23479"
_IS_UNVERIFIED: Final = "its certificate is not verified"
_FIXES: Final = {
    _IS_OPEN: "deploy/redis/users.acl",
    _IS_DEFAULT: "deploy/redis/users.acl",
    _IS_PLAIN: "rediss://",
    _IS_WEAK: "8.6.3",
    _IS_UNVERIFIED: "ssl_ca_certs",
}
_COMMANDS: Final = ("scheduler", "worker")


class Network:
    """A machine with several Redis, and another one that is to use them."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self._server, self._user = hosts.add("server"), hosts.add("user")
        self._folder = folder
        self._farm = FarmService(folder, "", self._user)
        self._runs = 0
        self.certificates = make_certificates(folder / "tls")
        self._make_certificate()
        users = folder / "users.acl"
        users.write_text(shipped_users())
        subprocess.run(
            ["sh", str(SHIPPED / "passwords.sh"), str(users), str(folder / "passwords")],
            check=True,
            capture_output=True,
        )
        socket = folder / "redis.sock"
        self._start_redis(_OPEN, "--protected-mode", "no")
        self._start_redis(_BESIDE, "--bind", "0.0.0.0", "--protected-mode", "no")
        few = folder / "few.acl"
        few.write_text("user default on nopass ~* +@all\nuser few on >secret ~* +@all -config\n")
        unprotected = ("--bind", "0.0.0.0", "--protected-mode", "no")
        self._start_redis(_UNASKED, *unprotected, "--aclfile", str(few))
        self._start_redis(_ONE_PASSWORD, "--requirepass", "secret")
        self._start_redis(_USERS, "--aclfile", str(users), "--unixsocket", str(socket))
        self._start(proxy_command(socket, self.address, _TLS, self.certificates))
        said = subprocess.run([redis_program(), "--version"], capture_output=True, check=True)
        real = said.stdout.decode().split(" v=")[1].split()[0]
        line = [self.address, self.address, str(_USERS), real, WITH_THE_CVE[len(real)]]
        self.lying_port = int(self._first_line([sys.executable, str(_LYING), *line]))
        line = ["127.0.0.1", self.address, str(_OPEN), real, real]
        #: Of the open one, on the machine with Redis, for that machine alone: as of a container.
        self.published_port = int(self._first_line([sys.executable, str(_LYING), *line]))

    @property
    def address(self) -> str:
        """Where Redis is."""
        return self._server.address

    def url(self, port: int, user: str = "", *, query: str = "", tls: bool = False) -> str:
        """Of one of them."""
        password = ""
        if user:
            file = self._folder / "passwords" / f"{user}.password"
            password = file.read_text().strip() if file.exists() else "secret"
        who = f"{user}:{password}@" if user else ""
        return f"redis{'s' * tls}://{who}{self.address}:{port}/0{query}"

    def starts(self, command: str, url: str, *more: str, says: str) -> str:
        """Start a long-running command, end it once it prints `says`; return its output."""
        log, process = self._run(self._user, command, url, *more)
        try:
            _says(log, says)
            assert process.poll() is None
        finally:
            _end(process)
            self._user.kill()
        return log.read_text()

    def refuses(self, command: str, url: str, code: int = 64) -> str:
        """Start a command that must fail; return its output."""
        log, process = self._run(self._user, command, url)
        try:
            assert process.wait(60) == code, log.read_text()
        finally:
            self._user.kill()
        return " ".join(log.read_text().split())

    def rejected_beside(self, command: str, url: str) -> str:
        """The same on the machine with Redis, where it ends by itself."""
        log, process = self._run(self._server, command, url)
        assert process.wait(60) == 64, log.read_text()
        return " ".join(log.read_text().split())

    def starts_beside(self, command: str, url: str, says: str) -> str:
        """Start a long-running command beside Redis; return its output up to `says`."""
        log, process = self._run(self._server, command, url)
        try:
            _says(log, says)
            assert process.poll() is None
        finally:
            _end(process)
        return log.read_text()

    def _run(
        self, host: Host, command: str, url: str, *more: str
    ) -> tuple[Path, subprocess.Popen[bytes]]:
        self._runs += 1
        log = self._folder / f"{command}-{self._runs}.log"
        home = self._folder / f"home-{self._runs}"
        home.mkdir()
        environ = self._farm.environ(home.name, {"TUNEMQ_REDIS": url})
        return log, host.start(FarmService.command(command, *more), environ, log)

    def _make_certificate(self) -> None:
        for kind in ("crt", "key"):
            (self.certificates / f"redis.{kind}").unlink()
        line = ["sh", str(SHIPPED / "certificates.sh"), self.address, str(self.certificates)]
        subprocess.run(line, check=True, capture_output=True)

    def _start_redis(self, port: int, *options: str) -> None:
        line = [redis_program(), "--bind", self.address, "--port", str(port), "--save", ""]
        log = self._start([*line, "--dir", str(self._folder), *options])
        eventually(lambda: "eady to accept" in log.read_text(), message=log.read_text)

    def _start(self, line: list[str]) -> Path:
        log = self._folder / f"server-{len(self._server.processes)}.log"
        self._server.start(line, self._farm.environ("server"), log, cwd=self._folder)
        return log

    def _first_line(self, line: list[str]) -> str:
        log = self._start(line)
        eventually(lambda: log.read_text().strip(), message=log.read_text)
        return log.read_text()


def _says(log: Path, text: str) -> None:
    eventually(lambda: text in log.read_text(), within=60, every=0.05, message=log.read_text)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End it in peace: for the lease of a scheduler that was killed the next one has to wait."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(30)
    process.kill()
    process.wait()


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    need("openssl", shutil.which("openssl"))
    with Hosts() as hosts:
        yield Network(hosts, tmp_path_factory.mktemp("network"))


@pytest.mark.parametrize("command", _COMMANDS)
@pytest.mark.parametrize(
    ("port", "user", "reasons"),
    [
        (_OPEN, "", (_IS_OPEN, _IS_DEFAULT, _IS_PLAIN)),
        (_ONE_PASSWORD, "default", (_IS_DEFAULT, _IS_PLAIN)),
        (_USERS, "{role}", (_IS_PLAIN,)),
    ],
)
def test_s05_redis_that_others_can_use_is_refused_with_the_fix(
    network: Network, command: str, port: int, user: str, reasons: tuple[str, ...]
):
    said = network.refuses(command, network.url(port, user.format(role=command)))
    for text, fix in _FIXES.items():
        assert (text in said) == (text in reasons), said
        assert text not in reasons or fix in said
    assert "--insecure" in said
    assert not re.search(r"secret|[0-9a-f]{64}", said)


@pytest.mark.parametrize("command", _COMMANDS)
def test_s05_redis_whose_users_have_admin_rights_is_refused(network: Network, command: str):
    said = network.refuses(command, network.url(network.lying_port, command))
    assert _IS_WEAK in said
    assert _FIXES[_IS_WEAK] in said


@pytest.mark.parametrize("place", [f"127.0.0.1:{_BESIDE}", f"few:secret@127.0.0.1:{_UNASKED}"])
def test_s05_scheduler_beside_an_open_redis_sees_that_others_reach_it(network: Network, place: str):
    said = network.rejected_beside("scheduler", f"redis://{place}/0")
    assert "lets everybody in, from other machines, too, without a password" in said
    assert f"reach it at {network.address}:{place[-4:]}" in said
    assert "deploy/redis/users.acl" in said
    assert _IS_PLAIN not in said


def test_s05_an_open_redis_that_only_this_machine_reaches_is_used(network: Network):
    url = f"redis://127.0.0.1:{network.published_port}/0"
    said = network.starts_beside("scheduler", url, says="Serving the farm")
    assert "To fix it" not in said


@pytest.mark.parametrize("command", _COMMANDS)
def test_s05_tls_that_verifies_nothing_is_refused(network: Network, command: str):
    url = network.url(_TLS, command, query="?ssl_cert_reqs=none", tls=True)
    said = network.refuses(command, url)
    assert _IS_UNVERIFIED in said
    assert _IS_PLAIN not in said


@pytest.mark.parametrize(
    ("command", "says"), [("scheduler", "Serving the farm"), ("worker", "It offers")]
)
def test_s05_services_started_with_insecure_name_the_problem(
    network: Network, command: str, says: str
):
    said = network.starts(command, network.url(_OPEN), "--insecure", says=says)
    for reason in (_IS_OPEN, _IS_DEFAULT, _IS_PLAIN):
        assert reason in said


@pytest.mark.parametrize(
    ("command", "says"), [("scheduler", "Serving the farm"), ("worker", "It offers")]
)
def test_s05_services_start_over_tls_with_the_users_of_their_roles(
    network: Network, command: str, says: str
):
    query = f"?ssl_ca_certs={network.certificates / 'ca.crt'}"
    said = network.starts(command, network.url(_TLS, command, query=query, tls=True), says=says)
    assert "To fix it" not in said


def test_s05_server_with_a_foreign_certificate_is_refused(network: Network, tmp_path: Path):
    other = make_certificates(tmp_path / "other")
    for command in _COMMANDS:
        url = network.url(_TLS, command, query=f"?ssl_ca_certs={other / 'ca.crt'}", tls=True)
        assert "CERTIFICATE_VERIFY_FAILED" in network.refuses(command, url, code=69)


# --- on this machine ------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["allkeys-lru", "allkeys-random", "allkeys-lfu"])
def test_s05_scheduler_refuses_a_redis_that_evicts_keys(tmp_path: Path, policy: str):
    redis = TcpRedis(tmp_path, options=["--maxmemory-policy", policy])
    farm = FarmService(tmp_path, redis.url)
    try:
        scheduler = farm.start_scheduler()
        assert scheduler.wait(60) == 64
        assert f"maxmemory-policy {policy}" in farm.said()
        assert "CONFIG SET maxmemory-policy noeviction" in farm.said()
        farm.start_scheduler("--insecure")
        eventually(lambda: "Serving the farm" in farm.said(), within=60, message=farm.said)
    finally:
        farm.close()
        redis.end()
