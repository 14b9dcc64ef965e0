"""A small Redis client for nodes: one connection, pipelines, and no automatic retry.

redis-py would add 70 ms to a node's start and 15 MiB to its memory. Since its version 8 it also
repeats commands whose reply was lost, but the event publisher has to know which commands those are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import BinaryIO, Final, TypeAlias

from tunemq_shared.base.errors import RedisRejectsUser, RedisUnavailable, TransportError
from tunemq_shared.broker.redis_address import RedisAddress
from tunemq_shared.broker.redis_dangers import LACKS_RIGHTS, LOGIN_REJECTED, login_rejected

RedisArgument: TypeAlias = bytes | bytearray | str | int
RedisCommand: TypeAlias = Sequence[RedisArgument]

_CONNECT_TIMEOUT_S: Final = 2.0
#: Seconds to wait for a reply. Shorter than the lease, so that a node finds a dead connection and
#: opens another before its lease expires.
_REPLY_TIMEOUT_S: Final = 3.0
#: Limits that no reply of Redis to a node exceeds; a server that does is not Redis.
_LONGEST_LINE: Final = 2**16
_LONGEST_NUMBER: Final = 20
_LARGEST: Final = 2**63
_MOST_BYTES: Final = 2**29
_MOST_ITEMS: Final = 2**20
_DEEPEST: Final = 4


class RedisCommandError(TransportError):
    """Redis answered a command with an error; the connection stays usable."""

    @property
    def is_full(self) -> bool:
        """Whether Redis lacks the memory that the command needs."""
        return str(self).startswith("OOM ")

    @property
    def is_wrong_type(self) -> bool:
        """Whether the key has another type in Redis than the farm gives it."""
        return str(self).startswith("WRONGTYPE ")


RedisReply: TypeAlias = "bytes | int | list[RedisReply] | RedisCommandError | None"


class RedisClient:
    """One connection; any error but a `RedisCommandError` reply closes it.

    Args:
        address: the address of Redis.

    Raises:
        RedisUnavailable: Redis is unreachable.
        RedisRejectsUser: Redis rejects the credentials.
    """

    def __init__(self, address: RedisAddress) -> None:
        self._address = address
        try:
            self._sock = address.connect(_CONNECT_TIMEOUT_S)
        except OSError as problem:
            raise RedisUnavailable(f"Redis at {address} cannot be reached: {problem}.") from problem
        self._sock.settimeout(_REPLY_TIMEOUT_S)
        self._replies: BinaryIO = self._sock.makefile("rb")
        self._greet()

    def pipeline(self, commands: Sequence[RedisCommand]) -> list[RedisReply]:
        """Send all commands, then read all replies; a rejected command's is a `RedisCommandError`.

        Raises:
            RedisUnavailable: the connection broke or a reply is overdue; some commands may be done.
        """
        try:
            self._sock.sendall(pack(commands))
            return [self._read() for _ in commands]
        except OSError as problem:
            self.close()
            raise RedisUnavailable(f"Redis at {self._address} was lost: {problem}.") from problem

    def close(self) -> None:
        """Close the connection; may be called again."""
        with contextlib.suppress(OSError):
            self._replies.close()
            self._sock.close()

    def _greet(self) -> None:
        address, commands = self._address, list[RedisCommand]()
        if address.password:
            who = [address.user] if address.user else []
            commands.append(["AUTH", *who, address.password])
        if address.database:
            commands.append(["SELECT", address.database])
        for reply in self.pipeline(commands) if commands else ():
            if isinstance(reply, RedisCommandError):
                self.close()
                raise user_rejected(address, "the login", reply)

    def _read(self, depth: int = 0) -> RedisReply:
        line = self._replies.readline(_LONGEST_LINE)
        if not line.endswith(b"\r\n"):
            if len(line) == _LONGEST_LINE:
                raise _other_protocol(line)
            raise ConnectionResetError("it closed the connection")
        kind, rest = line[:1], line[1:-2]
        if kind == b"$":
            return self._read_bytes(_number(rest, _MOST_BYTES))
        if kind == b":":
            return _number(rest, _LARGEST)
        if kind == b"+":
            return rest
        if kind == b"-":
            text = rest.decode(errors="replace")
            return RedisCommandError(
                f"{text}; {LACKS_RIGHTS}" if text.startswith("NOPERM ") else text
            )
        if kind == b"*" and depth < _DEEPEST:
            count = _number(rest, _MOST_ITEMS)
            return None if count < 0 else [self._read(depth + 1) for _ in range(count)]
        raise _other_protocol(line)

    def _read_bytes(self, size: int) -> bytes | None:
        if size < 0:
            return None
        data = self._replies.read(size + 2)
        if len(data) != size + 2:
            raise ConnectionResetError("it closed the connection")
        return data[:-2]


def user_rejected(address: RedisAddress, what: str, reply: RedisCommandError) -> RedisRejectsUser:
    """Return the error for a reply without which a connection is useless."""
    if str(reply).startswith(LOGIN_REJECTED):
        return RedisRejectsUser(login_rejected(address, reply))
    return RedisRejectsUser(f"Redis at {address} refuses {what}: {reply}.")


def _number(text: bytes, most: int) -> int:
    """Parse an integer of a reply, at most ``most``."""
    if len(text) > _LONGEST_NUMBER or not text.removeprefix(b"-").isdigit():
        raise _other_protocol(text)
    number = int(text)
    if not -_LARGEST <= number <= most:
        raise _other_protocol(text)
    return number


def _other_protocol(said: bytes) -> ConnectionAbortedError:
    return ConnectionAbortedError(f"it speaks another protocol ({said[:40]!r})")


def pack(commands: Sequence[RedisCommand]) -> bytes:
    """Encode ``commands`` in the Redis protocol."""
    parts: list[bytes | bytearray] = []
    for command in commands:
        parts.append(b"*%d\r\n" % len(command))
        for argument in command:
            raw = argument if isinstance(argument, bytes | bytearray) else str(argument).encode()
            parts += (b"$%d\r\n" % len(raw), raw, b"\r\n")
    return b"".join(parts)
