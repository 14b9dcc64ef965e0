"""One node as `Placement` sees it: what it has, what may be had of it, and what is free of that."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from tunemq_scheduler.core.allotments import ResourceAmounts
from tunemq_scheduler.core.placement.resource_request import (
    TOLERANCE,
    WITHHELD,
    DeviceShare,
    ResourceRequest,
    choose,
)
from tunemq_shared.protocol.messages import Gpu
from tunemq_shared.trainable.resource_names import GPU

_DIGITS = 9
#: What the UUIDs of parts of GPUs begin with.
_PART = "MIG-"


class PlacementNode:
    """A node's resources and GPUs.

    Attributes:
        total: all of it, by resource; as many GPUs as are listed.
        gpus: those that it listed; where it listed none there are as many without a name as
            ``total`` says, "0", "1" and so on.
        offered: what may be held of it, where that is not all.
        withheld: the GPUs on which nothing new is placed, and why; who has one may keep it.
        free: what may be held of it and is not; below 0 where more is held than is offered.
        shares: likewise of each GPU, withheld or not.
        devices: likewise, in the order of the GPUs; nothing fits on those that are withheld.
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
        """Allow so much of it to be held from now on."""
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
        """Have nothing new placed on these from now on, and on all others again."""
        self.withheld = {uuid: why for uuid, why in devices.items() if uuid in self._whole}
        self._see_gpus(self._whole)

    def take_back(self, free: Mapping[str, float], shares: Mapping[str, float] | None) -> None:
        """Have so much free; None where nobody knows of which GPUs that is."""
        self.free = dict(free)
        if shares is not None:
            self.shares = dict(shares)
            self._see_gpus(self._whole)

    def change(self, needs: ResourceRequest, devices: Mapping[str, float], sign: int) -> None:
        """Take a request's resources, or (``sign`` is 1) give them back."""
        free = self.free
        for name, amount in needs.amounts.items():
            free[name] = round(free.get(name, 0.0) + sign * amount, _DIGITS)
        if devices:
            for uuid, share in devices.items():
                self.shares[uuid] = round(self.shares[uuid] + sign * share, _DIGITS)
            self._see_gpus(devices)

    # --- what it has ------------------------------------------------------------------------------

    def key(self) -> tuple[tuple[tuple[str, float], ...], tuple[DeviceShare, ...]]:
        """Equal for nodes between which no request could tell a difference."""
        return tuple(self.free.items()), tuple(sorted(self.devices)) if self.devices else ()

    def all_devices(self) -> list[DeviceShare]:
        """Its GPUs, with nothing taken of them."""
        return list(self._whole.values())

    def is_open(self) -> bool:
        """Whether no more is held of it than is offered; what is withheld is not to be had."""
        return min(self.free.values(), default=0.0) > -TOLERANCE and (
            min(self._usable_shares(), default=0.0) > -TOLERANCE
        )

    def held(self) -> ResourceAmounts:
        """What is taken of it; only what is more than nothing."""
        taken = {name: _left(self._cap, name, free) for name, free in self.free.items()}
        shares = {uuid: _left(self._cap_shares, uuid, one) for uuid, one in self.shares.items()}
        if self.withheld:  # of these nothing is free, held or not
            taken[GPU] = round(sum(shares.values()), _DIGITS)
        return ResourceAmounts(_some(taken), _some(shares))

    def excess(self) -> ResourceAmounts:
        """What is held of it beyond what is offered."""
        free = {name: -amount for name, amount in self.free.items() if name != GPU}
        return ResourceAmounts(
            _some(free), _some({uuid: -share for uuid, share in self.shares.items()})
        )

    def there(self) -> dict[str, float]:
        """All that it has, but for what is withheld and nobody holds."""
        if not self.withheld:
            return self.total
        held = self.held().devices
        idle = sum(self._whole[uuid].share - held.get(uuid, 0.0) for uuid in self.withheld)
        return {**self.total, GPU: round(self.total[GPU] - idle, _DIGITS)}

    def not_held(self) -> dict[str, float]:
        """What of all that is there is not taken."""
        if self.offered is None:
            return self.free
        held = self.held().resources
        return {
            name: round(amount - held.get(name, 0.0), _DIGITS)
            for name, amount in self.there().items()
        }

    # --- requests ---------------------------------------------------------------------------------

    def has_amounts(self, needs: ResourceRequest) -> bool:
        """Whether there is enough of all but GPUs."""
        return _has(self.free, needs)

    def devices_for(self, needs: ResourceRequest) -> dict[str, float] | None:
        """The GPUs for a request, and how much of each; None where they do not suffice."""
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
        """Whether it has enough, were it empty, all of it offered and nothing withheld."""
        if not _has(self.total, needs):
            return False
        return not needs.names_device or choose(self.all_devices(), needs) is not None

    def may_ever_hold(self, needs: ResourceRequest) -> bool:
        """Whether what is offered, and not withheld, would do, were nothing of it held."""
        return _has(self._cap, needs) and (
            not needs.names_device or choose(self._offered_devices(), needs) is not None
        )

    def has_in_all(self, needs: ResourceRequest, devices: Mapping[str, float]) -> bool:
        """Whether all that it has, but what is held, suffices for a request on these GPUs."""
        if not _has(self.not_held(), needs):
            return False
        held = self.held().devices if devices else {}
        return all(
            uuid in self._whole
            and held.get(uuid, 0.0) + share <= self._whole[uuid].share + TOLERANCE
            for uuid, share in devices.items()
        )

    def is_whole(self) -> bool:
        """Whether all of it is offered, but for what is withheld."""
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
        """The GPUs that would do for a request, were they not withheld, and why they are."""
        if not (self.withheld and needs.names_device and self.could_hold(needs)):
            return {}
        return {
            uuid: why for uuid, why in self.withheld.items() if needs.will_do(self._whole[uuid])
        }

    def missing(self, needs: ResourceRequest) -> float:
        """How much has to be given back before a request fits, of what it asks; inf: never does."""
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
        """The shares of these changed; what is free of GPUs is what is free of each."""
        for uuid in changed:
            self.devices[self._places[uuid]] = self._device(uuid, self.shares[uuid])
        if self.shares:
            self.free[GPU] = round(sum(self._usable_shares()), _DIGITS)
            if self.offered is not None:
                self._cap = {**self._cap, GPU: round(sum(self._cap_shares.values()), _DIGITS)}


def _devices(total: Mapping[str, float], gpus: Sequence[Gpu]) -> dict[str, DeviceShare]:
    """The GPUs of a node, by UUID or number."""
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
