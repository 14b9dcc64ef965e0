"""Trials' output arrives in files of the experiment's folder once and in order."""

from __future__ import annotations

import os

import pytest

from tunemq_scheduler.farm.output import trial_output_files
from tunemq_scheduler.farm.output.trial_output_files import TrialOutputFiles
from tunemq_scheduler.transport.scheduler_signing import SchedulerSigning
from tunemq_shared.protocol.output_chunks import OutputChunk, encode
from tunemq_shared.signing.message_signing import MessageSigner

_SIGNER = MessageSigner("events")


def files_of(folder):
    return TrialOutputFiles(folder, "events", SchedulerSigning().output)


class Printed:
    """Chunks of output that arrived, and the files' content."""

    def __init__(self, folder):
        self.folder = folder
        (folder / "train_a").mkdir(exist_ok=True)
        self.files = files_of(folder)
        self.entries = 0

    def come(self, *chunks):
        entries = []
        for chunk in chunks:
            self.entries += 1
            data = _SIGNER.close(chunk if isinstance(chunk, bytes) else encode(chunk))
            entries.append((b"%d-0" % self.entries, [b"o", data]))
        return self.files.answered([(b"events:output", entries)])

    def read(self, name="stdout", trial="train_a"):
        return (self.folder / trial / name).read_bytes()


@pytest.fixture
def printed(tmp_path):
    return Printed(tmp_path)


def chunk(offset, data, *, attempt=1, name="stdout", folder="train_a", turn=0):
    return OutputChunk("a", attempt, folder, name, offset, data, turn)


def test_chunks_are_appended_in_order(printed):
    printed.come(chunk(0, b"one\n"), chunk(0, b"oh\n", name="stderr"))
    printed.come(chunk(4, b"two\n"))
    assert printed.read() == b"one\ntwo\n"
    assert printed.read("stderr") == b"oh\n"


def test_omitted_output_is_noted(printed):
    printed.come(chunk(0, b"one\n"), chunk(104, b"two\n"))
    assert printed.read() == b"one\n[100 bytes are not shown here]\ntwo\n"


def test_earlier_output_is_not_appended_again(printed):
    printed.come(chunk(0, b"one\n"), chunk(0, b"one\ntwo\n"), chunk(4, b"two\n"))
    assert printed.read() == b"one\ntwo\n"


def test_attempt_begins_at_its_beginning(printed):
    printed.come(chunk(0, b"one\n"), chunk(0, b"again\n", attempt=2))
    assert printed.read() == b"one\nagain\n"


def test_shortened_file_continues(printed):
    printed.come(chunk(0, b"0123456789"), chunk(0, b"[x]9", turn=1), chunk(4, b"abc", turn=1))
    assert printed.read() == b"0123456789[x]9abc"


def test_s03_repeated_chunk_is_not_appended_again(printed):
    chunks = [chunk(0, b"one\n"), chunk(4, b"two\n"), chunk(0, b"[x]\n", turn=1)]
    printed.come(*chunks)
    printed.come(*chunks)
    assert printed.read() == b"one\ntwo\n[x]\n"


def test_next_scheduler_continues_where_this_one_stopped(printed, tmp_path):
    assert printed.files.asks()[-1] == "0-0"
    printed.come(chunk(0, b"one\n"), chunk(4, b"two\n"))
    assert files_of(tmp_path).asks()[-1] == "2-0"
    (tmp_path / ".output-cursor").write_text("nonsense")
    assert files_of(tmp_path).asks()[-1] == "0-0"


def test_s03_chunk_repeated_after_a_restart_is_not_appended_again(printed, tmp_path):
    chunks = [chunk(0, b"one\n"), chunk(4, b"two\n"), chunk(0, b"[x]\n", turn=1)]
    printed.come(*chunks)
    with (tmp_path / ".output-known").open("ab") as file:
        file.write(b'[["a",1,"std')  # as after a crash
    printed.files = files_of(tmp_path)
    printed.come(*chunks, chunk(4, b"three\n", turn=1))
    printed.files = files_of(tmp_path)
    printed.come(*chunks, chunk(4, b"three\n", turn=1))
    assert printed.read() == b"one\ntwo\n[x]\nthree\n"


def test_cursor_file_does_not_grow_for_ever(printed, tmp_path, monkeypatch):
    monkeypatch.setattr(trial_output_files, "_KNOWN_LINES", 10)
    for number in range(100):
        printed.come(chunk(number, b"x"))
    assert len((tmp_path / ".output-known").read_bytes()) < 1000
    printed.files = files_of(tmp_path)
    printed.come(chunk(50, b"x"), chunk(99, b"x"), chunk(100, b"y"))
    assert printed.read() == b"x" * 100 + b"y"


def test_no_new_output_causes_no_work(printed, tmp_path):
    assert not printed.files.answered(None)
    assert [path.name for path in tmp_path.iterdir()] == ["train_a"]


def test_large_output_is_read_again_at_once(printed):
    assert printed.come(*(chunk(number, b"x") for number in range(100)))
    assert not printed.come(chunk(100, b"x"))


def test_output_file_does_not_grow_for_ever(printed, monkeypatch):
    monkeypatch.setattr(trial_output_files, "LIMIT_BYTES", 10)
    for number in range(5):
        printed.come(chunk(4 * number, b"abc\n"))
    assert printed.read() == b"abc\n" * 3


@pytest.mark.parametrize(
    "bad",
    [
        b"\xc1",
        chunk(0, b"x", folder="../other"),
        chunk(0, b"x", folder="a/b"),
        chunk(0, b"x", folder=""),
        chunk(0, b"x", folder="journal"),
        chunk(0, b"x", folder=".output-cursor"),
        chunk(0, b"x", folder="nobodys_a"),
        chunk(0, b"x", folder="train_b"),
        chunk(0, b"x", name="result.json"),
        chunk(0, b"x", name="../stdout"),
    ],
)
def test_output_of_an_unknown_node_is_left_out(printed, tmp_path, bad):
    for name in ("journal", "train_b"):
        (tmp_path / name).mkdir()
    printed.come(bad)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".output-cursor",
        "journal",
        "train_a",
        "train_b",
    ]
    assert not list(tmp_path.glob("*/std*"))


@pytest.mark.parametrize("has_reader", [False, True])
def test_fifo_in_place_of_a_file_does_not_block(printed, tmp_path, has_reader):
    folder = tmp_path / "train_a"
    os.mkfifo(folder / "stdout")
    reader = os.open(folder / "stdout", os.O_RDONLY | os.O_NONBLOCK) if has_reader else None
    printed.come(chunk(0, b"one\n"), chunk(0, b"oh\n", name="stderr"))
    assert printed.read("stderr") == b"oh\n"
    if reader is not None:
        assert os.read(reader, 10) == b""
        os.close(reader)


def test_link_in_place_of_a_file_is_not_followed(printed, tmp_path):
    (tmp_path / "other").write_bytes(b"mine\n")
    (tmp_path / "train_a" / "stdout").symlink_to(tmp_path / "other")
    printed.come(chunk(0, b"one\n"))
    assert (tmp_path / "other").read_bytes() == b"mine\n"


def test_fifo_in_place_of_the_cursor_counts_as_missing(tmp_path):
    os.mkfifo(tmp_path / ".output-cursor")
    assert files_of(tmp_path).asks()[-1] == "0-0"


def test_chunk_that_is_no_utf8_is_skipped(printed):
    printed.come(encode(chunk(0, b"")).replace(b"train_a", b"train_\xff"), chunk(0, b"text"))
    assert printed.read() == b"text"


@pytest.mark.parametrize("name", [".output-cursor", ".output-known"])
def test_s15_fifo_or_link_with_a_guessed_temporary_name_is_not_written_to(
    printed, tmp_path, monkeypatch, name
):
    monkeypatch.setattr(trial_output_files, "_KNOWN_LINES", -1)  # it is rewritten each time
    elsewhere = tmp_path / "elsewhere"
    elsewhere.touch()
    os.mkfifo(tmp_path / f"{name}.{os.getpid()}")
    printed.come(chunk(0, b"one\n"))
    (tmp_path / f"{name}.{os.getpid()}").unlink()
    (tmp_path / f"{name}.{os.getpid()}").symlink_to(elsewhere)
    printed.come(chunk(4, b"two\n"))
    assert printed.read() == b"one\ntwo\n"
    assert elsewhere.read_bytes() == b""


def test_s15_endless_file_of_offsets_is_read_up_to_a_limit(printed, tmp_path):
    printed.come(chunk(0, b"one\n"))
    os.truncate(tmp_path / ".output-known", 2**42)  # a hole of 4 TiB
    Printed(tmp_path).come(chunk(0, b"one\ntwo\n"))
    assert printed.read() == b"one\ntwo\n"
