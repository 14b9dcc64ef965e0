"""Files in folders where trials write, whatever lies there in their place."""

from __future__ import annotations

import os

import pytest

from tunemq_shared.plain_files import open_to_read, open_to_write


def write(path, text):
    descriptor = open_to_write(str(path), os.O_WRONLY | os.O_APPEND)
    with open(descriptor, "a") as file:
        file.write(text)


def test_regular_file_is_appended_to(tmp_path):
    write(tmp_path / "a", "1")
    write(tmp_path / "a", "2")

    with open_to_read(tmp_path / "a") as file:
        assert file.read() == b"12"
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("put", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/full", path)])
def test_something_else_is_moved_aside_by_who_writes_and_missing_to_who_reads(put, tmp_path):
    path = tmp_path / "a"
    put(path)
    with pytest.raises(FileNotFoundError):
        open_to_read(path)

    write(path, "1")
    path.unlink()
    put(path)
    write(path, "2")

    assert path.read_text() == "2"
    assert sorted(os.listdir(tmp_path)) == ["a", "a.not-a-file", "a.not-a-file-2"]


def test_folder_that_is_gone_or_a_file_is_made_again(tmp_path):
    path = tmp_path / "folder" / "a"
    with pytest.raises(FileNotFoundError):
        open_to_read(path)
    write(path, "1")
    os.unlink(path)
    os.rmdir(path.parent)
    path.parent.write_text("a file")
    with pytest.raises(FileNotFoundError):
        open_to_read(path)

    write(path, "2")

    assert path.read_text() == "2"
    assert (tmp_path / "folder.not-a-file").read_text() == "a file"
