"""Who is logged in, as the owner of what is asked of a farm."""

from __future__ import annotations

import getpass
import os
import re
from typing import Final

_UNSAFE: Final = re.compile(r"[^\w.@+=-]+")


def login_name() -> str:
    """The name, without what no owner's name can hold."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # nobody of that number is known, as in many containers
        name = f"uid-{os.getuid()}"
    return _UNSAFE.sub("_", name)[:64] or f"uid-{os.getuid()}"
