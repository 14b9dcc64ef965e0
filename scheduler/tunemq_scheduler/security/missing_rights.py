"""Find the rights that a role's user lacks in Redis, by commands that change nothing.

`ACL DRYRUN` would tell, but needs an administrator and Redis 7. Redis checks a user's rights before
it looks at the key, so each command is tried on a key that does not exist.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from tunemq_scheduler.transport.redis.redis_connection import (
    RedisCommand,
    RedisConnection,
    rights_fix,
)
from tunemq_shared.base.errors import RedisUnavailable, TransportError
from tunemq_shared.broker import redis_keys

_NOBODY: Final = "doctor-rights"
_REPLY, _LEASE, _ANSWER = (
    redis_keys.reply(_NOBODY),
    redis_keys.lease(_NOBODY),
    redis_keys.answer(_NOBODY),
)
_EVENTS, _QUEUE = redis_keys.events(_NOBODY), redis_keys.queue(_NOBODY)
_PIDBOX: Final = "_kombu.binding.celery.pidbox"
#: LPUSH cannot be tried without effect; no other client sees the key in between.
_PUSH: Final = "redis.call('LPUSH', KEYS[1], '') redis.call('DEL', KEYS[1])"

SCHEDULER: Final = "scheduler"
#: The commands of each role, by the name of its user in deploy/redis/users.acl.
_TRIED: Final[Mapping[str, tuple[RedisCommand, ...]]] = MappingProxyType(
    {
        SCHEDULER: (
            ("INFO", "server"),
            ("TIME",),
            ("SCAN", "0", "MATCH", _LEASE, "COUNT", "1"),
            ("GET", _LEASE),
            ("SET", _LEASE, "", "XX"),
            ("MGET", _LEASE),
            ("DEL", _LEASE),
            ("EXISTS", _EVENTS),
            ("EXPIRE", _REPLY, "1"),
            ("TTL", _EVENTS),
            ("PTTL", _LEASE),
            ("SETRANGE", _LEASE, "0", ""),
            ("HSET", _REPLY, "", "", "without a value"),
            ("SMEMBERS", _PIDBOX),
            ("EVAL", "return 1", "0"),
            ("LLEN", _QUEUE),
            ("XADD", _EVENTS, "NOMKSTREAM", "*", "f", ""),
            ("XDEL", _EVENTS, "1-1"),
            ("XREAD", "COUNT", "1", "STREAMS", _EVENTS, "0"),
            ("XTRIM", _EVENTS, "MAXLEN", "0"),
            ("XGROUP", "CREATE", _EVENTS, "maker", "$"),
            ("XGROUP", "DESTROY", _EVENTS, "maker"),
            ("EVAL", _PUSH, "1", _QUEUE),
        ),
        "worker": (
            ("GET", redis_keys.GENERATION),
            ("SET", _LEASE, "", "XX"),
            ("DEL", _LEASE),
            ("EXISTS", _EVENTS),
            ("EXPIRE", _REPLY, "1"),
            ("PEXPIRE", _LEASE, "1"),
            ("HMGET", _REPLY, "f"),
            ("HDEL", _REPLY, "f"),
            ("BRPOP", _QUEUE, "0.01"),
            ("XADD", _EVENTS, "NOMKSTREAM", "*", "f", ""),
            ("WATCH", redis_keys.GENERATION),
            ("MULTI",),
            ("EXEC",),
        ),
        "submitter": (
            ("GET", _ANSWER),
            ("DEL", _ANSWER),
            ("XADD", _ANSWER, "NOMKSTREAM", "*", "f", ""),
            ("XDEL", redis_keys.REQUESTS, "1-1"),
        ),
        "exporter": (("INFO", "server"), ("LLEN", _QUEUE), ("XLEN", _EVENTS)),
    }
)


def lacking(line: RedisConnection, role: str) -> list[str]:
    """List the commands that its role needs and the connection's user may not run.

    Args:
        line: An open connection.
        role: The name of its user in deploy/redis/users.acl.

    Raises:
        RedisUnavailable: The connection broke.
    """
    found: list[str] = []
    for command in _TRIED[role]:
        if _PUSH in command and {"eval", "del"} & set(found):
            continue  # it would tell nothing, or leave the key
        if not _may(line, command):
            found.append(_name(command))
    return found


def may_write_the_lease(line: RedisConnection, role: str) -> bool:
    """Whether a role that should only read the scheduler's lease can also write it.

    Raises:
        RedisUnavailable: The connection broke.
    """
    # XADD changes nothing at a key of another type.
    probe = ("XADD", redis_keys.SCHEDULER, "NOMKSTREAM", "*", "f", "")
    return role in {"worker", "submitter"} and _may(line, probe)


def role_of(user: str) -> str:
    """The role of a user, by its name; other names count as the scheduler's."""
    return user if user in _TRIED else SCHEDULER


def _may(line: RedisConnection, command: RedisCommand) -> bool:
    try:
        line.ask([command])
    except RedisUnavailable:
        raise
    except TransportError as refused:
        return not rights_fix(refused.__cause__ or refused)
    return True


def _name(command: RedisCommand) -> str:
    """The command's name in ACL's syntax."""
    if _PUSH in command:
        return "lpush"
    name, *rest = (str(part).lower() for part in command)
    return f"{name}|{rest[0]}" if name == "xgroup" else name
