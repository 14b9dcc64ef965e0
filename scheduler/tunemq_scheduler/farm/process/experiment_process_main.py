"""The process of one experiment: runs its code, without keys and without access to Redis.

It is forked for the farm's supervisor (`tunemq_scheduler.farm.process.experiment_forkserver`). One
end of a socket pair is its only connection (`tunemq_scheduler.farm.ipc`). It is killed when the
supervisor ends in any way.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import socket
import sys
import threading
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from tunemq_scheduler.api.pickled_tuner import load_tuner_parts
from tunemq_scheduler.api.tuner import TunerParts
from tunemq_scheduler.farm.common.scheduler_exit_codes import EXIT_FAILED, process_exit_code
from tunemq_scheduler.farm.ipc.experiment_side import SupervisorConnection
from tunemq_scheduler.farm.ipc.ipc_messages import (
    MOST_CHARACTERS,
    MOST_THREADS,
    THREAD_CHARACTERS,
    ExperimentExiting,
    ExperimentJob,
    ExperimentProblem,
)
from tunemq_scheduler.farm.process.experiment_start import run_on_farm
from tunemq_scheduler.farm.process.script_tuner import load_tuner
from tunemq_shared.base.errors import BugError, TuneError
from tunemq_shared.base.safe_text import harmless
from tunemq_shared.base.script_classes import receive_script_classes
from tunemq_shared.checkpoints.open_store import use_only
from tunemq_shared.code.blob_folder import BlobFolder, requested_blob
from tunemq_shared.code.blob_store import open_blobs
from tunemq_shared.code.bundles import unpacked
from tunemq_shared.protocol.farm_requests import PickledCode, ScriptCode
from tunemq_shared.system.plain_files import read_plain
from tunemq_shared.system.process_attributes import set_name
from tunemq_shared.system.standard_streams import tell


def run(sock: socket.socket) -> int:
    """Run the job from the supervisor at the other end of this socket; return the exit code."""
    faulthandler.enable()  # prints the location of a segfault in the experiment's code
    connection = SupervisorConnection(sock)
    try:
        code = _exit_code(connection)
        connection.send(ExperimentExiting(code, _threads_that_hold_up_the_exit()))
    finally:
        connection.close()
        _give_up_unwritten_output()
    return code


def _exit_code(connection: SupervisorConnection) -> int:
    """Run the experiment; report why it ends unless it is done."""
    try:
        _run(connection)
    except BugError:
        _end_with(connection, traceback.format_exc())
        return EXIT_FAILED
    except TuneError as problem:
        _end_with(connection, str(problem))
        return process_exit_code(problem)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except SystemExit as error:
        _end_with(
            connection, f"the experiment's own code ended its process: sys.exit({error.code!r})."
        )
        return EXIT_FAILED
    except Exception as problem:  # noqa: BLE001  the script's own; its traceback is reported here
        _end_with(connection, traceback.format_exc())
        return process_exit_code(problem)
    return 0


def _threads_that_hold_up_the_exit() -> tuple[str, ...]:
    """Return the names of the experiment's threads that Python waits for."""
    own = [one for one in threading.enumerate() if one is not threading.current_thread()]
    names = [harmless(str(one.name))[:THREAD_CHARACTERS] for one in own if not one.daemon]
    return tuple(names[:MOST_THREADS])


def _run(connection: SupervisorConnection) -> None:
    job = connection.first()
    if not isinstance(job, ExperimentJob):
        raise BugError(f"the supervisor sent {job!r} before the experiment's job")
    if job.stores is not None:
        use_only(job.stores)
    set_name(job.name)
    sys.argv[:] = [job.name]  # until there is a script
    run_on_farm(_loaded(job), job, connection)


def _loaded(job: ExperimentJob) -> TunerParts:
    """Load the experiment's Tuner, by running its script if it has one.

    The submitter's settings for the trials' environment replace its own.
    """
    code = job.code
    if isinstance(code, ScriptCode):
        path = unpacked(code.bundle, job.folder_for_code) / code.script
        parts = load_tuner(path, code.tuner).parts
    else:
        if code.bundle is not None:
            sys.path.insert(0, str(unpacked(code.bundle, job.folder_for_code)))
        parts = _unpickled(code, job)
    given: dict[str, Any] = {}
    if job.python:
        given["python"] = job.python
    if job.preload is not None:
        given["preload"] = list(job.preload)
    return parts._replace(run=replace(parts.run, **given))


def _unpickled(code: PickledCode, job: ExperimentJob) -> TunerParts:
    ref = code.tuner
    if ref.store:
        with open_blobs(ref.store) as blobs:
            path = Path(blobs.fetch(ref, BlobFolder(job.folder_for_code)).path)
    else:
        path = requested_blob(ref)
    receive_script_classes()
    return TunerParts(*load_tuner_parts(read_plain(path)))


def _end_with(connection: SupervisorConnection, problem: str) -> None:
    """Report why the process ends; also to the supervisor, because stderr may be on a full disk."""
    tell(problem)
    connection.send(ExperimentProblem(problem[-MOST_CHARACTERS:]))


def _give_up_unwritten_output() -> None:
    """Drop output that a full disk rejects; otherwise Python's exit code reports it."""
    streams = ((sys.stdout, 1), (sys.__stdout__, 1), (sys.stderr, 2), (sys.__stderr__, 2))
    for stream, descriptor in streams:
        # The experiment's code may have replaced the streams with objects that raise anything.
        with contextlib.suppress(Exception):
            if not _is_written(stream):
                nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
                os.dup2(nowhere, descriptor)
                os.close(nowhere)
                _is_written(stream)


def _is_written(stream: TextIO | None) -> bool:
    try:
        if stream is not None:
            stream.flush()
    except OSError:
        return False
    return True
