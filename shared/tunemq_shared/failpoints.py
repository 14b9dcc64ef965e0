"""Places in the real code where a test, or a curious person, lets a process fail on purpose.

``TUNEMQ_FAILPOINTS`` says which, for each process that finds it in its environment:

    upload.before_manifest=kill                  SIGKILL to oneself, the first time it is reached
    upload.before_manifest=kill@3                ... the third time that this process reaches it
    cache.before_copy=error,written.before_send=delay:0.5

``error`` raises OSError(EIO), ``delay`` sleeps so many seconds. Times are counted in each process
from its start, which for a forked one is its fork.
"""

from __future__ import annotations

import errno
import itertools
import math
import os
import signal
import time
from collections.abc import Iterator
from types import MappingProxyType
from typing import Final, NamedTuple

from tunemq_shared.errors import BugError, ConfigError

VARIABLE: Final = "TUNEMQ_FAILPOINTS"

#: Every place, one before and one after each step that is durable once it is done.
FAILPOINTS: Final = MappingProxyType(
    {
        "cache.before_copy": "host: nothing of a checkpoint is copied yet",
        "cache.after_copy": "host: all files of a checkpoint are copied, and not its manifest",
        "cache.before_rename": "host: a checkpoint is complete, and not visible yet",
        "cache.after_rename": "host: a checkpoint is visible on the disk",
        "written.before_send": "host: its node has not heard of a written checkpoint",
        "written.after_send": "host: its node was told of a written checkpoint",
        "node.before_written_event": "node: CheckpointWritten is not in the outbox yet",
        "node.after_written_event": "node: CheckpointWritten is in the outbox, its upload is not",
        "node.before_commit_event": "node: an upload is done, its CheckpointCommitted is not sent",
        "node.after_commit_event": "node: CheckpointCommitted is in the outbox",
        "upload.before_object": "transfers: before each file of a checkpoint is sent",
        "upload.within_object": "transfers: between two parts of a large file",
        "upload.after_object": "transfers: after each file of a checkpoint was sent",
        "upload.before_manifest": "transfers: all files are in the store, the manifest is not",
        "upload.after_manifest": "transfers: the manifest is in the store",
        "upload.before_committed_file": "transfers: the cache does not know of the commit yet",
        "upload.after_committed_file": "transfers: the cache knows of the commit",
        "download.before_rename": "transfers: all files are there, and not visible yet",
        "download.after_rename": "transfers: a downloaded checkpoint is visible in the cache",
        "ear.before_handover": "ear: has read an assignment, its node does not have it",
        "ear.after_handover": "ear: its node has an assignment",
        "orders.before_obey": "node: an assignment was handed over, nothing is done about it",
        "orders.after_obey": "node: hosts are what an assignment says, the lease does not tell",
        "events.before_spill": "node: the outbox is too large for memory, and not on disk yet",
        "events.after_spill": "node: a block of the outbox is on disk, and in memory still",
        "events.before_send": "node: events are in the outbox, and not in the stream",
        "events.after_send": "node: events are in the stream, the outbox does not know it",
        "events.before_release": "node: events are journalled, and in the outbox still",
        "events.after_release": "node: the outbox has forgotten what is journalled",
        "lease.before_send": "node: its lease is to be made or renewed",
        "lease.after_send": "node: its lease was made or renewed",
        "hello.before_send": "node: it is to introduce itself",
        "hello.after_send": "node: it has introduced itself",
        "goodbye.before_send": "node: all its hosts are gone, and nobody knows that it ends",
        "goodbye.after_send": "node: it said goodbye, and still runs",
        "journal.before_append": "scheduler: a turn is not in the journal yet",
        "journal.after_append": "scheduler: a turn is in the journal, its commands not performed",
        "journal.before_history": "scheduler: a snapshot begins, its finished trials not written",
        "journal.after_history": "scheduler: the history knows what a snapshot will refer to",
        "journal.before_snapshot": "scheduler: nothing of a snapshot's file is written",
        "journal.after_snapshot": "scheduler: a snapshot is written, and not visible yet",
        "journal.before_segment": "scheduler: the segment behind a snapshot is not made",
        "journal.after_segment": "scheduler: the segment behind a snapshot is there",
        "journal.before_snapshot_rename": "scheduler: a snapshot is complete, and does not count",
        "journal.after_snapshot_rename": "scheduler: a snapshot counts",
        "journal.before_removal": "scheduler: what older snapshots needed is still there",
        "journal.after_removal": "scheduler: what older snapshots needed is removed",
        "tuner.before_rename": "scheduler: what a restore needs is written, and not visible yet",
        "tuner.after_rename": "scheduler: what a restore needs is there",
        "queue.before_rename": "scheduler: a change of the queue is written, and not visible yet",
        "queue.after_rename": "scheduler: a change of the queue is visible, nobody was told",
        "queue.before_removal": "scheduler: an experiment is to be forgotten, and is queued yet",
        "queue.after_removal": "scheduler: an experiment is forgotten, nobody was told",
        "requests.after_taken": "scheduler: a request was taken from Redis, and is not done yet",
        "requests.after_done": "scheduler: a request was done, and is not remembered yet",
        "requests.after_record": "scheduler: a request is remembered, and not answered yet",
        "orders.before_send": "scheduler: what a node is to host is journalled, and not sent",
        "orders.after_send": "scheduler: what a node is to host is in its queue",
        "delete.before_manifest": "scheduler: a condemned checkpoint is still whole",
        "delete.after_manifest": "scheduler: a condemned checkpoint has no manifest any more",
        "delete.before_objects": "scheduler: objects that nothing refers to are still there",
        "delete.after_objects": "scheduler: objects that nothing refers to are removed",
        "serve.before_rename": "store serve: an object is complete, and not visible yet",
        "serve.after_rename": "store serve: an object is visible, its client does not know it",
    }
)

_KILL, _ERROR, _DELAY = "kill", "error", "delay"


class _Action(NamedTuple):
    what: str
    seconds: float
    nth: int


class _Armed:
    """The actions at one failpoint; counts how often it was reached."""

    def __init__(self) -> None:
        self.actions: list[_Action] = []
        self._times = itertools.count(1)  # counts without a lock in several threads

    def reached(self, name: str) -> None:
        now = next(self._times)
        for action in self.actions:
            if action.nth == now:
                _perform(name, action)


#: None until the environment was looked at; empty where nothing is to fail.
_armed: dict[str, _Armed] | None = None


def failpoint(name: str) -> None:
    """Fail here if this process was told to; ``name`` is one of `FAILPOINTS`.

    Raises:
        OSError: it was told to raise one here.
        ConfigError: ``TUNEMQ_FAILPOINTS`` cannot be read.
    """
    if _armed is None:
        _arm()
    if _armed:
        if name not in FAILPOINTS:
            raise BugError(f"{name!r} is no failpoint; add it to {__name__}.FAILPOINTS.")
        if name in _armed:
            _armed[name].reached(name)


def check_spec(text: str) -> None:
    """Check a value for ``TUNEMQ_FAILPOINTS``.

    Raises:
        ConfigError: it cannot be read; says which part and why.
    """
    for _ in _parsed(text):
        pass


def _arm() -> None:
    global _armed
    armed: dict[str, _Armed] = {}
    for name, action in _parsed(os.environ.get(VARIABLE, "")):
        armed.setdefault(name, _Armed()).actions.append(action)
    _armed = armed


def _disarm() -> None:
    """A forked process counts for itself, and may have been given another environment."""
    global _armed
    _armed = None


os.register_at_fork(after_in_child=_disarm)


def _parsed(text: str) -> Iterator[tuple[str, _Action]]:
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, rest = part.partition("=")
        if not equals:
            raise _wrong(part, "it must be name=action")
        if name not in FAILPOINTS:
            raise _wrong(part, f"there is no failpoint {name!r}; there are {', '.join(FAILPOINTS)}")
        what, at, nth = rest.partition("@")
        what, colon, seconds = what.partition(":")
        if what not in (_KILL, _ERROR, _DELAY) or bool(colon) != (what == _DELAY):
            raise _wrong(part, "the action must be kill, error or delay:SECONDS")
        yield name, _Action(what, _seconds(part, seconds), _nth(part, nth) if at else 1)


def _seconds(part: str, text: str) -> float:
    try:
        seconds = float(text or 0)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise _wrong(part, "delay needs a number of seconds, as in delay:0.5")
    return seconds


def _nth(part: str, text: str) -> int:
    if not (text.isascii() and text.isdecimal() and int(text) > 0):
        raise _wrong(part, "after @ comes the how-manieth time, from 1")
    return int(text)


def _wrong(part: str, reason: str) -> ConfigError:
    return ConfigError(f"{VARIABLE} has {part!r}: {reason}.")


def _perform(name: str, action: _Action) -> None:
    if action.what == _KILL:
        os.kill(os.getpid(), signal.SIGKILL)
    elif action.what == _ERROR:
        raise OSError(errno.EIO, f"failpoint {name}")
    else:
        time.sleep(action.seconds)
