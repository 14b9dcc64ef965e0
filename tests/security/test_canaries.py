"""The search for canaries finds them in every place and encoding."""

from __future__ import annotations

import base64
import os
import subprocess
import sys
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.security.canaries import Canaries, CommandLines, files_below
from tests.security.recorded_redis import Overheard
from tests.support.farms.farm_processes import TcpRedis
from tests.support.waiting import eventually

pytestmark = pytest.mark.security

TEXT, BYTES = "p/ss w0rd+with=odd&signs~0123456", bytes(range(120, 152))


@pytest.mark.parametrize(
    "written",
    [
        TEXT.encode(),
        quote(TEXT, safe="").encode(),
        TEXT.encode().hex().encode(),
        BYTES,
        BYTES.hex().upper().encode(),
        repr(BYTES).encode(),
        base64.b64encode(BYTES),
        base64.urlsafe_b64encode(b"ab" + BYTES + b"c"),
        *(base64.b64encode(b"x" * begin + TEXT.encode() + b"yy") for begin in range(7)),
    ],
)
def test_canary_is_found_in_every_encoding(written: bytes) -> None:
    canaries = Canaries({"text": TEXT, "bytes": BYTES})
    canaries.look("log", "one", b"before " + written + b" after")
    assert len(canaries.found) == 1
    assert canaries.seen == {"log": len(written) + 13}


def test_canary_search_finds_no_other_text() -> None:
    canaries = Canaries({"text": TEXT, "bytes": BYTES})
    canaries.look("log", "one", TEXT[:-4].encode() + os.urandom(10_000) + BYTES[3:])
    assert canaries.found == {}


def test_canary_across_two_chunks_of_a_file_is_found(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "file").write_bytes(bytes(2**22 - 7) + TEXT.encode())
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "password").write_text(TEXT)
    canaries = Canaries({"text": TEXT})
    canaries.look_into("files", files_below(tmp_path, without=[tmp_path / "kept"]))
    assert canaries.found == {"text": {f"files: {tmp_path / 'deep' / 'file'}"}}


def test_canary_in_process_arguments_is_found() -> None:
    canaries, seen = Canaries({"text": TEXT}), CommandLines()
    seen.start()

    def is_seen() -> bool:
        subprocess.run([sys.executable, "-c", "pass", TEXT], check=True)
        return any(TEXT.encode() in line for line in seen.lines.copy())

    eventually(is_seen)  # they live for some milliseconds each, and one may be missed
    canaries.look("ps", "a command line", seen.stop())
    assert set(canaries.found) == {"text"}


def test_redis_traffic_is_recorded(tmp_path: Path) -> None:
    server = TcpRedis(tmp_path)
    try:
        overheard = Overheard(server.client)
        overheard.start()
        assert overheard.is_there.wait(60)
        server.client.set("key", b"\0" + BYTES + b"\n")
        server.client.set("other", TEXT)
        eventually(lambda: b"other" in overheard.said)
        canaries = Canaries({"text": TEXT, "bytes": BYTES})
        canaries.look("monitor", "all", overheard.stop())
        assert set(canaries.found) == {"text", "bytes"}
    finally:
        server.end()
