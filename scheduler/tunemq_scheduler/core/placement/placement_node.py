"""One node in `Placement`: its total, offered and free resources."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from tunemq_scheduler.core.placement.resource_request import (
    TOLERANCE,
    WITHHELD,
    DeviceShare,
    ResourceRequest,
    choose,
)
from tunemq_scheduler.core.shared_amounts import ResourceAmounts
from tunemq_shared.protocol.messages import Gpu
from tunemq_shared.trainable.resource_names import GPU

_DIGITS = 9
#: The prefix of the UUIDs of MIG devices.
_PART = "MIG-"


class PlacementNode:
    """A node's resources and GPUs.

    Attributes:
        total: all resources by name; if GPUs are listed, their number.
        gpus: the GPUs that the node listed; if it listed none, `total` says how many there are,
            named "0", "1" and so on.
        offered: what may be held of it; None means everything.
        withheld: the GPUs on which nothing new is placed, and why; a trial may keep one it holds.
        free: what may be held and is not; below 0 if more is held than offered.
        shares: the free share of each GPU, withheld or not.
        devices: the same in the order of the GPUs; nothing fits on withheld ones.
    """

    __slots__ = (
        "_cap",
        "_cap_shares",
        "_places",
        "_whole",
        "devices",
        "free",
        "gpus",
        "offered",
        "shares",
        "total",
        "withheld",
    )

    def __init__(self, resources: Mapping[str, float], gpus: Sequence[Gpu] = ()) -> None:
        self.total = dict(resources)
        self.gpus = tuple(gpus)
        if gpus:
            self.total[GPU] = float(len(gpus))
        self._whole = _devices(self.total, self.gpus)
        self._places = {uuid: place for place, uuid in enumerate(self._whole)}
        self.devices = self.all_devices()
        self.offered: ResourceAmounts | None = None
        self.withheld: dict[str, str] = {}
        self._cap: Mapping[str, float] = self.total
        self._cap_shares = {uuid: device.share for uuid, device in self._whole.items()}
        self.free = dict(self.total)
        self.shares = dict(self._cap_shares)

    def offer(self, amounts: ResourceAmounts) -> None:
        """Limit what may be held of it from now on."""
        held = self.held()
        self.offered = amounts
        self._cap = {name: amounts.resources.get(name, 0.0) for name in self.total}
        self._cap_shares = {
            uuid: min(device.share, amounts.devices.get(uuid, 0.0))
            for uuid, device in self._whole.items()
        }
        self.free = {
            name: round(amount - held.resources.get(name, 0.0), _DIGITS)
            for name, amount in self._cap.items()
        }
        self.shares = {
            uuid: round(share - held.devices.get(uuid, 0.0), _DIGITS)
            for uuid, share in self._cap_shares.items()
        }
        self._see_gpus(self._whole)

    def withhold(self, devices: Mapping[str, str]) -> None:
        """Place nothing new on these GPUs, and allow all others again."""
        self.withheld = {uuid: why for uuid, why in devices.items() if uuid in self._whole}
        self._see_gpus(self._whole)

    def take_back(self, free: Mapping[str, float], shares: Mapping[str, float]) -> None:
        """Restore the free amounts."""
        self.free, self.shares = dict(free), dict(shares)
        self._see_gpus(self._whole)

    def change(self, needs: ResourceRequest, devices: Mapping[str, float], sign: int) -> None:
        """Allocate a request's resources, or free them if ``sign`` is 1."""
        free = self.free
        for name, amount in needs.amounts.items():
            free[name] = round(free.get(name, 0.0) + sign * amount, _DIGITS)
        if devices:
            for uuid, share in devices.items():
                self.shares[uuid] = round(self.shares[uuid] + sign * share, _DIGITS)
            self._see_gpus(devices)

    # --- contents ---------------------------------------------------------------------------------

    def key(self) -> tuple[tuple[tuple[str, float], ...], tuple[DeviceShare, ...]]:
        """Return a key that is equal for nodes that no request can distinguish."""
        return tuple(self.free.items()), tuple(sorted(self.devices)) if self.devices else ()

    def all_devices(self) -> list[DeviceShare]:
        """Return its GPUs as if nothing of them were held."""
        return list(self._whole.values())

    def is_open(self) -> bool:
        """Whether no more is held than offered, withheld GPUs aside."""
        return min(self.free.values(), default=0.0) > -TOLERANCE and (
            min(self._usable_shares(), default=0.0) > -TOLERANCE
        )

    def held(self) -> ResourceAmounts:
        """Return the amounts held of it, without zeros."""
        taken = {name: _left(self._cap, name, free) for name, free in self.free.items()}
        shares = {uuid: _left(self._cap_shares, uuid, one) for uuid, one in self.shares.items()}
        if self.withheld:  # withheld GPUs have nothing free, whether held or not
            taken[GPU] = round(sum(shares.values()), _DIGITS)
        return ResourceAmounts(_some(taken), _some(shares))

    def excess(self) -> ResourceAmounts:
        """Return the amounts held of it beyond its offer."""
        free = {name: -amount for name, amount in self.free.items() if name != GPU}
        return ResourceAmounts(
            _some(free), _some({uuid: -share for uuid, share in self.shares.items()})
        )

    def there(self) -> dict[str, float]:
        """Return all that it has, except withheld GPUs that no trial holds."""
        if not self.withheld:
            return self.total
        held = self.held().devices
        idle = sum(self._whole[uuid].share - held.get(uuid, 0.0) for uuid in self.withheld)
        return {**self.total, GPU: round(self.total[GPU] - idle, _DIGITS)}

    def not_held(self) -> dict[str, float]:
        """Return the part of `there` that is not held."""
        if self.offered is None:
            return self.free
        held = self.held().resources
        return {
            name: round(amount - held.get(name, 0.0), _DIGITS)
            for name, amount in self.there().items()
        }

    # --- requests ---------------------------------------------------------------------------------

    def has_amounts(self, needs: ResourceRequest) -> bool:
        """Whether the free amounts suffice, GPUs aside."""
        return _has(self.free, needs)

    def devices_for(self, needs: ResourceRequest) -> dict[str, float] | None:
        """Return the GPUs for a request and the share of each; None if they do not suffice."""
        if not needs.names_device:
            return {}
        chosen = choose(self.devices, needs)
        if chosen is None:
            return None
        uuids = list(self._whole)
        return {uuids[place]: share for place, share in chosen.items()}

    def can_hold(self, needs: ResourceRequest) -> bool:
        """Whether enough is free."""
        return self.has_amounts(needs) and self.devices_for(needs) is not None

    def could_hold(self, needs: ResourceRequest) -> bool:
        """Whether it could hold a request if empty, fully offered and with nothing withheld."""
        if not _has(self.total, needs):
            return False
        return not needs.names_device or choose(self.all_devices(), needs) is not None

    def capacity(self, needs: ResourceRequest) -> int:
        """Return how many such requests it could hold if empty and fully offered."""
        if not self.could_hold(needs):
            return 0
        counts = [self.total[name] / amount for name, amount in needs.amounts.items()]
        shares = [(one.share, one) for one in self.all_devices() if needs.will_do(one)]
        if needs.gpus:
            counts.append(sum(share >= 1 - TOLERANCE for share, _ in shares) / needs.gpus)
        elif needs.takes_device:
            parts = [share / (needs.share or needs.part_of(one)) for share, one in shares]
            counts.append(sum(math.floor(part + TOLERANCE) for part in parts))
        return math.floor(min(counts, default=1.0) + TOLERANCE)

    def may_ever_hold(self, needs: ResourceRequest) -> bool:
        """Whether its offer, except withheld GPUs, would suffice if nothing were held."""
        return _has(self._cap, needs) and (
            not needs.names_device or choose(self._offered_devices(), needs) is not None
        )

    def has_in_all(self, needs: ResourceRequest, devices: Mapping[str, float]) -> bool:
        """Whether its unheld resources suffice for a request on these GPUs."""
        if not _has(self.not_held(), needs):
            return False
        held = self.held().devices if devices else {}
        return all(
            uuid in self._whole
            and held.get(uuid, 0.0) + share <= self._whole[uuid].share + TOLERANCE
            for uuid, share in devices.items()
        )

    def is_whole(self) -> bool:
        """Whether all of it is offered, withheld GPUs aside."""
        if self.offered is None:
            return True
        are_offered = all(
            self._cap_shares[uuid] >= device.share - TOLERANCE
            for uuid, device in self._whole.items()
            if uuid not in self.withheld
        )
        return are_offered and all(
            self._cap[name] >= amount - TOLERANCE
            for name, amount in self.total.items()
            if name != GPU
        )

    def withheld_from(self, needs: ResourceRequest) -> dict[str, str]:
        """Return the GPUs that would fit a request but are withheld, and why."""
        if not (self.withheld and needs.names_device and self.could_hold(needs)):
            return {}
        return {
            uuid: why for uuid, why in self.withheld.items() if needs.will_do(self._whole[uuid])
        }

    def missing(self, needs: ResourceRequest) -> float:
        """Return which fraction of a request must be freed before it fits; inf if it never fits."""
        if not self.may_ever_hold(needs):
            return math.inf
        missing = sum(
            max(0.0, amount - self.free.get(name, 0.0)) / amount
            for name, amount in needs.amounts.items()
        )
        if needs.takes_device:
            shares = [one.share for one in self.devices if needs.will_do(one)]
            if needs.gpus:
                missing += (
                    max(0, needs.gpus - sum(one >= 1 - TOLERANCE for one in shares)) / needs.gpus
                )
            else:
                missing += max(0.0, 1.0 - max(shares))
        return missing

    def _offered_devices(self) -> list[DeviceShare]:
        return [self._device(uuid, self._cap_shares[uuid]) for uuid in self._whole]

    def _usable_shares(self) -> Iterable[float]:
        if not self.withheld:
            return self.shares.values()
        return [share for uuid, share in self.shares.items() if uuid not in self.withheld]

    def _device(self, uuid: str, share: float) -> DeviceShare:
        whole = self._whole[uuid]
        share = WITHHELD if uuid in self.withheld else share
        return DeviceShare(whole.model, whole.memory, share, whole.is_part)

    def _see_gpus(self, changed: Iterable[str]) -> None:
        """Update devices and the free GPUs after the shares of these GPUs changed."""
        for uuid in changed:
            self.devices[self._places[uuid]] = self._device(uuid, self.shares[uuid])
        if self.shares:
            self.free[GPU] = round(sum(self._usable_shares()), _DIGITS)
            if self.offered is not None:
                self._cap = {**self._cap, GPU: round(sum(self._cap_shares.values()), _DIGITS)}


def _devices(total: Mapping[str, float], gpus: Sequence[Gpu]) -> dict[str, DeviceShare]:
    """Return the GPUs of a node, by UUID or number."""
    if gpus:
        return {
            gpu.uuid: DeviceShare(gpu.model, gpu.memory, 1.0, gpu.uuid.startswith(_PART))
            for gpu in gpus
        }
    amount = total.get(GPU, 0.0)
    whole = {
        str(place): DeviceShare("", 0.0, 1.0) for place in range(math.floor(amount + TOLERANCE))
    }
    rest = round(amount - len(whole), _DIGITS)
    return whole if rest <= TOLERANCE else {**whole, str(len(whole)): DeviceShare("", 0.0, rest)}


def _has(free: Mapping[str, float], needs: ResourceRequest) -> bool:
    return all(amount <= free.get(name, 0.0) + TOLERANCE for name, amount in needs.amounts.items())


def _left(cap: Mapping[str, float], name: str, free: float) -> float:
    return round(cap.get(name, 0.0) - free, _DIGITS)


def _some(amounts: Mapping[str, float]) -> dict[str, float]:
    return {name: amount for name, amount in amounts.items() if amount > TOLERANCE}
