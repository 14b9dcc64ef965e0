"""Opens files in folders where experiments' code writes, too: whatever it put there in their place.

A FIFO would hold up who opens it, and a link would lead out of the folder.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Final

#: What opening says of a link, of a FIFO that nobody reads, of a socket, of a folder.
_NOT_PLAIN: Final = frozenset({errno.ELOOP, errno.ENXIO, errno.EISDIR})


def open_plain(path: Path, flags: int) -> int | None:
    """A descriptor of a regular file; None if something else is there. It never waits.

    Args:
        flags: as for `os.open`.

    Raises:
        OSError: it cannot be opened; FileNotFoundError if there is nothing.
    """
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno in _NOT_PLAIN:
            return None
        raise
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    return None
