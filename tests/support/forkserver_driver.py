"""A forkserver with trial processes for tests, driven as a node would drive it."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.waiting import eventually
from tunemq_shared.code.blob_folder import BlobFolder
from tunemq_shared.code.config_packing import pack_config
from tunemq_shared.protocol.messages import (
    Environment,
    NodeEvent,
    ResultReported,
    TrialOrder,
    TrialSpec,
    decode_node_event,
    encode,
)
from tunemq_shared.trainable.trainable_blobs import ship
from tunemq_workers.checkpoints import checkpoint_messages
from tunemq_workers.checkpoints.checkpoint_messages import FetchAnswer, SaveAnswer
from tunemq_workers.forkservers.forkserver_client import ForkserverClient
from tunemq_workers.processes.forkserver_messages import (
    ForkserverReport,
    ForkserverWarned,
    ProcessExited,
    ProcessForked,
    ProcessTreeGone,
)
from tunemq_workers.runtime import frames


def alive(pid: int) -> bool:
    """Whether the process runs: neither gone nor waiting to be waited for."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in {"Z", "X"}


class DrivenProcess:
    """The node's view of one trial process.

    It answers requests about checkpoints at once: the server's ``cache`` has room, and every
    checkpoint exists. While ``is_full``, requests for room get no answer.
    """

    def __init__(self, server: Server, name: str, line: socket.socket, order: TrialOrder) -> None:
        self.server, self.name, self.order = server, name, order
        self.events: list[NodeEvent] = []
        self.kinds: list[int] = []
        self.is_full = False
        self._line, self._decoder = line, frames.FrameDecoder()
        self._is_open = True

    @property
    def results(self) -> list[dict[str, Any]]:
        """The results that the trial has reported so far."""
        self.listen()
        return [event.metrics for event in self.events if isinstance(event, ResultReported)]

    def listen(self) -> None:
        """Read the messages that have arrived."""
        while self._is_open:
            try:
                data = self._line.recv(1 << 16)
            except BlockingIOError:
                return
            except ConnectionResetError:
                data = b""
            self._is_open = bool(data)
            for kind, payload in self._decoder.feed(data):
                self.kinds.append(kind)
                if kind == frames.ASK_SAVE:
                    if not self.is_full:
                        self.allow_save()
                elif kind == frames.FETCH:
                    self._answer(frames.FETCHED, FetchAnswer(str(self.server.cache)))
                elif payload and kind not in {frames.AWAIT_ORDER, frames.SAVING}:
                    self.events.append(decode_node_event(payload))

    def allow_save(self) -> None:
        """Let it write the checkpoint for which it asked for room."""
        self._answer(frames.SAVE_ANSWER, SaveAnswer(str(self.server.cache)))

    def _answer(self, kind: int, answer: SaveAnswer | FetchAnswer) -> None:
        with contextlib.suppress(ConnectionError):  # it has died since it asked
            self._line.send(frames.frame(kind, checkpoint_messages.encode(answer)))

    def tell(self, kind: int, order: TrialOrder) -> None:
        """Send an order."""
        self._line.send(frames.frame(kind, encode(order)))

    def result(self, n: int = 0) -> dict[str, Any]:
        """The ``n``-th result, once it is there."""
        self.until(lambda: len(self.results) > n, f"result {n}")
        return self.results[n]

    def until(self, condition: Callable[[], object], what: str, within: float = 60.0) -> None:
        """Serve both sockets until the condition holds."""

        def is_met() -> object:
            if not condition():
                select.select([self.server.client, self._line], [], [], 0.02)
                self.server.listen()
                self.listen()
            return condition()

        def said() -> str:
            return f"no {what}; it said {self.events}, {self.output()}"

        eventually(is_met, within=within, message=said)

    def exited(self, within: float = 60.0) -> ProcessExited:
        """Wait for its end; return how it ended."""
        self.until(lambda: self.server.said(ProcessExited, self.name), "end", within)
        return self.server.said(ProcessExited, self.name)[0]

    def gone(self, within: float = 60.0) -> None:
        """Return when its process tree is gone."""
        self.until(lambda: self.server.said(ProcessTreeGone, self.name), "ProcessTreeGone", within)
        self.listen()

    @property
    def pid(self) -> int:
        """Its process."""
        self.until(lambda: self.server.said(ProcessForked, self.name), "pid")
        return self.server.said(ProcessForked, self.name)[0].pid

    def output(self, name: str = "stderr") -> str:
        """The output of the trial."""
        assert self.order.start is not None
        path = Path(self.order.start.folder, name)
        return path.read_text() if path.exists() else ""

    def close(self) -> None:
        """Close the node's end."""
        self._line.close()


class Server:
    """One forkserver, and the trial processes that it has started."""

    def __init__(
        self,
        root: Path,
        preload: Sequence[str] = (),
        variables: dict[str, str] | None = None,
        sys_path: Sequence[str] = (),
    ) -> None:
        self.root = root
        self.cache = root / "cache"
        path = [*sys_path, *(entry for entry in sys.path if entry)]
        variables = {"PATH": os.environ["PATH"]} if variables is None else variables
        self.environment = Environment(sys.executable, tuple(preload), variables, tuple(path))
        self.client = ForkserverClient(
            self.environment, log=str(root / "forkserver"), hostname="here", node_ip="127.0.0.1"
        )
        self.reports: list[ForkserverReport] = []
        self.processes: list[DrivenProcess] = []

    def listen(self) -> None:
        """Read the reports that have arrived."""
        self.reports += self.client.read()

    def said(self, kind: type[Any], process: str | None = None) -> list[Any]:
        """The forkserver's reports of one kind, about one trial process or all."""
        return [
            report
            for report in self.reports
            if isinstance(report, kind) and (process is None or report.process == process)
        ]

    def warnings(self) -> list[str]:
        """The texts of the forkserver's warnings."""
        return [report.text for report in self.said(ForkserverWarned)]

    def until_ready(self, within: float = 60.0) -> None:
        """Return when it is ready."""
        deadline = time.monotonic() + within
        while not self.client.is_ready:
            if time.monotonic() > deadline:
                pytest.fail(f"not ready; it said {self.reports}")
            select.select([self.client], [], [], 0.1)
            self.listen()

    def order(self, function: Any, number: int = 0, **more: Any) -> TrialOrder:
        """The order to run ``function`` as trial ``number``."""
        start = TrialSpec(
            experiment="experiment",
            events_key="events",
            trial_name=f"trial_{number}",
            trial_number=number,
            folder=str(self.root / f"trial_{number}"),
            code=ship(function, BlobFolder(self.root / "blobs")),
            config=pack_config(more.pop("config", {})),
            resources=more.pop("resources", {"cpu": 1.0}),
            environment=self.environment,
            store=more.pop("store", str(self.root)),
            **more,
        )
        return TrialOrder(f"t{number}", 1, (), start=start)

    def start(
        self, function: Any, number: int = 0, gpus: Sequence[str] = (), **more: Any
    ) -> DrivenProcess:
        """Start a trial process for ``function``."""
        return self.start_order(self.order(function, number, **more), gpus)

    def start_order(self, order: TrialOrder, gpus: Sequence[str] = ()) -> DrivenProcess:
        """Start a trial process for an order that has a start."""
        name = f"h{len(self.processes)}"
        process = DrivenProcess(self, name, self.client.start(name, order, gpus), order)
        self.processes.append(process)
        return process

    def close(self) -> None:
        """End the forkserver and all its trial processes."""
        self.client.close()
        for process in self.processes:
            process.close()


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Yield a function that starts a forkserver in a new folder; it takes the options of `Server`.

    A test module imports it and names it in its ``__all__``.
    """
    servers: list[Server] = []

    def start(**options: Any) -> Server:
        root = tmp_path / f"server_{len(servers)}"
        root.mkdir()
        servers.append(Server(root, **options))
        return servers[-1]

    yield start
    for server in servers:
        server.close()
