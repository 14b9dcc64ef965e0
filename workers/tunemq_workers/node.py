"""The process of a node.

    python -P -m tunemq_workers.node --redis URL --name NAME --workdir DIR

It reads the command line, starts the ear before it imports anything else (Celery takes longest to
load), and leaves the rest to `tunemq_workers.node_setup`. All logs are in the working folder:
``node.log``, ``ear.log`` and one for each forkserver. To its own output the node writes only why it
cannot start.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from functools import partial
from typing import Final

from tunemq_shared.errors import ConfigError
from tunemq_workers.ear_process import start_ear
from tunemq_workers.redis_address import parse_address

#: The command line is of no use.
EXIT_USAGE: Final = 64


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a node until it is told to stop; the exit code."""
    options = _parser().parse_args(arguments)
    try:
        parse_address(options.redis)
        watched = None if options.watch_pid is None else os.pidfd_open(options.watch_pid)
    except ConfigError as problem:
        sys.stderr.write(f"{problem}\n")
        return EXIT_USAGE
    except ProcessLookupError:
        return 0  # the process that this node belongs to has ended already
    os.makedirs(options.workdir, mode=0o700, exist_ok=True)
    incarnation = os.urandom(8).hex()
    start = partial(start_ear, options.redis, incarnation, os.path.join(options.workdir, "ear.log"))
    ear = start()
    # Imported while the ear loads Celery.
    from tunemq_workers.node_setup import run_node

    try:
        return run_node(options, incarnation, start, ear, watched)
    except ConfigError as problem:
        sys.stderr.write(f"{problem}\n")
        return EXIT_USAGE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tunemq_workers.node", description=__doc__.split("\n")[0])
    parser.add_argument("--redis", required=True, metavar="URL", help="where Redis is")
    parser.add_argument("--name", required=True, help="this node's name, the same after a restart")
    parser.add_argument("--workdir", required=True, metavar="DIR", help="for logs and what spills")
    parser.add_argument(
        "--cpus", type=float, help="how many to offer; default: those that it may use"
    )
    parser.add_argument(
        "--resources",
        default="{}",
        metavar="JSON",
        help="further resources to offer, name to amount",
    )
    parser.add_argument(
        "--watch-pid", type=int, metavar="PID", help="end at once when this process ends"
    )
    parser.add_argument(
        "--prewarm",
        metavar="PATH",
        help="a file with an Environment whose forkserver is started before the first trial needs"
        " it; removed when it was read",
    )
    parser.add_argument(
        "--cache",
        metavar="DIR",
        help="for copies of checkpoints that are in a store; default: cache in the --workdir",
    )
    parser.add_argument(
        "--cache-bytes",
        metavar="SIZE",
        help="how much the copies may take, such as 20GiB; default: a tenth of the disk",
    )
    parser.add_argument(
        "--uploads-bytes",
        metavar="SIZE",
        help="trials wait before they write another checkpoint while so much is not uploaded yet;"
        " default: a tenth of the disk",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
