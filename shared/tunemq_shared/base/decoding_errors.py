"""The exceptions that decoding invalid bytes or text raises."""

from __future__ import annotations

from typing import Final

import msgspec

#: By msgspec. Python itself raises for text that is not UTF-8 and for deep nesting.
UNDECODABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

#: By the standard library's JSON decoder.
NO_JSON: Final = (ValueError, RecursionError)
