"""Fake surroundings of a node's trial processes, in memory, which tests control."""

from __future__ import annotations

import hashlib
import itertools
import os
from functools import partial
from pathlib import Path

import msgspec

from tunemq_shared.checkpoints.manifest import COMMITTED, FILES, MANIFEST
from tunemq_shared.protocol.messages import BlobRef, Environment, TrialOrder, TrialSpec, encode
from tunemq_shared.protocol.result_conditions import TO_THE_END
from tunemq_workers.checkpoints import checkpoint_messages
from tunemq_workers.runtime import frames
from tunemq_workers.runtime.transfer_messages import UploadCheckpoint, UploadResult


class Clock:
    """Timers that fire when a test advances the time."""

    def __init__(self):
        self.now = 0.0
        self.timers = []

    def after(self, delay_s, call):
        timer = Timer(self.now + delay_s, call)
        self.timers.append(timer)
        return timer

    def post(self, call):
        call()

    def advance(self, seconds):
        self.now += seconds
        due = [timer for timer in self.timers if timer.at <= self.now]
        self.timers = [timer for timer in self.timers if timer.at > self.now]
        for timer in due:
            if timer.call is not None:
                timer.call()


class Timer:
    def __init__(self, at, call):
        self.at, self.call = at, call

    def cancel(self):
        self.call = None


class FakeConnection:
    """Keeps the decoded messages to a trial process."""

    def __init__(self):
        self.sent = []
        self.unread = []
        self.is_held = self.is_closed = False
        self.on_event = None
        self.on_sent = None

    def send(self, kind, payload):
        if self.on_sent is not None:
            self.on_sent(kind)
        self.sent.append((kind, _DECODERS[kind](payload) if payload else None))

    def hold(self, is_held):
        self.is_held = is_held

    def drain(self):
        for event in self.unread:
            self.on_event(encode(event))

    def close(self):
        self.is_closed = True


_decode_order = msgspec.msgpack.Decoder(TrialOrder).decode
_DECODERS = {
    frames.ORDER: _decode_order,
    frames.NEXT: _decode_order,
    frames.SAVE_ANSWER: checkpoint_messages.decode_save_answer,
    frames.FETCHED: checkpoint_messages.decode_fetched,
}


class FakeDisk:
    """Runs each job at once and reports it when `settle` is called."""

    def __init__(self):
        self.done = []

    def run(self, place, job, then, failed=None):
        try:
            result = job()
        except OSError as problem:
            self.done.append(partial(failed or _raise, problem))
        else:
            self.done.append(lambda: then(result))

    def settle(self):
        while self.done:
            self.done.pop(0)()


def _raise(problem):
    raise problem


class FakeTransfers:
    """Transfers between a node's folders and a store in memory; each ends when a test says so."""

    def __init__(self):
        self.under_way = {}
        self.store = {}
        #: All uploads that began, including finished ones.
        self.uploads = []
        self.downloads = []
        self.is_closed = False
        self.on_death = None
        self._ids = itertools.count(1)

    def start(self, transfer, *callbacks):
        if isinstance(transfer, UploadCheckpoint):
            assert os.path.exists(os.path.join(transfer.folder, MANIFEST)), "it is on the disk"
            assert not transfer.base or os.path.exists(transfer.base)
            self.uploads.append(transfer)
        elif transfer not in self.waited_for:
            assert not os.path.lexists(transfer.folder), "nothing is in its place"
            self.downloads.append(transfer)
        number = next(self._ids)
        self.under_way[number] = (transfer, *callbacks)
        return number

    def cancel(self, number):
        self.under_way.pop(number, None)

    def close(self):
        self.under_way.clear()
        self.is_closed = True

    @property
    def waited_for(self):
        return [transfer for transfer, *_ in self.under_way.values()]

    def keys(self):
        return [transfer.key for transfer in self.waited_for]

    def finish(self, key):
        for transfer, on_done, _, _ in self._end(key):
            if isinstance(transfer, UploadCheckpoint):
                on_done(self._uploaded(transfer))
            else:
                self._downloaded(transfer)
                on_done(None)

    def fail(self, key, reason="the store is away", *, is_corrupt=False):
        for _, _, on_failed, _ in self._end(key):
            on_failed(reason, is_corrupt)

    def trouble(self, key, reason):
        for transfer, _, _, on_trouble in list(self.under_way.values()):
            if transfer.key == key:
                on_trouble(reason)

    def _end(self, key):
        found = [number for number, (one, *_) in self.under_way.items() if one.key == key]
        assert found, f"no transfer of {key} is under way"
        return [self.under_way.pop(number) for number in found]

    def _uploaded(self, upload):
        manifest = f"manifest of {upload.key}".encode()
        sha256 = hashlib.sha256(manifest).hexdigest()
        Path(upload.folder, COMMITTED).write_bytes(manifest)
        self.store[upload.key] = manifest
        return UploadResult(sha256, 10, (), 10)

    def _downloaded(self, download):
        folder = Path(download.folder)
        if not folder.exists():
            (folder / FILES).mkdir(parents=True)
            (folder / FILES / "weights").write_bytes(b"w" * 10)
            manifest = self.store[download.key]
            assert hashlib.sha256(manifest).hexdigest() == download.sha256
            (folder / COMMITTED).write_bytes(manifest)


def start(*, sha="s", reuse=False, cpu=1.0, preload=(), key="events", **how):
    values = {
        "experiment": "e",
        "events_key": key,
        "trial_name": "t",
        "trial_number": 0,
        "folder": "/f",
        "code": BlobRef(sha, 1, "/b"),
        "config": b"",
        "resources": {"cpu": cpu},
        "environment": Environment("python", preload, {}, ()),
        "store": "/s",
        "reuse": reuse,
        "stop_grace_s": 5.0,
    }
    return TrialSpec(**(values | how))


def order(
    trial, begin=None, *, attempt=1, run_until=TO_THE_END, stop=False, pause=False, kill=False
):
    return TrialOrder(trial, attempt, run_until, stop, begin, pause, kill)
