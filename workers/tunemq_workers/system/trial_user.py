"""The user that runs trials if it is not the node's own: ``--trial-user``.

Forkservers run as that user from their first instruction, so that neither preloaded modules nor
inherited state ever had the node's rights. The node also works on trials' files with that user's
rights: whatever a trial puts into its folder, such as a link to a file that only root may read, the
node cannot access more than the trial could. The node opens its own files within `own_files`.

A node imports this module before all others, so it imports little itself.
"""

from __future__ import annotations

import contextlib
import os
import pwd
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from tunemq_shared.base.errors import ConfigError
from tunemq_shared.system import process_attributes

#: Prefixes of variables of the node's user that do not apply to another user.
_OF_A_LOGIN: Final = ("XDG_", "SUDO_")
_MAIL: Final = "MAIL"


class UserAccount(NamedTuple):
    """A user with its groups."""

    name: str
    uid: int
    gid: int
    groups: tuple[int, ...]
    home: str

    def variables(self, own: Mapping[str, str]) -> dict[str, str]:
        """Return a node's environment adapted to this user."""
        kept = {n: v for n, v in own.items() if n != _MAIL and not n.startswith(_OF_A_LOGIN)}
        return {**kept, "HOME": self.home, "USER": self.name, "LOGNAME": self.name}


def find_account(text: str) -> UserAccount:
    """Return the account that ``--trial-user`` names: a name or number, optionally ``:GROUP``.

    Raises:
        ConfigError: the account does not exist or is root, or this process may not act for it.
    """
    if os.geteuid() != 0:
        raise ConfigError(
            f"--trial-user is {text}, and only a worker that root starts can run trials as another"
            f" user; this one is started by user {os.geteuid()}."
        )
    account = _parsed(text)
    if account.uid == 0:
        raise ConfigError(f"--trial-user is {text}, which is root; name a user without rights.")
    return account


def _parsed(text: str) -> UserAccount:
    name, colon, group = text.partition(":")
    if colon and not _is_number(group):
        raise ConfigError(f"--trial-user is {text!r}; pass a group as a number, as in 1000:1000.")
    try:
        entry = pwd.getpwuid(int(name)) if _is_number(name) else pwd.getpwnam(name)
    except (KeyError, OverflowError) as problem:
        if _is_number(name) and int(name) < 2**32 - 1 and colon:
            return UserAccount(name, int(name), int(group), (int(group),), "/")
        advice = (
            f"pass its group, too: {name}:{name}"
            if _is_number(name)
            else "name one of /etc/passwd, or give numbers, such as 1000:1000"
        )
        raise ConfigError(
            f"--trial-user is {text!r}, a user that this machine does not know; {advice}."
        ) from problem
    if colon:
        return UserAccount(entry.pw_name, entry.pw_uid, int(group), (int(group),), entry.pw_dir)
    groups = tuple(os.getgrouplist(entry.pw_name, entry.pw_gid))
    return UserAccount(entry.pw_name, entry.pw_uid, entry.pw_gid, groups, entry.pw_dir)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()


def leave_login() -> None:
    """Give up the keys that this process's user has in the kernel: no trial may use them.

    Call it before any process of another user is started.

    Raises:
        ConfigError: This is not possible here.
    """
    try:
        process_attributes.leave_session_keyring()
    except OSError as problem:
        raise ConfigError(
            "--trial-user cannot be used: trials would share the session keyring of the worker's"
            f" user ({problem})."
        ) from problem


def act_for(account: UserAccount) -> None:
    """Make this process, which root runs, work on files with the account's rights from now on.

    Programs that it executes gain no further rights (no_new_privileges), since trials name
    programs. The process also cannot follow links in ``/proc`` into other users' processes. Call it
    before other threads exist, and before `die_with_parent`, which it undoes.
    """
    process_attributes.no_new_privileges()
    process_attributes.look_into_no_other_users_process()
    os.setgroups(account.groups)
    process_attributes.files_as(account.uid, account.gid)


@contextlib.contextmanager
def own_files() -> Iterator[None]:
    """Open files within the context as this process's own user, in the calling thread."""
    uid, gid = process_attributes.files_user()
    if uid == os.geteuid():
        yield
        return
    process_attributes.files_as(os.geteuid(), os.getegid())
    try:
        yield
    finally:
        process_attributes.files_as(uid, gid)
