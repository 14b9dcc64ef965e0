"""`GpuAvailability`: decide which GPUs a trial process may use now, and which are withheld and why.

A device is *clear* when no evidence says that a process that is gone still holds its memory. After
a process ends, its memory has some time to come back; if it does not, the device is withheld until
it does. A device is also withheld while foreign processes hold much of its memory, and a broken one
until the worker restarts.

An embedded node holds a device only while it uses it: it locks the device before it forks a trial
process there, and releases it after it was clear and idle for a moment. Meanwhile a device that
another node has locked is withheld.

While a device has no trial process of this node, its used memory is compared with the amount that
was used when it last had none. This needs no pids, which mean nothing in a container. While it has
other trial processes, their memory cannot be told apart by amounts, so the processes of the one
that is gone are searched by pid.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Final, NamedTuple

import msgspec

from tunemq_shared.base.byte_sizes import show_bytes
from tunemq_shared.protocol.messages import Gpu
from tunemq_workers.gpu.drivers.gpu_types import GpuProcess, Xid
from tunemq_workers.gpu.drivers.xids import meaning, unusable_after
from tunemq_workers.gpu.gpu_locks import GpuLocks
from tunemq_workers.gpu.gpu_snapshots import DeviceSnapshot, GpuSnapshot, in_words
from tunemq_workers.runtime.reactor import Reactor, Timer, cancel, do_nothing
from tunemq_workers.runtime.trial_process_state import TrialProcess

#: Seconds that memory has to come back after a process ended.
GIVEN_BACK_WITHIN_S: Final = 15.0
#: Seconds between two snapshots: at least and at most while a device is not clear, and while it is
#: withheld.
_PAUSES_S: Final = (0.1, 2.0)
_PAUSE_WITHHELD_S: Final = 3.0
#: Seconds for which a lock is kept after the last process: the next trial mostly follows at once.
GIVE_BACK_IDLE_AFTER_S: Final = 1.0
#: The same as a number of snapshots, where these are slow: a trial that waits for several devices
#: must find the first ones still locked when the last one is clear.
_GIVE_BACK_IDLE_AFTER_SNAPSHOTS: Final = 3
#: Seconds between two checks whether another node still has a device.
_PAUSE_ELSEWHERE_S: Final = 1.0
#: Tolerated excess over the earlier amount: bytes, or part of the device's memory.
_SLACK_BYTES: Final = 300 * 2**20
_SLACK: Final = 0.02
#: Memory from which on a foreign process is reported.
_NOTED_BYTES: Final = 300 * 2**20
#: Part of its memory below which a crowded device is offered again, and above which a device
#: becomes crowded.
_CROWDED: Final = (0.05, 0.1)
#: Tolerated memory of unseen processes on a device that was never clear: bytes, or part of the
#: memory. The processes of a desktop may not be listed.
_UNSEEN_BYTES: Final = 2 * 2**30
_UNSEEN: Final = 0.1
#: Seconds after which a driver that does not report used memory is assumed to never do so. Less
#: than `GIVEN_BACK_WITHIN_S`, or the device would be withheld for a moment.
SILENT_FOR_S: Final = 10.0
#: The reason while the driver has not reported, or cannot report, memory since a process ended.
_UNKNOWN: Final = "the driver does not say whether its memory is given back"

_log = logging.getLogger(__name__)


class GpuObstacle(NamedTuple):
    """Why no process may be forked on a device now; ``is_withheld``: it will last."""

    reason: str
    is_withheld: bool


class _Device(msgspec.Struct, eq=False):
    """The state of a device.

    Attributes:
        memory: its memory in bytes; 0 if unknown.
        processes: names of the trial processes that have it.
        baseline: bytes used without foreign processes when it had no trial process; None: unknown.
        left_at: time since which it was not seen clear; None while it is clear.
        silent_since: time since which snapshots lack used memory; infinite once one had it.
        left: pids with which processes that are gone held it.
        strangers: pids that held it when it had no trial process and was clear.
        foreign: by pid, the reported foreign processes and their descriptions.
        told: the warnings that were sent, as (events stream, text).
        broken, elsewhere, crowded, kept: the reasons to withhold it: it is broken, another node has
            it, foreign processes hold much of it, or a process that is gone still holds it.
        awaited: the reason why it is not clear.
    """

    uuid: str
    memory: float
    processes: set[str] = set()
    baseline: float | None = None
    left_at: float | None = None
    silent_since: float | None = None
    left: set[int] = set()
    strangers: set[int] = set()
    foreign: dict[int, str] = {}
    told: set[tuple[str, str]] = set()
    broken: str = ""
    elsewhere: str = ""
    crowded: str = ""
    kept: str = ""
    awaited: str = ""
    timer: Timer | None = None

    @property
    def withheld(self) -> str:
        """The reason why it is withheld; "" if it is not."""
        return self.broken or self.elsewhere or self.crowded or self.kept

    def is_like_before(self, unexplained: float) -> bool:
        """Return whether ``unexplained`` bytes are no more than when it had no trial process."""
        if self.baseline is None:
            return not self.memory or unexplained <= max(_UNSEEN_BYTES, _UNSEEN * self.memory)
        return unexplained <= self.baseline + max(_SLACK_BYTES, _SLACK * self.memory)


class GpuAvailability:
    """The GPUs of a node and their state. Owned by the node's loop.

    Args:
        gpus: the GPUs that the node offers.
        timers: schedules timeouts.
        poll_within: requests a snapshot of all devices, within seconds, for `seen`.
        now: the monotonic clock, in seconds.
        me: the node's pid; default: this process's.
        locks: locks and releases devices; None: the node owns them permanently.
    """

    def __init__(
        self,
        gpus: Iterable[Gpu],
        timers: Reactor,
        poll_within: Callable[[float], object],
        *,
        now: Callable[[], float] = time.monotonic,
        me: int | None = None,
        locks: GpuLocks | None = None,
    ) -> None:
        #: Called when a device became usable, or is no longer.
        self.on_change: Callable[[], object] = do_nothing
        #: Takes all withheld devices and the reasons, whenever they change.
        self.on_withheld: Callable[[dict[str, str]], object] = do_nothing
        #: Takes (events stream, text) for experiments whose trials use a device.
        self.on_warning: Callable[[str, str], object] = do_nothing
        #: By UUID, descriptions of foreign processes, also on usable devices; replaced, not
        #: changed.
        self.foreign: Mapping[str, str] = {}
        self._timers, self._poll_within, self._now = timers, poll_within, now
        self._locks = locks
        self._is_looking_again = False
        self._snapshot_took_s = 0.0
        self._me = os.getpid() if me is None else me
        self._processes: dict[str, TrialProcess] = {}
        self._pids: dict[str, set[int]] = {}
        self._devices = {gpu.uuid: _Device(gpu.uuid, gpu.memory) for gpu in gpus}
        self._withheld: dict[str, str] = {}
        for device in self._devices.values():  # no snapshot yet
            self._await(device)

    # --- trial processes ------------------------------------------------------------------------

    def obstacle(self, devices: Iterable[str]) -> GpuObstacle | None:
        """Return why no process may be forked on these devices now; None if one may.

        Devices without known UUIDs are ignored.
        """
        found: list[GpuObstacle] = []
        for device in self._known(devices):
            if device.withheld or device.left_at is not None:
                reason = f"GPU {device.uuid}: {device.withheld or device.awaited}"
                found.append(GpuObstacle(reason, bool(device.withheld)))
        return max(found, key=lambda one: one.is_withheld, default=None)

    def claim(self, devices: Iterable[str]) -> None:
        """Lock these devices: all or none, or two nodes could wait for each other for ever.

        The previous holder may have left memory in use, so a snapshot is requested.
        """
        locks, taken = self._locks, list[_Device]()
        if locks is None:
            return
        for device in sorted(self._known(devices), key=lambda one: one.uuid):
            if device.withheld:
                return
            if not locks.has(device.uuid):
                taken.append(device)
        for device in taken:
            device.elsewhere = locks.take(device.uuid)
            if device.elsewhere:
                for one in taken:
                    locks.give_back(one.uuid)
                self._poll_again_later()
                self._tell_of_withheld()
                return
        for device in taken:
            self._await(device)
        if taken:
            self._poll_within(0.0)

    def took(self, process: TrialProcess) -> None:
        """Note that a trial process is forked, with the devices of its start."""
        devices = self._known(process.start.devices)
        if devices:
            self._processes[process.name], self._pids[process.name] = process, set()
        for device in devices:
            device.processes.add(process.name)
            self._tell_of_foreign(device)

    def gone(self, name: str) -> None:
        """Note that a trial process and its process tree are gone; ignored if it had no device."""
        process = self._processes.pop(name, None)
        if process is None:
            return
        pids = self._pids.pop(name)
        for device in self._known(process.start.devices):
            device.processes.discard(name)
            device.left |= pids
            self._await(device)
        self._poll_within(0.0)

    # --- snapshots ------------------------------------------------------------------------------

    def seen(self, snapshot: GpuSnapshot) -> None:
        """Handle a snapshot of all devices."""
        clear = self._clear()
        self._snapshot_took_s = self._now() - snapshot.asked_at
        for xid in snapshot.xids:
            self._complained(xid)
        for uuid, why in snapshot.unusable.items():
            self._devices[uuid].broken = self._devices[uuid].broken or why
        for uuid, one in snapshot.devices.items():
            if not self._devices[uuid].elsewhere:
                self._judge(self._devices[uuid], one, snapshot.asked_at)
        self._look_for_users()
        self.foreign = {
            device.uuid: ", ".join(device.foreign.values())
            for device in self._devices.values()
            if device.foreign
        }
        self._tell(clear)
        pauses = [
            self._pause(one)
            for one in self._devices.values()
            if one.left_at is not None and not one.elsewhere
        ]
        if pauses:
            self._poll_within(min(pauses))

    def _complained(self, xid: Xid) -> None:
        device = self._devices.get(xid.uuid)
        if device is None:
            return
        keys = [self._processes[name].key for name in device.processes]
        users = ", ".join(f"{trial}/{attempt}" for trial, attempt in keys)
        said = meaning(xid.number)
        _log.error("gpu.xid device=%s said=%r trials=%s", xid.uuid, said, users or "none")
        device.broken = device.broken or unusable_after(xid.number)

    def _judge(self, device: _Device, snapshot: DeviceSnapshot, asked_at: float) -> None:
        ours, theirs = self._sorted(device, snapshot.holdings)
        if device.left_at is not None and asked_at >= device.left_at:
            if device.processes:
                device.awaited = _not_back(ours) if ours else ""
            else:
                device.awaited = self._not_like_before(device, snapshot, ours, theirs, asked_at)
            if not device.awaited:
                self._is_clear(device)
        if device.left_at is None and not device.processes:
            device.strangers = {one.pid for one in snapshot.holdings}
            if (rest := _unexplained(snapshot, theirs)) is not None:
                before = rest if device.baseline is None else device.baseline
                device.baseline = min(before, rest)
        self._look_at_others(device, theirs)

    def _sorted(
        self, device: _Device, holdings: Iterable[GpuProcess]
    ) -> tuple[list[GpuProcess], list[GpuProcess]]:
        """Return the holders that are, or may be, processes that are gone, and the foreign ones."""
        ours: list[GpuProcess] = []
        theirs: list[GpuProcess] = []
        for holding in holdings:
            process = next((name for name in device.processes if self._is_of(name, holding)), None)
            if process is not None:
                self._pids[process].add(holding.pid)
            elif holding.pid in device.left or self._me in holding.line:
                ours.append(holding)
            elif holding.line or holding.pid in device.strangers:
                theirs.append(holding)
            elif not device.processes:  # while there are some, it may belong to one of them
                (theirs if device.baseline is None else ours).append(holding)
        return ours, theirs

    def _is_of(self, process: str, holding: GpuProcess) -> bool:
        return holding.pid in self._pids[process] or self._processes[process].pid in holding.line

    def _not_like_before(
        self,
        device: _Device,
        snapshot: DeviceSnapshot,
        ours: list[GpuProcess],
        theirs: list[GpuProcess],
        asked_at: float,
    ) -> str:
        """Say why a device without trial processes is not clear; "" if it is."""
        rest = _unexplained(snapshot, theirs)
        if rest is None:
            if device.silent_since is None:
                device.silent_since = asked_at
            if asked_at - device.silent_since < SILENT_FOR_S:  # the driver may only be slow
                return _UNKNOWN
            return _not_back(ours) if ours else ""
        device.silent_since = math.inf
        if device.is_like_before(rest):
            return ""
        if device.baseline is None and any(one.memory is None for one in theirs):
            return ""  # all of it may be foreign
        if ours:
            return _not_back(ours)
        if device.baseline is None:
            return f"memory not released: {show_bytes(int(rest))} is used by no visible process"
        more = show_bytes(int(rest - device.baseline))
        return f"memory not released: {more} more is used than before, by no visible process"

    # --- foreign processes ----------------------------------------------------------------------

    def _look_at_others(self, device: _Device, theirs: list[GpuProcess]) -> None:
        noted = [one for one in theirs if (one.memory or 0.0) >= _NOTED_BYTES]
        # Descriptions do not change with the amount, so that each is reported once.
        device.foreign = {one.pid: device.foreign.get(one.pid, str(one)) for one in noted}
        if not noted:
            device.told.clear()
        held = sum(one.memory or 0.0 for one in theirs)
        low, high = _CROWDED
        if device.memory and held > high * device.memory:
            device.crowded = device.crowded or f"not of this farm: {in_words(theirs)}"
        elif held < low * device.memory:
            device.crowded = ""
        self._tell_of_foreign(device)

    def _tell_of_foreign(self, device: _Device) -> None:
        """Warn each experiment that uses the device once; withheld devices are reported to all."""
        if device.withheld:
            return
        for text in device.foreign.values():
            told = f"GPU {device.uuid} is used by a process that is not of this farm: {text}"
            for name in device.processes:
                notices = (self._processes[name].start.events_key, told)
                if notices not in device.told:
                    device.told.add(notices)
                    _log.warning("gpu.foreign device=%s said=%r", device.uuid, text)
                    self.on_warning(*notices)

    # --- other nodes ----------------------------------------------------------------------------

    def _look_for_users(self) -> None:
        """Update which devices other nodes have locked."""
        if self._locks is None:
            return
        for device in self._devices.values():
            user = self._locks.user(device.uuid)
            if device.elsewhere and not user:
                self._await(device)
                self._poll_within(0.0)
            device.elsewhere = user
            if user:  # memory use on another node's device is normal
                device.crowded, device.foreign = "", {}
                self._poll_again_later()

    def _poll_again_later(self) -> None:
        if not self._is_looking_again:
            self._is_looking_again = True
            self._timers.after(_PAUSE_ELSEWHERE_S, self._poll_again)

    def _poll_again(self) -> None:
        self._is_looking_again = False
        clear = self._clear()
        self._look_for_users()
        self._tell(clear)

    def _give_back(self, device: _Device) -> None:
        if self._locks is not None and not device.processes:
            self._locks.give_back(device.uuid)

    # --- clear and withheld devices -------------------------------------------------------------

    def _await(self, device: _Device) -> None:
        """Wait for a snapshot that shows that the device is clear."""
        device.left_at = self._now()
        device.awaited = _UNKNOWN
        cancel(device.timer)
        device.timer = self._timers.after(GIVEN_BACK_WITHIN_S, lambda: self._overdue(device))

    def _is_clear(self, device: _Device) -> None:
        device.left_at, device.kept = None, ""
        device.left.clear()
        cancel(device.timer)
        if self._locks is not None and self._locks.has(device.uuid):
            give_back = partial(self._give_back, device)
            delay_s = max(
                GIVE_BACK_IDLE_AFTER_S, _GIVE_BACK_IDLE_AFTER_SNAPSHOTS * self._snapshot_took_s
            )
            device.timer = self._timers.after(delay_s, give_back)

    def _overdue(self, device: _Device) -> None:
        if device.left_at is not None and not (device.kept or device.elsewhere):
            clear = self._clear()
            device.kept = device.awaited
            self._tell(clear)

    def _tell(self, clear_before: set[str]) -> None:
        """Report what changed."""
        if self._tell_of_withheld() or self._clear() != clear_before:
            self.on_change()

    def _tell_of_withheld(self) -> bool:
        """Report the withheld devices if they changed, and return whether they did."""
        withheld = {one.uuid: one.withheld for one in self._devices.values() if one.withheld}
        is_notice = withheld != self._withheld
        if is_notice:
            for uuid, why in withheld.items():
                if uuid not in self._withheld:
                    _log.error("gpu.withheld device=%s why=%r", uuid, why)
            for uuid in self._withheld.keys() - withheld:
                _log.info("gpu.offered_again device=%s", uuid)
            self._withheld = withheld
            self.on_withheld(dict(withheld))
        return is_notice

    def _clear(self) -> set[str]:
        devices = self._devices.values()
        return {one.uuid for one in devices if one.left_at is None and not one.withheld}

    def _pause(self, device: _Device) -> float:
        """Return the seconds until the next snapshot of a device that is not clear."""
        if device.kept or device.left_at is None:
            return _PAUSE_WITHHELD_S
        shortest, longest = _PAUSES_S
        return min(max(shortest, (self._now() - device.left_at) / 2), longest)

    def _known(self, uuids: Iterable[str]) -> list[_Device]:
        return [self._devices[uuid] for uuid in uuids if uuid in self._devices]


def _unexplained(snapshot: DeviceSnapshot, theirs: list[GpuProcess]) -> float | None:
    """Return the bytes in use without those of foreign processes; None if unknown."""
    if snapshot.used is None:
        return None
    return max(0.0, snapshot.used - sum(one.memory or 0.0 for one in theirs))


def _not_back(ours: list[GpuProcess]) -> str:
    return f"memory not released: {in_words(ours)}"
