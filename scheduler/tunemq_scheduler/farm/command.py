"""``tunemq scheduler``: serves a farm, or runs one script's search on it in the foreground."""

from __future__ import annotations

import argparse
import os

from tunemq_shared.errors import ConfigError
from tunemq_shared.key_files import KEYS_VARIABLE
from tunemq_shared.redis_address import REDIS_VARIABLE, parse_address
from tunemq_shared.standard_streams import tell


def add_parser(groups: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the command line."""
    parser = groups.add_parser(
        "scheduler",
        help="serve a farm: take what people submit, and run it on its workers",
        description="Serves a farm until it is told to stop: takes searches from `tunemq submit`,"
        " keeps them in a queue, and runs as many as there is room for, each in a process of its"
        " own, on all workers of the same Redis. Ctrl-C, SIGTERM or any other end: trials run on,"
        " and the same command takes them over."
        " With a SCRIPT it runs that search alone, in the foreground (the part of the script under"
        ' `if __name__ == "__main__"` does not run), and the same command goes on with it; then'
        " Ctrl-C or SIGTERM stop every trial and save everything.",
        epilog="Exit codes: 0 it was told to stop, or the search is over; 1 it could not go on;"
        " 64 something given is of no use; 69 Redis cannot be reached; 75 another scheduler runs on"
        " this farm, has this search, or took it over. With a SCRIPT: 130 Ctrl-C; 143 SIGTERM."
        " Without --store, code and checkpoints lie in --results, and workers must be able to read"
        " that folder under the same path: all on one machine, or on a shared file system.",
    )
    parser.add_argument(
        "script",
        metavar="SCRIPT[:NAME]",
        nargs="?",
        help="run only this search; NAME of its Tuner, default: tuner",
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
        f" ${KEYS_VARIABLE}, else none: then whoever reaches Redis may say anything",
    )
    parser.add_argument(
        "--results",
        metavar="DIR",
        help="the folder of all experiments; default: what the script says, else $TUNEMQ_RESULTS,"
        " else ~/tunemq_results",
    )
    parser.add_argument(
        "--store",
        metavar="ADDRESS",
        help="what all workers reach, for code and checkpoints: s3://bucket/prefix, the address of"
        " a `tunemq store serve`, or a folder that all of them mount, into which results go, too;"
        " default: --results",
    )
    parser.add_argument(
        "--settings",
        metavar="FILE",
        help="a TOML file that says how the farm is shared: max_running, preempts,"
        " preempt_grace_s, stores, [shares] and [quotas.OWNER]",
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
        "--name",
        help="with a SCRIPT: of the experiment, and of its folder; default: its RunConfig.name",
    )
    parser.add_argument(
        "--insecure",
        action="store_true",
        help="start although Redis or the store lets others in, or could lose what is in it; what"
        " is wrong is told. `tunemq doctor` says the same, and how to mend it",
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
        help="with a SCRIPT: go on with a search whose scheduler cannot: with the ADDRESS of its"
        " experiment in a store, such as s3://bucket/prefix/name, from the copy there; without"
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
    if options.redis and parse_address(url).password:
        tell(
            "tunemq scheduler: whoever lists this machine's processes sees the password in"
            f" --redis; give the address in ${REDIS_VARIABLE} instead."
        )
    if options.script is None:
        return _serve(options, url)
    _refuse(
        options,
        ("store", "settings", "metrics", "metrics_host"),
        "a farm's service only; leave out SCRIPT, or that",
    )
    from tunemq_scheduler.farm.service import Wanted, run_service

    wanted = Wanted(
        url=url,
        keys=options.keys,
        script=options.script,
        results=options.results,
        name=options.name,
        journal_release=options.journal_release,
        insecure=options.insecure,
        take_over=options.take_over,
    )
    return run_service(wanted)


def _serve(options: argparse.Namespace, url: str) -> int:
    _refuse(options, ("name", "take_over"), "one search only; add its SCRIPT")
    from tunemq_scheduler.farm.serving import Service, serve_farm

    service = Service(
        url=url,
        keys=options.keys,
        results=options.results,
        store=options.store,
        settings=options.settings,
        journal_release=options.journal_release,
        insecure=options.insecure,
        metrics=options.metrics,
        metrics_hosts=tuple(options.metrics_host or ()),
    )
    return serve_farm(service)


def _refuse(options: argparse.Namespace, names: tuple[str, ...], why: str) -> None:
    for name in names:
        value = getattr(options, name)
        if value is not None:
            raise ConfigError(f"--{name.replace('_', '-')} {value} is for {why}.")
