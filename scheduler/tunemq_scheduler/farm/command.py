"""``tunemq scheduler``: runs a script's search on the nodes of a farm."""

from __future__ import annotations

import argparse
import os
from typing import Final

from tunemq_shared.errors import ConfigError

#: Where Redis is, if the command line does not say: a password in it is then in no list of
#: processes that others see.
REDIS_VARIABLE: Final = "TUNEMQ_REDIS"


def add_parser(groups: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the command line."""
    parser = groups.add_parser(
        "scheduler",
        help="run a script's search on the workers of a farm",
        description="Runs the Tuner that a script defines (the part of it under `if __name__ =="
        ' "__main__"` does not run) on all workers of the same Redis. The same command again goes'
        " on with the search where it was, whatever ended it: trials that ran on meanwhile are"
        " taken over, others go on from their last checkpoints. Ctrl-C or SIGTERM: every trial is"
        " stopped and everything saved.",
        epilog="The code of a search and what `with_parameters` binds to it lie in --results, so"
        " that workers must be able to read that folder under the same path, as must trials that"
        " keep their checkpoints in a folder: all on one machine, or on a shared file system."
        " Exit codes: 0 the search is over; 1 it could not go on; 64 something given is of no use;"
        " 69 Redis cannot be reached; 75 another scheduler runs on this farm, has this"
        " search, or took it over; 130 Ctrl-C; 143 SIGTERM.",
    )
    parser.add_argument("script", metavar="SCRIPT[:NAME]", help="NAME of its Tuner; default: tuner")
    parser.add_argument(
        "--redis",
        metavar="URL",
        help=f"where Redis is, such as redis://:password@host:6379/0; default: ${REDIS_VARIABLE}",
    )
    parser.add_argument(
        "--results",
        metavar="DIR",
        help="the folder of all experiments; default: what the script says, else $TUNEMQ_RESULTS,"
        " else ~/tunemq_results",
    )
    parser.add_argument(
        "--name", help="of the experiment, and of its folder; default: the script's RunConfig.name"
    )
    parser.add_argument(
        "--journal-release",
        choices=("local", "store"),
        default="local",
        help="when workers may forget what they reported: when it is on this machine's disk, or"
        " when the copy in the search's store has it, too, so that the loss of this machine loses"
        " nothing",
    )
    parser.add_argument(
        "--take-over",
        nargs="?",
        const="",
        metavar="ADDRESS",
        help="go on with a search whose scheduler cannot: with the ADDRESS of its experiment in a"
        " store, such as s3://bucket/prefix/name, from the copy there, on this machine; without"
        " one, from this machine's folder although a process that does not answer holds it: that"
        " is killed. Refused while the scheduler's lease is alive",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the search.

    Raises:
        UserError: something given is of no use; says what to do.
    """
    url = options.redis or os.environ.get(REDIS_VARIABLE, "")
    if not url:
        raise ConfigError(
            f"where Redis is has to be said: --redis redis://host:6379/0, or ${REDIS_VARIABLE}."
        )
    from tunemq_scheduler.farm.service import Wanted, run_service

    wanted = Wanted(
        url=url,
        script=options.script,
        results=options.results,
        name=options.name,
        journal_release=options.journal_release,
        take_over=options.take_over,
    )
    return run_service(wanted)
