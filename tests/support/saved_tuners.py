"""Changes the settings in a saved tuner, which only tests do."""

from __future__ import annotations

from typing import Any

import msgspec

from tunemq_scheduler.settings.saved_tuner import _SUM_BYTES, with_sum


def saved_fields(content: bytes) -> dict[str, Any]:
    """The fields of a saved tuner."""
    found: dict[str, Any] = msgspec.msgpack.decode(content[:-_SUM_BYTES])
    return found


def changed_tuner(content: bytes, **fields: Any) -> bytes:
    """The content of a saved tuner with other fields."""
    return with_sum(msgspec.msgpack.encode({**saved_fields(content), **fields}))
