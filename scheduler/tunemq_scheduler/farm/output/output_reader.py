"""`OutputReader`: brings what trials print on nodes into the folders of their experiments.

In a thread of its own, with a connection of its own: output is the least important thing that
travels, and neither a slow disk nor a silent Redis may hold up the supervisor for it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Final

from tunemq_scheduler.farm.output.trial_output_files import OpenChunk, TrialOutputFiles
from tunemq_scheduler.transport.redis.key_types import KeyType, OnKeyRejected, clear_wrong_types
from tunemq_scheduler.transport.redis.redis_connection import RedisConnection, ReplyTooLong
from tunemq_shared.base.errors import RedisUnavailable, TransportError

_EVERY_S: Final = 0.5
#: Nodes send the last lines within so long after a host has ended.
_AFTER_S: Final = 5.0
#: So long is waited for a disk or a Redis that does not go on, when all is to end.
_CLOSE_WITHIN_S: Final = 5.0


class OutputReader:
    """Reads the output streams of the experiments that it is to follow.

    Args:
        url: where Redis is.
        news: shows a line to people; called from another thread.
        opened: opens a piece of the experiment with these events, if it is one; likewise.
        refused: is told of a stream that was none; likewise.
    """

    def __init__(
        self, url: str, notices: Callable[[str], None], opened: OpenChunk, rejected: OnKeyRejected
    ) -> None:
        self._rejected = rejected
        self._connection = RedisConnection(url)
        self._notices, self._opened = notices, opened
        #: What was to be followed since the last look, the newest last: some were over before it.
        self._wanted: deque[dict[str, tuple[Path, str]]] = deque([{}])
        self._files: dict[str, TrialOutputFiles] = {}
        #: Until when those that are over are read.
        self._until: dict[str, float] = {}
        self._changed = threading.Event()
        self._is_closed = False
        #: Of which experiments people know that something is wrong.
        self._told: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="output", daemon=True)

    def start(self) -> None:
        """Begin to read."""
        self._thread.start()

    def follow(self, streams: dict[str, tuple[Path, str]]) -> None:
        """From now on read these: by experiment, its folder and the key of its events."""
        self._wanted.append(streams)

    def close(self) -> None:
        """Read what there is, and no more; does not wait for long."""
        self._is_closed = True
        self._changed.set()
        if self._thread.is_alive():
            self._thread.join(_CLOSE_WITHIN_S)
        if not self._thread.is_alive():
            self._connection.close()

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._changed.wait(_EVERY_S) and self._is_closed
            try:
                self._look()
            except RedisUnavailable:
                self._connection.close()  # the supervisor says that Redis is away

    def _look(self) -> None:
        wanted, now = dict(self._wanted[0]), time.monotonic()
        while len(self._wanted) > 1:
            self._wanted.popleft()
            wanted |= self._wanted[0]
        for name, (folder, key) in wanted.items():
            if name not in self._files:
                self._files[name] = TrialOutputFiles(folder, key, self._opened)
            self._until[name] = now + _AFTER_S
        if self._files:
            self._connection.connect()
        for name, files in self._files.items():
            try:
                self._bring(files)
            except RedisUnavailable:
                raise
            except (TransportError, OSError) as error:  # the others' output comes all the same
                if clear_wrong_types(self._connection, {files.key: KeyType.STREAM}, self._rejected):
                    continue
                if name not in self._told:
                    self._told.add(name)
                    self._notices(f"What trials of {name} print cannot be written down: {error}")
        for name in [one for one, until in self._until.items() if now > until]:
            del self._files[name], self._until[name]
            self._told.discard(name)

    def _bring(self, files: TrialOutputFiles) -> None:
        more = True
        while more:
            try:
                (reply,) = self._connection.ask([files.asks()])
            except ReplyTooLong:  # no node writes as much; of output some may be missing
                self._connection.connect()
                self._connection.ask([("DEL", files.key)])
                text = "A stream of what trials print was too long to be read: it is deleted."
                self._rejected("output", "oversized", text)
                return
            more = files.answered(reply)
