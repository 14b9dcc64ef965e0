"""The command line of ``tunemq``: runs the command, and prints errors in one line."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from tunemq_scheduler.api.login_name import login_name
from tunemq_scheduler.cli import (
    checkpoints_command,
    doctor_command,
    experiment_commands,
    journal_command,
    keys_command,
    nodes_command,
    run_command,
    store_serve_command,
    submit_command,
)
from tunemq_scheduler.cli import scheduler_command as scheduler
from tunemq_shared.base.errors import BugError, TuneError
from tunemq_shared.base.safe_text import harmless
from tunemq_shared.system.standard_streams import run_quietly

#: The command line is invalid (EX_USAGE); 1 means a negative result instead.
EXIT_USAGE = 64


#: Adds a command to the command line; argparse's type for that is private.
AddParser = Callable[[Any], None]


class _Parser(argparse.ArgumentParser):
    """Takes only whole names of options: a misspelt one would be another one."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **options})


def main(
    version: str,
    arguments: Sequence[str] | None = None,
    *,
    others: Sequence[AddParser] = (),
) -> int:
    """Run the command line; returns the exit status.

    Args:
        version: TuneMQ's version.
        arguments: By default those of this process.
        others: Add the commands of the workers' package, which the scheduler's does not import.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        # The locale's encoding may lack characters of names and reasons, and of our own texts.
        sys.stdout.reconfigure(errors="replace")
    return run_quietly(lambda: _run(version, arguments, others))


def _run(version: str, arguments: Sequence[str] | None, others: Sequence[AddParser]) -> int:
    parser: argparse.ArgumentParser = _Parser(
        prog="tunemq",
        description="Hyperparameter search on machines you own.",
        epilog=(
            "A script, or `tunemq run`, starts a search on this machine: see the README. A "
            "program of `tunemq run` reports results with `tunemq report`; `tunemq health` "
            "tells whether a scheduler or a worker is healthy."
        ),
    )
    parser.add_argument("--version", action="version", version=f"tunemq {version}")
    groups = parser.add_subparsers(metavar="COMMAND")
    run_command.add_parser(groups)
    scheduler.add_parser(groups)
    for add_parser in others:
        add_parser(groups)
    submit_command.add_parser(groups)
    experiment_commands.add_parser(groups)
    nodes_command.add_parser(groups)
    keys_command.add_parser(groups)
    doctor_command.add_parser(groups)
    checkpoints_command.add_parser(groups)
    journal_command.add_parser(groups)
    store_serve_command.add_parser(groups)
    given, behind = run_command.divided(sys.argv[1:] if arguments is None else arguments)
    options, unknown = parser.parse_known_args(given)
    if unknown and "command_line" not in options:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if "run" not in options:
        parser.print_help()
        return 0
    try:
        if "command_line" in options:
            run_command.take_command(options, unknown, behind)
        return int(options.run(options))
    except BugError:
        raise
    except TuneError as problem:
        sys.stderr.write(f"tunemq: {harmless(str(problem))}\n")
        return EXIT_USAGE
    except PermissionError as problem:
        place = harmless(os.fsdecode(problem.filename or "a file"))
        sys.stderr.write(f"tunemq: the user {login_name()} has no permission for {place}.\n")
        return EXIT_USAGE
    except KeyboardInterrupt:
        return 130
