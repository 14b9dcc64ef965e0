"""`tunemq doctor` finds problems of a Redis that other machines reach."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.support.farms.doctor_answers import Examination
from tests.support.farms.network_namespaces import Host, Hosts
from tests.support.proxies.lying_redis import WITH_THE_CVE
from tests.support.waiting import eventually
from tunemq_scheduler.embedded.redis_command import find_redis_server
from tunemq_scheduler.security.findings import FindingLevel

pytestmark = [pytest.mark.integration, pytest.mark.security]

_LYING = Path(__file__).parents[1] / "support" / "proxies" / "lying_redis.py"


class Head:
    """A machine with a Redis that others of its network can use, and no more of a farm."""

    def __init__(self, host: Host, folder: Path) -> None:
        self._host, self._folder = host, folder
        self.address = host.address
        self.password = "secret-secret"
        self.socket = folder / "redis.sock"
        line = [str(find_redis_server()), "--bind", self.address, "--protected-mode", "no"]
        line += ["--save", "", "--appendonly", "yes", "--dir", str(folder)]
        self._environ = {"HOME": str(folder), "PATH": "/usr/bin:/bin"}
        host.start(line, self._environ, folder / "redis.log")
        line = [str(find_redis_server()), "--bind", "0.0.0.0", "--port", "7001"]
        line += ["--requirepass", self.password, "--unixsocket", str(self.socket)]
        line += ["--save", ""]
        host.start([*line, "--dir", str(folder)], self._environ, folder / "second.log")
        self._commands = host.commands(self._environ)
        eventually(
            lambda: not self.examined(6379).of("redis"),
            every=0.2,
            message=lambda: str(self.examined(6379)),
        )

    def examined(self, port: int, *more: str) -> Examination:
        """Run the doctor on the Redis with this port."""
        return self.examined_at(f"redis://{self.address}:{port}/0", *more)

    def examined_at(self, url: str, *more: str) -> Examination:
        """Run the doctor on this Redis."""
        line = ("doctor", "--json", "--redis", url, *more)
        done = self._commands.run(
            (*line, "--store", str(self._folder)), self._environ, self._folder
        )
        assert done.stdout, done.stderr
        return msgspec.json.decode(done.stdout, type=Examination)

    def lying(self, real: str, said: str) -> int:
        """The port of a proxy that reports another version."""
        log = self._folder / "lying.log"
        line = [sys.executable, str(_LYING), self.address, self.address, "6379", real, said]
        self._host.start(line, self._environ, log)
        eventually(lambda: log.read_text().strip(), message=log.read_text)
        return int(log.read_text())

    def close(self) -> None:
        """End the command runner; the rest ends with the machine."""
        self._commands.close()


@pytest.fixture
def head(tmp_path: Path) -> Iterator[Head]:
    with Hosts() as hosts:
        head = Head(hosts.add("head"), tmp_path)
        yield head
        head.close()


def test_an_open_redis_off_the_loopback_is_found(head: Head):
    found = head.examined(6379)
    (password,), (user,), (tls,), (keys,) = (
        found.of(check) for check in ("redis-password", "redis-default-user", "redis-tls", "keys")
    )
    for one in (password, user, tls, keys):
        assert one.level is FindingLevel.PROBLEM, one
    for one in (password, user, tls):
        assert one.refuses, one
    assert "without a password" in password.what
    assert "deploy/redis/users.acl" in password.fix
    assert "rediss://" in tls.fix
    assert "tunemq keys new" in keys.fix
    (scheduler,) = found.of("scheduler")  # none runs on this head
    assert scheduler.level is FindingLevel.PROBLEM
    assert found.problems == 5, str(found)


@pytest.mark.parametrize("way", ["loopback", "unix socket"])
def test_redis_with_a_password_that_other_machines_reach_is_found(head: Head, way: str):
    place = "127.0.0.1:7001/0" if way == "loopback" else f"{head.socket}?db=0"
    scheme = "redis" if way == "loopback" else "unix"
    url = f"{scheme}://:{head.password}@{place}"
    eventually(lambda: not head.examined_at(url).of("redis"), every=0.2)
    found = head.examined_at(url)
    (keys,) = found.of("keys")
    assert keys.level is FindingLevel.PROBLEM
    assert f"other machines reach Redis at {head.address}:7001" in keys.what
    for check in ("redis-default-user", "redis-tls", "redis-lua"):
        (finding,) = found.of(check)
        assert finding.level is FindingLevel.WARNING, finding
        assert f"{head.address}:7001" in finding.what
    assert "127.0.0.1 alone" in found.of("redis-tls")[0].fix
    assert not found.of("redis-password")  # strangers do not have it
    assert head.password not in str(found)


def test_with_insecure_an_open_redis_is_a_warning(head: Head):
    found = head.examined(6379, "--insecure")
    for check in ("redis-password", "redis-default-user", "redis-tls"):
        assert found.of(check)[0].level is FindingLevel.WARNING
        assert found.of(check)[0].fix
    problems = [one.check for one in found.findings if one.level is FindingLevel.PROBLEM]
    assert problems == ["keys", "scheduler"]


def test_a_redis_with_the_cve_is_found_off_the_loopback(head: Head):
    said = subprocess.run([find_redis_server(), "--version"], capture_output=True, check=True)
    real = said.stdout.decode().split(" v=")[1].split()[0]
    assert not head.examined(6379).of("redis-cve")
    weak = WITH_THE_CVE[len(real)]
    (finding,) = head.examined(head.lying(real, weak)).of("redis-cve")
    assert finding.level is FindingLevel.PROBLEM
    assert finding.refuses
    assert weak in finding.what
    assert "CVE-2026-23479" in finding.what
    assert "8.6.3" in finding.fix
    (scripts,) = head.examined(head.lying(real, weak)).of("redis-lua")
    assert scripts.level is FindingLevel.WARNING
    assert "CVE-2025-49844" in scripts.what
    assert "a backport" in scripts.what
    assert "deploy/redis/users.acl" in scripts.fix
