"""`TransferClient`: the node's end of its transfers, with their listeners and timeouts.

The transfers process holds no state: when it dies, the node starts another and repeats all
unfinished orders, since every transfer may be done twice. A trial can make files that kill the
process, so after a death one trial's files are sent at a time, and given up after the second.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final

import msgspec

from tunemq_shared.objects.store_traffic import StoreTraffic
from tunemq_workers.processes.child_process import ChildProcess
from tunemq_workers.processes.child_supervisor import ChildSupervisor
from tunemq_workers.runtime import transfer_messages as messages
from tunemq_workers.runtime.reactor import Reactor, Timer, cancel, do_nothing

#: Seconds that the process may take to stop a cancelled transfer: a read from a store that does not
#: answer times out earlier.
_LEAVING_S: Final = 90.0
#: Seconds without work after which the node ends the process, to free its clients' memory.
_IDLE_S: Final = 60.0

#: How often the process may die while it sends a trial's files.
_MAX_DEATHS: Final = 2

#: Seconds for which `try_store` tries a store, and the pause before it tries again.
_TRIED_S: Final = 3600.0
_TRY_AGAIN_S: Final = 60.0

_log = logging.getLogger(__name__)


class _Listener(msgspec.Struct, eq=False):
    """A caller that waits for a transfer."""

    id: int
    job: _Job
    timeout_s: float
    on_done: Callable[[messages.UploadResult | None], object]
    on_failed: Callable[[str, bool], None]
    on_trouble: Callable[[str], None]
    on_disk_failed: Callable[[str], None] | None = None
    timer: Timer | None = None
    is_late: bool = False


class _Job(msgspec.Struct, eq=False):
    """One transfer, as the transfers process knows it."""

    id: int
    transfer: messages.Transfer
    listeners: list[_Listener] = []
    #: The current process has the order and has not answered it.
    is_begun: bool = False
    #: ... and has the order to abandon it.
    is_abandoned: bool = False
    #: How often the process died during it, for a trial's files.
    deaths: int = 0
    #: Why the transfer is delayed now; and why it was delayed last.
    trouble: str = ""
    problem: str = ""

    @property
    def is_wanted(self) -> bool:
        """Whether a listener waits whose timeout has not passed."""
        return not all(listener.is_late for listener in self.listeners)


class TransferClient:
    """Upload and download in a child process, which the first transfer starts. Never blocks.

    Use it in the reactor's thread, because the child ends with the thread that started it. For each
    transfer exactly one of ``on_done`` and ``on_failed`` is called, once, and only after `start`
    has returned. After that call the transfer is no longer active, unless other listeners wait for
    it.

    * ``on_done`` takes an upload's result; None for other transfers.
    * ``on_failed`` takes the reason, and whether the source is damaged or missing, so that a retry
      cannot succeed.
    * ``on_disk_failed``, if given, is called instead of ``on_failed`` if the local disk rejects the
      data.
    * ``on_trouble`` takes the reason for a delay, for people, and "" when the transfer continues.

    Args:
        reactor: runs the callbacks.
        start: starts a transfers process.
        children: the pids of the node's own children; receives the process's.
    """

    def __init__(
        self, reactor: Reactor, *, start: Callable[[], ChildProcess], children: set[int]
    ) -> None:
        #: Takes the reason why the process ended, unless the node ended it.
        self.on_death: Callable[[str], object] = do_nothing
        self._reactor = reactor
        self._ids = itertools.count(1)
        self._jobs: dict[int, _Job] = {}
        self._fetched: dict[tuple[str, ...], _Job] = {}
        self._listeners: dict[int, _Listener] = {}
        self._idle: Timer | None = None
        #: Store traffic of earlier processes, and of the present one.
        self._traffic_before = self._traffic = StoreTraffic()
        self._child = ChildSupervisor(
            reactor,
            "transfers",
            start,
            children,
            on_up=self._begin_all,
            decode=messages.decode_answer,
            on_answer=self._answered,
            on_end=self._child_ended,
        )

    def __len__(self) -> int:
        """Return the number of transfers that have a listener."""
        return sum(1 for job in self._jobs.values() if job.listeners)

    @property
    def pid(self) -> int | None:
        """The pid of the transfers process; None if there is none."""
        return self._child.pid

    @property
    def traffic(self) -> StoreTraffic:
        """Store traffic since the node began."""
        return self._traffic_before.plus(self._traffic)

    def start(
        self,
        transfer: messages.Transfer,
        on_done: Callable[[messages.UploadResult | None], object],
        on_failed: Callable[[str, bool], None],
        on_trouble: Callable[[str], None],
        on_disk_failed: Callable[[str], None] | None = None,
    ) -> int:
        """Begin a transfer, or join one that fetches the same; return a number for `cancel`."""
        target = _target(transfer)
        job = self._fetched.get(target)
        if job is None:
            number = next(self._ids)
            job = self._jobs[number] = _Job(number, transfer)
            if target:
                self._fetched[target] = job
            self._begin(job)
        number, timeout_s = next(self._ids), transfer.timeout_s
        listener = _Listener(number, job, timeout_s, on_done, on_failed, on_trouble, on_disk_failed)
        listener.timer = self._reactor.after(timeout_s, partial(self._time_is_over, listener))
        self._listeners[number] = listener
        job.listeners.append(listener)
        if job.trouble:
            self._reactor.after(0.0, lambda: self._tell([listener], job.trouble))
        return number

    def try_store(self, store: str) -> None:
        """Test a store until it answers; meanwhile `traffic` contains the problem."""

        def failed(_reason: str, _is_corrupt: bool) -> None:
            self._reactor.after(_TRY_AGAIN_S, lambda: self.try_store(store))

        def trouble(reason: str) -> None:
            if reason:
                _log.warning("store.unusable store=%s reason=%s", store, reason)
            else:
                _log.info("store.answers store=%s", store)

        self.start(messages.TryStore(store, _TRIED_S), lambda _: None, failed, trouble)

    def cancel(self, number: int) -> None:
        """Stop waiting without a callback; ignored if the transfer has ended."""
        listener = self._listeners.get(number)
        if listener is None:
            return
        self._dismiss(listener)
        if not listener.job.is_wanted and listener.job.id in self._jobs:
            self._abandon(listener.job)

    def close(self) -> None:
        """End the process and drop all transfers without callbacks."""
        for listener in list(self._listeners.values()):
            self._dismiss(listener)
        self._jobs.clear()
        self._fetched.clear()
        cancel(self._idle)
        self._child.close()

    # --- orders to the process ----------------------------------------------------------------

    def _begin(self, job: _Job) -> None:
        """Order the transfer from the process; if there is none, start it and order later."""
        if _sends_files(job) and self._must_wait():
            return
        if self._child.is_up:
            job.is_begun, job.is_abandoned = True, False
            self._child.send(messages.encode(messages.BeginTransfer(job.id, job.transfer)))
        else:
            self._child.start_if_none()

    def _must_wait(self) -> bool:
        """Whether a trial's files are being sent alone, to find out whether they are deadly."""
        jobs = self._jobs.values()
        are_sent = any(_sends_files(one) and one.is_begun for one in jobs)
        return are_sent and any(one.deaths for one in jobs)

    def _begin_all(self) -> None:
        jobs = list(self._jobs.values())
        for job in jobs:
            self._begin(job)
        for job in jobs:
            self._set_trouble(job, "")

    def _abandon(self, job: _Job) -> None:
        """Order the process to abandon an unwanted transfer; the job stays until it answers."""
        if not job.is_begun:
            self._over(job)
        elif not job.is_abandoned:
            job.is_abandoned = True
            self._child.send(messages.encode(messages.AbandonTransfer(job.id)))

    def _forget(self, job: _Job) -> None:
        del self._jobs[job.id]
        self._fetched.pop(_target(job.transfer), None)
        if _sends_files(job) and self._child.is_up:
            for one in self._jobs.values():
                if not one.is_begun and _sends_files(one):
                    self._begin(one)
        if not self._jobs:
            cancel(self._idle)
            self._idle = self._reactor.after(_IDLE_S, self._rest)

    def _rest(self) -> None:
        if not self._jobs:
            self._child.end()

    # --- answers, timeouts and failures -------------------------------------------------------

    def _answered(self, answer: messages.TransferAnswer) -> None:
        if isinstance(answer, messages.TransferTraffic):
            self._traffic = answer.traffic
            return
        job = self._jobs.get(answer.id)
        if job is None:  # a callback for the answer before this one closed the client
            return
        match answer:
            case messages.TransferRetrying(_, reason):
                self._set_trouble(job, reason)
            case messages.TransferDone(_, uploaded):
                job.is_begun = False
                # A listener that joined after the abandonment may have removed the files since.
                if job.is_abandoned and job.is_wanted:
                    self._over(job)
                else:
                    self._forget(job)
                    self._finish(job.listeners, lambda listener: listener.on_done(uploaded))
            case messages.TransferFailed(_, reason, is_corrupt, is_disk):
                job.is_begun = False
                if job.is_abandoned and not is_corrupt:
                    self._over(job)
                else:
                    self._forget(job)
                    self._finish(
                        job.listeners,
                        lambda who: (
                            who.on_disk_failed(reason)
                            if is_disk and who.on_disk_failed is not None
                            else who.on_failed(reason, is_corrupt)
                        ),
                    )

    def _over(self, job: _Job) -> None:
        """Handle the end of an abandoned job: fail late listeners, restart it for others."""
        late = [listener for listener in job.listeners if listener.is_late]
        if job.is_wanted:
            self._begin(job)
        else:
            self._forget(job)
        self._finish(late, self._give_up)

    def _child_ended(self, why: str) -> None:
        self._traffic_before, self._traffic = self.traffic.ended, StoreTraffic()
        if why:
            self.on_death(why)
        reason = (
            f"the transfers process died {_MAX_DEATHS} times while it sent them ({why});"
            " if memory ran out, have the trial write fewer files."
        )
        jobs = list(self._jobs.values())
        for job in jobs:
            job.deaths += job.is_begun and _sends_files(job)
            job.is_begun = False
        for job in jobs:
            if job.id in self._jobs and job.deaths == _MAX_DEATHS:
                self._forget(job)
                self._finish(job.listeners, lambda listener: listener.on_failed(reason, False))
            elif job.id in self._jobs:
                self._over(job)
                self._set_trouble(job, why)

    def _time_is_over(self, listener: _Listener) -> None:
        listener.is_late = True
        if listener.job.is_wanted:  # by other listeners
            self._finish([listener], self._give_up)
            return
        self._abandon(listener.job)
        if listener.id in self._listeners:
            listener.timer = self._reactor.after(_LEAVING_S, partial(self._is_stuck, listener.job))

    def _is_stuck(self, job: _Job) -> None:
        _log.error("transfers.stuck transfer=%r", job.transfer)
        self._child.end(f"the transfers process could not leave {_name(job)}")

    def _give_up(self, listener: _Listener) -> None:
        problem = listener.job.problem or "it was still going on"
        after = f"{listener.timeout_s:g} s"
        listener.on_failed(f"it was given up after {after}: {problem}", False)

    def _set_trouble(self, job: _Job, reason: str) -> None:
        if reason != job.trouble:
            job.trouble = reason
            job.problem = reason or job.problem
            self._tell(job.listeners, reason)

    def _tell(self, listeners: Iterable[_Listener], trouble: str) -> None:
        for listener in list(listeners):
            if listener.id in self._listeners and not listener.is_late:
                listener.on_trouble(trouble)

    def _finish(self, listeners: Iterable[_Listener], call: Callable[[_Listener], object]) -> None:
        for listener in list(listeners):
            # an earlier callback may have cancelled it
            if listener.id in self._listeners:
                self._dismiss(listener)
                call(listener)

    def _dismiss(self, listener: _Listener) -> None:
        del self._listeners[listener.id]
        listener.job.listeners.remove(listener)
        cancel(listener.timer)


def _target(transfer: messages.Transfer) -> tuple[str, ...]:
    """Return a key that equal fetches share; () for uploads, which are never shared."""
    match transfer:
        case messages.FetchBlob():
            return transfer.store, transfer.blob.sha256, transfer.folder
        case messages.DownloadCheckpoint():
            return transfer.store, transfer.key, transfer.sha256, transfer.folder
        case _:
            return ()


def _sends_files(job: _Job) -> bool:
    return isinstance(job.transfer, messages.UploadTrialFiles)


def _name(job: _Job) -> str:
    if isinstance(job.transfer, messages.FetchBlob):
        return f"the blob {job.transfer.blob.sha256}"
    if isinstance(job.transfer, messages.TryStore):
        return f"the test of {job.transfer.store}"
    if isinstance(job.transfer, messages.UploadTrialFiles):
        return f"the files of {job.transfer.key}"
    kind = "upload" if isinstance(job.transfer, messages.UploadCheckpoint) else "download"
    return f"the {kind} of checkpoint {job.transfer.key}"
