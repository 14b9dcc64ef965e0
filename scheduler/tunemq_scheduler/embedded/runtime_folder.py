"""Creates the private folder of an embedded farm: socket, logs, and the node's scratch space.

It is below ``$XDG_RUNTIME_DIR`` or the system's temporary folder, because the path of a unix socket
is limited to 107 bytes, and results folders often have longer paths.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator

from tunemq_scheduler.embedded.runtime_folder_lock import PREFIX, SOCKET
from tunemq_shared.base.errors import ConfigError

#: ``sun_path`` holds 108 bytes, the last of which is zero.
_LONGEST_SOCKET_PATH = 107


def make_runtime_folder() -> str:
    """Create a folder that only this user can access; return its path.

    Raises:
        ConfigError: no location is writable and has a short enough path.
    """
    rejected: list[str] = []
    for place in _places():
        try:
            folder = tempfile.mkdtemp(prefix=PREFIX, dir=place)  # with mode 0700
        except OSError as error:
            rejected.append(str(error))
            continue
        if len(os.fsencode(os.path.join(folder, SOCKET))) <= _LONGEST_SOCKET_PATH:
            return folder
        os.rmdir(folder)
        rejected.append(f"{place} is too long for a unix socket's path (107 bytes)")
    raise ConfigError(
        f"There is no place for the embedded Redis: {'; '.join(rejected)}."
        " Set XDG_RUNTIME_DIR or TMPDIR to a short path of a folder that you can write to."
    )


def _places() -> Iterator[str]:
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and os.path.isdir(runtime) and os.stat(runtime).st_uid == os.getuid():
        yield runtime
    yield tempfile.gettempdir()
    yield "/tmp"  # noqa: S108  mkdtemp makes a folder of mode 0700 with a random name
