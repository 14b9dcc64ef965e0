"""Users of one group submit code into a folder as the store."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.other_users import open_folder, reachable
from tunemq_scheduler.security.doctor.disk_checks import check_blobs
from tunemq_shared.code.blob_store import open_blobs

__all__ = ["open_folder"]

pytestmark = pytest.mark.integration

GROUP = 54330
PUT = """
import os, sys
from tunemq_scheduler.security.doctor.disk_checks import check_blobs
from tunemq_shared.base.errors import StoreError
from tunemq_shared.code.blob_folder import read_blob
from tunemq_shared.code.blob_store import open_blobs

store, data = sys.argv[1], sys.argv[2].encode()
os.umask(0o077)
try:
    ref = open_blobs(store).put(data)
except StoreError as error:
    print(error)
else:
    print(read_blob(ref) == data)
print([found.level.value for found in check_blobs(store)])
"""


def put(store: Path, data: str, user: int, *groups: int) -> list[str]:
    """Put a blob as another user; return what that printed."""
    reached = reachable()
    named = f"--groups={','.join(map(str, groups))}" if groups else "--clear-groups"
    become = ["setpriv", f"--reuid={user}", f"--regid={user}", named]
    python = [sys.executable, "-c", PUT, str(store), data]
    done = subprocess.run(
        [*reached, *become, *python], cwd="/", capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_members_of_the_folders_group_write_and_read_each_others_blobs(open_folder: Path) -> None:
    store = open_folder / "farm"
    store.mkdir()
    reachable()  # or skip
    subprocess.run(["chgrp", str(GROUP), str(store)], check=True)
    store.chmod(0o770)
    for user in (54331, 54332):
        assert put(store, "the same", user, GROUP) == ["True", "[]"]
        assert put(store, f"of {user}", user, GROUP) == ["True", "[]"]


def test_user_who_may_not_write_there_is_told_how_a_folder_is_shared(open_folder: Path) -> None:
    store = open_folder / "farm"
    store.mkdir()
    reachable()
    store.chmod(0o755)
    (said, levels) = put(store, "code", 54331)
    assert "Submit as the user who owns" in said
    assert levels == "[]"  # nothing is there yet
    open_blobs(str(store)).put(b"code")
    (said, levels) = put(store, "code", 54331)
    assert f"cannot be written to {store}/blobs: Permission denied. Submit as" in said
    assert "docs/farm.md" in said
    assert levels == "['problem']"
    assert check_blobs(str(store)) == []
