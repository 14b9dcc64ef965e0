"""``tunemq checkpoints``: list, verify, get and rm, by an experiment's folder or address."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from tunemq_scheduler.cli.experiment_checkpoints import (
    ExperimentCheckpoints,
    JournalledCheckpoint,
    opened,
)
from tunemq_scheduler.output.terminal.formatting import clean
from tunemq_shared.base.errors import CheckpointCorrupt, CheckpointError
from tunemq_shared.base.safe_text import harmless
from tunemq_shared.system.folder_trees import remove_tree

#: Exit code if checkpoints are damaged or missing.
EXIT_DAMAGED = 1


def add_parser(groups: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the commands to the command line."""
    group = groups.add_parser(
        "checkpoints",
        help="list, verify, get or remove the checkpoints of an experiment",
        description=(
            "Shows and changes the checkpoints that an experiment's journal lists, in its "
            "folder or in its store."
        ),
    )
    commands = group.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, run: Callable[[argparse.Namespace], int], what: str) -> None:
        parser = commands.add_parser(name, help=what, description=what)
        parser.add_argument(
            "experiment", help="its folder, or its address such as s3://bucket/prefix/experiment"
        )
        parser.set_defaults(run=run)
        parsers[name] = parser

    parsers: dict[str, argparse.ArgumentParser] = {}
    add("list", list_checkpoints, "list the checkpoints of an experiment")
    add("verify", verify, "read every byte and compare it with the manifests")
    add("get", get, "copy a checkpoint's verified files into a folder")
    add("rm", remove, "remove checkpoints of trials that have ended from the store")
    naming = "a checkpoint's key; or a trial's id or name, for its newest one"
    parsers["verify"].add_argument("checkpoints", nargs="*", help=f"{naming}; default: all")
    parsers["get"].add_argument("checkpoint", help=naming)
    parsers["get"].add_argument(
        "folder", nargs="?", help="a new folder; default: the last part of the key"
    )
    parsers["rm"].add_argument("checkpoints", nargs="+", help=naming)
    parsers["rm"].add_argument("--yes", action="store_true", help="do not ask for confirmation")
    parsers["rm"].add_argument(
        "--force", action="store_true", help="also those of trials that may continue from them"
    )


def list_checkpoints(options: argparse.Namespace) -> int:
    """Print a table of the checkpoints."""
    with opened(options.experiment) as kept:
        found, there = kept.all(), kept.there()
        table = Table(box=None, pad_edge=False)
        for heading in ("checkpoint", "trial", "iteration", "size", ""):
            table.add_column(
                heading, justify="right" if heading in {"iteration", "size"} else "left"
            )
        for one in found:
            size, newest = decimal(one.committed.size), "newest" if one.is_newest else ""
            state = newest if one.key in there else "not there"
            cells = (one.key, one.trial, str(one.committed.step), size, state)
            # Text, not str: users' names may look like markup.
            table.add_row(*(Text(clean(cell)) for cell in cells))
        if found:
            Console().print(table)
        total = decimal(sum(one.committed.size for one in found if one.key in there))
        amount = len(there.intersection(one.key for one in found))
        sys.stdout.write(f"{amount} checkpoints, {total}, in {kept.address}\n")
        if unknown := kept.unknown():
            sys.stdout.write(
                f"The store has {len(unknown)} more, which this journal does not list: the "
                "search is running or was killed, or this copy of the journal is older.\n"
            )
    return 0


def verify(options: argparse.Namespace) -> int:
    """Read checkpoints as a restore would, and report the damaged ones."""
    damaged = []
    with opened(options.experiment) as kept, tempfile.TemporaryDirectory() as scratch:
        chosen = [kept.named(name) for name in options.checkpoints] or kept.all()
        for one in _with_bar(chosen, "verifying"):
            target = Path(scratch, "checkpoint")
            try:
                kept.store.get_checkpoint(one.key, one.committed.sha256, target)
            except CheckpointCorrupt as error:
                damaged.append(str(error))
            _remove_tree(target)
    for line in damaged:
        sys.stdout.write(f"{harmless(line)}\n")
    sys.stdout.write(f"{len(chosen) - len(damaged)} of {len(chosen)} checkpoints are whole.\n")
    return EXIT_DAMAGED if damaged else 0


def get(options: argparse.Namespace) -> int:
    """Copy one checkpoint into a new folder."""
    with opened(options.experiment) as kept:
        one = kept.named(options.checkpoint)
        target = Path(options.folder or os.path.basename(one.key)).absolute()
        if target.exists():
            raise CheckpointError(f"{target} exists already; name a new folder.")
        for _ in _with_bar([one], "copying"):
            kept.store.get_checkpoint(one.key, one.committed.sha256, target)
    sys.stdout.write(f"{harmless(one.key)} (iteration {one.committed.step}) is in {target}\n")
    return 0


def remove(options: argparse.Namespace) -> int:
    """Remove checkpoints, except for their objects that other checkpoints refer to."""
    with opened(options.experiment) as kept:
        chosen = {one.key: one for one in map(kept.named, options.checkpoints)}
        if not options.force:
            _check_ended(kept, chosen.values())
        if not options.yes and not _agreed(chosen.values()):
            sys.stdout.write("nothing was removed\n")
            return 1
        collected = _collected_without(kept, set(chosen))
    sys.stdout.write(f"removed {len(chosen)} checkpoints and freed {decimal(collected)}\n")
    return 0


def _check_ended(kept: ExperimentCheckpoints, chosen: Iterable[JournalledCheckpoint]) -> None:
    for one in chosen:
        if one.trial in kept.runner.live:
            raise CheckpointError(
                f"{one.key} was not removed: the trial {one.trial} has not ended, and may continue"
                " from it. Stop its search first, or pass --force."
            )


def _collected_without(kept: ExperimentCheckpoints, condemned: set[str]) -> int:
    live = {**kept.runner.live_checkpoints(), **kept.unknown()}
    rest = {key: sha256 for key, sha256 in live.items() if key not in condemned}
    return kept.store.collect(rest, lambda key: key not in condemned).bytes


def _agreed(chosen: Iterable[JournalledCheckpoint]) -> bool:
    for one in chosen:
        newest = ", the newest of its trial" if one.is_newest else ""
        sys.stdout.write(f"{clean(one.key)}: {decimal(one.committed.size)}{newest}\n")
    try:
        return input("Remove permanently? [y/N] ").strip().lower() in {"y", "yes"}
    except EOFError:  # no terminal, and no --yes
        return False


def _with_bar(chosen: list[JournalledCheckpoint], what: str) -> Iterable[JournalledCheckpoint]:
    """Yield each checkpoint; shows a bar of the bytes done if stderr is a terminal."""
    columns = TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn()
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(what, total=sum(one.committed.size for one in chosen))
        for one in chosen:
            bar.update(task, description=f"{what} {clean(one.key)}")
            yield one
            bar.advance(task, one.committed.size)


def _remove_tree(folder: Path) -> None:

    remove_tree(folder)
