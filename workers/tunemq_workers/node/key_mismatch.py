"""`KeyWatch`: checks that a node and its farm's scheduler accept each other's keys, and warns.

A scheduler cannot tell which node sent a message that it rejects, so the node has to find out by
itself: it compares its keys with the key id that the scheduler publishes in Redis.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

from tunemq_workers.broker.node_signing import NodeSigning
from tunemq_workers.system.trial_user import own_files

#: A scheduler publishes the id of its key a little after it starts.
_TIMEOUT_S: Final = 5.0
#: The most bytes of a published key id that a log line shows.
_SHOWN: Final = 16

_log = logging.getLogger(__name__)


class KeyWatch:
    """Compares a node's keys with the key that the scheduler says it signs with.

    Args:
        signing: signs and checks this node's messages, with the keys that it has now.
        now: a monotonic clock, in seconds.
    """

    def __init__(self, signing: NodeSigning, now: Callable[[], float] = time.monotonic) -> None:
        self._signing, self._now = signing, now
        self._version = signing.keys.version
        self._signs: bytes | None = None
        self._since, self._is_told = 0.0, False
        #: False if a scheduler runs and one side rejects the other's messages.
        self.agrees = True

    def look(self, *, has_scheduler: bool, signs: bytes) -> bool:
        """Reread the key file, log what the user should know, and return whether the keys changed.

        Args:
            has_scheduler: whether a farm's scheduler runs.
            signs: the hexadecimal id of the key that the scheduler signs with, as it published it;
                empty if it published none.
        """
        keys = self._signing.keys
        with own_files():
            line = keys.look()
        if line:
            _log.warning("keys.read line=%s", line)
        for line in self._signing.rejected.notices():
            _log.warning("message.rejected what=%s", line)
        self.agrees = not has_scheduler or self._compare(signs)
        is_changed, self._version = keys.version != self._version, keys.version
        if is_changed:
            self._signs = None
        return is_changed

    def _compare(self, signs: bytes) -> bool:
        """Return whether both sides accept each other's messages; log the reason once if not."""
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
            _log.warning("keys.unused")
        else:
            shown = _key(signs).hex() or repr(signs[:_SHOWN])
            _log.warning("keys.unknown key=%s path=%s", shown, keys.path)
        return agrees


def _key(signs: bytes) -> bytes:
    """Return the key id as bytes; empty if ``signs`` is not a key id."""
    try:
        return bytes.fromhex(signs[: _SHOWN + 1].decode("ascii"))
    except ValueError:
        return b""
