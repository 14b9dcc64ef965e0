"""Commands whose output is read no further, as with ``| head``, end without an error."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Any

import pytest
from rich.console import Console

from tunemq_scheduler.cli.main import main

#: More than a buffer holds.
MUCH = ("x" * 79 + "\n") * 1000


def write_little() -> None:
    sys.stdout.write("x\n")


def write_much() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.write(MUCH)


def write_errors() -> None:
    sys.stderr.write("x")


def print_table() -> None:
    Console().print("a table")


def print_much() -> None:
    Console().print(MUCH)


@contextmanager
def broken_output() -> Iterator[None]:
    """Have stdout and stderr whose reader has ended; at the end nothing is left to write."""
    ours: list[IO[str]] = []
    for _ in range(2):
        reader, writer = os.pipe()
        os.close(reader)
        ours.append(open(writer, "w", encoding="utf-8"))  # noqa: SIM115  closed below
    # Not in a fixture: pytest has its own streams in a test.
    before, (sys.stdout, sys.stderr) = (sys.stdout, sys.stderr), ours
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        for stream in ours:
            stream.close()  # writes the rest, as the interpreter does at its end


def talk(say: Callable[[], None], code: int) -> int:
    """Run a command that writes its answer so."""

    def run(_options: argparse.Namespace) -> int:
        say()
        return code

    def add_parser(groups: Any) -> None:
        groups.add_parser("talk").set_defaults(run=run)

    return main("1.0", ["talk"], others=[add_parser])


@pytest.mark.parametrize("say", [write_little, write_much, write_errors, print_table, print_much])
def test_command_ends_without_an_error_and_leaves_nothing_to_write(say: Callable[[], None]) -> None:
    with broken_output():
        assert talk(say, 0) == 0


def test_command_with_a_negative_result_keeps_its_exit_status_if_it_wrote_little() -> None:
    with broken_output():
        assert talk(write_little, 1) == 1


def test_help_that_is_read_no_further_ends_without_an_error() -> None:
    with pytest.raises(SystemExit, match="0"), broken_output():
        main("1.0", ["--help"])


def test_other_exits_of_a_command_stay() -> None:
    def leave() -> None:
        sys.stdout.write("x")
        raise SystemExit(3)

    with pytest.raises(SystemExit, match="3"), broken_output():
        talk(leave, 0)
