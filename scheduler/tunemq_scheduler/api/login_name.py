"""The login name of the user, used as the owner of requests to a farm."""

from __future__ import annotations

import getpass
import os
import re
from typing import Final

_UNSAFE: Final = re.compile(r"[^\w.@+=-]+")


def login_name() -> str:
    """Return the user's login name, without characters that an owner's name cannot contain."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # the UID has no name, as in many containers
        name = f"uid-{os.getuid()}"
    return _UNSAFE.sub("_", name)[:64] or f"uid-{os.getuid()}"
