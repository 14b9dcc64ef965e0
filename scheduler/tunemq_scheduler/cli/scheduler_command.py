"""``tunemq scheduler``: the command that serves a farm."""

from __future__ import annotations

import argparse
import os

from tunemq_shared.base.errors import ConfigError
from tunemq_shared.base.known_variables import unknown_variables
from tunemq_shared.broker.redis_address import REDIS_VARIABLE, parse_address
from tunemq_shared.signing.key_files import KEYS_VARIABLE
from tunemq_shared.system.standard_streams import tell


def add_parser(groups: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the command line."""
    parser = groups.add_parser(
        "scheduler",
        help="serve a farm: take what people submit, and run it on its workers",
        description="Serves a farm until it is told to stop: takes searches from `tunemq submit`,"
        " keeps them in a queue, and runs as many as there is room for, each in a process of its"
        " own, on all workers of the same Redis. Ctrl-C, SIGTERM or any other end: trials run on,"
        " and the same command takes them over.",
        epilog="Exit codes: 0 stopped by a signal; 1 it could not continue; 2 and 64 invalid"
        " arguments; 69 Redis cannot be reached; 75 another scheduler runs on this farm, or took it"
        " over. Without --store, code and checkpoints lie in --results, and workers must be able to"
        " read that folder under the same path: all on one machine, or on a shared file system.",
    )
    parser.add_argument(
        "--redis",
        metavar="URL",
        help=f"where Redis is, such as redis://host:6379/0; default: ${REDIS_VARIABLE},"
        " which is the place for one with a password",
    )
    parser.add_argument(
        "--keys",
        metavar="FILE",
        help="scheduler.toml of the farm's keys, which `tunemq keys new` makes; default:"
        f" ${KEYS_VARIABLE}, else none: then every client of Redis can run code on the farm",
    )
    parser.add_argument(
        "--results",
        metavar="DIR",
        help="the folder of all experiments; default: $TUNEMQ_RESULTS, else ~/tunemq_results",
    )
    parser.add_argument(
        "--store",
        metavar="ADDRESS",
        help="what all workers reach, for code and checkpoints: s3://bucket/prefix, or a"
        " folder that all of them mount, into which results go, too; default: --results",
    )
    parser.add_argument(
        "--settings",
        metavar="FILE",
        help="a TOML file that says how the farm is shared: max_running, unresponsive_after_s,"
        " preempts, preempt_grace_s, stores, [shares] and [quotas.OWNER]",
    )
    parser.add_argument(
        "--metrics",
        metavar="HOST:PORT",
        help="serve metrics for Prometheus there; no HOST for all of this machine's addresses, port"
        " 0 for any that is free; default: none. Needs prometheus-client",
    )
    parser.add_argument(
        "--metrics-host",
        metavar="NAME",
        action="append",
        help="by which Prometheus asks for the metrics, such as the name of a service; may be given"
        " again. Addresses, localhost and this machine's own name are answered in any case",
    )
    parser.add_argument(
        "--insecure",
        action="store_true",
        help="start although Redis or the store is open to others or may lose data, and print a"
        " warning for each problem. `tunemq doctor` also says how to fix them",
    )
    parser.add_argument(
        "--journal-release",
        choices=("local", "store"),
        default="local",
        help="when workers may forget what they reported: when it is on this machine's disk, or"
        " when the copy in the store has it, too, so that the loss of this machine loses nothing",
    )
    parser.add_argument(
        "--take-over",
        metavar="ADDRESS",
        action="append",
        default=[],
        help="continue a search whose scheduler's machine is lost, from the copy at the ADDRESS of"
        " its experiment in a store, such as s3://bucket/prefix/name (what that lacks, such as the"
        " endpoint, is taken from --store if the bucket is the same), when it is submitted again"
        " under that name; if its trials may still run, no other search starts before that, for"
        " 10 minutes at most: then they end. May be given again",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Serve the farm; return the exit code.

    Raises:
        UserError: an argument or a setting is invalid; says what to do.
    """
    for unknown in unknown_variables(os.environ):
        tell(f"tunemq scheduler: {unknown}")
    url = options.redis or os.environ.get(REDIS_VARIABLE, "")
    if not url:
        raise ConfigError(
            f"where Redis is has to be said: --redis redis://host:6379/0, or ${REDIS_VARIABLE}."
        )
    if options.redis and parse_address(url).password:
        tell(
            "tunemq scheduler: users who list this machine's processes see the password in"
            f" --redis; set ${REDIS_VARIABLE} instead."
        )
    from tunemq_scheduler.farm.scheduler_service import ServeArguments, serve_farm

    service = ServeArguments(
        url=url,
        keys=options.keys,
        results=options.results,
        store=options.store,
        settings=options.settings,
        journal_release=options.journal_release,
        insecure=options.insecure,
        metrics=options.metrics,
        metrics_hosts=tuple(options.metrics_host or ()),
        take_over=tuple(options.take_over),
    )
    return serve_farm(service)
