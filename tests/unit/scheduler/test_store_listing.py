"""A served folder is listed like a bucket: in the order of whole keys, a page at a time."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tunemq_scheduler.store_server import listing
from tunemq_scheduler.store_server.listing import page_of

NAMES = st.text("a-0ü", min_size=1, max_size=2)
KEYS = st.sets(st.lists(NAMES, min_size=1, max_size=3).map("/".join), max_size=12)
ANY = st.text("a-0/ü", max_size=4)


@pytest.fixture(autouse=True, scope="module")
def _short_pages() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(listing, "PAGE", 3)
        yield


@given(KEYS, ANY, ANY)
@example({"a-1", "a/1", "a0", "ab/c"}, "a", "")
@example({"a/1", "a/2", "a/3", "a/4"}, "a/", "a/2")
def test_all_keys_are_listed_in_their_order(keys, prefix, after):
    # A key that is also a folder is nothing that a file system has.
    keys = {key for key in keys if not any(other.startswith(f"{key}/") for other in keys)}
    with tempfile.TemporaryDirectory() as folder:
        for key in keys:
            path = Path(folder, key)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        expected = sorted(key for key in keys if key.startswith(prefix) and key > after)
        assert list(listed(folder, prefix, after)) == expected


def test_what_has_no_key_is_left_out(tmp_path):
    (tmp_path / ".tunemq-store").mkdir()
    (tmp_path / ".tunemq-store" / "token").touch()
    (tmp_path / "a" / ".tunemq-store").mkdir(parents=True)
    (tmp_path / "a" / ".tunemq-store" / "b").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "odd\udcff").touch()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    assert list(listed(str(tmp_path))) == ["a/.tunemq-store/b"]


def listed(folder: str, prefix: str = "", after: str = "") -> Iterator[str]:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        while True:
            page = page_of(fd, prefix, after)
            assert len(page.objects) <= 3
            for found in page.objects:
                yield found.key
            if page.is_last:
                return
            after = page.objects[-1].key
    finally:
        os.close(fd)
