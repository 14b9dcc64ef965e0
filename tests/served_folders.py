"""A folder that `tunemq store serve` serves, as a process of its own, for tests.

with serving(folder) as server:             one of your own, to be killed, frozen, restarted
def test_it(shared_served): ...             the shared one, with `create_bucket` for each test
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from tests.object_servers import SERVER_PIDS
from tests.support import eventually, free_port
from tunemq_shared.http_address import TOKEN_FILE_VARIABLE, parse_http_address
from tunemq_shared.http_objects import HttpObjects


class FolderServer:
    """One server process; what it has stored stays when it is started again, on the same port."""

    def __init__(self, folder: Path, host: str = "127.0.0.1", options: Sequence[str] = ()) -> None:
        self.data = folder / "data"
        self.log = folder / "log"
        self.token_file = self.data / ".tunemq-store" / "token"
        self.host, self.options = host, options
        self.port = 0
        self.url = ""
        self.process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def token(self) -> str:
        return self.token_file.read_text().strip()

    @property
    def environ(self) -> dict[str, str]:
        """The variables with which a client is let in."""
        return {TOKEN_FILE_VARIABLE: str(self.token_file)}

    def create_bucket(self, name: str = "") -> str:
        """The name of a place below which there is nothing yet."""
        return name or f"place-{secrets.token_hex(6)}"

    def address(self, place: str = "", prefix: str = "") -> str:
        return "/".join(part for part in (self.url, place, prefix) if part)

    def objects(self, place: str = "", prefix: str = "") -> HttpObjects:
        """The objects below a prefix; close it."""
        return HttpObjects(parse_http_address(self.address(place, prefix)), self.environ)

    def start(self, variables: Mapping[str, str] | None = None) -> None:
        """Start it, and wait until it is ready."""
        self.port = self.port or free_port()  # nobody else has it when it comes back
        self.log.write_bytes(b"")
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "tunemq", "store", "serve", str(self.data)),
                    *("--listen", f"{self.host}:{self.port}"),
                    *self.options,
                ],
                env={**os.environ, **(variables or {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        SERVER_PIDS.add(self.process.pid)
        eventually(self._is_ready, message=self.said)
        found = re.search(r"at (https?://.*:(\d+))\n", self.said())
        assert found, self.said()
        self.url, self.port = found[1], int(found[2])

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def _is_ready(self) -> bool:
        assert self.process is not None
        if self.process.poll() is not None:
            pytest.fail(self.said())
        return "searches:" in self.said()

    def stop(self, how: signal.Signals = signal.SIGTERM) -> int:
        """End it in good order; its exit code."""
        return self._end(how)

    def kill(self) -> None:
        """End it like a power cut."""
        self._end(signal.SIGKILL)

    def incoming(self) -> list[Path]:
        """What is being written, or what somebody left who was writing."""
        return list((self.data / ".tunemq-store" / "incoming").iterdir())

    def freeze(self) -> None:
        """Let it keep its connections and answer nothing (SIGSTOP) until `thaw`."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def _end(self, how: signal.Signals) -> int:
        if self.process is None:
            return 0
        self.process.send_signal(how)
        self.process.send_signal(signal.SIGCONT)
        try:
            code = self.process.wait(60)
        finally:
            self.process.kill()
            self.process.wait()
            SERVER_PIDS.discard(self.process.pid)
            self.process = None
        return code


@contextlib.contextmanager
def serving(
    folder: Path, host: str = "127.0.0.1", options: Sequence[str] = ()
) -> Iterator[FolderServer]:
    """A server of one's own, which keeps its data below the folder."""
    server = FolderServer(folder, host, options)
    server.start()
    try:
        yield server
    finally:
        server.kill()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def shared_served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FolderServer]:
    """A server for tests that do it no harm."""
    with serving(tmp_path_factory.mktemp("served") / "server") as server:
        yield server


@pytest.fixture
def served(shared_served: FolderServer, monkeypatch: pytest.MonkeyPatch) -> FolderServer:
    """The shared server, which this test and its children are let in to."""
    for name, value in shared_served.environ.items():
        monkeypatch.setenv(name, value)
    return shared_served
