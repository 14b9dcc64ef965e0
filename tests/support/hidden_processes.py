"""Programs that see a ``/proc`` which hides processes, as systemd's ProtectProc= has them see it.

subprocess.Popen([*hiding("invisible"), *reachable(NOBODY), ...])     for tests that root runs
"""

from __future__ import annotations

import os
import platform
import shutil
from typing import Final

from tests.support.waiting import need

#: Since Linux 5.8 each mount of /proc has separate options; before, all mounts shared them.
_LINUX: Final = (5, 8)


def hiding(hidepid: str) -> list[str]:
    """The command prefix with which root runs a program that sees such a ``/proc``.

    Args:
        hidepid: the mount option: ``noaccess`` (1), ``invisible`` (2) or ``ptraceable`` (4).
    """
    need("root, to mount a /proc", os.geteuid() == 0 or None)
    need("unshare", shutil.which("unshare"))
    release = tuple(int(part) for part in platform.release().split(".")[:2])
    need("Linux 5.8, for options of one mount of /proc", release >= _LINUX)
    script = f'mount -t proc -o hidepid={hidepid} proc /proc && exec "$@"'
    return ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh"]
