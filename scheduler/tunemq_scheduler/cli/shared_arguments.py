"""Arguments and exit codes that all commands for a farm share."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import msgspec

from tunemq_scheduler.base.import_precedence import installed_packages_first
from tunemq_scheduler.output.terminal.harmless import harmless_json
from tunemq_shared.base.errors import (
    BugError,
    ConfigError,
    NoScheduler,
    RedisUnavailable,
    TuneError,
    UserError,
)
from tunemq_shared.base.failure_text import shortened
from tunemq_shared.base.safe_text import harmless
from tunemq_shared.broker.redis_address import REDIS_VARIABLE, parse_address
from tunemq_shared.signing.key_files import KEYS_VARIABLE
from tunemq_shared.system.process_attributes import leave_no_core_file

if TYPE_CHECKING:
    from tunemq_scheduler.api.farm_client import FarmClient

#: The scheduler rejected the request, or the experiment failed.
EXIT_REJECTED: Final = 1
#: Redis cannot be reached (EX_UNAVAILABLE).
EXIT_UNAVAILABLE: Final = 69
#: The farm has no scheduler, or it does not answer (EX_TEMPFAIL).
EXIT_NO_SCHEDULER: Final = 75

#: Epilog of each command's help.
EXIT_CODES: Final = (
    "Exit codes: 0 done; 1 refused or failed; 2 and 64 invalid arguments; 69 Redis does not "
    "answer or accepts no writes; 75 no scheduler runs there."
)

#: The most characters of an invalid argument that its error shows.
_SHOWN: Final = 40

FarmAction = Callable[["FarmClient", argparse.Namespace], int]


def add_command(
    groups: Any, name: str, act: FarmAction, what: str, *, more: str = "", epilog: str = EXIT_CODES
) -> argparse.ArgumentParser:
    """Add a command for a farm, with the options that all of them have."""
    parser: argparse.ArgumentParser = groups.add_parser(
        name, help=what, description=f"{what[0].upper()}{what[1:]}. {more}", epilog=epilog
    )
    add_options(parser)
    parser.set_defaults(run=lambda options: run(act, options))
    return parser


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for the farm's address, the key file and the output format."""
    parser.add_argument(
        "--redis",
        metavar="URL",
        help=(
            f"the farm's address, such as rediss://host:6379/0; default: ${REDIS_VARIABLE}, the "
            "place for an address with a password"
        ),
    )
    parser.add_argument(
        "--keys",
        metavar="FILE",
        help=f"your key file, if the farm has keys; default: ${KEYS_VARIABLE}",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def run(act: FarmAction, options: argparse.Namespace) -> int:
    """Run a command with a client of the farm; returns the exit status.

    Raises:
        UserError: An argument is invalid.
        BugError: A defect of TuneMQ.
    """
    url = options.redis or os.environ.get(REDIS_VARIABLE, "")
    if not url:
        raise ConfigError(
            f"Redis address missing: pass --redis redis://host:6379/0 or set {REDIS_VARIABLE}."
        )
    if options.redis and parse_address(url).password:
        tell(
            "users who list this machine's processes see the password in --redis; set "
            f"{REDIS_VARIABLE} instead."
        )
    leave_no_core_file()
    with installed_packages_first("redis"):
        from tunemq_scheduler.api.farm_client import FarmClient
    try:
        owner = getattr(options, "owner", None) or ""
        with FarmClient(url, owner=owner, keys=options.keys) as client:
            return act(client, options)
    except (UserError, BugError):
        raise
    except TuneError as problem:
        tell(str(problem))
        if isinstance(problem, RedisUnavailable):
            return EXIT_UNAVAILABLE
        return EXIT_NO_SCHEDULER if isinstance(problem, NoScheduler) else EXIT_REJECTED


def whole_number(least: int, most: int) -> Callable[[str], int]:
    """Return the type of an argument that is a whole number within these bounds."""

    def read(text: str) -> int:
        with contextlib.suppress(ValueError):
            if least <= (number := int(text)) <= most:
                return number
        raise argparse.ArgumentTypeError(
            f"{shortened(text, _SHOWN)!r} is invalid: use a whole number from {least} to {most}"
        )

    return read


def write_json(answer: object) -> None:
    """Write an answer as one line of JSON, with control characters escaped."""
    sys.stdout.write(f"{harmless_json(msgspec.json.encode(answer).decode())}\n")


def tell(text: str) -> None:
    """Print a message for people to stderr, separate from the command's answer."""
    sys.stdout.flush()
    sys.stderr.write(f"tunemq: {harmless(text)}\n")


def add_experiment(parser: argparse.ArgumentParser, *, trial: str = "") -> None:
    """Add the argument that names an experiment.

    Args:
        parser: Gets the argument.
        trial: Help for the optional trial argument; empty for none.
    """
    if not trial:
        parser.add_argument("experiment", metavar="NAME", help="name of the experiment")
        return
    parser.add_argument("experiment", metavar="NAME[/TRIAL]", help="name of the experiment")
    parser.add_argument("trial", metavar="TRIAL", nargs="?", default="", help=trial)


def named(options: argparse.Namespace) -> tuple[str, str]:
    """The names of the experiment and of the trial in the arguments; no trial is "".

    Raises:
        ConfigError: They name two trials.
    """
    name, slash, trial = options.experiment.partition("/")
    if slash and options.trial:
        raise ConfigError(
            f"{options.experiment} {options.trial} names two trials; write NAME/TRIAL."
        )
    return name, trial or options.trial
