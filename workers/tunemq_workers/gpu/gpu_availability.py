"""Which GPUs of a node a host may be forked on now, and which are withheld, and why.

A device is *clear* when nothing says that a host that has gone still holds memory of it. Whoever
has just gone is given some time; a device whose memory does not come back is withheld until it
does. So is one of which somebody else holds much. What is broken is withheld for good, that is,
until the worker is started again.

A script's node has a device only while it is used: it locks it before a host is forked there, and
gives it back when it was clear and idle for a moment. What another node has meanwhile is withheld.

While a device has no host of ours, what is used of it is compared with what was used when it had
none before, so that no pid matters: in a container they say nothing. While it has others, nobody
can tell what they have taken meanwhile, and the processes themselves are looked for.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple

from tunemq_shared.base.byte_sizes import show_bytes
from tunemq_shared.protocol.messages import Gpu
from tunemq_workers.gpu.drivers import Xid
from tunemq_workers.gpu.drivers.xids import meaning, unusable_after
from tunemq_workers.gpu.gpu_locks import GpuLocks
from tunemq_workers.gpu.gpu_snapshot import DeviceSnapshot, GpuMemoryHolder, GpuSnapshot, in_words
from tunemq_workers.runtime.checkpoint_interfaces import Timers
from tunemq_workers.runtime.reactor import Timer
from tunemq_workers.runtime.trial_process_interfaces import TrialProcess

#: Memory that has gone has this long to come back.
GIVEN_BACK_WITHIN_S: Final = 15.0
#: Between two looks at a device that is not clear: at least, at most, and when it is withheld.
_PAUSES_S: Final = (0.1, 2.0)
_PAUSE_WITHHELD_S: Final = 3.0
#: A lock is kept for so long after the last host: the search's next trial mostly comes at once.
GIVE_BACK_IDLE_AFTER_S: Final = 1.0
#: Where looks are slow, for so many of them: whoever waits for several devices finds those that
#: were clear first still locked when the last one is.
_GIVE_BACK_IDLE_AFTER_SNAPSHOTS: Final = 3
#: Between two looks whether another node still has a device.
_PAUSE_ELSEWHERE_S: Final = 1.0
#: More than before may be used: this much, or this part of the device.
_SLACK_BYTES: Final = 300 * 2**20
_SLACK: Final = 0.02
#: Of somebody else's processes those are told of that hold so much.
_NOTED_BYTES: Final = 300 * 2**20
#: A device is withheld when they hold more than this part of it, and offered again below the other.
_CROWDED: Final = (0.05, 0.1)
#: Where a device was never seen clear, so much may be used by nobody that is seen, or this part of
#: it: a desktop's processes may not be listed.
_UNSEEN_BYTES: Final = 2 * 2**30
_UNSEEN: Final = 0.1
#: A driver that has not said in this time what is used of a device never does. Less than
#: `GIVEN_BACK_WITHIN_S`, or the device would be withheld for a moment.
SILENT_FOR_S: Final = 10.0
#: Of what nobody has looked at since a host has gone, or cannot say anything about.
_UNKNOWN: Final = "the driver does not say whether its memory is given back"

_log = logging.getLogger(__name__)


class GpuObstacle(NamedTuple):
    """Why no host may be forked on a device now; ``is_withheld``: nor will be soon."""

    reason: str
    is_withheld: bool


@dataclass(slots=True, eq=False)
class _Device:
    """What is known of a device.

    Attributes:
        memory: all that it has, in bytes; 0 where nobody knows.
        hosts: those that have it.
        baseline: what was used of it, foreign processes aside, when it had none; None: not known.
        left_at: since when nobody has seen that it is clear; None while it is.
        silent_since: since when looks do not tell what is used; infinite once one did.
        left: the pids of what hosts that have gone held it with.
        strangers: the pids that held it when it had no host and was clear.
        foreign: by pid, those of somebody else's that are told of, with what is said of each.
        told: which events streams were told what of them.
        broken, elsewhere, crowded, kept: why it is withheld: for good, because another node has
            it, because of others, because a host that has gone still holds it.
        awaited: what it waits for while it is not clear.
    """

    uuid: str
    memory: float
    processes: set[str] = field(default_factory=set)
    baseline: float | None = None
    left_at: float | None = None
    silent_since: float | None = None
    left: set[int] = field(default_factory=set)
    strangers: set[int] = field(default_factory=set)
    foreign: dict[int, str] = field(default_factory=dict)
    told: set[tuple[str, str]] = field(default_factory=set)
    broken: str = ""
    elsewhere: str = ""
    crowded: str = ""
    kept: str = ""
    awaited: str = ""
    timer: Timer | None = None

    @property
    def withheld(self) -> str:
        """Why it is withheld; empty if it is not."""
        return self.broken or self.elsewhere or self.crowded or self.kept

    def is_like_before(self, unexplained: float) -> bool:
        """Whether no more is used than when it had no host."""
        if self.baseline is None:
            return not self.memory or unexplained <= max(_UNSEEN_BYTES, _UNSEEN * self.memory)
        return unexplained <= self.baseline + max(_SLACK_BYTES, _SLACK * self.memory)


class GpuAvailability:
    """Knows the GPUs of a node. Owned by the node's loop.

    Args:
        gpus: those that the node offers.
        timers: for the time that memory has to come back.
        look_in: has somebody look at all devices in so many seconds, and tell `seen`.
        now: the monotonic clock.
        me: this node's process.
        locks: take devices and give them back; without, they are this node's anyway.
    """

    def __init__(
        self,
        gpus: Iterable[Gpu],
        timers: Timers,
        poll_within: Callable[[float], object],
        *,
        now: Callable[[], float] = time.monotonic,
        me: int | None = None,
        locks: GpuLocks | None = None,
    ) -> None:
        #: Called when some device may be used again, or may not be any more.
        self.on_change: Callable[[], object] = _nothing
        #: Takes all that is withheld, and why, whenever that changes.
        self.on_withheld: Callable[[dict[str, str]], object] = _nothing
        #: Takes (events stream, text) for those whose trials use a device.
        self.on_warning: Callable[[str, str], object] = _nothing
        #: Of devices that somebody else uses, too: what people should know; replaced, not changed.
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
        for device in self._devices.values():  # nobody has looked yet
            self._await(device)

    # --- what hosts ask and tell ----------------------------------------------------------------

    def obstacle(self, devices: Iterable[str]) -> GpuObstacle | None:
        """Why no host may be forked on these devices now; None if one may.

        Those that are not known one by one are nobody's business here.
        """
        found: list[GpuObstacle] = []
        for device in self._known(devices):
            if device.withheld or device.left_at is not None:
                reason = f"GPU {device.uuid}: {device.withheld or device.awaited}"
                found.append(GpuObstacle(reason, bool(device.withheld)))
        return max(found, key=lambda one: one.is_withheld, default=None)

    def claim(self, devices: Iterable[str]) -> None:
        """Have these for this node: all or none, or two nodes would wait for each other for ever.

        Whoever had one before may have left something there, so that it has to be looked at.
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
        """A host is forked, with the devices of its start."""
        devices = self._known(process.start.devices)
        if devices:
            self._processes[process.name], self._pids[process.name] = process, set()
        for device in devices:
            device.processes.add(process.name)
            self._tell_of_foreign(device)

    def gone(self, name: str) -> None:
        """Nothing is left of a host; one that had no device is ignored."""
        process = self._processes.pop(name, None)
        if process is None:
            return
        pids = self._pids.pop(name)
        for device in self._known(process.start.devices):
            device.processes.discard(name)
            device.left |= pids
            self._await(device)
        self._poll_within(0.0)

    # --- what the driver says -------------------------------------------------------------------

    def seen(self, snapshot: GpuSnapshot) -> None:
        """Somebody has looked."""
        clear = self._clear()
        self._snapshot_took_s = self._now() - snapshot.asked_at
        for xid in snapshot.xids:
            self._complained(xid)
        for uuid, why in snapshot.unusable.items():
            self._breaks(self._devices[uuid], why)
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
        users = ", ".join(f"{trial}/{attempt}" for trial, attempt in self._trials_on(device))
        said = meaning(xid.number)
        _log.error("gpu.xid device=%s said=%r trials=%s", xid.uuid, said, users or "none")
        if why := unusable_after(xid.number):
            self._breaks(device, why)

    def _breaks(self, device: _Device, why: str) -> None:
        if not device.broken:
            device.broken = why

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
        self, device: _Device, holdings: Iterable[GpuMemoryHolder]
    ) -> tuple[list[GpuMemoryHolder], list[GpuMemoryHolder]]:
        """What is of hosts that have gone, or may be, and what is certainly somebody else's."""
        ours: list[GpuMemoryHolder] = []
        theirs: list[GpuMemoryHolder] = []
        for holding in holdings:
            process = next((name for name in device.processes if self._is_of(name, holding)), None)
            if process is not None:
                self._pids[process].add(holding.pid)
            elif holding.pid in device.left or self._me in holding.line:
                ours.append(holding)
            elif holding.line or holding.pid in device.strangers:
                theirs.append(holding)
            elif not device.processes:  # while there are some, it may be one of theirs
                (theirs if device.baseline is None else ours).append(holding)
        return ours, theirs

    def _is_of(self, process: str, holding: GpuMemoryHolder) -> bool:
        return holding.pid in self._pids[process] or self._processes[process].pid in holding.line

    def _not_like_before(
        self,
        device: _Device,
        snapshot: DeviceSnapshot,
        ours: list[GpuMemoryHolder],
        theirs: list[GpuMemoryHolder],
        asked_at: float,
    ) -> str:
        """Why a device that has no host is not clear."""
        rest = _unexplained(snapshot, theirs)
        if rest is None:
            if device.silent_since is None:
                device.silent_since = asked_at
            if asked_at - device.silent_since < SILENT_FOR_S:  # it may only have been slow
                return _UNKNOWN
            return _not_back(ours) if ours else ""
        device.silent_since = math.inf
        if device.is_like_before(rest):
            return ""
        if device.baseline is None and any(one.memory is None for one in theirs):
            return ""  # it may be all theirs
        if ours:
            return _not_back(ours)
        if device.baseline is None:
            return f"memory not given back: {show_bytes(int(rest))} is used by nobody that is seen"
        more = show_bytes(int(rest - device.baseline))
        return f"memory not given back: {more} more is used than before, by nobody that is seen"

    # --- others ---------------------------------------------------------------------------------

    def _look_at_others(self, device: _Device, theirs: list[GpuMemoryHolder]) -> None:
        noted = [one for one in theirs if (one.memory or 0.0) >= _NOTED_BYTES]
        # What is said of one stays what it is, however much it takes later.
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
        """Tell the experiments that use it, each once; of what is withheld all are told."""
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
        """Who has what this node has not."""
        if self._locks is None:
            return
        for device in self._devices.values():
            user = self._locks.user(device.uuid)
            if device.elsewhere and not user:
                self._await(device)
                self._poll_within(0.0)
            device.elsewhere = user
            if user:  # what is held of it is no news
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

    # --- clear, and withheld --------------------------------------------------------------------

    def _await(self, device: _Device) -> None:
        """From now on it has to be seen that it is clear."""
        device.left_at = self._now()
        device.awaited = _UNKNOWN
        if device.timer is not None:
            device.timer.cancel()
        device.timer = self._timers.after(GIVEN_BACK_WITHIN_S, lambda: self._overdue(device))

    def _is_clear(self, device: _Device) -> None:
        device.left_at, device.kept = None, ""
        device.left.clear()
        if device.timer is not None:
            device.timer.cancel()
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
        """Say what has changed."""
        if self._tell_of_withheld() or self._clear() != clear_before:
            self.on_change()

    def _tell_of_withheld(self) -> bool:
        """Say what is withheld, if that is news."""
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
        """How long not to look at a device that is not clear."""
        if device.kept or device.left_at is None:
            return _PAUSE_WITHHELD_S
        shortest, longest = _PAUSES_S
        return min(max(shortest, (self._now() - device.left_at) / 2), longest)

    def _known(self, uuids: Iterable[str]) -> list[_Device]:
        return [self._devices[uuid] for uuid in uuids if uuid in self._devices]

    def _trials_on(self, device: _Device) -> list[tuple[str, int]]:
        return [self._processes[name].key for name in device.processes]


def _unexplained(snapshot: DeviceSnapshot, theirs: list[GpuMemoryHolder]) -> float | None:
    """What is used of a device, foreign processes aside; None where nobody says."""
    if snapshot.used is None:
        return None
    return max(0.0, snapshot.used - sum(one.memory or 0.0 for one in theirs))


def _not_back(ours: list[GpuMemoryHolder]) -> str:
    return f"memory not given back: {in_words(ours)}"


def _nothing(*_: object) -> None:
    """Until somebody listens."""
