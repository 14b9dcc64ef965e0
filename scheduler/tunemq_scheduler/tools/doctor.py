"""``tunemq doctor``: looks a farm over, and says what is wrong and how to mend it."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Final

from tunemq_scheduler.folders import farm_results_folder
from tunemq_scheduler.installed_packages import installed_packages_first
from tunemq_scheduler.security.findings import Finding, Level
from tunemq_scheduler.tools.on_farm import tell, write_json
from tunemq_shared.errors import ConfigError
from tunemq_shared.key_files import KEYS_VARIABLE
from tunemq_shared.redis_address import REDIS_VARIABLE

#: Something given is of no use, as argparse has it.
EXIT_WRONG_USE: Final = 2

_WORST_FIRST: Final = (Level.PROBLEM, Level.WARNING, Level.OK)


def add_parser(groups: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the command line."""
    parser = groups.add_parser(
        "doctor",
        help="look a farm over, and say what is wrong and how to mend it",
        description="Looks at a farm's Redis, store, keys, nodes, disks and clocks, and says of"
        " each whether all is well. To be run on the farm's head, as the user and with the"
        " environment and the options of `tunemq scheduler`, whether that runs or not. Of the"
        " farm nothing is changed; in the store it writes objects called .tunemq-probe-..., to see"
        " who may, and removes them.",
        epilog="Exit codes: 0 there is no problem; 1 there are some; 2 something given is of no"
        " use.",
    )
    parser.add_argument(
        "--redis",
        metavar="URL",
        help=f"of the farm; default: ${REDIS_VARIABLE}, which is the place for one with a password",
    )
    parser.add_argument(
        "--store",
        metavar="ADDRESS",
        help="of the farm; default: what the farm's scheduler says",
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
        help="what the scheduler and workers start on with --insecure is a warning, no problem",
    )
    parser.add_argument("--json", action="store_true", help="answer in JSON, for programs")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Look, and say what was found; the exit status."""
    try:
        found = _examined(options, os.environ)
    except ConfigError as wrong:
        tell(str(wrong))
        return EXIT_WRONG_USE
    if options.json:
        write_json(
            {
                "findings": found,
                "problems": _number(found, Level.PROBLEM),
                "warnings": _number(found, Level.WARNING),
            }
        )
    else:
        sys.stdout.write(shown(found))
    return int(any(one.level is Level.PROBLEM for one in found))


def shown(findings: Iterable[Finding]) -> str:
    """Findings as lines for a person: one for each check, below it what is wrong and the fix.

    What a node or a server has said of itself has no control characters here.
    """
    found = list(findings)
    width = max(len(one.check) for one in found)
    lines: list[str] = []
    for check, group in groupby(sorted(found, key=_place(found)), key=lambda one: one.check):
        of_check = sorted(group, key=lambda one: _WORST_FIRST.index(one.level))
        worst = of_check[0]
        wrong = [one for one in of_check if one.level is not Level.OK]
        said = "" if wrong else "; ".join(one.what for one in of_check)
        lines.append(f"{worst.level.value:7}  {check:{width}}  {said}".rstrip())
        for one in wrong:
            lines += [f"{'':9}{one.what}", f"{'':9}to mend it: {one.fix}"]
    lines.append(_sum(found))
    return "".join(f"{_printable(line)}\n" for line in lines)


def _examined(options: argparse.Namespace, environ: Mapping[str, str]) -> list[Finding]:
    url = options.redis or environ.get(REDIS_VARIABLE, "")
    if not url:
        raise ConfigError(
            f"where Redis is has to be said: --redis redis://host:6379/0, or ${REDIS_VARIABLE}."
        )
    with installed_packages_first("redis"):
        from tunemq_scheduler.security.doctor.examination import (
            Patient,
            allowed_by_insecure,
            examine,
        )

    keys = environ.get(KEYS_VARIABLE, "") if options.keys is None else options.keys
    found = examine(
        Patient(
            url=url,
            keys=os.path.abspath(os.path.expanduser(keys)) if keys else "",
            store=options.store or "",
            results=farm_results_folder(options.results, options.store),
            environ=environ,
        )
    )
    return allowed_by_insecure(found) if options.insecure else found


def _place(found: Sequence[Finding]) -> Callable[[Finding], int]:
    """Sorts findings of one check together, where the first of them is."""
    first: dict[str, int] = {}
    for number, one in enumerate(found):
        first.setdefault(one.check, number)
    return lambda one: first[one.check]


def _sum(found: Sequence[Finding]) -> str:
    checks = len({one.check for one in found})
    problems, warnings = _number(found, Level.PROBLEM), _number(found, Level.WARNING)
    if not problems and not warnings:
        return f"{checks} checks: all is well."
    return f"{checks} checks: {_counted(problems, 'problem')}, {_counted(warnings, 'warning')}."


def _number(found: Iterable[Finding], level: Level) -> int:
    return sum(one.level is level for one in found)


def _counted(number: int, what: str) -> str:
    return f"{number or 'no'} {what}{'' if number == 1 else 's'}"


def _printable(line: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in line)
