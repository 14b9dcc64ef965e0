"""Check that key files are private, and that the farm signs its messages if it must."""

from __future__ import annotations

import base64
import contextlib
import errno
import os
import stat
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from tunemq_scheduler.security.findings import Finding, ok, problem, warning
from tunemq_shared.base.errors import ConfigError
from tunemq_shared.broker.redis_address import RedisAddress
from tunemq_shared.signing.key_files import KEYS_VARIABLE, KeyFile, check_private, read_key_file
from tunemq_shared.system.folder_rights import lets_others_replace

#: As many as the kernel follows.
_MOST_LINKS: Final = 40


class PrivateFile(NamedTuple):
    """A file that only its owner may read.

    Attributes:
        path: Of the file.
        what: Its content, for people.
    """

    path: Path
    what: str


def private_files(
    keys: str, redis: RedisAddress, environ: Mapping[str, str]
) -> Iterator[PrivateFile]:
    """Iterate over the private files that this machine's processes of the farm read.

    Args:
        keys: The path of the key file; empty if there is none.
        redis: May name a private key.
        environ: May name the store's credentials file.
    """
    if keys:
        yield PrivateFile(Path(keys), "the farm's key file")
    if redis.key_file:
        yield PrivateFile(Path(redis.key_file), "the private key that Redis is shown")
    credentials = environ.get("AWS_SHARED_CREDENTIALS_FILE") or "~/.aws/credentials"
    path = Path(credentials.replace("~", environ.get("HOME", "~"), 1)).expanduser()
    if path.is_file():
        yield PrivateFile(path, "the keys of the store")


def check_private_files(files: Iterable[PrivateFile]) -> list[Finding]:
    """Check that only their owner can read or change the files."""
    looked_at = list(files)
    found = [
        problem("key-files", wrong, fix) for file in looked_at for wrong, fix in _wrong_with(file)
    ]
    names = ", ".join(str(file.path) for file in looked_at)
    return found or [ok("key-files", f"only for their owner: {names}" if names else "none in use")]


@contextlib.contextmanager
def private_copy(path: str) -> Iterator[str]:
    """Yield a key file's path; for one that others may read, a private copy's path.

    `check_private_files` reports that others may read it; with the copy the other checks still
    work.

    Args:
        path: Of the file; empty if there is none.
    """
    try:
        about = os.stat(path)
        is_ours = stat.S_ISREG(about.st_mode) and about.st_uid in {0, os.geteuid()}
        if not (is_ours and about.st_mode & (stat.S_IRWXG | stat.S_IRWXO)):
            yield path
            return
        content = Path(path).read_bytes()
    except OSError:
        yield path
        return
    with tempfile.NamedTemporaryFile() as copy:
        copy.write(content)
        copy.flush()
        yield copy.name


def check_keys(path: str, reach: str) -> tuple[KeyFile, list[Finding]]:
    """Read the key file and check that everything is signed that must be.

    `check_private_files` reports a file that others may read.

    Args:
        path: Of the file; empty if there is none.
        reach: How other machines reach Redis; empty if it is not known that they do.

    Returns:
        The keys, none if the file is invalid; and the findings.
    """
    if not path:
        if not reach:
            return KeyFile(), [
                ok("keys", "nothing is signed: no other machine is seen to reach Redis")
            ]
        return KeyFile(), [
            problem(
                "keys",
                f"no key file is in use and {reach}: every client that can write to Redis can run"
                " code on every node",
                "tunemq keys new FOLDER; then tunemq scheduler --keys FOLDER/scheduler.toml, on"
                " each node tunemq worker --keys worker.toml, for each submitter tunemq keys add"
                f" NAME; and tunemq doctor --keys FOLDER/scheduler.toml (or ${KEYS_VARIABLE})",
            )
        ]
    try:
        check_private(path)
    except ConfigError:
        return KeyFile(), []
    try:
        keys = read_key_file(path)
    except ConfigError as error:
        fix = "use scheduler.toml of the folder that `tunemq keys new FOLDER` has made"
        return KeyFile(), [problem("keys", str(error), fix)]
    return keys, [_judged(path, keys)]


def secrets_in(keys: KeyFile) -> Iterator[str]:
    """Iterate over the keys in base64, as files hold them."""
    tables = (keys.orders, keys.events, keys.journals, *keys.submitters.values())
    for table in tables:
        for key in table:
            yield base64.b64encode(key.secret).decode()


def _judged(path: str, keys: KeyFile) -> Finding:
    if not (keys.orders and keys.events):
        return warning(
            "keys",
            f"{path} is not the scheduler's: what nodes say cannot be checked with it",
            "run this where the scheduler runs: tunemq doctor --keys scheduler.toml",
        )
    if not keys.submitters:
        return warning(
            "keys", f"{path} has no submitter, so no user can submit", "tunemq keys add NAME"
        )
    return ok("keys", f"all is signed; submitters: {', '.join(sorted(keys.submitters))}")


def _wrong_with(file: PrivateFile) -> Iterator[tuple[str, str]]:
    """Iterate over a file's problems with their fixes."""
    path, named = file.path, f"{file.what}, {file.path},"
    try:
        about = path.stat()
        places = dict(_places_on_the_way(path))
    except OSError as error:
        yield f"{named} cannot be looked at: {error.strerror}", f"ls -l {path}"
        return
    if not stat.S_ISREG(about.st_mode):
        yield f"{named} is no file", f"name another one than {path}"
        return
    if about.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        mode = stat.S_IMODE(about.st_mode)
        fix = f"chmod 600 {path}; then replace its keys, since other users may have read them"
        yield f"{named} can be read or changed by others: its mode is {mode:04o}", fix
    if about.st_uid not in {0, os.geteuid()}:
        yield f"{named} belongs to user {about.st_uid}", f"chown {os.geteuid()} {path}"
    # In a user namespace without root, / and all that root has on it belong to another number.
    trusted = {0, os.geteuid(), os.stat("/").st_uid}
    for place, status in places.items():
        if status.st_uid not in trusted:
            why = f"{place} belongs to user {status.st_uid}"
            fix = f"chown {'-h ' * stat.S_ISLNK(status.st_mode)}{os.geteuid()} {place}"
        elif stat.S_ISDIR(status.st_mode) and lets_others_replace(status):
            why = f"{place} has mode {stat.S_IMODE(status.st_mode):04o}"
            fix = f"chmod go-w {place}"
        else:
            continue
        yield f"{named} is in a place where others may replace it: {why}", fix


def _places_on_the_way(path: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Iterate over all folders and links through which a path leads to a file.

    Raises:
        OSError: One of them cannot be looked at.
    """
    here, names = Path("/"), list(path.absolute().parts[1:])
    links = 0
    yield here, here.stat()
    while names:
        above, here = here, here.parent if names[0] == ".." else here / names[0]
        del names[0]
        status = here.lstat()
        if stat.S_ISLNK(status.st_mode):
            links += 1
            if links > _MOST_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
            yield here, status
            target = above / os.readlink(here)
            here, names = Path("/"), [*target.parts[1:], *names]
        elif stat.S_ISDIR(status.st_mode):
            yield here, status
