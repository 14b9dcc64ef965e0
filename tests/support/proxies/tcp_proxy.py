"""A TCP proxy that fails as a network does (cut, silent, one-way, slow) and alters task messages.

    with TcpProxy(server.path) as proxy:              # a unix socket, or (host, port)
        node = ...                                    # uses proxy.url
        proxy.go_silent()                             # half-open: nothing arrives, no error
        proxy.heal()

A silent proxy drops the data and forgets the connections: after `heal` those connections stay
silent for ever, as behind a router that has forgotten them; new ones work.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any, Self, TypeVar

from tunemq_shared.broker import redis_keys

T = TypeVar("T")

#: The directions, as the client sees them.
UP, DOWN = "up", "down"
_PIECE = 65536
_REMEMBERED = 1000
_QUEUES = redis_keys.queue("").encode()
#: A message that is held back to be overtaken is let go after so long.
_HELD_S = 0.3


class TcpProxy:
    """Listens on a port of this machine and passes everything on to ``target``.

    Args:
        target: the path of a unix socket, or host and port.
    """

    def __init__(self, target: str | tuple[str, int]) -> None:
        self.target = target
        #: Bytes that arrived, by direction.
        self.moved = {UP: 0, DOWN: 0}
        #: Connections that were accepted.
        self.accepted = 0
        #: How task messages are altered; see `tamper`.
        self.tampering: Tampering | None = None
        self._silent: set[str] = set()
        self._held: set[str] = set()
        self._delay_s = 0.0
        self._bytes_per_s = float("inf")
        self._refuses = False
        self._links: set[_Link] = set()
        self._sock = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.port: int = self._sock.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._changed = asyncio.Condition()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tcp proxy", daemon=True)
        self._thread.start()
        self._ready.wait()

    @property
    def url(self) -> str:
        """The proxy as the address of Redis."""
        return f"redis://127.0.0.1:{self.port}/0"

    # --- faults; all take effect at once, and last until `heal` ---------------------------------

    def cut(self, *, stay: bool = False) -> None:
        """Reset all connections (RST); new ones are welcome, or with ``stay`` are reset too."""

        def now() -> None:
            self._refuses = stay
            for link in list(self._links):
                link.reset()

        self._do(now)

    def go_silent(self, *directions: str) -> None:
        """Drop all data in these directions (`UP`, `DOWN`; both by default) without RST or FIN.

        The proxy accepts new connections, which are silent, too.
        """
        self._do(lambda: self._silent.update(directions or (UP, DOWN)))

    def silence(self, said: bytes) -> int:
        """Silence for ever the connections whose client recently sent `said`; return how many."""

        def now() -> int:
            found = [link for link in self._links if said in link.said and not link.lost]
            for link in found:
                link.lost |= {UP, DOWN}
            return len(found)

        return self._do(now)

    def hold(self, *directions: str) -> None:
        """Hold data back; `heal` passes it all on, late and complete."""
        self._do(lambda: self._held.update(directions or (UP, DOWN)))

    def slow(self, *, delay_s: float = 0.0, bytes_per_s: float = float("inf")) -> None:
        """Delay each piece by `delay_s` seconds, pass at most `bytes_per_s` bytes per second."""

        def now() -> None:
            self._delay_s, self._bytes_per_s = delay_s, bytes_per_s

        self._do(now)

    def tamper(
        self, *, double: float = 0.0, swap: float = 0.0, lose: float = 0.0, seed: int = 0
    ) -> Tampering:
        """Double, swap (with the next one) or lose task messages, each with this probability.

        The publisher is answered as if nothing had happened.
        """
        tampering = Tampering(self.target, double, swap, lose, random.Random(seed))
        self._do(lambda: setattr(self, "tampering", tampering))
        return tampering

    def heal(self) -> None:
        """End all faults but tampering."""

        async def now() -> None:
            async with self._changed:
                self._refuses = False
                self._silent.clear()
                self._held.clear()
                self._delay_s, self._bytes_per_s = 0.0, float("inf")
                self._changed.notify_all()

        asyncio.run_coroutine_threadsafe(now(), self._loop).result(60)

    def close(self) -> None:
        """End it, and all connections through it."""
        if self._loop.is_closed():
            return
        self.heal()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- its thread -----------------------------------------------------------------------------

    def _do(self, call: Callable[[], T]) -> T:
        async def in_loop() -> T:
            return call()

        return asyncio.run_coroutine_threadsafe(in_loop(), self._loop).result(60)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, sock=self._sock))
        self._ready.set()
        self._loop.run_forever()
        server.close()
        for link in list(self._links):
            link.reset()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        if self._refuses:
            _reset(writer)
            return
        try:
            if isinstance(self.target, str):
                there = await asyncio.open_unix_connection(self.target)
            else:
                there = await asyncio.open_connection(*self.target)
        except OSError:
            _reset(writer)
            return
        link = _Link(writer, there[1])
        self._links.add(link)
        # Cancelled when the proxy is closed, which asyncio's streams take for an error.
        with contextlib.suppress(asyncio.CancelledError):
            await self._serve_link(link, (reader, writer), there)

    async def _serve_link(
        self,
        link: _Link,
        here: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        there: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    ) -> None:
        reader, writer = here
        try:
            await asyncio.gather(
                self._pass_on(link, UP, reader, there[1], writer),
                self._pass_on(link, DOWN, there[0], writer, there[1]),
            )
        finally:
            self._links.discard(link)
            for one in (writer, there[1]):
                one.close()

    async def _pass_on(
        self,
        link: _Link,
        direction: str,
        source: asyncio.StreamReader,
        sink: asyncio.StreamWriter,
        back: asyncio.StreamWriter,
    ) -> None:
        parser = _Parser()
        try:
            while data := await source.read(_PIECE):
                self.moved[direction] += len(data)
                if direction == UP:
                    link.said = (link.said + data)[-_REMEMBERED:]
                if direction in self._silent:
                    link.lost.add(direction)
                if direction in link.lost:
                    continue
                if self._delay_s or self._bytes_per_s < float("inf"):
                    await asyncio.sleep(self._delay_s + len(data) / self._bytes_per_s)
                async with self._changed:
                    await self._changed.wait_for(lambda: direction not in self._held)
                if direction in self._silent or direction in link.lost:
                    link.lost.add(direction)
                    continue
                if direction == UP and self.tampering is not None:
                    data = self.tampering.edit(parser, data, back)
                sink.write(data)
                await sink.drain()
        except OSError:
            link.reset()
            return
        if link.lost or self._silent:  # a peer behind a dead link does not notice its end
            return
        with contextlib.suppress(OSError):
            sink.write_eof()


class _Link:
    """One connection through the proxy.

    ``lost`` are the directions in which bytes were dropped; ``said`` is the recent data of its
    client.
    """

    def __init__(self, *ends: asyncio.StreamWriter) -> None:
        self._ends = ends
        self.lost: set[str] = set()
        self.said = b""

    def reset(self) -> None:
        for end in self._ends:
            _reset(end)


def _reset(writer: asyncio.StreamWriter) -> None:
    sock = writer.get_extra_info("socket")
    if sock.family != socket.AF_UNIX:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


class Tampering:
    """Alters task messages, the ``LPUSH`` into a node's queue, and counts them.

    Duplicates and reordered messages go to Redis on a separate connection, so that the publisher's
    replies stay in step.
    """

    def __init__(
        self,
        target: str | tuple[str, int],
        double: float,
        swap: float,
        lose: float,
        chance: random.Random,
    ) -> None:
        self._target, self._chance = target, chance
        self._double, self._swap, self._lose = double, swap, lose
        self._waiting: dict[bytes, list[bytes]] = {}
        self._task: set[asyncio.Task[None]] = set()
        self.seen = self.doubled = self.swapped = self.lost = 0
        #: How many for the same node were lost one after another, now and at most.
        self._in_a_row: dict[bytes, int] = {}
        self.lost_in_a_row = 0

    def edit(self, parser: _Parser, data: bytes, back: asyncio.StreamWriter) -> bytes:
        """Return the bytes to pass on to Redis in the place of ``data``."""
        passed = b""
        for command, raw in parser.feed(data):
            is_command = len(command) == 3 and command[0].upper() == b"LPUSH"
            if not is_command or not command[1].startswith(_QUEUES):
                passed += raw
                continue
            self.seen += 1
            key = command[1]
            held = self._waiting.pop(key, [])
            drawn = self._chance.random()
            if drawn < self._lose:
                self.lost += 1
                self._in_a_row[key] = self._in_a_row.get(key, 0) + 1
                self.lost_in_a_row = max(self.lost_in_a_row, self._in_a_row[key])
                back.write(b":1\r\n")
                later = held
            elif not held and drawn < self._lose + self._swap:
                back.write(b":1\r\n")
                self._waiting[key] = [raw]
                self._start(self._let_go(key, raw))
                continue
            else:
                passed += raw
                self._in_a_row[key] = 0
                self.swapped += len(held)
                later = held
                if drawn >= 1 - self._double:
                    self.doubled += 1
                    later = [*held, raw]
            if later:
                self._start(self._push(later))
        return passed

    async def _let_go(self, key: bytes, raw: bytes) -> None:
        await asyncio.sleep(_HELD_S)
        if self._waiting.get(key) == [raw]:
            del self._waiting[key]
            await self._push([raw])

    async def _push(self, raw: list[bytes]) -> None:
        with contextlib.suppress(OSError):  # Redis may be away: then they are lost
            if isinstance(self._target, str):
                reader, writer = await asyncio.open_unix_connection(self._target)
            else:
                reader, writer = await asyncio.open_connection(*self._target)
            writer.write(b"".join(raw))
            for _ in raw:
                await reader.readline()
            writer.close()

    def _start(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._task.add(task)
        task.add_done_callback(self._task.discard)


class _Parser:
    """Cuts a stream of RESP commands into whole ones."""

    def __init__(self) -> None:
        self._data = b""

    def feed(self, data: bytes) -> Iterator[tuple[list[bytes], bytes]]:
        """The commands that are complete: their parts, and the bytes as they came."""
        self._data += data
        while (end := self._end_of_command()) is not None:
            raw, self._data = self._data[:end], self._data[end:]
            yield self._parts, raw

    def _end_of_command(self) -> int | None:
        first = self._data.find(b"\r\n")
        if first < 0:
            return None
        self._parts: list[bytes] = []
        at = first + 2
        if not self._data.startswith(b"*"):  # an inline command
            self._parts = self._data[:first].split()
            return at
        for _ in range(int(self._data[1:first])):
            line = self._data.find(b"\r\n", at)
            if line < 0:
                return None
            size = int(self._data[at + 1 : line])
            at = line + 2 + size + 2
            if len(self._data) < at:
                return None
            self._parts.append(self._data[line + 2 : at - 2])
        return at
