"""What msgspec raises for bytes that are not what they should be."""

from __future__ import annotations

from typing import Final

import msgspec

#: Not msgspec, but Python tells of text that is no UTF-8, and of what is nested too deeply.
UNDECODABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
