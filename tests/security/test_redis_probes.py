"""The findings about a Redis depend on what its user may query; the probes guess nothing."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.farms.farm_processes import TcpRedis
from tests.support.farms.secured_redis import ROLES, SHIPPED, SecuredRedis, secured_redis
from tunemq_scheduler.security import redis_probes
from tunemq_scheduler.security.findings import Finding, FindingLevel
from tunemq_scheduler.security.own_addresses import own_addresses
from tunemq_scheduler.security.redis_probes import (
    AOF,
    EVICTION,
    LOGINS,
    LUA,
    REMOTE_CONTROL,
    RIGHTS,
    WRITES,
    probe,
    refuse_dangers,
)
from tunemq_shared.base.errors import RedisUnavailable
from tunemq_shared.broker.redis_dangers import CVE, DEFAULT_USER, PASSWORD, TLS, VERSION

SHIPPED_USERS = (SHIPPED / "users.acl").read_text()
pytestmark = [pytest.mark.integration, pytest.mark.security]

_ALL = {PASSWORD, DEFAULT_USER, TLS, VERSION, CVE, LUA, EVICTION, AOF, WRITES, RIGHTS}
_ALL |= {REMOTE_CONTROL}


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredRedis]:
    with secured_redis(tmp_path_factory.mktemp("redis")) as redis:
        yield redis


def findings(redis: SecuredRedis, user: str) -> list[Finding]:
    """Return the findings with a user's rights, without the wrong passwords of other tests."""
    return [one for one in probe(redis.url(user)) if one.check != LOGINS]


def test_shipped_redis_users_have_no_problem(redis: SecuredRedis):
    found = findings(redis, "scheduler")
    assert {one.check for one in found} == _ALL
    assert {one.level for one in found} == {FindingLevel.OK}


def test_probe_without_permission_is_reported_as_unknown(redis: SecuredRedis):
    found = {one.check: one for one in findings(redis, "worker")}
    assert found.keys() == _ALL
    unknown = {EVICTION: "INFO", AOF: "INFO", WRITES: "SETRANGE", REMOTE_CONTROL: "SMEMBERS"}
    assert {check for check, one in found.items() if one.level is not FindingLevel.OK} == {*unknown}
    for check, command in unknown.items():
        assert f"{check} was not looked at: the user 'worker' may not ask" in found[check].what
        assert command in found[check].what
        assert "scheduler's user" in found[check].fix
    assert redis.client.info()["redis_version"] in found[VERSION].what


def test_user_with_redis_admin_rights_is_found(redis: SecuredRedis):
    (finding,) = (one for one in findings(redis, "admin") if one.level is not FindingLevel.OK)
    assert (finding.check, finding.level) == (RIGHTS, FindingLevel.WARNING)
    assert "'admin' may administer" in finding.what
    assert "deploy/redis/users.acl" in finding.fix


@pytest.mark.parametrize("role", ROLES)
def test_doctor_names_each_right_that_a_roles_user_lacks(redis: SecuredRedis, role: str):
    (line,) = (one for one in SHIPPED_USERS.splitlines() if one.startswith(f"user {role} "))
    rights = {part[1:] for part in line.split() if part.startswith("+")}
    rights -= {"ping", "select", "acl|log"}  # without the last, doctor only says less
    for right in rights:
        # Redis 6.2 takes no subcommand away.
        redis.client.execute_command("ACL", "SETUSER", role, f"-{right.split('|')[0]}")
        try:
            (found,) = (one for one in probe(redis.url(role)) if one.check == RIGHTS)
        finally:
            redis.client.execute_command("ACL", "SETUSER", role, *(f"+{one}" for one in rights))
        assert found.level is FindingLevel.PROBLEM, right
        assert right in found.what
        assert f"+{right}" in found.fix
        assert "deploy/redis/users.acl" in found.fix
    (found,) = (one for one in probe(redis.url(role)) if one.check == RIGHTS)
    assert found.level is FindingLevel.OK
    assert redis.client.keys("*") == []


def test_probe_with_a_wrong_password_is_an_error(redis: SecuredRedis):
    with pytest.raises(RedisUnavailable):
        probe(redis.url("scheduler", password="wrong"))


def test_open_redis_on_the_loopback_is_accepted(tmp_path_factory: pytest.TempPathFactory):
    server = TcpRedis(tmp_path_factory.mktemp("open"), options=["--appendonly", "yes"])
    try:
        assert {one.level for one in probe(server.url)} == {FindingLevel.OK}
    finally:
        server.end()


def test_start_on_a_local_redis_with_a_password_that_others_reach_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(redis_probes, "own_addresses", lambda: ["127.0.0.2"])
    server = TcpRedis(tmp_path, "secret-secret", ["--bind", "127.0.0.1", "127.0.0.2"])
    told: list[str] = []
    try:
        refuse_dangers(server.url, is_insecure=False, tell=told.append)
    finally:
        server.end()
    assert all(line.startswith("warning: ") for line in told)
    assert any("is not encrypted" in line for line in told)
    assert all(f"at 127.0.0.2:{server.port}" in line for line in told)


def test_unknown_reach_of_a_local_redis_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def unknown() -> list[str]:
        raise PermissionError("the kernel does not show them")

    monkeypatch.setattr(redis_probes, "own_addresses", unknown)
    server = TcpRedis(tmp_path, "secret-secret", ["--appendonly", "yes"])
    try:
        found = [one for one in probe(server.url) if one.level is not FindingLevel.OK]
    finally:
        server.end()
    assert [(one.check, one.level) for one in found] == [(PASSWORD, FindingLevel.WARNING)]
    assert "is not known: the kernel does not show them" in found[0].what


def test_local_redis_behind_a_socket_of_which_no_port_is_known_is_a_warning(redis: SecuredRedis):
    found = [one for one in probe(redis.plain_url("worker")) if one.check == PASSWORD]
    assert [one.level for one in found] == [FindingLevel.WARNING]
    assert "(INFO)" in found[0].what


def test_probe_tries_only_addresses_of_this_machine():
    for address in own_addresses():
        place = ipaddress.ip_address(address)
        assert not place.is_loopback
        family = socket.AF_INET if place.version == 4 else socket.AF_INET6
        with socket.socket(family) as sock:
            sock.bind((address, 0))  # only a local address can be bound
