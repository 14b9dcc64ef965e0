"""The file with the token that a server lets clients in with; made where there is none."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from tunemq_scheduler.store_server.served_folder import OWN
from tunemq_shared.errors import ConfigError
from tunemq_shared.http_address import read_token


def token_file_of(folder: Path) -> Path:
    """Where the token of a served folder is, if nobody says otherwise; it is not served."""
    return folder / OWN / "token"


def token_in(path: Path) -> str:
    """The token in the file, which only its owner may read if it is made here.

    Raises:
        ConfigError: the file cannot be made.
        StoreError: there is no token in it.
    """
    if not path.exists():
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _make(path, secrets.token_urlsafe(32))
        except OSError as error:
            raise ConfigError(
                f"--token-file {path} cannot be made: {error.strerror}; name a file that you may "
                "write, or one that is there."
            ) from error
    return read_token(path, "--token-file")


def _make(path: Path, token: str) -> None:
    """Write the file so that it is there whole or not at all, and over nobody else's."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(fd, "w", encoding="ascii") as file:
            file.write(f"{token}\n")
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):  # another process was faster, and that counts
            os.link(partial, path)
    finally:
        partial.unlink()
