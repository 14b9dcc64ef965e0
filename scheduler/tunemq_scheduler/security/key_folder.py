"""`KeyFolder`: the key files of a farm, made and changed together.

``scheduler.toml`` has all keys, and the other files derive from it. If a table has two keys, the
newer one came from `rotate`; the first one signs, so their order shows the step of the rotation.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import re
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tunemq_shared.base.errors import ConfigError
from tunemq_shared.signing.key_files import (
    EVENTS,
    JOURNALS,
    ORDERS,
    SUBMITTER_NAME,
    SUBMITTERS,
    KeyFile,
    read_key_file,
)
from tunemq_shared.signing.live_keys import KeyRole
from tunemq_shared.signing.message_signing import KEY_ID_BYTES, SECRET_BYTES, SigningKey

SCHEDULER_FILE: Final = KeyRole.SCHEDULER.value
WORKER_FILE: Final = KeyRole.WORKER.value
#: The name, in commands, of the keys of scheduler and workers.
WORKER: Final = "worker"

#: Length of the Unix time that begins an id, so that ids show which key is newer.
_TIME_BYTES: Final = 4
_BARE: Final = re.compile(r"[A-Za-z0-9_-]+")
_HEAD: Final = """\
# {file}: keys of a TuneMQ farm, made by `tunemq keys`. Readers of this file can act in its name.
"""

#: The tables of no submitter; the last one is only in the scheduler's file.
_FARM_TABLES: Final = (ORDERS, EVENTS, JOURNALS)
#: The keys of each table, in the order of the file.
Tables = dict[str, tuple[SigningKey, ...]]


def made_at(key: SigningKey) -> int:
    """The Unix time at which a key was made."""
    return int.from_bytes(key.id[:_TIME_BYTES], "big")


class KeyFolder:
    """The folder of key files that `tunemq keys new` makes.

    Args:
        path: Of the folder.
    """

    def __init__(self, path: str) -> None:
        self.path = Path(path).expanduser().absolute()

    def keys(self) -> KeyFile:
        """Read all keys.

        Raises:
            ConfigError: There are none, or the file is invalid.
        """
        return read_key_file(self.path / SCHEDULER_FILE)

    def create(self, names: Iterable[str]) -> list[str]:
        """Make the keys of a new farm with these submitters; returns the names of its files.

        Raises:
            ConfigError: There are keys already, a name is invalid, or the disk cannot be written.
        """
        names = tuple(dict.fromkeys(names))
        _check_names(names)
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be made: {error.strerror}.") from error
        with self._locked():
            if (self.path / SCHEDULER_FILE).exists():
                raise ConfigError(
                    f"there are keys in {self.path} already. `tunemq keys add` makes some for a"
                    " further submitter, `tunemq keys rotate` begins to change them; those of"
                    " another farm need another folder."
                )
            every = (*_FARM_TABLES, *map(_table, names))
            return self._write({table: (_new_key(),) for table in every})

    def add(self, names: Iterable[str]) -> list[str]:
        """Make keys for further submitters; returns the names of the changed files.

        Raises:
            ConfigError: One of them has keys, or a name is invalid.
        """
        names = tuple(dict.fromkeys(names))
        _check_names(names)
        with self._locked():
            tables = self._tables()
            for name in names:
                if _table(name) in tables:
                    raise ConfigError(
                        f"{name} has keys already, in {self._submitters_file(name)}. If others"
                        f" may have read them: tunemq keys rotate {self.path} {name}"
                    )
            return self._write(tables | {_table(name): (_new_key(),) for name in names})

    def remove(self, names: Iterable[str]) -> list[str]:
        """Remove the keys of these submitters; returns the names of the changed files.

        Raises:
            ConfigError: One of them has no keys.
        """
        with self._locked():
            tables = self._tables()
            gone = {_table(name) for name in self._known(tables, names)}
            changed = self._write(
                {table: its for table, its in tables.items() if table not in gone}
            )
            for name in names:
                self._submitters_file(name).unlink(missing_ok=True)
            return changed

    def rotate(self, whose: Iterable[str] = ()) -> list[str]:
        """Add a second key to each table, which verifies but does not sign yet.

        Args:
            whose: "worker", "journals", or submitters; by default all but the journals'.

        Returns:
            The names of the changed files.

        Raises:
            ConfigError: One of the tables has a second key already.
        """
        with self._locked():
            tables = self._tables()
            chosen = self._chosen(tables, whose)
            for table in chosen:
                if len(tables[table]) > 1:
                    raise ConfigError(
                        f"there is a second key in [{table}] already: first run `tunemq keys"
                        f" promote {self.path}`, or `tunemq keys drop {self.path}` where that was"
                        f" done (`tunemq keys show {self.path}` says how far it is)."
                    )
            added = {table: (*tables[table], _new_key(tables[table])) for table in chosen}
            return self._write(tables | added)

    def promote(self, whose: Iterable[str] = ()) -> list[str]:
        """Make the newer key of each table sign; returns the names of the changed files.

        Raises:
            ConfigError: The newest keys sign already.
        """
        with self._locked():
            tables = self._tables()
            ready = [
                table for table in self._chosen(tables, whose) if not _signs_newest(tables[table])
            ]
            if not ready:
                raise ConfigError(
                    f"each newest key in {self.path} signs already. To have new ones: tunemq keys"
                    f" rotate {self.path}; to have done with old ones: tunemq keys drop {self.path}"
                )
            turned = {table: tuple(sorted(tables[table], key=_age)) for table in ready}
            return self._write(tables | turned)

    def drop(self, whose: Iterable[str] = ()) -> list[str]:
        """Remove the keys that do not sign; returns the names of the changed files.

        Raises:
            ConfigError: There are none, or a newer key does not sign yet.
        """
        with self._locked():
            tables = self._tables()
            chosen = self._chosen(tables, whose)
            for table in chosen:
                if not _signs_newest(tables[table]):
                    raise ConfigError(
                        f"the new key in [{table}] does not sign yet, and would be alone: first"
                        f" `tunemq keys promote {self.path}`, and copy the files."
                    )
            if not any(len(tables[table]) > 1 for table in chosen):
                raise ConfigError(f"there are no old keys in {self.path}: nothing to drop.")
            return self._write(tables | {table: tables[table][:1] for table in chosen})

    # --- shared helpers ---------------------------------------------------------------------------

    def _tables(self) -> Tables:
        keys = self.keys()
        submitters = {_table(name): its for name, its in keys.submitters.items()}
        # Key files of an earlier TuneMQ have no key for journals.
        journals = keys.journals or (_new_key(),)
        return {ORDERS: keys.orders, EVENTS: keys.events, JOURNALS: journals, **submitters}

    def _chosen(self, tables: Tables, whose: Iterable[str]) -> list[str]:
        named = set(whose)
        if not named:
            # Journals in the store are signed once: without their key they could not be read.
            return [table for table in tables if table != JOURNALS]
        chosen = [ORDERS, EVENTS] if WORKER in named else []
        chosen += [JOURNALS] if JOURNALS in named else []
        return [*chosen, *map(_table, self._known(tables, named - {WORKER, JOURNALS}))]

    def _known(self, tables: Tables, names: Iterable[str]) -> list[str]:
        known = {table: table.partition(".")[2] for table in tables if table not in _FARM_TABLES}
        for name in names:
            if _table(name) not in known:
                raise ConfigError(
                    f"there are no keys of {name!r} in {self.path}, but of"
                    f" {', '.join((WORKER, JOURNALS, *known.values()))}."
                )
        return sorted(names)

    def _submitters_file(self, name: str) -> Path:
        return self.path / f"{name}.toml"

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Lock the folder against other processes that change it.

        Raises:
            ConfigError: There is no such folder.
        """
        try:
            folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigError(
                f"{self.path} cannot be opened: {error.strerror}. The folder of a farm's keys is"
                " made by: tunemq keys new FOLDER"
            ) from error
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            yield
        finally:
            os.close(folder)

    def _write(self, tables: Tables) -> list[str]:
        """Write the changed files, the one with all keys last: it commits the change."""
        wanted: dict[str, Mapping[str, tuple[SigningKey, ...]]]
        wanted = {WORKER_FILE: {table: tables[table] for table in (ORDERS, EVENTS)}}
        for table, its in tables.items():
            if table not in _FARM_TABLES:
                wanted[f"{table.partition('.')[2]}.toml"] = {table: its}
        wanted[SCHEDULER_FILE] = tables
        changed = []
        for file, held in wanted.items():
            path, text = self.path / file, _text(file, held).encode()
            try:
                if path.exists() and path.read_bytes() == text:
                    continue
                _replace(path, text)
            except OSError as error:
                raise ConfigError(f"{path} cannot be written: {error.strerror}.") from error
            changed.append(file)
        return changed[-1:] + changed[:-1]


def _check_names(names: Iterable[str]) -> None:
    for name in names:
        if not SUBMITTER_NAME.fullmatch(name):
            raise ConfigError(
                f"a submitter cannot be called {name!r}: give letters, digits and .@+=-, 64 at"
                " most."
            )
        if f"{name}.toml" in {SCHEDULER_FILE, WORKER_FILE} or name == JOURNALS:
            raise ConfigError(f"a submitter cannot be called {name!r}: that means other keys.")


def _table(name: str) -> str:
    return f"{SUBMITTERS}.{name}"


def _new_key(others: Iterable[SigningKey] = ()) -> SigningKey:
    at = max(int(time.time()), *(made_at(key) + 1 for key in others), 0)
    identity = at.to_bytes(_TIME_BYTES, "big") + secrets.token_bytes(KEY_ID_BYTES - _TIME_BYTES)
    return SigningKey(identity, secrets.token_bytes(SECRET_BYTES))


def _age(key: SigningKey) -> int:
    return -made_at(key)


def _signs_newest(keys: tuple[SigningKey, ...]) -> bool:
    return made_at(keys[0]) == max(map(made_at, keys))


def _text(file: str, tables: Mapping[str, tuple[SigningKey, ...]]) -> str:
    parts = [_HEAD.format(file=file)]
    for table, keys in tables.items():
        group, dot, name = table.partition(".")
        quoted = name if _BARE.fullmatch(name) else json.dumps(name, ensure_ascii=False)
        parts.append(f"\n[{group}{dot}{quoted if dot else ''}]\n")
        parts += (f'{key.id.hex()} = "{base64.b64encode(key.secret).decode()}"\n' for key in keys)
    return "".join(parts)


def _replace(path: Path, data: bytes) -> None:
    beside = path.with_name(f".{path.name}.new")
    beside.unlink(missing_ok=True)
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(descriptor, "wb") as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
