"""`KeyWatch`: whether a node and its farm's scheduler have keys of each other, told to people.

A node that was refused hears nothing of it: its scheduler cannot tell whom it refuses.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

from tunemq_workers.broker.node_signing import NodeSigning
from tunemq_workers.system.trial_user import own_files

#: A scheduler that has just begun says a little later which key it signs with.
_TIMEOUT_S: Final = 5.0
#: Of what stands in Redis no more is shown.
_SHOWN: Final = 16

_log = logging.getLogger(__name__)


class KeyWatch:
    """Looks at a node's keys, and at which one the scheduler says that it signs with.

    Args:
        seals: use the keys.
        now: a monotonic clock.
    """

    def __init__(self, signing: NodeSigning, now: Callable[[], float] = time.monotonic) -> None:
        self._signing, self._now = signing, now
        self._version = signing.keys.version
        self._signs: bytes | None = None
        self._since, self._is_told = 0.0, False
        #: Whether this node and the scheduler that runs now, if one does, believe each other.
        self.agrees = True

    def look(self, *, has_scheduler: bool, signs: bytes) -> bool:
        """Look; what people should know is logged. Whether other keys are used than before.

        Args:
            has_scheduler: whether a farm's scheduler runs.
            signs: the id of the key that it signs with, as it may have said it; in hex.
        """
        keys = self._signing.keys
        with own_files():
            line = keys.look()
        if line:
            _log.warning("keys.read line=%s", line)
        for line in self._signing.rejected.notices():
            _log.warning("message.refused what=%s", line)
        self.agrees = not has_scheduler or self._compare(signs)
        is_changed, self._version = keys.version != self._version, keys.version
        if is_changed:
            self._signs = None
        return is_changed

    def _compare(self, signs: bytes) -> bool:
        """Return whether both sides believe each other; log once why they do not."""
        keys = self._signing.keys
        if signs:
            agrees = keys.is_signed and keys.orders.believes(_key(signs))
        else:
            agrees = not keys.is_signed
        now = self._now()
        if signs != self._signs:
            self._signs, self._since, self._is_told = signs, now, False
        if agrees or self._is_told or now < self._since + _TIMEOUT_S:
            return agrees
        self._is_told = True
        if not keys.is_signed:
            _log.warning("keys.missing")
        elif not signs:
            _log.warning("keys.of_no_use")
        else:
            shown = _key(signs).hex() or repr(signs[:_SHOWN])
            _log.warning("keys.unknown key=%s path=%s", shown, keys.path)
        return agrees


def _key(signs: bytes) -> bytes:
    """The key's id; empty of what is none."""
    try:
        return bytes.fromhex(signs[: _SHOWN + 1].decode("ascii"))
    except ValueError:
        return b""
