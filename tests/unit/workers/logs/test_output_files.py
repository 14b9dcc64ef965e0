from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from tunemq_workers.logs import output_files


def lines(count):
    return b"".join(b"line %06d\n" % n for n in range(count))


class Broken:
    """A stream with which a trial's code has replaced its own."""

    def flush(self):
        raise RuntimeError("no stream")


@pytest.mark.parametrize("stream", [None, 4, Broken()])
def test_flush_stream_of_a_closed_or_missing_stream_does_not_raise(monkeypatch, stream):
    monkeypatch.setattr(sys, "stdout", stream)
    output_files.flush()


def test_file_below_the_limit_stays_unchanged(tmp_path):
    path = tmp_path / "stdout"
    path.write_bytes(lines(100))

    output_files.cap(str(path), 1200)

    assert path.read_bytes() == lines(100)


def test_file_above_the_limit_keeps_its_newest_half_in_whole_lines(tmp_path):
    path = tmp_path / "stdout"
    path.write_bytes(lines(1000))

    output_files.cap(str(path), 1200)

    first, *rest = path.read_bytes().splitlines(keepends=True)
    assert rest == lines(1000).splitlines(keepends=True)[-len(rest) :]
    assert len(b"".join(rest)) <= 600
    assert first == b"[%d bytes of older output dropped]\n" % (12000 - len(b"".join(rest)))


def test_writer_of_a_shortened_file_continues_at_its_end(tmp_path):
    path = tmp_path / "stdout"
    with open(path, "ab", buffering=0) as writer:
        writer.write(lines(1000))
        output_files.cap(str(path), 1200)
        size = path.stat().st_size
        writer.write(b"more\n")

    assert path.stat().st_size == size + 5
    assert path.read_bytes().endswith(b"\nmore\n")


def test_single_endless_line_is_shortened_too(tmp_path):
    path = tmp_path / "stdout"
    path.write_bytes(b"x" * 5000)

    output_files.cap(str(path), 1200)

    assert path.stat().st_size < 1200


def test_missing_file_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        output_files.cap(os.path.join(tmp_path, "stdout"))


def test_files_of_a_trial_that_ends_are_shortened_and_missing_ones_ignored(tmp_path, monkeypatch):
    monkeypatch.setattr(output_files, "LIMIT_BYTES", 1200)
    (tmp_path / "stderr").write_bytes(lines(1000))
    output_files.settle(str(tmp_path))
    assert (tmp_path / "stderr").stat().st_size < 1200
    output_files.settle(str(tmp_path / "none"))


def test_file_whose_length_its_trial_changes_meanwhile_is_read_only_in_part(tmp_path):
    path = tmp_path / "stdout"
    code = (
        "import os, sys, time\n"
        "fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)\n"
        "os.ftruncate(fd, 3_000_000)\n"
        "print('ready', flush=True)\n"
        "while True:\n"
        "    os.ftruncate(fd, 3_000_000)\n"
        "    os.ftruncate(fd, 4 << 40)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, path], stdout=subprocess.PIPE) as toggles:
        assert toggles.stdout.readline() == b"ready\n"
        end = time.monotonic() + 3
        while time.monotonic() < end:
            output_files.cap(str(path), 2_000_000)
        toggles.kill()

    assert path.stat().st_blocks * 512 < 8 * 2_000_000
