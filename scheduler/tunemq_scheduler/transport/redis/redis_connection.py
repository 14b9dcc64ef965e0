"""`RedisConnection`: a connection that sends commands and reads their replies separately.

redis-py's client waits for each reply. A loop that waits for Redis and for Ctrl-C at once needs the
socket. And it can read an "OK" a turn later instead of waiting for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from redis import ConnectionPool
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)
from redis.retry import Retry

from tunemq_scheduler.transport.redis.bounded_replies import BoundedParser, TooLong
from tunemq_shared.base.errors import RedisRejectsUser, RedisUnavailable, TransportError
from tunemq_shared.broker import redis_keys
from tunemq_shared.broker.redis_address import parse_address
from tunemq_shared.broker.redis_dangers import LACKS_RIGHTS, login_rejected

RedisCommand = Sequence[str | bytes | int]

#: Limits for connecting, and for waiting for a reply.
_TIMEOUT_S: Final = 5.0
_CONNECT_TIMEOUT_S: Final = 2.0


#: In the answer of a Redis that cannot write to its disk; of a script, Redis 6.2 says more before.
_NO_DISK: Final = "MISCONF"
#: In the answer of a Redis that must not write without its replicas.
_TOO_FEW_REPLICAS: Final = "NOREPLICAS"


#: A full Redis rejects this command; otherwise it has no effect, also on a missing key.
PROBE: Final[RedisCommand] = ("SETRANGE", redis_keys.GENERATION, "0", "")


class RedisRefusesWrites(TransportError):
    """Redis rejects writes until a person fixes it; reads still work.

    Attributes:
        what: the problem, in a sentence.
        fix: what to do about it.
    """

    def __init__(self, what: str, fix: str) -> None:
        super().__init__(f"{what} To fix it: {fix}")
        self.what, self.fix = what, fix


class RedisIsReplica(RedisUnavailable):
    """Redis is a read-only replica of another."""


class RedisFull(RedisRefusesWrites):
    """Redis has no memory for a write; reads and deletions still work."""

    def __init__(self, what: str) -> None:
        super().__init__(
            what,
            "raise maxmemory in redis.conf and restart Redis, or redis-cli CONFIG SET maxmemory"
            " MORE as its administrator.",
        )


class ReplyTooLong(RedisUnavailable):
    """A reply exceeded the memory limit: the connection was closed; commands may have run."""


class RedisConnection:
    """A connection that `connect` opens, and opens again after an error.

    Args:
        url: ``unix://``, ``redis://`` or ``rediss://``.

    Raises:
        ConfigError: this is not an address of Redis.
    """

    def __init__(self, url: str) -> None:
        address = parse_address(url)
        #: For messages, in which it shows no password.
        self.address = address
        pool = ConnectionPool.from_url(
            address.url(),
            protocol=2,
            parser_class=BoundedParser,
            socket_timeout=_TIMEOUT_S,
            socket_connect_timeout=_CONNECT_TIMEOUT_S,
            retry=Retry(NoBackoff(), 0),  # callers retry: they know what they may repeat
            driver_info=None,
        )
        self._connection: Any = pool.make_connection()
        self.is_open = False
        self._due = 0

    def connect(self) -> None:
        """Open the connection, if it is not open.

        Raises:
            RedisUnavailable: there is no answer.
        """
        if self.is_open:
            return
        self.close()  # a reply on the old connection would be mistaken for a new one
        try:
            self._connection.connect()
        except RedisError as error:
            raise self._broken(error) from error
        self.is_open = True

    def fileno(self) -> int:
        """Return the socket, for `select`; a reply makes it readable."""
        # redis-py has no public access to it; kombu does the same.
        descriptor: int = self._connection._sock.fileno()  # noqa: SLF001
        return descriptor

    def post(self, commands: Sequence[RedisCommand]) -> None:
        """Send commands; their replies are read before the next commands are sent.

        Raises:
            TransportError: an earlier command failed (its reply is read here); these were not sent.
            RedisFull: an earlier command failed for lack of memory; these were not sent.
            RedisUnavailable: the connection broke; the commands may or may not have run.
        """
        self._settle()
        self._send(commands)

    def ask(self, commands: Sequence[RedisCommand]) -> list[Any]:
        """Send commands and return their replies.

        Raises:
            TransportError: Redis rejected a command; all replies were read.
            RedisRefusesWrites: Redis rejected a command because it cannot write to its disk.
            ReplyTooLong: a reply was too long to read.
            RedisFull: a command failed for lack of memory, or an earlier posted one did and these
                were not sent.
            RedisUnavailable: the connection broke; the commands may or may not have run.
        """
        self._settle()
        self._send(commands)
        return self._settle()

    def receive(self) -> Any:
        """Return the reply to the one posted command; waits for it."""
        if not self._due:  # the connection was closed meanwhile, and the reply is lost
            raise self._broken("the connection is closed")
        return self._settle()[0]

    def close(self) -> None:
        """Close the connection; pending replies are lost."""
        self._connection.disconnect()
        self.is_open, self._due = False, 0

    def unexpected(self, reply: object) -> RedisUnavailable:
        """Close the connection because a reply does not match its command; return the error."""
        return self._broken(f"unexpected reply of type {type(reply).__name__}")

    def _send(self, commands: Sequence[RedisCommand]) -> None:
        if not self.is_open:  # redis-py would reconnect and break the count of replies
            raise self._broken("the connection is closed")
        try:
            self._connection.send_packed_command(self._connection.pack_commands(commands))
        except RedisError as error:
            raise self._broken(error) from error
        self._due += len(commands)

    def _settle(self) -> list[Any]:
        try:
            return self._read()
        finally:
            if self._due:  # a signal or a redis-py error: the remaining replies are never read
                self.close()

    def _read(self) -> list[Any]:
        replies: list[Any] = []
        # Later commands often fail only because an earlier one was refused.
        rejected: ResponseError | None = None
        while self._due:
            try:
                replies.append(self._connection.read_response())
            except BusyLoadingError as error:  # this lasts for a while
                raise self._broken(error) from error
            except ReadOnlyError as error:  # until a new primary is chosen, or the address changed
                self.close()
                raise RedisIsReplica(f"Redis at {self.address} is a read-only replica.") from error
            except ResponseError as error:
                rejected = rejected or error
            except TooLong as error:
                self.close()
                raise ReplyTooLong(f"Redis at {self.address}: {error}") from error
            except RedisError as error:
                raise self._broken(error) from error
            self._due -= 1
        if rejected is not None:
            raise self._refused(rejected) from rejected
        return replies

    def _refused(self, rejected: ResponseError) -> TransportError:
        said = str(rejected)
        if isinstance(rejected, OutOfMemoryError) or "-OOM " in said:  # in a script of Redis 6.2
            return RedisFull(
                f"Redis at {self.address} is full, and refuses orders and results ({said})."
            )
        _, no_disk, why = said.partition(_NO_DISK)
        if no_disk:
            return RedisRefusesWrites(
                f"Redis at {self.address} cannot write to its disk, and refuses orders and results"
                f" ({no_disk}{why.partition('.')[0]}).",
                "make room on the disk of Redis' `dir` (redis-cli CONFIG GET dir; df), and see that"
                " its user may write there; its log says why it fails.",
            )
        if _TOO_FEW_REPLICAS in said:
            return RedisRefusesWrites(
                f"Redis at {self.address} has too few replicas, and refuses orders and results.",
                "start its replicas, or redis-cli CONFIG SET min-replicas-to-write 0.",
            )
        return TransportError(
            f"Redis at {self.address} refused a command: {said}{rights_fix(rejected)}"
        )

    def _broken(self, error: object) -> RedisUnavailable:
        self.close()
        if isinstance(error, AuthenticationError):
            return RedisRejectsUser(login_rejected(self.address, error))
        return RedisUnavailable(f"Redis at {self.address} cannot be reached: {error}")


def rights_fix(rejected: BaseException) -> str:
    """Return advice if the Redis user, or a script, lacks a right; else an empty string."""
    lacks = isinstance(rejected, NoPermissionError) or any(
        words in str(rejected) for words in ("executing the script can't run", "NOPERM")
    )
    return f"; {LACKS_RIGHTS}" if lacks else ""
