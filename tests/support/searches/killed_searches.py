"""A search in a separate script that tests kill, and checks of its steps and remains."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.journal_records import read_records
from tests.support.searches.chain import open_gate
from tests.support.waiting import eventually
from tunemq.testing.comparable_state import comparable
from tunemq.testing.journal_replay import replay
from tunemq_scheduler.journal.journal_files import FILE_NAME, TURNS_SUFFIX, numbers, turns_file
from tunemq_scheduler.journal.journal_frames import frame_at
from tunemq_scheduler.journal.journal_reader import read_header
from tunemq_shared.protocol import messages as m

SCRIPT = Path(__file__).parents[2] / "faults" / "scripts" / "search.py"
#: Whatever the script starts inherits this variable, wherever it goes.
MARK = "SEARCH_TEST_MARK"
#: Parts of names or command lines by which tests find the farm's processes.
WATCHDOG, REDIS = "embedded.watchdog", "redis-server"
NODE, CONSUMER = "tunemq_workers.node.node_process", "tunemq-consumer"
#: However a script ends, nothing of it is left after two seconds; on a busy machine, after so long.
GONE_WITHIN_S = 60.0
#: A shell that becomes the script.
_RUN = 'exec "$@"'


@dataclass
class Seen:
    """An event in the journal, and when it was seen there by the monotonic clock."""

    at: float
    event: m.Event


class JournalTail:
    """Reads a journal while it grows."""

    def __init__(self, path: Path) -> None:
        self._folder = path
        #: Of the segments that there are: how far each is read.
        self._offsets: dict[int, int] = {}
        self.seen: list[Seen] = []

    def read(self) -> list[Seen]:
        """All that has been seen, the newest included."""
        for number in numbers(self._folder, TURNS_SUFFIX):
            path, offset = turns_file(self._folder, number), self._offsets.setdefault(number, 0)
            with contextlib.suppress(FileNotFoundError):
                if os.stat(path).st_size > offset:
                    self._offsets[number] = self._read_new(path, offset, time.monotonic())
        return self.seen

    def _read_new(self, path: Path, offset: int, now: float) -> int:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            while (frame := frame_at(file, offset, size)) is not None:
                if offset:  # the first one is the header
                    entries = m.decode_records(frame.payload)
                    self.seen += [Seen(now, entry.event) for entry in entries]
                offset = frame.end
        return offset


class RunningSearch:
    """A process of the script with ``options`` (see `tests.faults.scripts.search.Options`).

    Args:
        folder: for its files.
        at_terminal: run it in the foreground of a terminal; else its output is a pipe.
        shell: a command line in which ``"$@"`` is the script.
        cpus: number of trials that run at a time.
        script: another script, which also names its search ``search``.
        variables: for its environment.
    """

    def __init__(
        self,
        folder: Path,
        *,
        at_terminal: bool = False,
        shell: str | None = None,
        cpus: int = 4,
        script: Path = SCRIPT,
        variables: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        self.folder, self.mark = folder, uuid.uuid4().hex
        if options.get("gate") is not None:
            self.open_gate(options["gate"])
        self.runtime = Path(tempfile.mkdtemp(prefix="tq-", dir="/tmp"))  # short, for the socket
        self.journal = JournalTail(folder / "search" / FILE_NAME)
        self.said = b""
        command = [sys.executable, str(script), str(folder), json.dumps(options)]
        self._ours, theirs = os.openpty() if at_terminal else os.pipe()
        if at_terminal:
            # The first terminal that the leader of a session opens becomes its terminal.
            shell = f"exec <>{os.ttyname(theirs)} >&0 2>&1; {shell or _RUN}"
        if shell is not None:
            command = ["sh", "-c", shell, "sh", *command]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            env={
                **os.environ,
                **(variables or {}),
                MARK: self.mark,
                "TUNEMQ_RESULTS": str(folder),
                "XDG_RUNTIME_DIR": str(self.runtime),
                "TMPDIR": str(self.runtime),
                "TUNEMQ_CPUS": str(cpus),
                "TERM": "xterm",
                "COLUMNS": "120",
            },
        )
        os.close(theirs)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        if at_terminal:
            eventually(lambda: os.tcgetpgrp(self._ours) == self.process.pid)

    def _read(self) -> None:
        # Reading a terminal that no process has open fails.
        with contextlib.suppress(OSError):
            while data := os.read(self._ours, 65536):
                self.said += data

    # --- journal and results ----------------------------------------------------------------------

    def wait_for(
        self, kind: type[Any], within: float = 60.0, after: int = 0, **fields: Any
    ) -> Seen:
        """The first event of a kind with these fields in the journal after ``after`` entries."""
        found: list[Seen] = []

        def is_there() -> bool:
            found[:] = [
                seen
                for seen in self.journal.read()[after:]
                if isinstance(seen.event, kind)
                and all(getattr(seen.event, name) == value for name, value in fields.items())
            ]
            return bool(found)

        eventually(is_there, within=within, message=lambda: f"no {kind.__name__}{fields}{self}")
        return found[0]

    def all_of(self, kind: type[Any]) -> list[Any]:
        """All events of a kind in the journal."""
        return [seen.event for seen in self.journal.read() if isinstance(seen.event, kind)]

    def trial(self, number: int) -> str:
        """A trial's id."""
        return self.wait_for(m.ConfigSuggested, n=number).event.trial

    def steps(self, number: int) -> list[tuple[int, int]]:
        """The steps that a trial has begun: number and process."""
        with contextlib.suppress(FileNotFoundError):
            text = (self.folder / "steps" / str(number)).read_text(encoding="ascii")
            lines = [line for line in text.splitlines(keepends=True) if line.endswith("\n")]
            return [(int(step), int(pid)) for step, pid in map(str.split, lines)]
        return []

    def wait_for_step(self, number: int, step: int, after: int = 0) -> int:
        """The process of a trial that begins a step, once it does; ``after`` lines are ignored."""
        found: list[int] = []

        def has_begun() -> bool:
            found[:] = [pid for begun, pid in self.steps(number)[after:] if begun == step]
            return bool(found)

        eventually(has_begun, within=60, message=lambda: f"trial {number}, step {step}{self}")
        return found[0]

    def recorded(self, number: int) -> list[tuple[int, int]]:
        """The contents of a trial's result.json: step and value."""
        (file,) = self.folder.glob(f"search/*_{number:05d}/result.json")
        whole, _, _torn = file.read_text(encoding="utf-8").rpartition("\n")  # it may be written now
        lines = [json.loads(line) for line in whole.splitlines()]
        return [(line["training_iteration"], line["value"]) for line in lines]

    # --- processes --------------------------------------------------------------------------------

    def processes(self, part: str = "") -> list[psutil.Process]:
        """All processes of the script whose name or command line has ``part``."""
        return [
            process
            for process in psutil.process_iter()
            if process.pid not in {self.process.pid, os.getpid()} and self._is_ours(process, part)
        ]

    def _is_ours(self, process: psutil.Process, part: str) -> bool:
        try:
            line = " ".join(process.cmdline())
            # Redis writes its title over its environment, and its socket's path into the title.
            if str(self.runtime) not in line and process.environ().get(MARK) != self.mark:
                return False
            # The command lines of all services are arguments of the watchdog.
            return part in f"{process.name()} {line}" and (
                WATCHDOG not in line or part in {"", WATCHDOG}
            )
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            return False

    def one(self, part: str) -> psutil.Process:
        """Wait for the one process whose name or command line has ``part``."""
        found: list[psutil.Process] = []

        def is_there() -> bool:
            found[:] = self.processes(part)
            return len(found) == 1

        eventually(is_there, within=60, message=lambda: f"{part}: {found}{self}")
        return found[0]

    def process_trees(self) -> set[int]:
        """The pids of the process trees that trials have started."""
        files = (self.folder / "families").glob("*[0-9]")
        return {int(pid) for file in files for pid in file.read_text(encoding="ascii").split()}

    def left(self) -> list[str]:
        """The remains of its farm: processes, and files in its socket and temporary folder."""
        return [*map(str, self.processes()), *os.listdir(self.runtime)]

    # --- its end ----------------------------------------------------------------------------------

    def ends(self, within: float = 150.0) -> int:
        """Wait for the script's end and read its output; return its exit code."""
        try:
            code = self.process.wait(within)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the script does not end{self}") from None
        self._reader.join(GONE_WITHIN_S)
        assert not self._reader.is_alive(), "a process still holds the script's output"
        return code

    def leaves_nothing(self, pids: Collection[int] = (), within: float = GONE_WITHIN_S) -> None:
        """Wait until nothing of its farm is left, nor of the processes with these ``pids``."""

        def left() -> list[str]:
            return [*self.left(), *(str(pid) for pid in pids if is_alive(pid))]

        eventually(lambda: not left(), within=within, message=lambda: f"left: {left()}{self}")

    def journal_gives_the_state(self) -> None:
        """Check that a replay of the journal gives the state that the script had at its end."""
        path = self.folder / "search" / FILE_NAME
        again = comparable(replay(read_header(path).settings, read_records(path)))
        assert again == (self.folder / "snapshot").read_bytes()

    def close(self) -> None:
        """Kill all of it."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            with contextlib.suppress(pytest.fail.Exception):  # the test of this reports it
                self.leaves_nothing()
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._reader.join(5)
        os.close(self._ours)
        if self.process.stdin is not None:
            self.process.stdin.close()
        shutil.rmtree(self.runtime, ignore_errors=True)

    def open_gate(self, up_to: int) -> None:
        """Let trials that have a gate do the steps up to this one."""
        open_gate(self.folder / "gate", up_to)

    def stop(self, number: int) -> None:
        """Have the script stop a trial."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"%d\n" % number)
        self.process.stdin.flush()

    def type(self, keys: bytes) -> None:
        """Type at its terminal."""
        os.write(self._ours, keys)

    def __str__(self) -> str:
        events = [seen.event for seen in self.journal.read()[-30:]]
        return "\n" + self.said.decode(errors="replace") + "\n".join(map(str, events))


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that only waits to be reaped does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def searches(folder: Path) -> Iterator[Callable[..., RunningSearch]]:
    """For a fixture: starts searches below ``folder``, and ends them with the test."""
    running: list[RunningSearch] = []

    def start(**given: Any) -> RunningSearch:
        below = folder / str(len(running))
        below.mkdir()
        running.append(RunningSearch(below, **given))
        return running[-1]

    yield start
    for one in running:
        one.close()
