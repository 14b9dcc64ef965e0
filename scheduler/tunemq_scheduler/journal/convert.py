"""Makes a folder of a journal of version 1 when its search goes on; the file is kept beside it."""

from __future__ import annotations

import fcntl
import shutil
from pathlib import Path
from typing import Final

from tunemq_scheduler.journal import layout, version1
from tunemq_scheduler.journal.contents import JOURNAL_VERSION, SegmentHeader, tunemq_version
from tunemq_scheduler.journal.frames import pack
from tunemq_shared.errors import JournalError, JournalLocked
from tunemq_shared.messages import encode

#: Behind the name of the file of version 1 once a folder has taken its place.
KEPT_SUFFIX: Final = ".v1"
_NEW_SUFFIX: Final = ".converted"


def converted(path: Path) -> int:
    """Have a journal of this version at ``path``; returns how many torn bytes were left out.

    A crash at any moment leaves the file, or the folder, or both under their other names, from
    which the next call goes on.

    Raises:
        JournalError: it cannot be read or written; the file is as it was.
    """
    kept = path.with_name(path.name + KEPT_SUFFIX)
    new = path.with_name(path.name + _NEW_SUFFIX)
    try:
        if not path.exists() and kept.exists() and new.exists():
            layout.put_in_place(new, path, sync=True)
        if not path.is_file():
            return 0
        with open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            torn = _write(path, new)
            layout.put_in_place(path, kept, sync=True)
            layout.put_in_place(new, path, sync=True)
    except BlockingIOError as error:
        raise JournalLocked(f"{path} is being converted by another process already.") from error
    except OSError as error:
        raise JournalError(
            f"the journal {path} of version 1 cannot be converted: {error.strerror}."
        ) from error
    return torn


def _write(path: Path, new: Path) -> int:
    old, payloads, torn = version1.read(path)
    today = {"version": JOURNAL_VERSION, "tunemq": tunemq_version()}
    header = SegmentHeader(**{**old.fields(), **today}, segment=1, turns_before=0)
    if new.exists():
        shutil.rmtree(new)
    new.mkdir()
    content = b"".join(pack(turn, one) for turn, one in enumerate((encode(header), *payloads)))
    segment = layout.turns_file(new, 1)
    layout.put_in_place(layout.write_part(segment, content, sync=True), segment, sync=True)
    return torn
