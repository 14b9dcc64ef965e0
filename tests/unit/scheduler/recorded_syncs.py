"""A user's syncer that only records its work, a callback that uses it, and trials for both."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.waiting import eventually
from tests.unit.scheduler.fake_trials import FakeTrial
from tunemq_scheduler.output.syncing import folder_sync
from tunemq_scheduler.output.syncing import syncer_callback as module
from tunemq_scheduler.output.syncing.syncer import Syncer
from tunemq_scheduler.output.syncing.syncer_callback import SyncerCallback
from tunemq_shared.protocol.messages import CheckpointCommitted


class Counter:
    """Counts the calls of all copies of a `NotingSyncer`."""

    def __init__(self) -> None:
        self.ups: list[tuple[str, str, tuple[str, ...]]] = []
        self.deleted: list[str] = []
        self.closed = 0
        self.at_work = self.most_at_work = 0
        self.is_open = threading.Event()
        self.is_open.set()
        self.failing: dict[str, Exception] = {}
        self.rejections = 0
        self.lock = threading.Lock()

    def __deepcopy__(self, memo: Any) -> Counter:
        return self

    def of(self, name: str) -> int:
        """Return how often the folder was uploaded."""
        return sum(os.path.basename(local) == name for local, _, _ in self.ups)


class NotingSyncer(Syncer):
    """A user's syncer that completes each call at once and only records it."""

    def __init__(self, counter: Counter) -> None:
        super().__init__()
        self.counter = counter

    def sync_up(
        self, local_dir: str, remote_dir: str, exclude: Sequence[str] | None = None
    ) -> bool:
        counter = self.counter
        if counter.rejections:
            counter.rejections -= 1
            return False
        with counter.lock:
            counter.most_at_work = max(counter.at_work + 1, counter.most_at_work)
            counter.at_work += 1
        counter.is_open.wait(60)
        with counter.lock:
            counter.at_work -= 1
        counter.ups.append((local_dir, remote_dir, tuple(exclude or ())))
        if os.path.basename(local_dir) in counter.failing:
            raise counter.failing[os.path.basename(local_dir)]
        return True

    def sync_down(
        self, remote_dir: str, local_dir: str, exclude: Sequence[str] | None = None
    ) -> bool:
        raise AssertionError

    def delete(self, remote_dir: str) -> bool:
        self.counter.deleted.append(remote_dir)
        return True

    def close(self) -> None:
        self.counter.closed += 1

    def pause(self, seconds: float) -> None:
        pass


@pytest.fixture
def counter() -> Iterator[Counter]:
    counter = Counter()
    yield counter
    counter.is_open.set()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "journal").write_bytes(b"j")
    return tmp_path / "experiment"


@pytest.fixture(autouse=True)
def no_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REST_S", 0.01)
    monkeypatch.setattr(module, "ARTIFACTS_REST_S", 0.01)
    monkeypatch.setattr(folder_sync, "PAUSE_S", 0.001)


@pytest.fixture
def make(counter: Counter, folder: Path) -> Callable[..., SyncerCallback]:
    def made(**settings: Any) -> SyncerCallback:
        return SyncerCallback(NotingSyncer(counter), str(folder), "mine://there/e", **settings)

    return made


def trial_in(folder: Path, number: int = 0) -> FakeTrial:
    trial = FakeTrial(number, folder)
    os.makedirs(trial.local_path, exist_ok=True)
    return trial


def tell(callback: SyncerCallback, hook: str, trial: FakeTrial, **more: Any) -> None:
    """Call a hook and end the turn."""
    getattr(callback, hook)(iteration=1, trials=[trial], trial=trial, **more)
    callback.on_step_end(iteration=1, trials=[trial])


def settled(callback: SyncerCallback) -> None:
    """Run turns until no transfer is in flight."""

    def turned() -> bool:
        callback.on_step_end(iteration=1, trials=[])
        return not callback._running and not callback._waiting

    eventually(turned)


def committed(trial: FakeTrial, n: int = 1) -> CheckpointCommitted:
    key = f"{trial.trial_name}/checkpoint_1-{n:06d}"
    os.makedirs(os.path.join(os.path.dirname(trial.local_path), key))
    return CheckpointCommitted(trial.trial_id, 1, n, n, key, "0" * 64, 1)
