"""The main loop of a trial process: it runs one trial, or several in turn, and exits.

It exits with `os._exit`: user libraries may hang or crash while Python shuts down (GPU contexts,
forgotten threads), and must not hold the trial's slot. Only `atexit` handlers run, since loggers
rely on them, and an alarm limits their time.
"""

from __future__ import annotations

import atexit
import os
import signal
import socket
import time
import traceback
from functools import partial
from typing import Any, Final, NamedTuple, NoReturn

import cloudpickle  # noqa: F401 - preloaded: every trial's code needs it

from tunemq_shared.base.errors import StoreError
from tunemq_shared.base.failure_text import one_line, traceback_text
from tunemq_shared.base.script_classes import receive_script_classes
from tunemq_shared.checkpoints.checkpoint_sink import CheckpointSink
from tunemq_shared.checkpoints.local_store import LocalCheckpointStore
from tunemq_shared.checkpoints.store_sink import StoreSink
from tunemq_shared.code.config_packing import unpack_config
from tunemq_shared.objects.store_address import is_remote
from tunemq_shared.protocol.messages import (
    TrialFailed,
    TrialOrder,
    TrialSpec,
    TrialStarted,
    TrialWaits,
)
from tunemq_shared.trainable.run_trial import TrainableRunner
from tunemq_shared.trainable.trainable_blobs import load
from tunemq_shared.trial.session import TrialSession
from tunemq_workers.logs import output_files
from tunemq_workers.processes.forkserver_messages import TrialProcessSpec, decode_process_spec
from tunemq_workers.trial_process.cache_sink import CacheSink
from tunemq_workers.trial_process.node_channel import NodeChannel
from tunemq_workers.trial_process.received_signals import ReceivedSignals
from tunemq_workers.trial_process.script_objects_for_spawn import end_children
from tunemq_workers.trial_process.trial_process_setup import TrialEnvironment, leave_the_forkserver

#: How long all `atexit` handlers may take together, in seconds.
EXIT_GRACE_S: Final = 4

#: The exit code of a trial process that failed because of an error in TuneMQ.
_SOFTWARE: Final = 70


class ForkContext(NamedTuple):
    """The data that a forked child gets from its forkserver."""

    name: str
    forkserver: int
    line: int
    spec: int
    gate: int | None
    trial_environment: TrialEnvironment


def run(task: ForkContext) -> NoReturn:
    """Set up this forked process, run its trials, and exit."""
    code = _SOFTWARE
    try:
        leave_the_forkserver(task.forkserver)
        if task.gate is not None:
            os.read(task.gate, 1)  # memory allocated earlier counts for the node's cgroup
            os.close(task.gate)
        with open(task.spec, "rb", buffering=0) as file:
            spec = decode_process_spec(file.readall())
        if spec.cpus:
            os.sched_setaffinity(0, spec.cpus)
        _TrialLoop(task, spec, NodeChannel(socket.socket(fileno=task.line))).run()
        code = 0
    except BaseException:  # noqa: BLE001 - the exit code and the log report it
        traceback.print_exc()
    finally:
        output_files.flush()
        os._exit(code)


class _TrialLoop:
    """Runs the trials of one process, one after another."""

    def __init__(self, task: ForkContext, spec: TrialProcessSpec, channel: NodeChannel) -> None:
        self._task, self._spec, self._channel = task, spec, channel
        self._program = TrainableRunner()
        self._signals = ReceivedSignals()
        self._trainable: Any = None
        self._code = ""

    def run(self) -> None:
        """Run the first trial and, if the process is reusable, the next ones."""
        order: TrialOrder | None = self._spec.order
        while order is not None and self._run_trial(order):
            order = self._channel.wait_for_next_trial()
        # The default action of SIGALRM ends the process, even if a thread hangs or holds the GIL.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(EXIT_GRACE_S)
        self._program.close()
        end_children()
        atexit._run_exitfuncs()  # noqa: SLF001 - no public function runs them without ending Python

    def _run_trial(self, order: TrialOrder) -> bool:
        """Run one trial to its end; return whether another one may follow."""
        if order.start is None:
            raise ValueError(f"the order for {order.trial} lacks its start")
        self._channel.send(self._started(order, order.start))
        session = self._prepared(order)
        if session is None:
            return False
        self._program.run(self._trainable, session)
        output_files.flush()
        return order.start.reuse and not self._channel.has_failed

    def _started(self, order: TrialOrder, start: TrialSpec) -> TrialStarted:
        spec = self._spec
        return TrialStarted(
            order.trial,
            order.attempt,
            os.getpid(),
            spec.hostname,
            spec.node_ip,
            time.time(),
            spec.gpus,
            output_files.sizes(start.folder),
        )

    def _prepared(self, order: TrialOrder) -> TrialSession | None:
        """Set up and return the trial's session; None if that failed and the failure was sent."""
        start = order.start
        assert start is not None
        self._channel.says_that_it_waits = start.limits.has_times
        self._channel.before_ending = partial(output_files.settle, start.folder)
        sink = self._sink(order, start)
        try:
            sink.make_folder(start.folder)
            prepare = self._task.trial_environment.prepare
            sink.when_available(
                partial(prepare, start, process=self._task.name, gpus=self._spec.gpus)
            )
        except OSError as error:
            self._fail(order, "storage", error)
            return None
        try:
            if start.code.sha256 != self._code:
                receive_script_classes()
                self._trainable = load(start.code)
                self._code = start.code.sha256
            config = unpack_config(start.config)
        except BaseException as error:  # noqa: BLE001 - any code runs here; it is sent
            self._fail(order, "fetch" if isinstance(error, StoreError) else "load", error)
            return None
        got_sigterm = partial(self._signals.has, signal.SIGTERM)
        got_sigterm()  # those of an earlier trial do not count
        return TrialSession(order, config, self._channel, sink, got_sigterm)

    def _sink(self, order: TrialOrder, start: TrialSpec) -> CheckpointSink:
        """Return the trial's checkpoint sink: a folder is written here, a store by the node."""
        folder_name = os.path.basename(start.folder)
        if is_remote(start.store):
            return CacheSink(self._channel, folder_name)

        def say(reason: str) -> None:
            what = "save" if reason else ""
            self._channel.send(TrialWaits(order.trial, order.attempt, what, reason))
            self._channel.waits(is_waiting=bool(reason))

        store = LocalCheckpointStore(start.store)
        return StoreSink(store, folder_name, timeout_s=start.sync_timeout_s, say=say)

    def _fail(self, order: TrialOrder, kind: str, error: BaseException) -> None:
        text = traceback_text(error)
        self._channel.send(
            TrialFailed(order.trial, order.attempt, kind, one_line(error), text, time.time())
        )
