"""Probe a Redis: what it would allow strangers, and whether it keeps its data.

The probes change nothing. Results that need rights which this user lacks are reported as unknown.
The most important one needs no rights: whether Redis lets a stranger in.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

from tunemq_scheduler.security.findings import Finding, ok, problem, warning
from tunemq_scheduler.security.missing_rights import lacking, may_write_the_lease, role_of
from tunemq_scheduler.security.own_addresses import own_addresses
from tunemq_scheduler.security.start_up_findings import refuse
from tunemq_scheduler.transport.redis.redis_connection import (
    PROBE,
    RedisConnection,
    RedisRefusesWrites,
)
from tunemq_shared.base.errors import RedisUnavailable, TransportError
from tunemq_shared.base.safe_text import harmless
from tunemq_shared.broker import redis_dangers, redis_keys
from tunemq_shared.broker.redis_address import REDIS_VARIABLE, RedisAddress, parse_address
from tunemq_shared.broker.redis_cves import RedisRelease, release_in_hello, release_in_info
from tunemq_shared.broker.redis_dangers import LACKS_RIGHTS

EVICTION, AOF, WRITES, LUA = "redis-eviction", "redis-aof", "redis-writes", "redis-lua"
RIGHTS, LOGINS, REMOTE_CONTROL = "redis-rights", "redis-logins", "celery-remote-control"

#: A process that Redis does not let in tries again within this time (seconds).
_LOGIN_S: Final = 60.0
_KEEPS_ALL: Final = "noeviction"
#: From this version of Redis and Valkey on, a user's right can be limited to reading a key.
_READ_ONLY_KEYS: Final = (7,)
#: The set of queues for commands to Celery workers: one per worker that has not deregistered.
_PIDBOX: Final = "_kombu.binding.celery.pidbox"
#: Kombu's separator of the parts of a binding.
_BINDING_MARK: Final = b"\x06\x16"
_LOOPBACK: Final = "have it listen on 127.0.0.1 alone (bind in redis.conf)"
_PASSWORDS: Final = (
    f"{_LOOPBACK}, or load deploy/redis/users.acl, which has a user with a password for each role."
)


def refuse_dangers(url: str, *, is_insecure: bool, tell: Callable[[str], None]) -> None:
    """Check that a scheduler may use this Redis.

    Args:
        url: Of Redis.
        is_insecure: ``--insecure`` was given: problems are only shown.
        tell: Shows a line to people.

    Raises:
        ConfigError: It may not; names all problems and their fixes.
        RedisUnavailable: Redis cannot be reached.
    """
    address, line = parse_address(url), RedisConnection(url)
    try:
        line.connect()
        told = _info(line)
        reach = _reach(address, told)
        release = _release(line, told)
        found = [*_check_access(address, release, reach), _check_eviction(address, told)]
    finally:
        line.close()
    refuse(found, is_insecure=is_insecure, tell=tell)


def probe(url: str) -> list[Finding]:
    """Run all checks of a Redis, from this machine and as this user.

    Raises:
        ConfigError: The address is invalid.
        RedisUnavailable: Redis cannot be reached, or rejects the login.
    """
    address, line = parse_address(url), RedisConnection(url)
    try:
        line.connect()
        told = _info(line)
        reach = _reach(address, told)
        release = _release(line, told)
        return [
            *_check_access(address, release, reach),
            _check_lua(reach.address or address, release),
            _check_eviction(address, told),
            _check_aof(address, told),
            _check_writes(address, line),
            _check_rights(address, line, release),
            *_rejected_logins(address, line),
            _check_remote_control(address, line),
        ]
    finally:
        line.close()


def reach_of_others(url: str) -> str:
    """Say how other machines reach this Redis; empty if it is not known that they do.

    Raises:
        ConfigError: The address is invalid.
    """
    address, line = parse_address(url), RedisConnection(url)
    if not address.is_local:
        return f"Redis at {address} is not on this machine"
    try:
        line.connect()
        reach = _reach(address, _info(line))
    except TransportError:
        return ""
    finally:
        line.close()
    return f"other machines reach Redis at {reach.address}" if reach.address else ""


# --- access ---------------------------------------------------------------------------------------


class _Reach(NamedTuple):
    """How other machines reach a Redis to which this one connects by the loopback or a socket.

    Attributes:
        address: At which they reach it; None if they do not, and for other Redis.
        is_open: They need no password there.
        unknown: Why that is not known; else empty.
    """

    address: RedisAddress | None = None
    is_open: bool = False
    unknown: str = ""


def _check_access(address: RedisAddress, release: RedisRelease, reach: _Reach) -> Iterator[Finding]:
    found = list(redis_dangers.dangers(address, release))
    others = []
    if reach.address:
        others = list(_dangers_beyond(address, release, reach.address))
    if reach.is_open:
        what = (
            f"Redis at {address} lets everybody in, from other machines, too, without a"
            f" password: they reach it at {reach.address}."
        )
        found.append(redis_dangers.RedisRisk(redis_dangers.PASSWORD, what, _PASSWORDS))
    fine = {
        redis_dangers.PASSWORD: "strangers are not let in",
        redis_dangers.DEFAULT_USER: f"its user is {address.user!r}",
        redis_dangers.TLS: "what goes there is encrypted",
        redis_dangers.CVE: f"{release} does not have CVE-2026-23479",
    }
    if address.is_local and not reach.address:
        fine = dict.fromkeys(fine, reach.unknown or f"other machines do not reach {address}")
    fine[redis_dangers.VERSION] = str(release)
    for check, words in fine.items():
        wrong = [danger for danger in found if danger.check == check]
        beyond = [danger for danger in others if danger.check == check]
        if check == redis_dangers.PASSWORD and reach.unknown:
            yield warning(check, f"{reach.unknown}.", _PASSWORDS)
        elif (
            not (wrong or beyond)
            and not release.version
            and check in {redis_dangers.VERSION, redis_dangers.CVE}
        ):
            yield _unknown(check, address, "INFO")
        elif not (wrong or beyond):
            yield ok(check, words)
        yield from (problem(check, one.what, one.fix, refuses=True) for one in wrong)
        # It asks others for a password, and perhaps only this machine uses it.
        yield from (warning(check, one.what, one.fix) for one in beyond)


def _reach(address: RedisAddress, told: dict[str, str]) -> _Reach:
    """Try whether other machines could reach a local Redis.

    Redis's own settings do not answer that: in a container it listens on all addresses, but only
    this machine may be forwarded to it.
    """
    if not address.is_local:
        return _Reach()
    unknown = f"whether other machines reach Redis at {address} is not known"
    if address.path and "tcp_port" not in told:
        user = address.user or "default"
        return _Reach(unknown=f"{unknown}: the user {user!r} may not ask for its port (INFO)")
    port = int(told["tcp_port"]) if address.path else address.port
    if not port:
        return _Reach()
    # A unix socket does not tell whether Redis uses TLS on its port.
    ways = (False, True) if address.path else (address.tls,)
    try:
        hosts = own_addresses()
    except OSError as error:
        return _Reach(unknown=f"{unknown}: {error}")
    places = [
        address._replace(path="", host=host, port=port, tls=tls, verify=False)
        for host in hosts
        for tls in ways
    ]
    reached = next(filter(redis_dangers.is_there, places), None)
    return _Reach(reached, is_open=bool(reached and redis_dangers.lets_everybody_in(reached)))


def _dangers_beyond(
    address: RedisAddress, release: RedisRelease, reached: RedisAddress
) -> Iterator[redis_dangers.RedisRisk]:
    """Iterate over the dangers of a local Redis for those who reach it from other machines."""
    # `verify` was off for the attempt alone.
    for one in redis_dangers.dangers_with_password(reached._replace(verify=True), release):
        what = f"Other machines reach Redis at {address}, too: they reach it at {reached}. "
        yield one._replace(what=what + one.what, fix=f"{_LOOPBACK}, or {one.fix}")


def _check_lua(address: RedisAddress, release: RedisRelease) -> Finding:
    """Check for CVEs of Lua scripts: at most a warning, since only the scheduler runs scripts."""
    if not release.number:
        return _unknown(LUA, address, "INFO")
    if address.is_local or not release.has_lua_cves:
        return ok(
            LUA, f"other machines do not reach {address}" if address.is_local else str(release)
        )
    return warning(
        LUA,
        f"Redis at {address} is {release}: users who may run Lua scripts can have it run code"
        " (CVE-2025-49844 and others), unless it is a vendor's package that has the fix (a"
        " backport). Of deploy/redis/users.acl only the scheduler's user may run scripts.",
        "install Redis 6.2.20, 7.2.11, 7.4.6, 8.0.4, 8.2.2 or later of its line (Valkey 7.2.11,"
        " 8.0.6, 8.1.4), or such a package; and load deploy/redis/users.acl of this version.",
    )


def _check_rights(address: RedisAddress, line: RedisConnection, release: RedisRelease) -> Finding:
    if address.is_default_user:  # `redis-default-user` reports that already
        return ok(RIGHTS, "it is the default user, see redis-default-user")
    role = role_of(address.user)
    if lacks := lacking(line, role):
        return problem(
            RIGHTS,
            f"{address.user!r} lacks rights that a {role} needs in Redis at {address}:"
            f" {', '.join(lacks)}.",
            f"{LACKS_RIGHTS}: redis-cli ACL SETUSER {address.user}"
            f" {' '.join(f'+{command}' for command in lacks)}, or ACL LOAD.",
        )
    if release.number >= _READ_ONLY_KEYS and may_write_the_lease(line, role):
        return warning(
            RIGHTS,
            f"{address.user!r} may write {redis_keys.SCHEDULER} in Redis at {address}, which a"
            f" {role} only reads: a forged one keeps schedulers from starting.",
            "load deploy/redis/users.acl of this version (its %R~KEY needs Redis 7).",
        )
    if _asked(line, "CONFIG", "GET", "maxmemory-policy") is None:
        return ok(RIGHTS, f"{address.user!r} has the rights of a {role}, and may not administer it")
    return warning(
        RIGHTS,
        f"{address.user!r} may administer Redis at {address}, which no part of a farm needs.",
        "give it the rights that its role has in deploy/redis/users.acl.",
    )


def _rejected_logins(address: RedisAddress, line: RedisConnection) -> Iterator[Finding]:
    """Report users whose logins Redis rejects now; yields nothing without the right to see them."""
    for entry in _asked(line, "ACL", "LOG") or ():
        facts = dict(zip(entry[::2], entry[1::2], strict=True))
        if facts[b"reason"] != b"auth" or float(facts[b"age-seconds"]) > _LOGIN_S:
            continue
        user = harmless(facts[b"username"].decode(errors="replace"))
        place = re.search(rb"addr=(\S+)", facts[b"client-info"])
        where = f" from {harmless(place[1].decode(errors='replace'))}" if place else ""
        yield warning(
            LOGINS,
            f"Redis at {address} refuses the login of {user!r}{where}: its password there is"
            " another one.",
            f"write its present password into ${REDIS_VARIABLE} of that process and start it"
            f" again, or give that user this password back in Redis (ACL SETUSER).",
        )


# --- data -----------------------------------------------------------------------------------------


def _check_eviction(address: RedisAddress, told: dict[str, str]) -> Finding:
    policy, limit = told.get("maxmemory_policy"), told.get("maxmemory", "0")
    if policy is None:
        return _unknown(EVICTION, address, "INFO")
    if policy == _KEEPS_ALL:
        return ok(EVICTION, f"maxmemory-policy {_KEEPS_ALL}")
    what = f"Redis at {address} has the maxmemory-policy {policy}"
    fix = (
        f"redis-cli CONFIG SET maxmemory-policy {_KEEPS_ALL}, and the same line in redis.conf: then"
        " it refuses what it has no memory for, and nodes wait."
    )
    if limit != "0":
        used = told.get("maxmemory_human", limit)
        what += f": when its {used} are used up it deletes orders and results of trials."
    else:
        what += "; should it get a maxmemory, it will delete orders and results of trials."
    if limit == "0" and not policy.startswith("allkeys-"):
        return warning(EVICTION, what, fix)
    return problem(EVICTION, what, fix, refuses=True)


def _check_aof(address: RedisAddress, told: dict[str, str]) -> Finding:
    is_on = told.get("aof_enabled")
    if is_on is None:
        return _unknown(AOF, address, "INFO")
    if is_on == "1":
        return ok(AOF, "appendonly yes")
    return problem(
        AOF,
        f"Redis at {address} keeps nothing on disk: a restart of it loses requests that the"
        " scheduler has not begun, and nodes must resend events that no journal has.",
        "redis-cli CONFIG SET appendonly yes, and the same line in redis.conf.",
    )


def _check_writes(address: RedisAddress, line: RedisConnection) -> Finding:
    try:
        line.ask([PROBE])
    except RedisUnavailable:
        raise
    except RedisRefusesWrites as error:
        what = (
            f"{error.what} Nodes and scheduler seem to be away, and are not looked at: their leases"
            " cannot be renewed."
        )
        return problem(WRITES, what, error.fix)
    except TransportError:
        return _unknown(WRITES, address, "SETRANGE")
    return ok(WRITES, "it takes orders and results")


# --- other clients --------------------------------------------------------------------------------


def _check_remote_control(address: RedisAddress, line: RedisConnection) -> Finding:
    queues = _asked(line, "SMEMBERS", _PIDBOX)
    if queues is None:
        return _unknown(REMOTE_CONTROL, address, f"SMEMBERS {_PIDBOX}")
    if not queues:
        return ok(REMOTE_CONTROL, "no Celery worker takes commands from others")
    names = ", ".join(sorted(map(_worker_name, queues)))
    return problem(
        REMOTE_CONTROL,
        f"Celery workers on Redis at {address} do what anybody there broadcasts, such as"
        f" `shutdown`: {names}.",
        "give them another Redis, or set worker_enable_remote_control = False; of one that was"
        f" killed a trace is left: redis-cli DEL {_PIDBOX}",
    )


def _worker_name(binding: bytes) -> str:
    queue = binding.rpartition(_BINDING_MARK)[2].decode(errors="replace")
    return queue.removesuffix(".celery.pidbox")


# --- requests -------------------------------------------------------------------------------------


def _info(line: RedisConnection) -> dict[str, str]:
    """Redis's ``INFO``; empty if this user may not ask for it."""
    text = _asked(line, "INFO")
    if text is not None:
        lines = text.decode(errors="replace").splitlines()
        return dict(one.split(":", 1) for one in lines if ":" in one)
    return {}


def _release(line: RedisConnection, told: dict[str, str]) -> RedisRelease:
    return release_in_info(told) if told else release_in_hello(_asked(line, "HELLO", "2"))


def _asked(line: RedisConnection, *command: str) -> Any:
    """The answer to a command; None if Redis rejects it or does not know it.

    Raises:
        RedisUnavailable: The connection broke.
    """
    try:
        return line.ask([command])[0]
    except RedisUnavailable:
        raise
    except TransportError:
        return None


def _unknown(check: str, address: RedisAddress, command: str) -> Finding:
    return warning(
        check,
        f"{check} was not looked at: the user {address.user or 'default'!r} may not ask Redis at"
        f" {address} ({command}).",
        f"look as the scheduler's user of deploy/redis/users.acl, who may do {command}.",
    )
