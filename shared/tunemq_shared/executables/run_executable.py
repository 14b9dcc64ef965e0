"""Run a command as the running trial: start it, report its results, and wait for its end."""

from __future__ import annotations

import json
import os
import queue
import shutil
import sys
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import msgspec

from tunemq_shared.base.errors import CheckpointError, ExecutableFailed, MetricError, TrainableError
from tunemq_shared.checkpoints.checkpoint import Checkpoint
from tunemq_shared.checkpoints.checkpoint_markers import TEMPORARY_PREFIX, remove
from tunemq_shared.executables import report_socket
from tunemq_shared.executables.checkpoint_inbox import CheckpointInbox
from tunemq_shared.executables.followed_file import FollowedFile
from tunemq_shared.executables.metric_lines import MetricLines
from tunemq_shared.executables.output_intake import (
    ProgramResult,
    ProgramResultReader,
    ResultSources,
)
from tunemq_shared.executables.program import Program
from tunemq_shared.executables.templates import names_in, parameters_of, render, variables_of
from tunemq_shared.protocol.messages import TrialSpec
from tunemq_shared.trial.control_flow import TrialPauseExit
from tunemq_shared.trial.trial_folder_upload import ATTEMPT
from tunemq_shared.trial.trial_session import TrialSession

#: Sources of results; any other value is the name of a file.
STDOUT: Final = "stdout"
REPORT: Final = "report"
#: Ends errors about files that a farm's nodes do not have.
FOLDER_HINT: Final = (
    "A farm has only the files that were sent: with `tunemq submit --folder .` or fit(folder=...) "
    "those beside the script, without what .gitignore excludes and without files with secrets; a "
    "line !NAME in a .tunemqignore there includes one."
)

#: Seconds between two checks whether the trial must stop.
_POLL_INTERVAL_S: Final = 0.1
#: Seconds of a trial's grace time that are reserved for this process.
_OWN_S: Final = 1.5
_LEAST_GRACE_S: Final = 0.5
#: For files that the trial's folder has only while the program runs; then the attempt's number, as
#: a lost attempt may still run. Folders of this name are not copied to a store, and those of killed
#: processes are removed.
_WORK: Final = f"{TEMPORARY_PREFIX}_program"


class ProgramCommand(msgspec.Struct, frozen=True, kw_only=True):
    """The command of a trial; all texts may hold names in braces.

    Attributes:
        arguments: The program and its arguments.
        metrics_from: `STDOUT`, `REPORT`, or a file of JSON lines.
        pattern: A regular expression for lines of stdout that are results.
        cwd: The working directory; relative to the trial's folder if it holds names, else to the
            same folder as the program.
        folder: The folder of a relative program, where the search does not bring its own.
    """

    arguments: tuple[str, ...]
    metrics_from: str = STDOUT
    pattern: str | None = None
    cwd: str
    folder: str = ""

    @property
    def texts(self) -> tuple[str, ...]:
        """All texts in which names are replaced."""
        return (*self.arguments, self.metrics_from, self.cwd)


def run(command: ProgramCommand, config: Mapping[str, Any], session: TrialSession) -> None:
    """Run the command to its end.

    Raises:
        ExecutableFailed: Its exit code is not 0.
        MetricError: A metric is invalid, or it ended without a result.
        TrainableError: It cannot be started.
        TrialExit: The trial ended first, and so did the program.
    """
    work = os.path.join(session.start.folder, f"{_WORK}_{session.attempt}")
    remove(work)
    os.makedirs(work)
    try:
        _TrialAttempt(command, config, session, work).run()
    except (ExecutableFailed, TrainableError) as error:
        is_elsewhere = _base_folder(command, session.start) != command.folder
        if is_elsewhere and "No such file" in str(error):
            error.args = (f"{error}\n{FOLDER_HINT}",)
        raise
    finally:
        remove(work)


class _TrialAttempt:
    """One attempt of a trial that runs a command."""

    def __init__(
        self, command: ProgramCommand, config: Mapping[str, Any], session: TrialSession, work: str
    ) -> None:
        self._session = session
        self._inbox = CheckpointInbox(work)
        self._socket = os.path.join(work, "report")
        #: Whether the trial ended, or paused, while the program waited for `tunemq report`.
        self._ends_in_call = False
        given = _write_config(work, config)
        restored = _restored(session)
        context, folder = session.context, _folder_of_attempt(session)
        self._folder = folder
        ours = {
            "trial_id": context.get_trial_id(),
            "trial_name": context.get_trial_name(),
            "trial_dir": folder,
            "experiment": context.get_experiment_name(),
            "config": given,
            "checkpoint": restored,
            "checkpoint_dir": self._inbox.folder,
        }
        values = ours | dict(parameters_of(config))
        self._arguments = [render(argument, values) for argument in command.arguments]
        base = os.path.join(folder, _base_folder(command, session.start))
        program = command.arguments[0]
        if os.sep in program and not names_in(program):
            self._arguments[0] = os.path.normpath(os.path.join(base, self._arguments[0]))
        above = folder if names_in(command.cwd) else base
        self._cwd = os.path.normpath(os.path.join(above, render(command.cwd, values)))
        self._metrics_from = render(command.metrics_from, values)
        self._pattern = command.pattern
        self._variables = _variables(ours, config, self._socket)

    def run(self) -> None:
        session = self._session
        expected = session.reported_metrics
        lines = file = None
        if self._metrics_from == STDOUT:
            lines = MetricLines(expected, self._pattern)
        elif self._metrics_from != REPORT:
            file = FollowedFile(os.path.join(self._folder, self._metrics_from))
        with (
            report_socket.listen(self._socket) as listener,
            closing(Program(self._arguments, self._variables, self._cwd)) as program,
        ):
            sources = ResultSources(lines, file, listener, self._inbox, expected)
            result_reader = ProgramResultReader(program.stdout, program.ended, sources)
            try:
                self._report_all(result_reader)
            finally:
                result_reader.end_calls()
                code = program.end(max(_LEAST_GRACE_S, session.start.stop_grace_s - _OWN_S))
                self._keep_last(result_reader, code)
            program.check()
        if expected and not session.progress.iteration:
            raise MetricError(self._without_result(expected, lines))

    def _report_all(self, result_reader: ProgramResultReader) -> None:
        """Report results until the program ends."""
        while True:
            try:
                found = result_reader.next(_POLL_INTERVAL_S)
            except queue.Empty:
                self._session.look_for_stop()
                continue
            if found is None:
                return
            self._report(found)

    def _report(self, found: ProgramResult) -> None:
        call, folder = found.call, found.checkpoint
        try:
            self._session.report(found.metrics, None if folder is None else Checkpoint(folder))
        except (MetricError, CheckpointError) as problem:
            if call is None:
                raise
            # As in Python: the caller may report again.
            call.answer(str(problem))
        except BaseException:
            if call is not None:
                self._ends_in_call = True
                call.close()
            raise
        else:
            if call is not None:
                call.answer()
        finally:
            if folder is not None and self._inbox.is_ours(folder):
                remove(folder)

    def _keep_last(self, result_reader: ProgramResultReader, code: int) -> None:
        """Report what the program printed before it paused, and save what it wrote after that.

        The files only if the program exited with code 0, by itself or at a pause, or they may be
        incomplete; and only if all its results count, or they would be ahead of the last one. A
        program whose `tunemq report` ended unanswered may not know that its result counts, and so
        save the step before.
        """
        session, left = self._session, result_reader.join()
        is_paused = session.ended is TrialPauseExit
        is_whole = code == 0 and (is_paused or session.ended is None) and not self._ends_in_call
        last = self._inbox.take() if is_whole else None
        if is_paused:
            while left and last is None and left[-1].checkpoint is None:
                left.pop()  # the trial repeats what it did after its last checkpoint
            while left and self._reports_before_pause(left[0]):
                del left[0]
        is_all = not left and not result_reader.has_dropped
        if last is not None and is_all and session.progress.iteration:
            session.save(Path(last))

    def _reports_before_pause(self, found: ProgramResult) -> bool:
        folder = found.checkpoint
        try:
            return self._session.report_before_pause(
                found.metrics, None if folder is None else Checkpoint(folder)
            )
        except (MetricError, CheckpointError):
            return False

    def _without_result(self, expected: tuple[str, ...], lines: MetricLines | None) -> str:
        name = expected[0]
        begin = f"{self._arguments[0]} ended without a result: {' and '.join(map(repr, expected))} "
        if lines is None:
            return f"{begin}came neither from {self._metrics_from} nor from `tunemq report`."
        seen = f" Printed were {', '.join(map(repr, lines.seen))}." if lines.seen else ""
        return (
            f"{begin}stood on no line that it printed, and `tunemq report` was not called.{seen} "
            f'Print a line such as "{name}=0.3", call `tunemq report {name}=0.3`, or correct the '
            "name of the metric."
        )


def _base_folder(command: ProgramCommand, start: TrialSpec) -> str:
    """Return the folder of relative paths.

    That of the script, as it was sent to the farm; else the one in which the user made the command,
    if this machine shares it; else none, which means the trial's.
    """
    if start.bundle is not None:
        return start.environment.sys_path[0]
    is_shared = not start.environment.inherits and os.access(command.folder, os.X_OK)
    return command.folder if is_shared else ""


def _folder_of_attempt(session: TrialSession) -> str:
    """Return the trial's folder; where a lost attempt may write there, a folder of this attempt."""
    if not session.start.is_shared:
        return session.start.folder
    folder = os.path.join(session.start.folder, f"{ATTEMPT}{session.attempt}")
    os.makedirs(folder, exist_ok=True)
    return folder


def _write_config(work: str, config: Mapping[str, Any]) -> str:
    path = os.path.join(work, "config.json")
    with open(path, "w", encoding="utf-8") as file:
        json.dump(config, file, indent=2)
    return path


def _restored(session: TrialSession) -> str:
    """Return the copy of the checkpoint to continue from; empty if there is none."""
    kept = session.newest_checkpoint()
    return "" if kept is None else str(kept.path)


def _variables(ours: Mapping[str, str], config: Mapping[str, Any], socket: str) -> dict[str, str]:
    variables = {**os.environ, **variables_of(config)}
    variables |= {f"TUNEMQ_{name.upper()}": value for name, value in ours.items()}
    variables[report_socket.VARIABLE] = socket
    # Otherwise Python buffers a few kilobytes of output.
    variables.setdefault("PYTHONUNBUFFERED", "1")
    path = variables.get("PATH", os.defpath)
    if not all(shutil.which(name, path=path) for name in ("tunemq", "python")):
        # Last on the PATH: a `python` of the user's comes first.
        variables["PATH"] = os.pathsep.join((path, os.path.dirname(sys.executable)))
    return variables
