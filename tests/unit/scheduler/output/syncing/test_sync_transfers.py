"""One transfer at a time in a thread, with timeout, cancellation and fencing."""

from __future__ import annotations

import logging
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from tests.support.waiting import eventually
from tunemq_scheduler.output.syncing.background_syncer import BackgroundSyncer, SyncCommand
from tunemq_scheduler.output.syncing.background_transfer import BackgroundTransfer
from tunemq_scheduler.output.syncing.syncer import Syncer
from tunemq_shared.base.errors import ConfigError, TuneError
from tunemq_shared.base.retrying import CancelToken, TransferCancelled


class Gate:
    """A transfer that blocks until the test opens the gate; counts the concurrent transfers."""

    def __init__(self) -> None:
        self.is_open = threading.Event()
        self.at_work = self.most_at_work = self.begun = 0
        self.outcome: Callable[[], Any] = lambda: "done"
        self.cancel: CancelToken | None = None
        self._lock = threading.Lock()

    def pass_through(self, *_args: Any, cancel: CancelToken, **_named: Any) -> Any:
        with self._lock:
            self.at_work += 1
            self.most_at_work = max(self.at_work, self.most_at_work)
            self.cancel = cancel
            self.begun += 1  # last, so that a reader who sees it sees the other values, too
        self.is_open.wait(60)
        with self._lock:
            self.at_work -= 1
        cancel.check()
        return self.outcome()

    def be_reached(self) -> None:
        """Return when a transfer is running; one that is cancelled earlier never begins."""
        eventually(lambda: self.begun)


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.is_open.set()


# --- BackgroundTransfer ---------------------------------------------------------------------------


@pytest.mark.parity(150)
def test_transfer_runs_in_the_background_and_once(gate: Gate) -> None:
    transfer = BackgroundTransfer(gate.pass_through, 60)
    assert transfer.is_running
    gate.is_open.set()
    transfer.wait()
    assert not transfer.is_running
    transfer.wait()
    assert gate.begun == 1


@pytest.mark.parity(150)
def test_transfer_error_is_raised_by_wait_once(gate: Gate) -> None:
    gate.is_open.set()
    gate.outcome = lambda: 1 // 0
    transfer = BackgroundTransfer(gate.pass_through, 60)
    with pytest.raises(ZeroDivisionError):
        transfer.wait()
    transfer.wait()


@pytest.mark.parity(150)
def test_transfer_timeout_counts_from_its_start(gate: Gate) -> None:
    transfer = BackgroundTransfer(gate.pass_through, 60)
    gate.be_reached()
    assert not transfer.is_overdue
    transfer.timeout_s = 0.05
    eventually(lambda: transfer.is_overdue)
    with pytest.raises(TimeoutError, match=r"it took longer than 0.05 s"):
        transfer.wait(10)
    assert not transfer.is_running


def test_transfer_that_observes_its_timeout_itself_timed_out_too() -> None:
    def heeds(*, cancel: CancelToken) -> None:
        while True:
            cancel.check()
            cancel.pause(0.01)

    transfer = BackgroundTransfer(heeds, 0.05)
    eventually(lambda: not transfer.is_running)
    with pytest.raises(TimeoutError, match=r"it took longer than 0.05 s"):
        transfer.wait()


@pytest.mark.parity(151)
def test_no_transfer_starts_beside_one_that_timed_out(gate: Gate) -> None:
    first = BackgroundTransfer(gate.pass_through, 60)
    gate.be_reached()
    with pytest.raises(TimeoutError):
        first.wait(0.01)
    second = BackgroundTransfer(gate.pass_through, 60, after=first)
    third = BackgroundTransfer(gate.pass_through, 60, after=second)
    assert (gate.begun, gate.at_work) == (1, 1)
    gate.is_open.set()
    second.wait()
    third.wait()
    assert (gate.begun, gate.most_at_work) == (3, 1)


@pytest.mark.parity(151)
def test_transfer_that_timed_out_is_cancelled_and_its_successor_is_not(gate: Gate) -> None:
    seen: list[type[BaseException] | None] = []

    def cancellable(*, cancel: CancelToken) -> None:
        try:
            gate.pass_through(cancel=cancel)
        except TransferCancelled as error:
            seen.append(type(error))
            raise
        seen.append(None)

    first = BackgroundTransfer(cancellable, 60)
    gate.be_reached()
    with pytest.raises(TimeoutError):
        first.wait(0.01)
    second = BackgroundTransfer(cancellable, 60, after=first)
    gate.is_open.set()
    second.wait()
    assert seen == [TransferCancelled, None]


@pytest.mark.parity(151)
def test_transfer_behind_one_that_never_ends_times_out_itself(gate: Gate) -> None:
    first = BackgroundTransfer(gate.pass_through, 60)
    gate.be_reached()
    with pytest.raises(TimeoutError):
        first.wait(0.01)
    second = BackgroundTransfer(gate.pass_through, 0.05, after=first)
    with pytest.raises(TimeoutError):
        second.wait()
    assert gate.begun == 1


def test_transfer_end_is_reported_when_its_outcome_is_available(gate: Gate) -> None:
    told = threading.Event()
    states: list[bool] = []

    def on_end() -> None:
        states.append(transfer.is_running)
        told.set()

    transfer = BackgroundTransfer(gate.pass_through, 60, on_end=on_end)
    gate.is_open.set()
    assert told.wait(60)
    assert states == [False]


def test_transfer_that_is_cancelled_raises_in_wait(gate: Gate) -> None:
    transfer = BackgroundTransfer(gate.pass_through, 60)
    transfer.cancel()
    gate.is_open.set()
    with pytest.raises(TransferCancelled):
        transfer.wait()


# --- BackgroundSyncer -----------------------------------------------------------------------------


class GatedSyncer(BackgroundSyncer):
    """A syncer whose transfers only pass a gate."""

    def __init__(self, gate: Gate | None = None, **settings: Any) -> None:
        super().__init__(**settings)
        self.gate = gate

    def _sync_up_command(self, local_path: str, uri: str, exclude: Sequence[str]) -> SyncCommand:
        return self._passing(local_path=local_path, uri=uri, exclude=exclude)

    def _sync_down_command(self, uri: str, local_path: str, exclude: Sequence[str]) -> SyncCommand:
        return self._passing(local_path=local_path, uri=uri, exclude=exclude)

    def _delete_command(self, uri: str) -> SyncCommand:
        return self._passing(uri=uri)

    def _passing(self, **arguments: Any) -> SyncCommand:
        assert self.gate is not None
        return self.gate.pass_through, arguments


@pytest.mark.parity(158)
def test_second_sync_is_skipped_with_a_warning(
    gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    syncer = GatedSyncer(gate, sync_period=0)
    assert syncer.sync_up("/here", "there") is True
    assert syncer.sync_up("/here", "there") is False
    assert syncer.sync_down("there", "/here") is False
    assert syncer.delete("there") is False
    assert "still in progress: copying /here to there is left out" in caplog.text
    gate.is_open.set()
    syncer.wait()
    assert gate.begun == 1


@pytest.mark.parity(158)
def test_overdue_sync_is_given_up_for_the_next_and_only_logged(
    gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    syncer = GatedSyncer(gate, sync_timeout=70)
    syncer.sync_up("/here", "there")
    transfer = syncer._transfer
    assert transfer is not None
    assert transfer.timeout_s == 70
    gate.be_reached()
    transfer.timeout_s = 0.02
    eventually(lambda: transfer.is_overdue)
    assert syncer.sync_up("/here", "there") is True
    assert "The last sync failed: it took longer than 0.02 s" in caplog.text
    gate.is_open.set()
    syncer.wait()
    assert gate.most_at_work == 1


@pytest.mark.parity(158)
def test_unreported_sync_failure_is_logged_by_the_next_sync(
    gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    gate.is_open.set()
    gate.outcome = lambda: 1 // 0
    syncer = GatedSyncer(gate)
    syncer.sync_up("/here", "there")
    eventually(lambda: gate.begun == 1 and gate.at_work == 0)
    syncer._transfer.join()
    gate.outcome = lambda: None
    assert syncer.sync_down("there", "/here") is True
    syncer.wait()
    assert "The last sync failed: the sync failed: integer division" in caplog.text


@pytest.mark.parity(154)
def test_only_a_started_sync_begins_a_new_period(gate: Gate) -> None:
    syncer = GatedSyncer(gate, sync_period=1000)
    syncer.delete("there")
    assert syncer.sync_up_if_needed("/here", "there") is False
    assert syncer.sync_down_if_needed("there", "/here") is False
    gate.is_open.set()
    syncer.wait()
    assert syncer.sync_up_if_needed("/here", "there") is True
    syncer.wait()
    assert syncer.sync_down_if_needed("there", "/here") is True
    syncer.wait()
    assert syncer.sync_up_if_needed("/here", "there") is False


@pytest.mark.parity(160)
def test_failed_sync_is_a_tune_error_and_a_slow_one_a_timeout(gate: Gate) -> None:
    gate.outcome = lambda: 1 // 0
    syncer = GatedSyncer(gate, sync_timeout=60)
    syncer.sync_up("/here", "there")
    with pytest.raises(TimeoutError, match=r"took longer than 0.01 s"):
        syncer.wait(0.01)
    gate.is_open.set()
    syncer.retry()
    with pytest.raises(TuneError, match="the sync failed: integer division") as caught:
        syncer.wait()
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    syncer.wait()


@pytest.mark.parity(160)
def test_retry_without_a_first_sync_is_rejected(gate: Gate) -> None:
    with pytest.raises(TuneError, match="no operation to retry"):
        GatedSyncer(gate).retry()


@pytest.mark.parity(153)
def test_retry_repeats_the_last_command(gate: Gate) -> None:
    gate.is_open.set()
    syncer = GatedSyncer(gate)
    for launch in (lambda: syncer.sync_up("/here", "there"), lambda: syncer.delete("there")):
        launch()
        syncer.wait()
        syncer.retry()
        syncer.retry()  # a second retry starts no concurrent transfer
        syncer.wait()
    assert gate.most_at_work == 1


@pytest.mark.parity(156)
def test_syncer_is_pickled_without_its_transfer_in_flight(gate: Gate) -> None:
    syncer = GatedSyncer(sync_period=7, sync_timeout=80)
    syncer.gate = gate
    syncer.sync_up_if_needed("/here", "there")
    syncer.gate = None
    other = pickle.loads(pickle.dumps(syncer))
    assert (other.sync_period, other.sync_timeout) == (7, 80)
    other.wait()
    with pytest.raises(TuneError, match="no operation to retry"):
        other.retry()
    other.gate = gate
    assert other.sync_up_if_needed("/here", "there") is True
    gate.is_open.set()
    other.wait()
    syncer.wait()


@pytest.mark.parity(156)
def test_close_cancels_the_transfer_in_flight_and_waits_for_its_end(gate: Gate) -> None:
    syncer = GatedSyncer(gate)
    syncer.sync_up("/here", "there")
    gate.be_reached()

    def end_a_little_later() -> None:
        assert gate.cancel is not None
        gate.cancel.pause(60)  # the gate stays closed until the transfer is cancelled
        time.sleep(0.01)
        gate.is_open.set()

    ending = threading.Thread(target=end_a_little_later)
    ending.start()
    syncer.close()
    assert gate.at_work == 0
    ending.join()
    with pytest.raises(TuneError, match="called off"):
        syncer.wait()
    with pytest.raises(TuneError, match="closed"):
        syncer.sync_up("/here", "there")


def test_cancel_ends_the_pauses_between_retries(gate: Gate) -> None:
    gate.is_open.set()
    gate.outcome = lambda: 1 // 0
    syncer = GatedSyncer(gate)
    syncer.sync_up("/here", "there")

    def wait() -> None:
        with pytest.raises(TuneError, match="cancelled"):
            syncer.wait_or_retry(3, 60)
        ended.append(True)

    ended: list[bool] = []
    thread = threading.Thread(target=wait)
    thread.start()
    eventually(lambda: gate.begun == 1)
    syncer.cancel()
    thread.join(60)
    assert ended == [True]
    assert gate.begun == 1


# --- wait_or_retry --------------------------------------------------------------------------------


class Failing(Syncer):
    """Fails a given number of times and records the pauses instead of sleeping."""

    def __init__(self, failures: int, error: type[Exception] = OSError) -> None:
        super().__init__()
        self.failures = failures
        self.error = error
        self.calls: list[str] = []
        self.pauses: list[float] = []

    def sync_up(self, local_dir: str, remote_dir: str, exclude: Any = None) -> bool:
        return True

    def sync_down(self, remote_dir: str, local_dir: str, exclude: Any = None) -> bool:
        return True

    def delete(self, remote_dir: str) -> bool:
        return True

    def wait(self, timeout: float | None = None) -> None:
        self.calls.append("wait")
        if self.failures:
            self.failures -= 1
            raise self.error(f"{self.failures} to come")

    def retry(self) -> None:
        self.calls.append("retry")

    def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)


@pytest.mark.parity(155)
def test_failed_sync_is_retried_until_it_succeeds(caplog: pytest.LogCaptureFixture) -> None:
    syncer = Failing(2, TimeoutError)
    with caplog.at_level(logging.WARNING):
        syncer.wait_or_retry()
    assert syncer.calls == ["wait", "retry", "wait", "retry", "wait"]
    assert caplog.text.count("is tried again after") == 2


@pytest.mark.parity(155)
def test_last_retry_is_waited_for_and_none_follows_it() -> None:
    syncer = Failing(100)
    with pytest.raises(TuneError, match="given up after 2 retries: 97 to come") as caught:
        syncer.wait_or_retry(max_retries=2)
    assert syncer.calls == ["wait", "retry", "wait", "retry", "wait"]
    assert len(syncer.pauses) == 2
    assert isinstance(caught.value.__cause__, OSError)


@pytest.mark.parity(155)
def test_retry_pauses_grow_and_vary_up_to_a_minute() -> None:
    seen: list[list[float]] = []
    for _ in range(20):
        syncer = Failing(100)
        with pytest.raises(TuneError):
            syncer.wait_or_retry(max_retries=6, backoff_s=5)
        seen.append(syncer.pauses)
    for place, longest in enumerate((5, 10, 20, 40, 60, 60)):
        drawn = [pauses[place] for pauses in seen]
        assert all(longest / 2 <= pause <= longest for pause in drawn)
        assert len(set(drawn)) > 10


def test_max_retries_of_zero_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"max_retries=0.*give a whole number from 1"):
        Failing(0).wait_or_retry(max_retries=0)


@pytest.mark.parity(153)
def test_synchronous_syncer_needs_no_wait_and_no_retry() -> None:
    class AtOnce(Failing):
        wait = Syncer.wait
        retry = Syncer.retry

    syncer = AtOnce(0)
    assert syncer.sync_up("/here", "there")
    syncer.wait()
    syncer.retry()
    syncer.cancel()
    syncer.close()
