"""``tunemq doctor``: checks a farm, and prints each problem with its fix."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Final

from tunemq_scheduler.base.import_precedence import installed_packages_first
from tunemq_scheduler.cli.shared_arguments import tell, write_json
from tunemq_scheduler.security.findings import Finding, FindingLevel
from tunemq_scheduler.storage.folders import farm_results_folder
from tunemq_shared.base.errors import ConfigError
from tunemq_shared.broker.redis_address import REDIS_VARIABLE
from tunemq_shared.objects.s3_address import KEY_VARIABLES
from tunemq_shared.objects.store_address import is_remote
from tunemq_shared.signing.key_files import KEYS_VARIABLE

#: Exit code for invalid arguments, the same as argparse's.
EXIT_WRONG_USE: Final = 2

#: The variable with the scheduler's options in the shipped systemd unit.
_OPTIONS_VARIABLE: Final = "TUNEMQ_SCHEDULER_OPTIONS"

_WORST_FIRST: Final = (FindingLevel.PROBLEM, FindingLevel.WARNING, FindingLevel.OK)


def add_parser(groups: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the command line."""
    parser = groups.add_parser(
        "doctor",
        help="check a farm, and print the problems with their fixes",
        description=(
            "Checks a farm's Redis, store, keys, scheduler, nodes, disks and clocks. Run it on "
            "the farm's head as the user, and with the environment and the options, of `tunemq "
            "scheduler`, whether that runs or not. It changes nothing in the farm; in the "
            "store it writes, reads and removes objects called .tunemq-probe-... with the keys "
            "that it has. It ends within minutes, even if a server does not answer."
        ),
        epilog=(
            "Exit codes, for cron: 0 no problem (there may be warnings); 1 at least one "
            "problem: a part of the farm does not work, or others may misuse it; 2 invalid "
            "arguments, nothing was checked."
        ),
    )
    parser.add_argument(
        "--redis",
        metavar="URL",
        help=(
            f"the farm's address; default: ${REDIS_VARIABLE}, the place for an address with a "
            "password"
        ),
    )
    parser.add_argument(
        "--store",
        metavar="ADDRESS",
        help=(
            "the farm's store; default: the one that the farm's scheduler reports, or if none "
            f"answers the --store in ${_OPTIONS_VARIABLE}"
        ),
    )
    parser.add_argument(
        "--store-keys",
        metavar="ROLE=FILE",
        action="append",
        default=[],
        help=(
            "try the store with these keys, too: ROLE is worker or submitter, FILE a "
            "credentials file as for AWS_SHARED_CREDENTIALS_FILE; may be given for each role. "
            "The scheduler's keys come from the environment"
        ),
    )
    parser.add_argument(
        "--keys",
        metavar="FILE",
        help=f"the scheduler's key file; default: ${KEYS_VARIABLE}",
    )
    parser.add_argument(
        "--results",
        metavar="DIR",
        help="the folder of all experiments; default: $TUNEMQ_RESULTS, else ~/tunemq_results",
    )
    parser.add_argument(
        "--insecure",
        action="store_true",
        help=(
            "report as warnings, not problems, what --insecure allows the scheduler and "
            "workers to start with"
        ),
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Check the farm and print the findings; returns the exit status."""
    try:
        found = _examined(options, os.environ)
    except ConfigError as wrong:
        tell(str(wrong))
        return EXIT_WRONG_USE
    if options.json:
        write_json(
            {
                "findings": found,
                "problems": _number(found, FindingLevel.PROBLEM),
                "warnings": _number(found, FindingLevel.WARNING),
            }
        )
    else:
        sys.stdout.write(shown(found))
    return int(any(one.level is FindingLevel.PROBLEM for one in found))


def shown(findings: Iterable[Finding]) -> str:
    """Format findings for a person: one line per check, and below it each problem and its fix.

    Control characters in text from nodes and servers are replaced.
    """
    found = list(findings)
    width = max(len(one.check) for one in found)
    lines: list[str] = []
    for check, group in groupby(sorted(found, key=_place(found)), key=lambda one: one.check):
        of_check = sorted(group, key=lambda one: _WORST_FIRST.index(one.level))
        worst = of_check[0]
        wrong = [one for one in of_check if one.level is not FindingLevel.OK]
        said = "" if wrong else "; ".join(one.what for one in of_check)
        lines.append(f"{worst.level.value:7}  {check:{width}}  {said}".rstrip())
        for one in wrong:
            lines += [f"{'':9}{one.what}", f"{'':9}fix: {one.fix}"]
    lines.append(_sum(found))
    return "".join(f"{_printable(line)}\n" for line in lines)


def _examined(options: argparse.Namespace, environ: Mapping[str, str]) -> list[Finding]:
    url = options.redis or environ.get(REDIS_VARIABLE, "")
    if not url:
        raise ConfigError(
            f"Redis address missing: pass --redis redis://host:6379/0 or set {REDIS_VARIABLE}."
        )
    with installed_packages_first("redis"):
        from tunemq_scheduler.security.doctor.examination import (
            DoctorTarget,
            allowed_by_insecure,
            examine,
        )
        from tunemq_scheduler.security.store_role_probes import StoreKeys, StoreRole

    def role_keys(given: str) -> StoreKeys:
        """Parse one --store-keys argument."""
        name, _, file = given.partition("=")
        roles = [str(role) for role in StoreRole if role is not StoreRole.SCHEDULER]
        path = os.path.abspath(os.path.expanduser(file))
        if name not in roles or not os.path.isfile(path):
            raise ConfigError(
                f"--store-keys {given!r} is invalid: give ROLE=FILE with one of the roles "
                f"{' and '.join(roles)} and an existing file."
            )
        of_role = {
            variable: value for variable, value in environ.items() if variable not in KEY_VARIABLES
        }
        of_role["AWS_SHARED_CREDENTIALS_FILE"] = path
        return StoreKeys(StoreRole(name), of_role, path)

    keys = environ.get(KEYS_VARIABLE, "") if options.keys is None else options.keys
    is_told = options.results is not None or not is_remote(options.store or "s3://")
    store_of_unit = _option_of_unit("store", environ)
    results_of_unit = _option_of_unit("results", environ)
    found = examine(
        DoctorTarget(
            url=url,
            keys=os.path.abspath(os.path.expanduser(keys)) if keys else "",
            store=options.store or "",
            store_if_unknown=store_of_unit,
            results=farm_results_folder(options.results, options.store) if is_told else "",
            results_if_unknown=farm_results_folder(results_of_unit or None, store_of_unit or None),
            environ=environ,
            role_keys=tuple(map(role_keys, options.store_keys)),
        )
    )
    return allowed_by_insecure(found) if options.insecure else found


def _option_of_unit(name: str, environ: Mapping[str, str]) -> str:
    """An option in the scheduler's systemd unit; empty if it has none."""
    found = re.search(rf"(?:^|\s)--{name}(?:=|\s+)(\S+)", environ.get(_OPTIONS_VARIABLE, ""))
    return found[1] if found else ""


def _place(found: Sequence[Finding]) -> Callable[[Finding], int]:
    """Make a sort key that groups findings by check, in the order of first appearance."""
    first: dict[str, int] = {}
    for number, one in enumerate(found):
        first.setdefault(one.check, number)
    return lambda one: first[one.check]


def _sum(found: Sequence[Finding]) -> str:
    checks = len({one.check for one in found})
    problems, warnings = _number(found, FindingLevel.PROBLEM), _number(found, FindingLevel.WARNING)
    if not problems and not warnings:
        return f"{checks} checks: no problem found."
    return f"{checks} checks: {_counted(problems, 'problem')}, {_counted(warnings, 'warning')}."


def _number(found: Iterable[Finding], level: FindingLevel) -> int:
    return sum(one.level is level for one in found)


def _counted(number: int, what: str) -> str:
    return f"{number or 'no'} {what}{'' if number == 1 else 's'}"


def _printable(line: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in line)
