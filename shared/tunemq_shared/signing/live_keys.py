"""`LiveKeys`: the keys of a process, reloaded when its key file changes."""

from __future__ import annotations

import os
import time
from enum import Enum
from typing import Final, NamedTuple, Self

from tunemq_shared.base.errors import ConfigError
from tunemq_shared.signing.key_files import (
    EVENTS,
    JOURNALS,
    KEYS_VARIABLE,
    ORDERS,
    SUBMITTERS,
    KeyFile,
    read_key_file,
)
from tunemq_shared.signing.message_signing import MessageSigner, SigningKey

#: Seconds between two looks at the file, at least.
_POLL_INTERVAL_S: Final = 1.0


class KeyRole(Enum):
    """The role of a key file; the value is the file that `tunemq keys new` makes for it."""

    SCHEDULER = "scheduler.toml"
    WORKER = "worker.toml"
    SUBMITTER = "<your name>.toml"


class _FileVersion(NamedTuple):
    """A file's identity and times; they differ after the file is written or replaced."""

    device: int
    inode: int
    size: int
    changed_ns: int
    mode_changed_ns: int


class LiveKeys:
    """The keys of a process; see `find_keys`.

    Its signers stay the same objects and use the reloaded keys. Any thread may use them; only one
    thread may call `look`.

    Args:
        path: Of the key file; empty for no keys, so that nothing is signed.
        role: Who uses the keys.

    Raises:
        ConfigError: The file is invalid for that role; says how to fix it.
    """

    def __init__(self, path: str, role: KeyRole) -> None:
        self.path, self._role = path, role
        #: Increases when the keys in use change.
        self.version = 0
        self._seen = _seen(path)
        self._changing: _FileVersion | None = None
        self._looked_at = time.monotonic()
        self._file = _read(path, role) if path else KeyFile()
        self.orders, self.events = self._file.orders_signer(), self._file.events_signer()

    def __repr__(self) -> str:
        return f"LiveKeys({self.path!r})"

    @classmethod
    def none(cls) -> Self:
        """Make an empty set of keys: nothing is signed."""
        return cls("", KeyRole.SCHEDULER)

    @property
    def is_signed(self) -> bool:
        """Whether there are keys, so that unsigned messages are rejected."""
        return bool(self.path)

    @property
    def submitters(self) -> tuple[str, ...]:
        """The names of the submitters in the file."""
        return tuple(self._file.submitters)

    def journal_keys(self, search: str) -> tuple[SigningKey, ...]:
        """The keys for the copy of this search's journal, as the file has them now."""
        return self._file.journal_keys(search)

    def submitter(self, name: str) -> MessageSigner:
        """Make the signer for a submitter's messages; it does not follow the file.

        Raises:
            InvalidSignature: The farm has keys, but none of this submitter's.
        """
        return self._file.submitter_signer(name)

    def look(self) -> str:
        """Reload the file if it changed, and return a line for people about that, else "".

        If the new file is invalid, the old keys stay in use, and the line says so once.
        """
        now = time.monotonic()
        if not self.path or now < self._looked_at + _POLL_INTERVAL_S:
            return ""
        self._looked_at = now
        seen = _seen(self.path)
        if seen == self._seen:
            self._changing = None
            return ""
        if seen != self._changing:
            self._changing = seen  # its writer may not have finished
            return ""
        self._seen, self._changing = seen, None
        try:
            found = _read(self.path, self._role)
        except ConfigError as problem:
            return f"{problem} The keys that were read before stay in use."
        if found == self._file:
            return ""
        self._file = found
        if found.orders:
            self.orders.use(found.orders)
        if found.events:
            self.events.use(found.events)
        self.version += 1
        return f"The key file {self.path} was read again: {_described(found)}."


def find_keys(given: str | None, role: KeyRole) -> LiveKeys:
    """Load the keys of this process.

    Args:
        given: The path on the command line; if None, that in `KEYS_VARIABLE`; without either
            there are no keys.
        role: Who uses the keys.

    Raises:
        ConfigError: The file is invalid for that role; says how to fix it.
    """
    path, name = given, "--keys"
    if path is None:
        path, name = os.environ.get(KEYS_VARIABLE), KEYS_VARIABLE
    if path is None:
        return LiveKeys("", role)
    if not path:
        more = "" if given is not None else ", or unset it where nothing is to be signed"
        raise ConfigError(f"{name} is empty: give the path of {role.value}{more}.")
    return LiveKeys(os.path.abspath(os.path.expanduser(path)), role)


def _read(path: str, role: KeyRole) -> KeyFile:
    found = read_key_file(path)
    if role is KeyRole.SUBMITTER:
        if not found.submitters:
            raise _wrong_file(path, role, f"[{SUBMITTERS}.NAME]")
        return found
    for table, keys in ((ORDERS, found.orders), (EVENTS, found.events)):
        if not keys:
            raise _wrong_file(path, role, f"[{table}]")
    if role is KeyRole.SCHEDULER and not found.journals and not found.submitters:
        raise ConfigError(
            f"the key file {path} is that of a worker: it has no keys in [{JOURNALS}] and none of"
            f" submitters. Give the scheduler the file {role.value} of the same folder."
        )
    if role is KeyRole.SCHEDULER and not found.journals:
        raise ConfigError(
            f"the key file {path} has no keys in [{JOURNALS}], with which the scheduler signs the"
            " copies of journals: an earlier TuneMQ made it. Add one: tunemq keys rotate FOLDER"
            f" {JOURNALS}; and copy the file again."
        )
    if role is KeyRole.WORKER and found.submitters:
        raise ConfigError(
            f"the key file {path} has keys of submitters, which a worker does not need and its "
            f"trials might find: give the worker the file {role.value} of the same folder."
        )
    if role is KeyRole.WORKER and found.journals:
        raise ConfigError(
            f"the key file {path} has keys in [{JOURNALS}], which are the scheduler's alone: give"
            f" the worker the file {role.value} of the same folder."
        )
    return found


def _wrong_file(path: str, role: KeyRole, table: str) -> ConfigError:
    who = "who asks a farm" if role is KeyRole.SUBMITTER else f"a {role.name.lower()}"
    return ConfigError(
        f"the key file {path} has no keys in {table}, which {who} needs: the right one is"
        f" {role.value} in the folder that `tunemq keys new` made."
    )


def _described(keys: KeyFile) -> str:
    """Say which keys sign, for people: ids are not secret."""
    if not keys.orders:
        ((name, hers), *_) = keys.submitters.items()
        return f"{hers[0].id.hex()} signs for {name}"
    signs = f"{keys.orders[0].id.hex()} signs orders, {keys.events[0].id.hex()} events"
    believed = sum(map(len, (keys.orders, keys.events, *keys.submitters.values())))
    who = f", of {len(keys.submitters)} submitters" if keys.submitters else ""
    return f"{signs}; {believed} keys are believed{who}"


def _seen(path: str) -> _FileVersion | None:
    """The version of a file; None if it does not exist."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return _FileVersion(
        found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
    )
