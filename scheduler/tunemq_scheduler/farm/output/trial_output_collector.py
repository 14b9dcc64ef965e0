"""`OutputReader`: writes the output of trials on nodes into the folders of their experiments.

It has a separate thread and connection: output is the least important data, so neither a slow disk
nor a silent Redis may delay the supervisor because of it.
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
#: Nodes send the last lines within this time after a trial process has ended.
_AFTER_S: Final = 5.0
#: How long `close` waits for a disk or a Redis that does not respond.
_CLOSE_WITHIN_S: Final = 5.0


class OutputReader:
    """Reads the output streams of running experiments.

    Args:
        url: the Redis address.
        notices: shows a line to people; called from another thread.
        opened: verifies a piece of output for an event key; called from another thread.
        rejected: receives a stream of the wrong type; called from another thread.
    """

    def __init__(
        self, url: str, notices: Callable[[str], None], opened: OpenChunk, rejected: OnKeyRejected
    ) -> None:
        self._rejected = rejected
        self._connection = RedisConnection(url)
        self._notices, self._opened = notices, opened
        #: Streams to follow since the last poll, the newest last; some may have ended meanwhile.
        self._wanted: deque[dict[str, tuple[Path, str]]] = deque([{}])
        self._files: dict[str, TrialOutputFiles] = {}
        #: Until when the streams of ended experiments are read.
        self._until: dict[str, float] = {}
        self._changed = threading.Event()
        self._is_closed = False
        #: Experiments whose problem was reported.
        self._told: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="output", daemon=True)

    def start(self) -> None:
        """Start reading."""
        self._thread.start()

    def follow(self, streams: dict[str, tuple[Path, str]]) -> None:
        """Set the streams to read: by experiment, its folder and its event key."""
        self._wanted.append(streams)

    def close(self) -> None:
        """Read the remaining output and stop; does not wait long."""
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
                self._connection.close()  # the supervisor reports that Redis is away

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
            except (TransportError, OSError) as error:  # others must still be read
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
            except ReplyTooLong:  # nodes do not write that much; some output may be lost
                self._connection.connect()
                self._connection.ask([("DEL", files.key)])
                text = "A stream of what trials print was too long to be read: it is deleted."
                self._rejected("output", "oversized", text)
                return
            more = files.answered(reply)
