"""The folders that the user of ``--trial-user`` needs: made and checked when a node starts."""

from __future__ import annotations

import logging
import os
import stat
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Final

from tunemq_shared.base.errors import ConfigError
from tunemq_shared.system.folder_trees import names_in, remove_tree
from tunemq_workers.forkservers.sigstop_guard import killing_stopped_starts
from tunemq_workers.node.protected_folders import make_folder
from tunemq_workers.processes.child_process import LOGS
from tunemq_workers.runtime.disk_jobs import DiskJobs
from tunemq_workers.runtime.reactor import Reactor
from tunemq_workers.system.trial_user import UserAccount, own_files
from tunemq_workers.work_folder import is_marked

#: The most time for the account check, which is one import by a cold interpreter.
_CHECK_S: Final = 60.0
#: A trial that starts in between fails, and is retried.
_RESTORED_EVERY_S: Final = 1.0
#: The rights of the files and folders that will be made in a folder; see acl(5).
_DEFAULT_ACL: Final = "system.posix_acl_default"
#: Where its value has the owner's rights: behind a version of 4 bytes and a tag of 2.
_OWNERS_RIGHTS: Final = 6
_RWX: Final = 0o7
#: The program that the user runs to check that it can run trials, and cannot make root run code.
_CHECK: Final = """\
import os, sys
sys.path[:] = {path!r} + sys.path
import tunemq_shared, tunemq_workers.processes.forkserver_messages
packages = [*tunemq_shared.__path__, *tunemq_workers.__path__]
for place in [os.path.realpath(sys.executable), *sys.path, *packages]:
    if os.access(place, os.W_OK):
        sys.exit("it can change " + place + ", which root runs")
for folder in {folders!r}:
    if not os.access(folder, os.W_OK | os.X_OK):
        sys.exit("it cannot write to " + folder)
"""

_log = logging.getLogger(__name__)


def claim_workdir(account: UserAccount, workdir: str, names: Sequence[str]) -> str:
    """Make a working folder; reject one that others could change, or with foreign files.

    The account may pass through it, but not list it.

    Call it before this start makes the lock file: a lock file then proves an earlier start.

    Args:
        workdir: an absolute path.
        names: the folders that `give_folders` will be called with.

    Returns:
        The path without links.

    Raises:
        ConfigError: the folder cannot be used; says why, and what to do.
    """
    with _refusing():
        workdir = make_folder(workdir, "--workdir")
        mode = stat.S_IMODE(os.stat(workdir).st_mode)
        if not os.listdir(workdir):
            mode = 0o700  # it is new, or was made for this worker
            os.chmod(workdir, mode)  # before the checks: others may put files there until then
        elif mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise ConfigError(
                f"others may write to {workdir}, so trials could replace the worker's files "
                f"there. Run chmod go-w {workdir}, or choose another --workdir."
            )
        for name in names:
            folder = os.path.join(workdir, name)
            if os.path.islink(folder):
                raise ConfigError(
                    f"{folder} is a link, which is not followed for --trial-user: remove it. To"
                    " have copies of checkpoints elsewhere, name the folder itself with --cache."
                )
            if _owner(folder) not in (None, account.uid) and not is_marked(workdir):
                raise ConfigError(
                    f"{folder} is not TuneMQ's: no worker has worked in {workdir} before, and for"
                    f" --trial-user {account.name} it would be emptied. Move it away, or name"
                    " another --workdir."
                )
        os.chmod(workdir, mode | 0o011)  # noqa: S103  to traverse, not to read
    return workdir


def give_folders(
    account: UserAccount, workdir: str, names: Iterable[str], cache: str | None
) -> str | None:
    """Give the folders that trials and the node share to the account; make the logs private.

    Args:
        workdir: the node's, as `claim_workdir` returned it.
        names: folders in there; those of another user are emptied, since they hold only copies.
        cache: one more folder, if the user named it; its content is the user's and stays.

    Returns:
        The path of ``cache`` without links.

    Raises:
        ConfigError: a folder cannot be used, or the account cannot run trials; says why.
    """
    folders = [os.path.join(workdir, name) for name in names]
    with _refusing():
        _make_logs_private(os.path.join(workdir, LOGS))
        for folder in folders:
            if _owner(folder) not in (None, account.uid):
                remove_tree(folder)
                if os.path.lexists(folder):
                    os.rmdir(folder)  # raises the reason why it is still there
            if _owner(folder) is None:
                os.mkdir(folder, mode=0o700)
                os.chown(folder, account.uid, account.gid)
        if cache is not None:
            cache = make_folder(os.path.abspath(cache), "--cache", account)
            folders.append(cache)
        restore_rights(folders)
    _check(account, folders)
    return cache


def _make_logs_private(logs: str) -> None:
    """Make the folder of logs, or take it over, and remove links, folders and foreign files there.

    A trial that ran as the node's user may have put them there, and the node follows links when it
    opens a log. Such a trial may still run, so the folder is closed to it first.
    """
    with suppress(FileNotFoundError, IsADirectoryError):
        os.unlink(logs)  # a link, or another file
    with suppress(FileExistsError):
        os.mkdir(logs, 0o700)
    folder = os.open(logs, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fchown(folder, os.geteuid(), os.getegid())
        os.fchmod(folder, 0o700)
        for name in names_in(folder):
            status = os.stat(name, dir_fd=folder, follow_symlinks=False)
            if stat.S_ISDIR(status.st_mode):
                remove_tree(os.path.join(logs, name))
            elif (
                not stat.S_ISREG(status.st_mode)
                or status.st_uid != os.geteuid()
                or status.st_nlink > 1  # it may be any file of the node's user
            ):
                os.unlink(name, dir_fd=folder)
    finally:
        os.close(folder)


def restore_rights(folders: Iterable[str]) -> None:
    """Give the owner all rights to these folders, and to new entries of them.

    A trial may have removed them.
    """
    with own_files():
        for folder in folders:
            with suppress(FileNotFoundError, NotADirectoryError):
                # One descriptor: a trial may put another file in the place of its cache meanwhile.
                opened = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
                try:
                    _restore_rights(f"/proc/self/fd/{opened}")
                finally:
                    os.close(opened)


def _restore_rights(folder: str) -> None:
    mode = stat.S_IMODE(os.stat(folder).st_mode)
    if mode & stat.S_IRWXU != stat.S_IRWXU:
        with suppress(OSError):
            os.chmod(folder, mode | stat.S_IRWXU)
    with suppress(OSError):  # there is no default ACL, or the file system has no such lists
        entries = os.getxattr(folder, _DEFAULT_ACL)
        if entries[_OWNERS_RIGHTS] & _RWX != _RWX:  # an administrator's may stay
            os.removexattr(folder, _DEFAULT_ACL)


def keep_rights(timers: Reactor, disk: DiskJobs, folders: Collection[str]) -> None:
    """Restore the rights to folders that trials and the node share, now and once per second.

    Otherwise one trial that changes their modes or default ACLs would make all later ones on the
    node fail. A trial can also keep a folder locked for minutes, so a job of ``disk`` does it.
    """

    def again(problem: OSError | None) -> None:
        if problem is not None:
            _log.warning("rights.not_restored problem=%r", str(problem))
        timers.after(_RESTORED_EVERY_S, partial(keep_rights, timers, disk, folders))

    place = f"{os.path.commonpath(folders)} (rights)"
    disk.run(place, partial(restore_rights, folders), again, again)


@contextmanager
def _refusing() -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        raise ConfigError(
            f"--trial-user: {problem.filename}: {problem.strerror or problem}. Repair that, or name"
            " another --workdir."
        ) from problem


def _owner(path: str) -> int | None:
    try:
        return os.lstat(path).st_uid
    except FileNotFoundError:
        return None


def _check(account: UserAccount, folders: list[str]) -> None:
    """Run this interpreter as the account.

    Raises:
        ConfigError: the account cannot import TuneMQ, or cannot write to one of the folders.
    """
    code = _CHECK.format(path=[entry for entry in sys.path if entry], folders=folders)
    try:
        with killing_stopped_starts():  # by a trial of that user that an earlier node left
            ended = subprocess.run(
                [sys.executable, "-I", "-c", code],  # -I: runs no files of that user
                cwd="/",
                env=account.variables({}),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_CHECK_S,
                check=False,
                # Trials of that user could type into the terminal at which root starts a worker.
                start_new_session=True,
                user=account.uid,
                group=account.gid,
                extra_groups=account.groups,
            )
    except (OSError, subprocess.SubprocessError) as problem:
        reason = f"{sys.executable}: {getattr(problem, 'strerror', None) or problem}"
    else:
        if ended.returncode == 0:
            return
        lines = ended.stderr.strip().splitlines()
        reason = lines[-1] if lines else f"{sys.executable} ended with {ended.returncode}"
    raise ConfigError(
        f"--trial-user is {account.name}, who cannot run trials here: {reason}. That user must "
        "be able to reach the interpreter, TuneMQ and the --workdir, and to change none of the "
        "modules that root imports."
    )
