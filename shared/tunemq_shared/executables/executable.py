"""`executable`: a command as a trainable."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

from tunemq_shared.base.errors import TrainableError
from tunemq_shared.executables.run_executable import REPORT, STDOUT, ProgramCommand, run
from tunemq_shared.executables.templates import check_names, names_in
from tunemq_shared.trial.session import running


def executable(
    command: Sequence[str],
    *,
    metrics_from: str = STDOUT,
    pattern: str | None = None,
    cwd: str | os.PathLike[str] | None = None,
    name: str | None = None,
) -> Executable:
    """Make a trainable that runs a command in each trial; see ``docs/executables.md``.

    In the arguments ``{lr}`` stands for the parameter ``lr``, ``{opt.lr}`` for ``lr`` in the group
    ``opt``, and ``{{`` for a brace. No shell is involved.

    Args:
        command: The program and its arguments.
        metrics_from: The source of results: ``"stdout"``, ``"report"`` (only ``tunemq report``,
            which works with the others as well), or the name of a file of JSON lines, below the
            trial's folder.
        pattern: A regular expression for a line of stdout, with a named group per metric; replaces
            ``name=value`` and JSON.
        cwd: The working directory, by default the current one.
        name: The name of the trainable, and so of its trials' folders; by default the program's.

    Raises:
        TrainableError: The command is invalid.

    Returns:
        The trainable, for `Tuner` or `run`.

    Example:
        >>> from tunemq import Tuner, executable, uniform
        >>> train = executable(["python", "train.py", "--lr={lr}"])
        >>> tuner = Tuner(train, param_space={"lr": uniform(0.001, 0.1)})
    """
    return Executable(command, metrics_from=metrics_from, pattern=pattern, cwd=cwd, name=name)


class Executable:
    """The trainable that `executable` returns: a function of a configuration, with a command."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        metrics_from: str,
        pattern: str | None,
        cwd: str | os.PathLike[str] | None,
        name: str | None,
    ) -> None:
        if isinstance(command, str) or not command or not all(isinstance(a, str) for a in command):
            raise TrainableError(
                f"executable({command!r}): give a list of texts, the program and its arguments, "
                'such as ["./train.sh", "--lr", "{lr}"].'
            )
        folder = os.path.abspath(cwd) if cwd is not None and not names_in(str(cwd)) else cwd
        where = os.getcwd() if folder is None else os.fspath(folder)
        self.command = ProgramCommand(
            arguments=(_program(command[0]), *command[1:]),
            metrics_from=_checked_source(metrics_from),
            pattern=_checked_pattern(pattern, metrics_from),
            cwd=where,
        )
        for text in self.command.texts:
            names_in(text)
        self.__name__ = name or _name_of(command)

    def __call__(self, config: dict[str, Any]) -> None:
        """Run the command, as the running trial."""
        run(self.command, config, running("executable"))

    def check_names(self, known: Mapping[str, bool]) -> None:
        """Check that the arguments name only these parameters, and TuneMQ's own names.

        Args:
            known: The parameters; True for a group with unknown parameters in it.

        Raises:
            TrainableError: There is another name; lists the known ones.
        """
        check_names(self.command.texts, known)


def _program(given: str) -> str:
    """The program, as a command or path that works in every folder.

    Raises:
        TrainableError: It does not exist, or is not executable.
    """
    if names_in(given):
        return given
    if os.sep not in given:
        if shutil.which(given) is None:
            beside = f"; for the file here write ./{given}" if os.path.isfile(given) else ""
            raise TrainableError(f"there is no command {given!r} on the PATH{beside}.")
        return given
    path = os.path.abspath(given)
    if not os.path.isfile(path):
        raise TrainableError(f"the program {given!r} is no file: there is none at {path}.")
    if not os.access(path, os.X_OK):
        raise TrainableError(
            f"the program {given!r} cannot be executed: chmod +x {given}, or name what runs it, "
            f"such as: bash {given}"
        )
    return path


def _checked_source(source: str) -> str:
    if not isinstance(source, str) or not source:
        raise TrainableError(
            f"metrics_from={source!r} is invalid: give {STDOUT!r}, {REPORT!r} or the name of a "
            "file of JSON lines."
        )
    if os.path.isabs(source) and not names_in(source):
        raise TrainableError(
            f"metrics_from={source!r}: all trials would write that file. Give a name below each "
            f"trial's folder, such as 'metrics.jsonl', and write {{trial_dir}}/metrics.jsonl in "
            "the arguments."
        )
    return source


def _checked_pattern(pattern: str | None, source: str) -> str | None:
    if pattern is None:
        return None
    if source != STDOUT:
        raise TrainableError(
            f"pattern={pattern!r} is for lines of stdout, and results come from {source!r}; leave "
            "one of the two out."
        )
    try:
        groups = re.compile(pattern).groupindex
    except re.error as error:
        raise TrainableError(f"pattern={pattern!r} is no regular expression: {error}.") from error
    if not groups:
        raise TrainableError(
            f"pattern={pattern!r} has no named group; name each metric, such as "
            r"'loss (?P<loss>\S+)'."
        )
    return pattern


def _name_of(command: Sequence[str]) -> str:
    """The name of what runs: for ``python train.py`` and ``./train.sh`` it is ``train``."""
    what = command[1] if len(command) > 1 and os.path.isfile(command[1]) else command[0]
    return os.path.splitext(os.path.basename(what))[0]
