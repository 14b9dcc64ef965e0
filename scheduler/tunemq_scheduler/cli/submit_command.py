"""``tunemq submit``: submits a script's search to a farm."""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial
from typing import TYPE_CHECKING

from tunemq_scheduler.api.farm_answer_types import (
    ExperimentDetail,
    ExperimentState,
    ExperimentSubmitted,
    LogPage,
)
from tunemq_scheduler.cli.shared_arguments import (
    EXIT_REJECTED,
    add_command,
    tell,
    whole_number,
    write_json,
)
from tunemq_shared.base.errors import ConfigError
from tunemq_shared.base.known_variables import unknown_variables
from tunemq_shared.protocol.farm_requests import (
    MAX_PRIORITY,
    ExperimentEnvironment,
    ShowExperiment,
)

if TYPE_CHECKING:
    from tunemq_scheduler.api.farm_client import FarmClient

_MORE = (
    "The farm's scheduler runs the script's Tuner on the farm's nodes; the part of the script "
    'under `if __name__ == "__main__"` does not run. Without --detach the command shows the '
    "progress until the search ends; Ctrl-C then leaves the search running."
)
_EPILOG = (
    "Exit codes: 0 queued (--detach), or finished; 1 refused, failed or stopped; 2 and 64 "
    "invalid arguments; 69 Redis does not answer; 75 no scheduler runs there; 130 Ctrl-C, the "
    "search continues."
)


def add_parser(groups: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the command line."""
    parser = add_command(
        groups, "submit", submit, "submit a script's search to a farm", more=_MORE, epilog=_EPILOG
    )
    parser.add_argument(
        "script",
        metavar="SCRIPT[:NAME]",
        help="variable of the script that holds the Tuner; default: tuner",
    )
    parser.add_argument(
        "--name", default="", help="name of the experiment; default: a generated name"
    )
    parser.add_argument(
        "--owner",
        help=(
            "owner of the experiment; default: the owner of the key file; without one, your "
            "login name"
        ),
    )
    parser.add_argument(
        "--priority",
        type=whole_number(-MAX_PRIORITY, MAX_PRIORITY),
        default=0,
        metavar="N",
        help=f"higher priorities run first, from -{MAX_PRIORITY} to {MAX_PRIORITY}; default: 0",
    )
    parser.add_argument(
        "--folder",
        metavar="DIR",
        help=(
            "the folder of code to send; it contains the script. Default: the script, and its "
            "folder if it imports modules from there"
        ),
    )
    parser.add_argument(
        "--python",
        metavar="PATH",
        help=(
            "the interpreter of the search and its trials, for instance of a virtual "
            "environment, as a path on the farm's machines; default: theirs"
        ),
    )
    parser.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help=(
            "an environment variable for the search and its trials; may be repeated. NAME "
            "alone takes the value from your environment: use it for secrets, because other "
            "users see a command's arguments"
        ),
    )
    parser.add_argument(
        "--preload",
        metavar="MODULES",
        help=(
            "modules that trials find imported, separated by commas; default: those that the "
            "code imports"
        ),
    )
    parser.add_argument(
        "--detach", action="store_true", help="print the experiment's name, and do not wait"
    )


def submit(client: FarmClient, options: argparse.Namespace) -> int:
    """Submit the search; without ``--detach`` follow it to its end."""
    from tunemq_scheduler.api.submit import SubmitOptions, submit_script

    for unknown in unknown_variables(os.environ):
        tell(unknown)
    submit_options = SubmitOptions(
        name=options.name,
        priority=options.priority,
        folder=options.folder,
        settings=ExperimentEnvironment(
            python=options.python or "",
            variables=_variables(options.env),
            preload=_modules(options.preload),
        ),
    )
    submitted = submit_script(client, options.script, submit_options)
    if options.detach:
        if options.json:
            write_json(submitted)
        else:
            sys.stdout.write(f"{submitted.name}\n")
        return 0
    return _attached(client, submitted, is_json=options.json)


def _attached(client: FarmClient, submitted: ExperimentSubmitted, *, is_json: bool) -> int:
    from tunemq_scheduler.api.log_following import follow
    from tunemq_scheduler.output.terminal.harmless import write_output

    name = submitted.name
    behind = f", behind {submitted.ahead} other(s)" if submitted.ahead else ""
    tell(f"{name} is queued{behind}. Ctrl-C leaves it running.")
    show = partial(write_output, sys.stderr if is_json else sys.stdout)
    try:
        page: LogPage = follow(client, name, identity=submitted.id, show=show, tell=tell)
    except KeyboardInterrupt:
        tell(
            f"{name} continues. Follow it with: tunemq logs -f {name}; stop it with: tunemq "
            f"stop {name}"
        )
        return 130
    if is_json:
        write_json(client.ask(ShowExperiment(name=name, id=submitted.id), ExperimentDetail))
    tell(f"{name} is {page.state}" + (f": {page.reason}" if page.reason else ""))
    return 0 if page.state is ExperimentState.FINISHED else EXIT_REJECTED


def _variables(given: list[str]) -> dict[str, str]:
    found = {}
    for one in given:
        name, equals, value = one.partition("=")
        if not name:
            raise ConfigError(f"--env {one!r} is invalid: write NAME=VALUE, or NAME.")
        if not equals and name not in os.environ:
            raise ConfigError(
                f"--env {name} takes the value from your environment, where it is not set; set it,"
                " or write NAME=VALUE."
            )
        found[name] = value if equals else os.environ[name]
    return found


def _modules(given: str | None) -> tuple[str, ...] | None:
    if given is None:
        return None
    modules = tuple(part.strip() for part in given.split(",") if part.strip())
    for module in modules:
        if not all(part.isidentifier() for part in module.split(".")):
            raise ConfigError(f"--preload {module!r} is not the name of a module.")
    return modules
