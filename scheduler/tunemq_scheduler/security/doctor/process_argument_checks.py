"""Check that no process has a key of the farm in its arguments, which every user can list."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Final, NamedTuple
from urllib.parse import quote

from tunemq_scheduler.security.findings import Finding, ok, problem
from tunemq_shared.base.errors import ConfigError
from tunemq_shared.broker.redis_address import REDIS_VARIABLE, RedisAddress, parse_address

#: The most bytes of a command line to read: every user can make a process with a huge one.
_MOST_BYTES: Final = 2**17
#: Shorter secrets occur in command lines by chance.
_SHORTEST_SECRET: Final = 6
#: Shorter secrets occur within words and paths by chance.
_SHORTEST_WITHIN: Final = 12
#: Delimiters of a secret that is an argument, or a value, or part of an address.
_BEFORE, _BEHIND = r"(?:^|[=:@/'\"])", r"(?:$|[=:@/'\"])"
_SECRET_VARIABLES: Final = re.compile(
    r"(?:^|[\s'\"])(AWS_SECRET_ACCESS_KEY|AWS_SESSION_TOKEN|MINIO_ROOT_PASSWORD|MINIO_SECRET_KEY)"
    r"=[^\s'\"]"
)
_REDIS_URL: Final = re.compile(r"(?:rediss?|unix)://[^\s'\"]+")
_FIX: Final = (
    f"stop that process, change the key, and give it in ${REDIS_VARIABLE} (an address with a"
    " password) or AWS_SECRET_ACCESS_KEY, from a file that only its user may"
    " read, such as EnvironmentFile= of a systemd unit with mode 0600"
)


class ListedProcess(NamedTuple):
    """A process of this machine."""

    pid: int
    arguments: Sequence[str]

    def __str__(self) -> str:
        program = os.path.basename(self.arguments[0]) if self.arguments else "?"
        return f"process {self.pid} ({program})"


class KnownSecrets:
    """Secrets that must not be in arguments.

    Args:
        redis: The farm's Redis: its address with any password counts as a secret.
        known: Further secrets.
    """

    def __init__(self, redis: RedisAddress, known: Iterable[str]) -> None:
        self._redis = redis
        texts = {
            text for secret in {redis.password, *known} for text in (secret, quote(secret, safe=""))
        }
        self._known = [
            re.compile(
                re.escape(text)
                if len(text) >= _SHORTEST_WITHIN
                else f"{_BEFORE}{re.escape(text)}{_BEHIND}"
            )
            for text in texts
            if len(text) >= _SHORTEST_SECRET
        ]

    def shown_by(self, process: ListedProcess) -> str:
        """Describe the secret in a process's arguments; empty if there is none."""
        is_ours = any("tunemq" in argument for argument in process.arguments)
        for argument in process.arguments:
            if any(map(self._is_ours_with_password, _REDIS_URL.findall(argument))):
                return "the address of Redis with its password"
            if any(secret.search(argument) for secret in self._known):
                return "a key of this farm"
            if is_ours and (found := _SECRET_VARIABLES.search(argument)):
                return f"the value of {found[1]}"
        return ""

    def _is_ours_with_password(self, url: str) -> bool:
        with suppress(ConfigError, ValueError):
            found = parse_address(url)
            ours = self._redis
            if not found.password:
                return False
            if found.path or ours.path:
                return found.path == ours.path
            return found.port == ours.port and _host(found) == _host(ours)
        return False


def check_arguments(secrets: KnownSecrets, processes: Iterable[ListedProcess]) -> list[Finding]:
    """Check the arguments of processes."""
    found = [
        problem("keys-in-arguments", f"{process} shows {what} to all who list processes", _FIX)
        for process in processes
        if (what := secrets.shown_by(process))
    ]
    return found or [ok("keys-in-arguments", "no process of this machine shows a key")]


def running_processes() -> Iterator[ListedProcess]:
    """Iterate over this machine's processes, as far as /proc shows them."""
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError), open(f"/proc/{name}/cmdline", "rb") as file:
                parts = file.read(_MOST_BYTES).decode(errors="replace").split("\0")
                if any(parts):
                    yield ListedProcess(int(name), parts)


def _host(address: RedisAddress) -> str:
    host = address.host.lower()
    return "localhost" if host in {"127.0.0.1", "::1"} else host
