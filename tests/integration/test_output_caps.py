"""The output of a trial process stays below a size limit, and the newest part is kept."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.forkserver_driver import Server
from tests.support.waiting import eventually
from tunemq_workers.logs.output_caps import OutputCaps
from tunemq_workers.runtime.reactor import Reactor

pytestmark = pytest.mark.integration

LIMIT = 200_000


class Loop:
    """A reactor that runs in a thread, with caps for some folders."""

    def __init__(self) -> None:
        self.reactor = Reactor()
        self.folders: set[str] = set()
        self.looks = 0
        self.caps = OutputCaps(self.reactor, self._looked, period_s=0.01, limit_bytes=LIMIT)
        self._thread = threading.Thread(target=self.reactor.run, args=[lambda: None])
        self._threads = self._thread, self.caps._thread

    def _looked(self) -> set[str]:
        self.looks += 1
        return self.folders

    def start(self) -> None:
        self.caps.start()
        self._thread.start()

    def stop(self) -> None:
        self.reactor.post(self.reactor.stop)
        self._thread.join()

    def used_s(self) -> float:
        """Return the processor time of the output watch, without the tests' other threads."""
        clocks = [time.pthread_getcpuclockid(one.ident or 0) for one in self._threads]
        return sum(map(time.clock_gettime, clocks))

    def look_again(self, times: int = 2) -> None:
        """Wait for ``times`` more looks."""
        looks = self.looks + times
        eventually(lambda: self.looks >= looks)


@pytest.fixture
def loop() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop.stop()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path)
    yield server
    server.close()


def prints_a_lot(config):
    import os
    import sys
    import time

    from tunemq_shared.trial.session import report

    def wait_for_a_cut():
        # The file is empty for a moment during a cut.
        while not 0 < os.fstat(sys.stdout.fileno()).st_size <= config["limit"]:
            time.sleep(0.01)

    for n in range(100_000):
        if n == 99_000:
            wait_for_a_cut()  # else one that takes its time could lose all that follows
        print(f"line {n:06d} " + 40 * "x")
        if n % 1_000 == 0:
            print(f"error {n:06d}", file=sys.stderr)
            report({"printed": n})
    # A cut may lose output that is printed at the same moment, so the last line comes after it.
    wait_for_a_cut()
    print("the end")
    report({"printed": 100_000})


def test_the_output_of_a_trial_that_prints_without_end_is_kept_short(server, loop):
    folder = server.root / "trial_0"
    loop.folders = {str(folder)}
    loop.start()
    process = server.start(prints_a_lot, config={"limit": LIMIT})
    process.gone()
    text = ""

    def is_short() -> bool:
        nonlocal text
        text = (folder / "stdout").read_text()  # empty during a cut
        # Output that is printed during the cut may stand before that line.
        return len(text) <= LIMIT and "bytes of older output dropped]\n" in text

    eventually(is_short)
    assert "line 099" in text  # not each of the last ones, for the same reason
    assert "the end\n" in text
    assert "error 099000" in (folder / "stderr").read_text()


def lines(path: Path, size: int) -> None:
    path.write_bytes(b"x" * 99 + b"\n")
    with path.open("ab") as file:
        file.write((b"y" * 99 + b"\n") * (size // 100))


def test_output_printed_just_before_the_end_is_shortened_too(loop, tmp_path):
    loop.folders = {str(tmp_path)}
    loop.start()
    loop.look_again()
    lines(tmp_path / "stderr", 3 * LIMIT)
    loop.folders = set()
    eventually(lambda: (tmp_path / "stderr").stat().st_size <= LIMIT)


def test_a_folder_without_files_does_no_harm(loop, tmp_path):
    loop.folders = {str(tmp_path / "missing"), str(tmp_path)}
    loop.start()
    loop.look_again()
    lines(tmp_path / "stdout", 3 * LIMIT)
    eventually(lambda: (tmp_path / "stdout").stat().st_size <= LIMIT)


def test_output_watch_without_files_uses_almost_no_cpu(loop):
    loop.start()

    def is_cheap() -> bool:
        before = loop.used_s()
        loop.look_again(50)
        return loop.used_s() - before < 0.5

    # Python may have collected the garbage of all earlier tests in this thread.
    assert any(is_cheap() for _ in range(3))
