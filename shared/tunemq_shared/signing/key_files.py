"""Key files: which role holds which keys of a farm. See `docs/security.md`.

A key file is TOML that only its owner may read::

    [orders]                      # the scheduler signs orders to nodes
    5f0c2a9be1d34c77 = "<base64 of 32 bytes>"

    [events]                      # nodes sign events to the scheduler
    91d0b66a0f2e4b10 = "..."

    [journals]                    # the scheduler signs the copies of journals in the store
    0b7d3a51c2e84f96 = "..."

    [submitters.ada]              # ada's requests, and the answers to her
    c4f1d2e3a5b69788 = "..."

In each table the first key signs and all keys verify, so that keys can be rotated while the farm
runs. The scheduler holds all tables, and it alone holds journals; a worker holds orders and events;
a submitter holds only her own table.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import os
import re
import stat
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import msgspec

from tunemq_shared.base.errors import ConfigError
from tunemq_shared.signing.message_signing import (
    KEY_ID_BYTES,
    SECRET_BYTES,
    InvalidSignature,
    MessageSigner,
    SigningKey,
)

#: The path of the process's key file, if the command line does not say.
KEYS_VARIABLE: Final = "TUNEMQ_KEYS"

#: Purposes of signatures; a submitter's is this prefix and a name.
ORDERS, EVENTS, JOURNALS, SUBMITTER = "orders", "events", "journals", "submitter:"
#: The tables that belong to no submitter.
_FARM_TABLES: Final = frozenset({ORDERS, EVENTS, JOURNALS})
#: The table of all submitters.
SUBMITTERS: Final = "submitters"

#: The submitter of commands that use the scheduler's key file, if it has keys.
OPERATOR: Final = "operator"

#: Valid names of submitters, and so of owners of experiments.
SUBMITTER_NAME: Final = re.compile(r"[\w.@+=-][\w .@+=-]{0,63}")

_KEY_ID: Final = re.compile(rf"[0-9a-f]{{{2 * KEY_ID_BYTES}}}")
#: Room for some ten thousand keys.
_MOST_BYTES: Final = 2**20
_BY_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO


class KeyFile(msgspec.Struct, frozen=True, kw_only=True):
    """The keys in a file; all empty on a farm that signs nothing.

    Attributes:
        orders: For messages from the scheduler to nodes.
        events: For messages from nodes to the scheduler.
        journals: For the copies of journals, which the scheduler writes and reads.
        submitters: By name, for each submitter's requests and their answers.
    """

    orders: tuple[SigningKey, ...] = ()
    events: tuple[SigningKey, ...] = ()
    journals: tuple[SigningKey, ...] = ()
    submitters: dict[str, tuple[SigningKey, ...]] = {}

    @property
    def is_empty(self) -> bool:
        """Whether the file has no key."""
        return not (self.orders or self.events or self.journals or self.submitters)

    def orders_signer(self) -> MessageSigner:
        """Make the signer of messages from the scheduler to nodes."""
        return MessageSigner(ORDERS, self.orders)

    def events_signer(self) -> MessageSigner:
        """Make the signer of messages from nodes to the scheduler."""
        return MessageSigner(EVENTS, self.events)

    def journal_keys(self, search: str) -> tuple[SigningKey, ...]:
        """Derive the keys for journals of searches of this name only."""
        context = b"journals of the search " + search.encode()
        return tuple(
            SigningKey(key.id, hmac.digest(key.secret, context, "sha256")) for key in self.journals
        )

    def submitter_signer(self, name: str) -> MessageSigner:
        """Make the signer of a submitter's requests and their answers.

        Raises:
            InvalidSignature: The farm has keys, but none of this submitter's, so that no unsigned
                message can count as hers.
        """
        keys = self.submitters.get(name, ())
        if not keys and not self.is_empty:
            raise InvalidSignature(
                f"is in the name of {name!r}, of whom there are no keys here", "unknown_submitter"
            )
        return MessageSigner(SUBMITTER + name, keys)


def journal_signer(keys: Iterable[SigningKey] = ()) -> MessageSigner:
    """Make the signer of a journal's copy, with the keys of `KeyFile.journal_keys`."""
    return MessageSigner(JOURNALS, tuple(keys))


def read_key_file(path: Path | str) -> KeyFile:
    """Read a key file.

    Raises:
        ConfigError: It is unreadable or invalid, or other users may read it; says how to fix it.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise _unreadable(path, error) from error
    try:
        _check_private(path, os.fstat(descriptor))
        with open(descriptor, "rb", closefd=False) as file:
            data = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise _unreadable(path, error) from error
    finally:
        os.close(descriptor)
    if len(data) > _MOST_BYTES:
        raise ConfigError(f"the key file {path} has more than {_MOST_BYTES} bytes: it is none.")
    return _parsed(path, data)


def check_private(path: Path | str) -> None:
    """Check that only its owner, who is this user or root, can read or write a key file.

    Raises:
        ConfigError: Others can, or there is no such file; says how to fix it.
    """
    try:
        found = os.stat(path)
    except OSError as error:
        raise _unreadable(path, error) from error
    _check_private(path, found)


def _check_private(path: Path | str, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise ConfigError(f"the key file {path} is no file; `tunemq keys new FOLDER` makes some.")
    if found.st_uid not in {0, os.geteuid()}:
        raise ConfigError(
            f"the key file {path} belongs to user {found.st_uid}, who may have written it, and this"
            f" runs as user {os.geteuid()}: chown {os.geteuid()} {path}"
        )
    if found.st_mode & _BY_OTHERS:
        mode = stat.S_IMODE(found.st_mode)
        raise ConfigError(
            f"the key file {path} has mode {mode:04o}, so users other than its owner can read"
            f" or change it: chmod 600 {path}; if another user may have read it, replace its keys:"
            " tunemq keys rotate FOLDER."
        )


def _unreadable(path: Path | str, error: OSError) -> ConfigError:
    fix = ""
    if isinstance(error, FileNotFoundError):
        fix = " `tunemq keys new FOLDER` makes the key files of a farm, and says which goes where."
    elif isinstance(error, PermissionError):
        fix = f" It has to be the file of user {os.geteuid()}, who runs this: chown, and chmod 600."
    return ConfigError(f"the key file {path} cannot be read: {error.strerror}.{fix}")


# --- parsing --------------------------------------------------------------------------------------


def _parsed(path: Path | str, data: bytes) -> KeyFile:
    try:
        found = tomllib.loads(data.decode())
    except UnicodeDecodeError as error:
        raise ConfigError(f"the key file {path} is no text.{_COPY}") from error
    except tomllib.TOMLDecodeError as error:
        # The parser's message quotes at most one character of the file.
        raise ConfigError(f"the key file {path} is invalid: {error}.{_COPY}") from error
    if unknown := sorted(set(found) - {*_FARM_TABLES, SUBMITTERS}):
        raise ConfigError(
            f"the key file {path} has {unknown[0]!r}, which is not known: its tables are [{ORDERS}]"
            f", [{EVENTS}], [{JOURNALS}] and [{SUBMITTERS}.NAME].{_COPY}"
        )
    keys = KeyFile(
        orders=_keys(path, ORDERS, found.get(ORDERS, {})),
        events=_keys(path, EVENTS, found.get(EVENTS, {})),
        journals=_keys(path, JOURNALS, found.get(JOURNALS, {})),
        submitters=_submitters(path, found.get(SUBMITTERS, {})),
    )
    if keys.is_empty:
        raise ConfigError(f"the key file {path} has no keys.{_COPY}")
    _check_distinct(path, keys)
    return keys


_COPY: Final = (
    " Copy it again from the folder that `tunemq keys new` made; key files are not written by hand."
)


def _submitters(path: Path | str, found: Any) -> dict[str, tuple[SigningKey, ...]]:
    if not isinstance(found, dict):
        raise ConfigError(f"the key file {path}: {SUBMITTERS} is no table.{_COPY}")
    for name in found:
        if not SUBMITTER_NAME.fullmatch(name):
            raise ConfigError(f"the key file {path}: {name!r} is no name of a submitter.{_COPY}")
    return {name: _keys(path, f"{SUBMITTERS}.{name}", keys) for name, keys in found.items()}


def _keys(path: Path | str, table: str, found: Any) -> tuple[SigningKey, ...]:
    if not isinstance(found, dict):
        raise ConfigError(f"the key file {path}: {table} is no table.{_COPY}")
    keys = []
    for key, text in found.items():
        secret = _secret(text)
        # The message must not repeat the text: half of a truncated secret is still secret.
        if not _KEY_ID.fullmatch(key):
            raise ConfigError(
                f"the key file {path}: [{table}] has an entry whose name is no id of a key, which"
                f" is {2 * KEY_ID_BYTES} digits of 0-9a-f.{_COPY}"
            )
        if secret is None:
            raise ConfigError(
                f"the key file {path}: the key {key} in [{table}] is not the base64 of"
                f" {SECRET_BYTES} bytes.{_COPY}"
            )
        keys.append(SigningKey(bytes.fromhex(key), secret))
    if table not in _FARM_TABLES and not keys:
        raise ConfigError(f"the key file {path}: there is no key in [{table}].{_COPY}")
    return tuple(keys)


def _secret(text: Any) -> bytes | None:
    if not isinstance(text, str):
        return None
    try:
        secret = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return None
    return secret if len(secret) == SECRET_BYTES else None


def _check_distinct(path: Path | str, keys: KeyFile) -> None:
    """Reject a key in two tables: its holder for one purpose could forge messages of the other."""
    tables = {ORDERS: keys.orders, EVENTS: keys.events, JOURNALS: keys.journals}
    tables |= {f"{SUBMITTERS}.{name}": its for name, its in keys.submitters.items()}
    places: dict[bytes, str] = {}
    for table, its in tables.items():
        for key in its:
            for part in (key.id, key.secret):
                if part in places:
                    raise ConfigError(
                        f"the key file {path}: the key {key.id.hex()} stands in [{places[part]}]"
                        f" and in [{table}]; no two may be the same.{_COPY}"
                    )
            places[key.id] = places[key.secret] = table
