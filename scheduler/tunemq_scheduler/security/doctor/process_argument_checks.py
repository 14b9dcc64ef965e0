"""Check that no process has a key of the farm in its arguments, which every user can list."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Final, NamedTuple
from urllib.parse import quote

from tunemq_scheduler.security.doctor.time_limit import within
from tunemq_scheduler.security.findings import Finding, ok, problem, warning
from tunemq_shared.base.errors import ConfigError
from tunemq_shared.broker.redis_address import REDIS_VARIABLE, RedisAddress, parse_address

#: The most bytes of a command line to read: every user can make a process with a huge one.
_MOST_BYTES: Final = 2**17
_PROCESSES: Final = "/proc"
#: Seconds to wait for the arguments of one process, and how many may keep us waiting: every user
#: can make a process whose memory cannot be read, by a file system that does not answer.
_READ_S: Final = 5.0
_MOST_SILENT: Final = 4
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
_CHECK: Final = "keys-in-arguments"
_FIX: Final = (
    f"stop that process, change the key, and give it in ${REDIS_VARIABLE} (an address with a"
    " password) or AWS_SECRET_ACCESS_KEY, from a file that only its user may"
    " read, such as EnvironmentFile= of a systemd unit with mode 0600"
)


class ListedProcess(NamedTuple):
    """A process of this machine; its arguments are None if they could not be read in time."""

    pid: int
    arguments: Sequence[str] | None

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
        arguments = process.arguments or ()
        is_ours = any("tunemq" in argument for argument in arguments)
        for argument in arguments:
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
    found, silent = [], 0
    for process in processes:
        if what := secrets.shown_by(process):
            what = f"{process} shows {what} to all who list processes"
            found.append(problem(_CHECK, what, _FIX))
        if process.arguments is None:
            silent += 1
            is_last = silent == _MOST_SILENT
            found.append(_not_read(process, is_last=is_last))
            if is_last:
                break
    return found or [ok(_CHECK, "no process of this machine shows a key")]


def running_processes() -> Iterator[ListedProcess]:
    """Iterate over this machine's processes, as far as /proc shows them."""
    for name in filter(str.isdigit, os.listdir(_PROCESSES)):
        try:
            parts = within(_READ_S, partial(_arguments, name))
        except TimeoutError:
            yield ListedProcess(int(name), None)
            continue
        except OSError:
            continue
        if any(parts):
            yield ListedProcess(int(name), parts)


def _arguments(name: str) -> list[str]:
    with open(f"{_PROCESSES}/{name}/cmdline", "rb") as file:
        return file.read(_MOST_BYTES).decode(errors="replace").split("\0")


def _not_read(process: ListedProcess, *, is_last: bool) -> Finding:
    rest = "; so not all processes were looked at" if is_last else ""
    return warning(
        _CHECK,
        f"{process} was not looked at: its arguments could not be read within {_READ_S:g} s{rest}",
        f"see whose process it is (ls -ld {_PROCESSES}/{process.pid}) and end it, then run"
        " `tunemq doctor` again",
    )


def _host(address: RedisAddress) -> str:
    host = address.host.lower()
    return "localhost" if host in {"127.0.0.1", "::1"} else host
