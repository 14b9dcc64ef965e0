"""What the user that trials run as has to find on a machine, made and tried when a node starts."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from typing import Final

from tunemq_shared.errors import ConfigError
from tunemq_workers.account import Account

#: How long the check of an account may take: one import by a cold interpreter.
_CHECK_S: Final = 60.0
#: What the user runs to find out whether it can host trials; ``{}`` is a folder to be written to.
_CHECK: Final = """\
import os, sys
sys.path[:] = {path!r} + sys.path
import tunemq_workers.forkserver_messages
for folder in {folders!r}:
    if not os.access(folder, os.W_OK | os.X_OK):
        sys.exit("it cannot write to " + folder)
"""


def give_folders(account: Account, workdir: str, names: Iterable[str], cache: str | None) -> None:
    """Make the folders that trials and the node share the account's, and the rest nobody's else.

    Args:
        workdir: the node's. Who runs trials may pass through it, and sees nothing of it.
        names: folders in there; another user's are emptied, since they hold nothing but copies.
        cache: a further one, if people have named it; what is in it is theirs.

    Raises:
        ConfigError: a folder cannot be used, or the account cannot host trials; says why.
    """
    os.chmod(workdir, 0o711)  # noqa: S103  to pass, not to read
    for entry in os.scandir(workdir):
        if entry.is_file(follow_symlinks=False):
            os.chmod(entry.path, 0o600)
    folders = [os.path.join(workdir, name) for name in names]
    for folder in folders:
        if _owner(folder) not in (None, account.uid):
            shutil.rmtree(folder)
    if cache is not None:
        folders.append(os.path.abspath(cache))
    for folder in folders:
        if _owner(folder) is None:
            os.makedirs(folder, mode=0o700)
            os.chown(folder, account.uid, account.gid)
    _check(account, folders)


def _owner(path: str) -> int | None:
    try:
        return os.lstat(path).st_uid
    except FileNotFoundError:
        return None


def _check(account: Account, folders: list[str]) -> None:
    """Run this interpreter as the account.

    Raises:
        ConfigError: it cannot import TuneMQ, or not write to one of the folders.
    """
    code = _CHECK.format(path=[entry for entry in sys.path if entry], folders=folders)
    try:
        ended = subprocess.run(
            [sys.executable, "-P", "-c", code],
            cwd="/",
            env=account.variables({}),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_CHECK_S,
            check=False,
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
        f"--trial-user is {account.name}, who cannot run trials here: {reason}. The interpreter,"
        " TuneMQ and the --workdir have to be where that user may go."
    )
