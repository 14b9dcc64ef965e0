"""`executable`: a command as a trainable."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from tunemq_shared.base.errors import TrainableError
from tunemq_shared.executables.run_executable import (
    FOLDER_HINT,
    REPORT,
    STDOUT,
    ProgramCommand,
    run,
)
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
        cwd: The working directory, by default the current one; on a farm that of the script.
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

    #: The folder of the script that a farm loads now; there the node finds the program.
    script_folder: ClassVar[str | None] = None

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
        folder = Executable.script_folder or os.getcwd()
        if Executable.script_folder is None:
            _check_program(command[0], folder)
        else:
            _check_sent(command if cwd is None else command[:1], folder)
        self.command = ProgramCommand(
            arguments=tuple(command),
            metrics_from=_checked_source(metrics_from),
            pattern=_checked_pattern(pattern, metrics_from),
            cwd="" if cwd is None else os.fspath(cwd),
            folder=folder,
        )
        for text in self.command.texts:
            names_in(text)
        self.__name__ = name or _name_of(command, folder)

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


def _check_program(given: str, folder: str) -> None:
    """Check that the program exists and is executable.

    Raises:
        TrainableError: It does not exist, or is not executable.
    """
    if names_in(given):
        return
    if os.sep not in given:
        if shutil.which(given) is None:
            beside = f"; for the file here write ./{given}" if os.path.isfile(given) else ""
            raise TrainableError(f"there is no command {given!r} on the PATH{beside}.")
        return
    path = os.path.normpath(os.path.join(folder, given))
    if not os.path.isfile(path):
        raise TrainableError(f"the program {given!r} is no file: there is none at {path}.")
    if not os.access(path, os.X_OK):
        raise TrainableError(
            f"the program {given!r} cannot be executed: chmod +x {given}, or name what runs it, "
            f"such as: bash {given}"
        )


def _check_sent(command: Sequence[str], folder: str) -> None:
    """Check a farm's copy of the script's folder: it has the program, or the script that it runs.

    All other programs are those of the nodes.

    Raises:
        TrainableError: The file was not sent, or is not executable.
    """
    program, script = command[0], "".join(command[1:2])
    is_own = os.sep in program and not os.path.isabs(program)
    name = program if is_own else script if script.endswith((".py", ".sh")) else ""
    if not name or os.path.isabs(name) or names_in(name):
        return
    if not os.path.isfile(os.path.join(folder, name)):
        raise TrainableError(f"{name!r} was not sent. {FOLDER_HINT}")
    if is_own:
        _check_program(program, folder)


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


def _name_of(command: Sequence[str], folder: str) -> str:
    """The name of what runs: for ``python train.py`` and ``./train.sh`` it is ``train``."""
    is_script = len(command) > 1 and os.path.isfile(os.path.join(folder, command[1]))
    return os.path.splitext(os.path.basename(command[1] if is_script else command[0]))[0]
