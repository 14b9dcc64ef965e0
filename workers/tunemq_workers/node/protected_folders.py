"""Make folders that no other user can replace, for a worker whose trials run as another user."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from typing import Final

from tunemq_shared.base.errors import ConfigError
from tunemq_shared.system.folder_rights import lets_others_replace
from tunemq_workers.system.trial_user import UserAccount

#: `os.open` follows no link with these: `make_folder` decides which ones it follows.
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
#: As many as the kernel follows.
_MOST_LINKS: Final = 40


def make_folder(path: str, option: str, account: UserAccount | None = None) -> str:
    """Make a folder, and those above it that are missing, where no other user can replace them.

    It walks from the root by descriptors and checks each folder before it looks up a name there: a
    path that is resolved first and checked afterwards can lead elsewhere in between. A new folder
    has mode 0700, and new ones above it 0755, so that trials can reach it.

    Args:
        path: an absolute path.
        option: the option that names it, for messages.
        account: may own the folder itself, and gets it if it is made here; by default the worker's
            own user does.

    Returns:
        The path without links. Other users cannot change where it leads, except that ``account``
        can replace the folder itself if it owns that and the folder above is like /tmp.

    Raises:
        ConfigError: another user owns a folder or a link on the way, or can replace folders there.
        OSError: a folder cannot be made or opened.
    """
    names, real, links = _names(path), "/", 0
    place = os.open("/", _FOLDER)
    try:
        while names:
            _check_folder(os.fstat(place), real, option)
            name, *names = names
            path = os.path.dirname(real) if name == ".." else os.path.join(real, name)
            status = _find_or_make(name, place, is_above=bool(names), account=account)
            if stat.S_ISLNK(status.st_mode):
                _check_owner(status, f"{path} is a link of", option)
                links += 1
                if links > _MOST_LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
                names = [*_names(os.path.join(real, os.readlink(name, dir_fd=place))), *names]
                name = path = "/"
            # O_RDONLY mounts a folder that is mounted on demand, but needs the right to read.
            inner = os.open(name, _FOLDER if names else _FOLDER | os.O_PATH, dir_fd=place)
            os.close(place)
            place, real = inner, path
        _check_owner(os.fstat(place), f"{real} belongs to", option, account)
    except OSError as problem:
        problem.filename = path
        raise
    finally:
        os.close(place)
    return real


def could_replace(path: str, account: UserAccount, *, is_made_again: bool = False) -> bool:
    """Return whether a user could replace a file, a folder on the way to it, or its content.

    Args:
        path: an absolute path; it may be missing.
        account: the user.
        is_made_again: whether the file goes at times, as a socket does, so that a folder like /tmp
            does not protect it.
    """
    place, names, links = "/", _names(path), 0
    while names:
        name, *names = names
        inner = os.path.dirname(place) if name == ".." else os.path.join(place, name)
        status = _status(inner)
        comes_again = is_made_again and not names
        if name != ".." and _may_replace(_status(place), status, account, comes_again):
            return True
        if status is None:
            return False
        if stat.S_ISLNK(status.st_mode):
            links += 1
            target = os.readlink(inner)
            if links > _MOST_LINKS:
                return True
            names = [*_names(target), *names]
            place = "/" if target.startswith("/") else place
        else:
            place = inner
    status = _status(place)
    return status is not None and not stat.S_ISSOCK(status.st_mode) and _may_write(status, account)


def _status(path: str) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except OSError:
        return None


def _may_replace(
    folder: os.stat_result | None,
    entry: os.stat_result | None,
    account: UserAccount,
    comes_again: bool,
) -> bool:
    if folder is None or not _may_write(folder, account):
        return False
    protects = folder.st_mode & stat.S_ISVTX and folder.st_uid != account.uid
    return not protects or comes_again or entry is None or entry.st_uid == account.uid


def _may_write(status: os.stat_result, account: UserAccount) -> bool:
    """Return whether a user may write, or give itself that right as the owner."""
    if status.st_uid == account.uid:
        return True
    in_group = status.st_gid in {account.gid, *account.groups}
    return bool(status.st_mode & (stat.S_IWGRP if in_group else stat.S_IWOTH))


def _names(path: str) -> list[str]:
    return [name for name in path.split("/") if name not in ("", ".")]


def _find_or_make(
    name: str, place: int, *, is_above: bool, account: UserAccount | None
) -> os.stat_result:
    """Return the status of a name in a checked folder, where a folder is made if it is missing."""
    with suppress(FileNotFoundError):
        return os.stat(name, dir_fd=place, follow_symlinks=False)
    with suppress(FileExistsError):  # in a folder like /tmp, another user was faster
        os.mkdir(name, 0o700, dir_fd=place)  # no other user can replace it from now on
        if is_above:
            os.chmod(name, 0o755, dir_fd=place)  # noqa: S103  whatever the umask is
        elif account is not None:
            os.chown(name, account.uid, account.gid, dir_fd=place, follow_symlinks=False)
    return os.stat(name, dir_fd=place, follow_symlinks=False)


def _check_folder(status: os.stat_result, path: str, option: str) -> None:
    """Reject a folder in which another user may replace the folders of others."""
    _check_owner(status, f"{path} belongs to", option)
    if lets_others_replace(status):
        mode = stat.S_IMODE(status.st_mode)
        raise ConfigError(
            f"others may write to {path}, who could make root write elsewhere by links there. Its"
            f" mode is {mode:04o}: run chmod go-w {path}, or name another {option}."
        )


def _check_owner(
    status: os.stat_result, whose: str, option: str, account: UserAccount | None = None
) -> None:
    if status.st_uid in (0, os.geteuid()) or (account and status.st_uid == account.uid):
        return
    raise ConfigError(
        f"{whose} user {status.st_uid}, who could make root write elsewhere by links. For"
        f" --trial-user, name a {option} that root made, in folders that only root can change."
    )
