"""One connection to Redis whose commands are sent and whose replies are read apart.

redis-py's client waits for each reply. A loop that has to listen to Redis and to a person's Ctrl-C
at once needs the socket, and one that has better things to do than wait for "OK" reads it a turn
later.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from redis import ConnectionPool
from redis.backoff import NoBackoff
from redis.exceptions import (
    BusyLoadingError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)
from redis.retry import Retry

from tunemq_scheduler.transport.redis.bounded_replies import BoundedParser, TooLong
from tunemq_shared.base.errors import RedisUnavailable, TransportError
from tunemq_shared.broker.redis_address import parse_address
from tunemq_shared.broker.redis_dangers import LACKS_RIGHTS

RedisCommand = Sequence[str | bytes | int]

#: For connecting, and for a reply that is due.
_TIMEOUT_S: Final = 5.0
_CONNECT_TIMEOUT_S: Final = 2.0


#: What the answer of a Redis begins with that cannot write to its disk.
_NO_DISK: Final = "MISCONF"


class RedisRefusesWrites(TransportError):
    """Redis takes no writes until somebody sees to it; reading goes on.

    Attributes:
        what: is wrong, in a sentence.
        fix: what to do about it.
    """

    def __init__(self, what: str, fix: str) -> None:
        super().__init__(f"{what} To mend it: {fix}")
        self.what, self.fix = what, fix


class RedisFull(RedisRefusesWrites):
    """Redis has no memory for what was to be written; reading and removing go on."""

    def __init__(self, what: str) -> None:
        super().__init__(
            what, "redis-cli CONFIG SET maxmemory MORE, and the same line in redis.conf."
        )


class ReplyTooLong(RedisUnavailable):
    """A reply was too long for us: the connection was closed; commands may have been done."""


class RedisConnection:
    """A connection that is opened by `connect` and, after an error, by `connect` again.

    Args:
        url: ``unix://``, ``redis://`` or ``rediss://``.

    Raises:
        ConfigError: it is no address of Redis.
    """

    def __init__(self, url: str) -> None:
        address = parse_address(url)
        #: The place without the credentials, for messages.
        self.address = str(address)
        pool = ConnectionPool.from_url(
            address.url(),
            protocol=2,
            parser_class=BoundedParser,
            socket_timeout=_TIMEOUT_S,
            socket_connect_timeout=_CONNECT_TIMEOUT_S,
            retry=Retry(NoBackoff(), 0),  # repeating is for those who know what is idempotent
            driver_info=None,
        )
        self._connection: Any = pool.make_connection()
        self.is_open = False
        self._due = 0

    def connect(self) -> None:
        """Open the connection, if it is not.

        Raises:
            WireUnavailable: nobody answers there.
        """
        if self.is_open:
            return
        self.close()  # a reply to whoever used the old one would pass for ours
        try:
            self._connection.connect()
        except RedisError as error:
            raise self._broken(error) from error
        self.is_open = True

    def fileno(self) -> int:
        """The socket, to wait for it with `select`; a reply makes it readable."""
        # redis-py has no public way to it; kombu does the same.
        descriptor: int = self._connection._sock.fileno()  # noqa: SLF001
        return descriptor

    def post(self, commands: Sequence[RedisCommand]) -> None:
        """Send commands; their replies are read before anything else is sent.

        Raises:
            WireError: an earlier command failed (its reply is read here); these were not sent.
            RedisFull: likewise, for want of memory.
            WireUnavailable: the connection broke; commands may or may not have been done.
        """
        self._settle()
        self._send(commands)

    def ask(self, commands: Sequence[RedisCommand]) -> list[Any]:
        """Send commands and return their replies.

        Raises:
            WireError: one of them was refused; all replies were read.
            RedisRefusesWrites: likewise, by a Redis that cannot write to its disk.
            ReplyTooLong: a reply was so long that it was not read.
            RedisFull: one was refused for want of memory, or a posted one before them was, and
                these were not sent.
            WireUnavailable: the connection broke; commands may or may not have been done.
        """
        self._settle()
        self._send(commands)
        return self._settle()

    def receive(self) -> Any:
        """The reply to the one command that was posted; waits for it."""
        if not self._due:  # the connection was closed meanwhile, and the reply is lost
            raise self._broken("the connection is closed")
        return self._settle()[0]

    def close(self) -> None:
        """Close the connection; replies that are due are lost."""
        self._connection.disconnect()
        self.is_open, self._due = False, 0

    def unexpected(self, reply: object) -> RedisUnavailable:
        """Close the connection: it gave a reply that is none to what was asked."""
        return self._broken(f"unexpected reply of type {type(reply).__name__}")

    def _send(self, commands: Sequence[RedisCommand]) -> None:
        if not self.is_open:  # redis-py would connect by itself, behind our count of replies
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
            if self._due:  # a signal, or what redis-py raises: what is left is never read
                self.close()

    def _read(self) -> list[Any]:
        replies: list[Any] = []
        rejected: ResponseError | None = None
        full: ResponseError | None = None
        while self._due:
            try:
                replies.append(self._connection.read_response())
            except (BusyLoadingError, ReadOnlyError) as error:  # it will do so for a while
                raise self._broken(error) from error
            except OutOfMemoryError as error:
                full = error
            except ResponseError as error:
                if "-OOM " in str(error):  # in a script of Redis 6.2
                    full = error
                else:
                    rejected = rejected or error
            except TooLong as error:
                self.close()
                raise ReplyTooLong(f"Redis at {self.address}: {error}") from error
            except RedisError as error:
                raise self._broken(error) from error
            self._due -= 1
        if rejected is not None and str(rejected).startswith(_NO_DISK):
            raise RedisRefusesWrites(
                f"Redis at {self.address} cannot write to its disk, and refuses orders and results"
                f" ({str(rejected).partition('.')[0]}).",
                "make room on the disk of Redis' `dir` (redis-cli CONFIG GET dir; df), and see that"
                " its user may write there; its log says why it fails.",
            ) from rejected
        if rejected is not None:
            raise TransportError(
                f"Redis at {self.address} refused a command: {rejected}{rights_fix(rejected)}"
            ) from rejected
        if full is not None:
            raise RedisFull(
                f"Redis at {self.address} is full, and refuses orders and results ({full})."
            ) from full
        return replies

    def _broken(self, error: object) -> RedisUnavailable:
        self.close()
        return RedisUnavailable(f"Redis at {self.address} cannot be reached: {error}")


def rights_fix(rejected: BaseException) -> str:
    """What to do where our user may not give that command, or a script of ours one of its own."""
    lacks = isinstance(rejected, NoPermissionError) or any(
        words in str(rejected) for words in ("executing the script can't run", "NOPERM")
    )
    return f"; {LACKS_RIGHTS}" if lacks else ""
