"""``tunemq keys``: makes and rotates a farm's keys, and says where each key file belongs."""

from __future__ import annotations

import argparse
import datetime as dt
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from tunemq_scheduler.api.login_name import login_name
from tunemq_scheduler.cli.shared_arguments import write_json
from tunemq_scheduler.security.key_folder import (
    SCHEDULER_FILE,
    WORKER,
    WORKER_FILE,
    KeyFolder,
    made_at,
)
from tunemq_shared.signing.key_files import (
    EVENTS,
    JOURNALS,
    KEYS_VARIABLE,
    ORDERS,
    KeyFile,
    read_key_file,
)

_MORE: Final = (
    "With keys the scheduler, the workers and the submitters sign their messages, and reject "
    "unsigned ones. docs/security.md explains how to set up and change keys."
)


def add_parser(groups: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the commands to the command line."""
    group = groups.add_parser("keys", help="make and change the keys of a farm", description=_MORE)
    commands = group.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, run: Callable[[argparse.Namespace], int], what: str, more: str) -> Any:
        parser = commands.add_parser(
            name, help=what, description=f"{what[0].upper()}{what[1:]}. {more}"
        )
        parser.add_argument("folder", metavar="FOLDER", help="folder of the farm's key files")
        parser.set_defaults(run=run)
        return parser

    new = add("new", make, "make the keys of a farm", "Prints where each file goes.")
    new.add_argument("names", metavar="NAME", nargs="*", help="names of submitters; default: yours")
    more = add("add", add_submitters, "make keys for more submitters", "")
    gone = add(
        "remove",
        remove_submitters,
        "remove the keys of submitters",
        "Their submitted searches continue.",
    )
    for parser in (more, gone):
        parser.add_argument("names", metavar="NAME", nargs="+", help="names of submitters")
    steps = (
        "Change keys in three steps, without stopping anything: rotate, promote, drop. After each"
    )
    steps = f"{steps} copy the files to where they are used."
    rotate = add("rotate", rotate_keys, "step 1: add new keys, which are accepted", steps)
    promote = add("promote", promote_keys, "step 2: sign with the new keys", steps)
    drop = add("drop", drop_keys, "step 3: no longer accept the old keys", steps)
    for parser in (rotate, promote, drop):
        parser.add_argument(
            "names",
            metavar="WHOSE",
            nargs="*",
            help=(
                f"{WORKER!r} for the keys of scheduler and workers, {JOURNALS!r} for those of "
                f"the copies of journals, or submitters; default: all but {JOURNALS!r}"
            ),
        )
    show = add("show", show_keys, "list keys, without their secrets", "")
    show.add_argument("--json", action="store_true", help="print JSON, for programs")


def make(options: argparse.Namespace) -> int:
    """Run ``keys new``."""
    folder = KeyFolder(options.folder)
    files = folder.create(options.names or [login_name()])
    _say(
        f"Made the keys of a farm in {folder.path}, which only you may read. Copy each file to "
        "where it is used, over an encrypted channel such as scp, with mode 600:"
    )
    _say_places(folder, files)
    _say(
        "Restart the scheduler, then each worker, with its own file by --keys or "
        f"${KEYS_VARIABLE}: from then on they reject unsigned messages. Keep {folder.path}: "
        "further commands change the files there."
    )
    return 0


def add_submitters(options: argparse.Namespace) -> int:
    """Run ``keys add``."""
    folder = KeyFolder(options.folder)
    files = folder.add(options.names)
    _say(f"Made keys for {_joined(options.names)}. Copy:")
    _say_places(folder, files)
    return 0


def remove_submitters(options: argparse.Namespace) -> int:
    """Run ``keys remove``."""
    folder = KeyFolder(options.folder)
    files = folder.remove(options.names)
    _say(f"Removed the keys of {_joined(options.names)}. The farm accepts them until you copy:")
    _say_places(folder, files)
    return 0


def rotate_keys(options: argparse.Namespace) -> int:
    """Run ``keys rotate``."""
    return _step(
        options,
        KeyFolder.rotate,
        "Made new keys, which will be accepted but do not sign yet. Copy:",
        (
            "When all have them (each logs within seconds that it read its key file again): "
            f"{_next('promote', options)}"
        ),
    )


def promote_keys(options: argparse.Namespace) -> int:
    """Run ``keys promote``."""
    return _step(
        options,
        KeyFolder.promote,
        "The new keys sign; the old ones are still accepted. Copy:",
        (
            "When all have them, wait some minutes, until no message that the old keys signed is "
            f"on its way: {_next('drop', options)}"
        ),
    )


def drop_keys(options: argparse.Namespace) -> int:
    """Run ``keys drop``."""
    return _step(
        options,
        KeyFolder.drop,
        "Removed the old keys. The farm accepts them until you copy, for the last time:",
        "",
    )


def show_keys(options: argparse.Namespace) -> int:
    """Run ``keys show``."""
    path = Path(options.folder).expanduser()
    keys = KeyFolder(options.folder).keys() if path.is_dir() else read_key_file(path)
    rows = _rows(keys)
    if options.json:
        write_json(rows)
        return 0
    for row in rows:
        sys.stdout.write(f"{row['for']:24} {row['key']}  made {row['made']}  {row['use']}\n")
    return 0


def _step(
    options: argparse.Namespace,
    change: Callable[[KeyFolder, Sequence[str]], list[str]],
    what: str,
    after: str,
) -> int:
    folder = KeyFolder(options.folder)
    files = change(folder, options.names)
    _say(what)
    _say_places(folder, files)
    if after:
        _say(after)
    return 0


def _rows(keys: KeyFile) -> list[dict[str, str]]:
    farm = {ORDERS: keys.orders, EVENTS: keys.events, JOURNALS: keys.journals}
    tables = {**farm, **keys.submitters}
    return [
        {
            "for": table,
            "key": key.id.hex(),
            "made": f"{dt.datetime.fromtimestamp(made_at(key), tz=dt.UTC):%Y-%m-%d %H:%M} UTC",
            "use": "believed" if number else "signs",
        }
        for table, its in tables.items()
        for number, key in enumerate(its)
    ]


def _say_places(folder: KeyFolder, files: Sequence[str]) -> None:
    paths = {shlex.quote(str(folder.path / file)): file for file in files}
    width = max(map(len, paths))
    for path, file in paths.items():
        sys.stdout.write(f"  {path:{width}}  {_place(file)}\n")


def _place(file: str) -> str:
    if file == SCHEDULER_FILE:
        return "to the head: tunemq scheduler --keys scheduler.toml"
    if file == WORKER_FILE:
        return "to each worker: tunemq worker --keys worker.toml"
    name = file.removesuffix(".toml")
    return f"to {name}: export {KEYS_VARIABLE}={shlex.quote(file)}"


def _next(command: str, options: argparse.Namespace) -> str:
    return shlex.join(["tunemq", "keys", command, options.folder, *options.names])


def _joined(names: Sequence[str]) -> str:
    return ", ".join(names)


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
