"""A log is read page by page without splitting characters."""

from __future__ import annotations

import os

import pytest

from tunemq_scheduler.farm.service.log_pages import read_page


def test_pages_of_any_size_add_up_to_the_file(tmp_path):
    text = "naïve 日本語 😀\n" * 3
    path = tmp_path / "log"
    path.write_text(text, encoding="utf-8")
    for limit in range(4, 20):
        found, offset = "", 0
        while (page := read_page(path, offset, limit)).data:
            assert page.offset == offset
            found += page.data.decode()
            offset = page.end
        assert found == text
        assert offset == page.size


def test_invalid_bytes_are_read_all_the_same(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b"\xff\xfe\xf0" * 5)
    offset = 0
    for _ in range(20):
        offset = read_page(path, offset, 4).end
    assert offset == 15


def test_half_written_character_waits_for_its_other_half(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b"ab\xc3")
    page = read_page(path, 0)
    assert (page.data, page.end, page.size) == (b"ab", 2, 3)
    path.write_bytes(b"ab\xc3\xa4")
    assert read_page(path, page.end).data == "ä".encode()


def test_tail_begins_with_a_whole_line(tmp_path):
    path = tmp_path / "log"
    path.write_text("one\ntwo\nthree\n")
    page = read_page(path, -8)
    assert (page.data, page.offset, page.end) == (b"three\n", 8, 14)
    assert read_page(path, -1000).data == path.read_bytes()


def test_truncated_file_is_read_from_its_beginning(tmp_path):
    path = tmp_path / "log"
    path.write_text("new\n")
    page = read_page(path, 1000)
    assert (page.data, page.offset) == (b"new\n", 0)


def test_missing_file_is_empty(tmp_path):
    assert read_page(tmp_path / "none", 5) == read_page(None, 0) == (b"", 0, 0, 0)


@pytest.mark.parametrize("kind", ["FIFO", "link", "folder"])
def test_path_that_is_no_file_is_empty_and_does_not_block(tmp_path, kind):
    path = tmp_path / "log"
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "link":
        (tmp_path / "other").write_text("secret")
        path.symlink_to(tmp_path / "other")
    else:
        path.mkdir()
    assert read_page(path, 0) == (b"", 0, 0, 0)
