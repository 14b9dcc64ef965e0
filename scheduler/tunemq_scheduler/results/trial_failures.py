"""Failures of trials: writes them into the trials' folders, and groups them by cause."""

from __future__ import annotations

import os
import re
import signal
import time
from typing import Final

import msgspec

from tunemq_scheduler.core.commands import NotifyFailure
from tunemq_scheduler.core.failure_policy import CLASSES, classify
from tunemq_scheduler.storage.folders import ERROR_FILE
from tunemq_shared.base.errors import StoreError
from tunemq_shared.base.safe_text import harmless
from tunemq_shared.protocol.messages import NodeLost, TrialFailed, TrialProcessDied
from tunemq_shared.system.plain_files import open_to_write
from tunemq_shared.system.processes import signal_name
from tunemq_shared.trial.results import whole_seconds

_RANKS: Final = {kind: rank for rank, kind in enumerate((*CLASSES, "other"))}

#: The most trials that a group names.
_NAMED: Final = 3
#: The most groups; bounds the memory of a search whose trials all fail differently.
_MOST_GROUPS: Final = 100

_FRAME: Final = re.compile(
    r'^\s*File "(?P<file>[^"]*)", line (?P<line>\d+)(?:, in (?P<name>.*))?$', re.MULTILINE
)
_VARYING: Final = re.compile(r"0x[0-9a-f]+|\d+(?:\.\d+)?(?:e[+-]?\d+)?", re.IGNORECASE)
_CHAIN: Final = (
    "The above exception was the direct cause of the following exception:",
    "During handling of the above exception, another exception occurred:",
)


class TrialFailure(msgspec.Struct, frozen=True, kw_only=True):
    """One failure of one trial.

    Attributes:
        trial: the trial's name.
        kind: one of the classes of `tunemq_scheduler.core.failure_policy`.
        error: the exception in one line, as Python shows it: ``ValueError: too small``.
        traceback: Python's traceback, if there is one.
        hostname: the machine where it happened.
        at: Unix time.
        number: counts the trial's failures, from 1.
        file: the error file, if it could be written.
        is_final: True if the failure put the trial into ERROR, False if the trial is retried.
        verdict: which failure of how many it is, or why the trial is not retried.
        output: the end of the trial's output.
    """

    trial: str
    kind: str
    error: str
    traceback: str = ""
    hostname: str = ""
    at: float = 0.0
    number: int = 1
    file: str | None = None
    is_final: bool = True
    verdict: str = ""
    output: str = ""

    @property
    def consequence(self) -> str:
        """The failure's class, budget and consequence in one line; empty if unknown."""
        if not self.verdict:
            return ""
        known = CLASSES[self.kind]
        if not self.is_final:
            return f"{known.description}: {self.verdict}; it is tried again"
        return "; ".join(filter(None, [f"{known.description}: {self.verdict}", known.fix]))


class FailureGroup(msgspec.Struct, kw_only=True):
    """Failures with the same cause.

    Attributes:
        kind, error: those of the first failure.
        cause: the original exception if another one was raised from it; otherwise empty.
        place: the line of code that raised it, ``file:line in function``; empty if unknown.
        count: the number of failures.
        trials: the names of the first few trials, each once.
        hostnames: the machines, each once.
        file: the error file of the first failure.
    """

    kind: str
    error: str
    cause: str
    place: str
    count: int = 0
    trials: list[str] = []
    hostnames: list[str] = []
    file: str | None = None


class FailureLog:
    """Groups failures by cause as they arrive, in bounded memory."""

    def __init__(self) -> None:
        self._groups: dict[tuple[str, str, str], FailureGroup] = {}
        self.total = 0

    def add(self, failure: TrialFailure) -> FailureGroup:
        """Count a failure; return its group."""
        self.total += 1
        cause, place = root_cause(failure.traceback)
        shown_cause = cause if cause != failure.error else ""
        key = (failure.kind, _VARYING.sub("#", shown_cause or failure.error), place)
        if key not in self._groups and len(self._groups) >= _MOST_GROUPS:
            key = ("other", "", "")
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = FailureGroup(
                kind=failure.kind,
                error=failure.error,
                cause=shown_cause,
                place=place,
                file=failure.file,
            )
        group.count += 1
        for names, name in ((group.trials, failure.trial), (group.hostnames, failure.hostname)):
            if name and name not in names and len(names) < _NAMED:
                names.append(name)
        return group

    def groups(self) -> list[FailureGroup]:
        """Return all groups: the user's own exceptions first, then the most frequent."""
        return sorted(
            self._groups.values(),
            key=lambda group: (_RANKS[group.kind], -group.count),
        )


def failure_of(
    event: TrialFailed | TrialProcessDied | NodeLost,
    *,
    trial: str,
    hostname: str,
    number: int,
    retried: bool,
    kind: str = "",
    verdict: str = "",
) -> TrialFailure:
    """Convert a node's failure event to a `TrialFailure`.

    Args:
        number: counts this trial's failures from 1.
        kind: its class. Default: the class that the event alone implies.
        verdict: see `TrialFailure`.
    """
    traceback, at = "", time.time()
    match event:
        case TrialFailed():
            error, traceback, at = event.error, event.traceback, event.at
        case TrialProcessDied():
            error, at = describe_death(event.signal, event.exit_code, event.cause), event.at
        case NodeLost():  # no clock of the node gave a time
            error = f"the node that ran the trial was lost: {event.reason}"
    return TrialFailure(
        trial=trial,
        kind=kind or classify(event).kind,
        error=error,
        traceback=traceback,
        hostname=hostname,
        at=at,
        number=number,
        is_final=not retried,
        verdict=verdict,
        output="" if isinstance(event, NodeLost) else event.output,
    )


def recorded_failure(command: NotifyFailure, trial: str, number: int) -> TrialFailure:
    """Convert a failure that the runner recorded to a `TrialFailure`; see `failure_of`."""
    return failure_of(
        command.failure,
        trial=trial,
        hostname=command.hostname,
        number=number,
        retried=command.retried,
        kind=command.kind,
        verdict=command.told,
    )


def write_failure(folder: str, failure: TrialFailure) -> str:
    """Append a failure to the trial's ``error.txt``; return the file's path.

    Raises:
        StoreError: the file cannot be written; the message says where and why.
    """
    path = os.path.join(folder, ERROR_FILE)
    when = time.strftime("%Y-%m-%d_%H-%M-%S", time.localtime(whole_seconds(failure.at)))
    where = f" on {failure.hostname}" if failure.hostname else ""
    told = failure.traceback.rstrip() or failure.error
    then = f"({failure.consequence})\n" if failure.consequence else ""
    more = f"\n{told}\n{then}{failure.output}".replace("\nFailure # ", "\n Failure # ")  # no header
    text = harmless(f"Failure # {failure.number} (occurred at {when}{where}){more}")
    try:
        descriptor = open_to_write(path, os.O_WRONLY | os.O_APPEND)
        with open(descriptor, "a", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise StoreError(f"{path} cannot be written: {error.strerror}.") from error
    return path


def root_cause(traceback: str) -> tuple[str, str]:
    """Return the first exception of a traceback in one line, and the code that raised it."""
    first = traceback
    for description in _CHAIN:
        first = first.partition(description)[0]
    error = ""
    for line in first.splitlines():
        if line and not line[0].isspace() and not line.startswith(("Traceback (", "|")):
            error = line
            break
    frames = list(_FRAME.finditer(first))
    if not frames:
        return error, ""
    last = frames[-1]
    place = f"{last['file']}:{last['line']}"
    return error, f"{place} in {last['name']}" if last["name"] else place


def describe_death(signal_number: int | None, exit_code: int | None, cause: str = "") -> str:
    """Explain why a trial process ended without reporting; see `TrialProcessDied`."""
    if cause == "memory":
        return "the trial's process was killed because the machine had no memory left for it"
    if cause == "cuda_memory":
        return "the trial's process died when it had printed that a GPU's memory ran out"
    if signal_number is None:
        return f"the trial's process exited by itself with code {exit_code}"
    name = signal_name(signal_number)
    if signal_number == signal.SIGKILL:
        return f"the trial's process was killed by {name}; often that means that memory ran out"
    return f"the trial's process was killed by {name}"
