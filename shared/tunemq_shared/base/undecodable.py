"""What is raised for bytes and text that are not what they should be."""

from __future__ import annotations

from typing import Final

import msgspec

#: By msgspec. Not it, but Python tells of text that is no UTF-8, and of what is nested too deeply.
UNDECODABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

#: By the standard library's JSON.
NO_JSON: Final = (ValueError, RecursionError)
