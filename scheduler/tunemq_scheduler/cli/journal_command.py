"""``tunemq journal``: show, check and salvage the journal of an experiment."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec

from tunemq_scheduler.cli.shared_arguments import whole_number
from tunemq_scheduler.experiment.bring_experiment import check_newest_here
from tunemq_scheduler.journal.copy_signing_keys import known_journal_signer
from tunemq_scheduler.journal.damage_check import JournalCheckResult, examine
from tunemq_scheduler.journal.fetch_copy import fetch_journal
from tunemq_scheduler.journal.journal_copy import JournalCopy
from tunemq_scheduler.journal.journal_files import (
    FILE_NAME,
    SNAPSHOT_SUFFIX,
    TURNS_SUFFIX,
    numbers,
    turns_file,
)
from tunemq_scheduler.journal.journal_frames import JournalFrames
from tunemq_scheduler.journal.journal_headers import SegmentHeader, decode_header, readable
from tunemq_scheduler.journal.journal_reader import RecoveredJournal, read_header
from tunemq_scheduler.journal.journal_replay import replay_as_far_as_possible, replay_recovered
from tunemq_scheduler.journal.journal_writer import Journal
from tunemq_scheduler.journal.salvage import SalvageResult, salvage
from tunemq_shared.base.depth_and_integer_limits import MOST_IN_MESSAGES
from tunemq_shared.base.errors import ConfigError, JournalError, StoreError
from tunemq_shared.base.safe_text import harmless
from tunemq_shared.checkpoints.open_store import canonical_address, is_remote, open_objects
from tunemq_shared.code.config_packing import peek_config
from tunemq_shared.objects.store_address import without_settings
from tunemq_shared.protocol.messages import JournalRecord, decode_records
from tunemq_shared.system.standard_streams import tell

#: The most seconds for which `tunemq journal copy` waits for a store that does not answer.
_COPY_S = 600.0
#: Exit code if the journal is damaged.
EXIT_DAMAGED = 1


def add_parser(groups: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the commands to the command line."""
    group = groups.add_parser(
        "journal",
        help="show, check or salvage the journal of an experiment",
        description=(
            "The journal records every result, decision and checkpoint of an experiment in "
            "order. It is the subfolder 'journal' of the experiment's folder."
        ),
    )
    commands = group.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, run: Callable[[argparse.Namespace], int], what: str, more: str) -> Any:
        parser = commands.add_parser(name, help=what, description=f"{what}. {more}")
        parser.set_defaults(run=run)
        return parser

    show = add(
        "show",
        show_entries,
        "print the events, one in a line",
        (
            "The number before each event is its turn; a turn becomes durable as a whole. Turns "
            "that a snapshot covers are shown as long as their files exist."
        ),
    )
    check = add(
        "check",
        check_journal,
        "read and replay the whole journal",
        (
            "Exit codes: 0 it is whole, or only its end is incomplete, which a restart repairs; 1 "
            "it is damaged. The search may be running."
        ),
    )
    fix = add(
        "salvage",
        salvage_journal,
        "write the readable part of a damaged journal into a new one",
        (
            "Keeps the damaged journal beside the new one, under another name, and prints what was "
            "lost. The search must not run."
        ),
    )
    copy = add(
        "copy",
        copy_journal,
        "bring the copy of an ended search's journal in its store up to date",
        (
            "For searches that ended after a backup of the store that was put back. The search must"
            " not run. Run it as the scheduler's user, with its keys."
        ),
    )
    copy.add_argument("path", help="the experiment's folder")
    where = "the experiment's folder, or its journal"
    for parser in (show, check):
        parser.add_argument("path", help=f"{where}, or the address of its store")
    fix.add_argument("path", help=where)
    show.add_argument("--trial", metavar="ID", help="only events of this trial")
    show.add_argument(
        "--tail", metavar="N", type=whole_number(0, MOST_IN_MESSAGES), help="only the last N lines"
    )
    show.add_argument("--json", action="store_true", help="print a JSON object for each line")
    fix.add_argument("--json", action="store_true", help="print a JSON object with the losses")


# --- show -----------------------------------------------------------------------------------------


def show_entries(options: argparse.Namespace) -> int:
    """Print the journal's records."""
    with _opened(options.path) as (path, lost):
        if lost:
            sys.stderr.write(f"{harmless(lost)}\n")
        lines = _lines(path, options.trial, as_json=options.json)
        if options.tail is not None:
            lines = iter(deque(lines, maxlen=options.tail))
        for line in lines:
            sys.stdout.write(f"{harmless(line)}\n")
    return 0


def _lines(path: Path, trial: str | None, *, as_json: bool) -> Iterator[str]:
    write = _as_json if as_json else _as_text
    for turn, journal_records in _turns(path):
        for journal_record in journal_records:
            if trial is None or getattr(journal_record.event, "trial", None) == trial:
                yield write(turn, journal_record)


def _turns(path: Path) -> Iterator[tuple[int, list[JournalRecord]]]:
    """Iterate over all turns with their numbers, up to the first damage."""
    last = -1
    for number in numbers(path, TURNS_SUFFIX):
        segment = turns_file(path, number)
        frames = iter(JournalFrames(segment))
        if (first := next(frames, None)) is not None:
            decode_header(first.payload, SegmentHeader, segment)
        for frame in frames:
            if frame.number > last:
                yield frame.number, readable(frame.payload, decode_records, segment)
                last = frame.number


def _as_text(turn: int, journal_record: JournalRecord) -> str:
    said = [f"{turn:>6}  {_sentence(journal_record.event)}"]
    said += [f"-> {_sentence(answer)}" for answer in journal_record.answers]
    return "  ".join(said)


def _sentence(event: Any) -> str:
    fields = (f"{name}={_short(value)}" for name, value in _fields(event).items())
    return " ".join([type(event).__name__, *fields])


def _short(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=repr)
    plain = text.replace("\n", "\\n")
    return plain if plain.isprintable() and plain else json.dumps(text)


def _as_json(turn: int, journal_record: JournalRecord) -> str:
    shown = {
        "turn": turn,
        "event": type(journal_record.event).__name__,
        **_fields(journal_record.event),
    }
    if journal_record.answers:
        shown["answers"] = [
            {"answer": type(one).__name__, **_fields(one)} for one in journal_record.answers
        ]
    return json.dumps(shown, default=repr)


def _fields(event: Any) -> dict[str, Any]:
    fields = {name: getattr(event, name) for name in event.__struct_fields__}
    if isinstance(config := fields.get("config"), bytes):
        fields["config"] = peek_config(config) if config else None  # an action may have none
    return {name: _plain(value) for name, value in fields.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, msgspec.Struct):
        return {name: _plain(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, bytes):
        return f"<{len(value)} bytes>"
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _check_user(path: Path) -> None:
    """Refuse to write as root into a folder of another user, who could not open the files then.

    Raises:
        ConfigError: it is such a folder; says what to do.
    """
    if os.geteuid() == 0 and path.exists() and (owner := path.stat().st_uid) != 0:
        raise ConfigError(
            f"{path} belongs to user {owner}, who cannot open what root writes there. Run this as "
            "that user, or by `tunemq-farm`, which does that."
        )


# --- copy -----------------------------------------------------------------------------------------


def copy_journal(options: argparse.Namespace) -> int:
    """Bring the copy in the store up to date."""
    folder = Path(options.path)
    _check_user(folder)
    address = read_header(folder / FILE_NAME).store
    if not is_remote(address):
        raise ConfigError(f"the search in {folder} has no copy: its store is no bucket.")
    message_signer = known_journal_signer(address)
    check_newest_here(address, str(folder), message_signer)
    journal, _ = Journal.resume(folder / FILE_NAME)
    with closing(journal), open_objects(address) as objects:
        copier = JournalCopy(journal, objects, message_signer)
        is_whole = copier.close(_COPY_S, tell=tell)
    if not is_whole:
        raise StoreError(f"the journal in {folder} is not whole in the store; run this again.")
    sys.stdout.write(f"{harmless(without_settings(address))} has the journal of {folder}.\n")
    return 0


# --- check ----------------------------------------------------------------------------------------


def check_journal(options: argparse.Namespace) -> int:
    """Read and replay the whole journal."""
    with _opened(options.path) as (path, lost):
        if lost:
            sys.stdout.write(
                f"damaged: {harmless(lost)}\n`tunemq scheduler --take-over` and `Tuner.restore` "
                "continue from there; the search's folder on the scheduler's machine may have "
                "more.\n"
            )
            return EXIT_DAMAGED
        verdict = _examined_while_used(path)
        if verdict.damage or verdict.found is None:
            sys.stdout.write("".join(f"damaged: {harmless(line)}\n" for line in verdict.damage))
            sys.stdout.write(
                "`tunemq journal salvage` writes the readable part into a new journal, and "
                "keeps this one.\n"
            )
            return EXIT_DAMAGED
        sys.stdout.write("".join(f"{harmless(line)}\n" for line in _described(verdict.found)))
        if verdict.found.cut:
            sys.stdout.write(
                f"{verdict.found.cut} bytes at the end belong to a turn that was not complete, "
                "or is being written; nothing was done because of it, and a restart cuts them "
                "off.\n"
            )
    sys.stdout.write("whole\n")
    return 0


def _examined_while_used(path: Path) -> JournalCheckResult:
    """Check the journal; repeats if a snapshot of its running search removed files meanwhile."""
    while True:
        files = numbers(path, TURNS_SUFFIX)
        try:
            verdict = examine(path, replay_as_far_as_possible)
        except JournalError:
            if numbers(path, TURNS_SUFFIX) == files:
                raise
        else:
            if not verdict.damage or numbers(path, TURNS_SUFFIX) == files:
                return verdict


def _described(found: RecoveredJournal) -> list[str]:
    runner = replay_recovered(found)
    header, states = found.header, dict(sorted(runner.counts.items()))
    counts = ", ".join(f"{count} {state}" for state, count in states.items() if count)
    written = f" by TuneMQ {header.tunemq}" if header.tunemq else ""
    return [
        f"experiment {header.experiment} ({header.experiment_id}), begun{written}",
        (
            f"{found.turn} turns, {found.snapshot_turn} of them in a snapshot, "
            f"{len(found.finished)} summaries in the history"
        ),
        f"{runner.suggested} trials: {counts or 'none'}; {runner.elapsed:.0f} s",
    ]


# --- salvage --------------------------------------------------------------------------------------


def salvage_journal(options: argparse.Namespace) -> int:
    """Write a new journal from the readable part of a damaged one."""
    path = _local(options.path)
    _check_user(path)
    done = salvage(path, replay_as_far_as_possible)
    if options.json:
        sys.stdout.write(f"{msgspec.json.encode(done, enc_hook=str).decode()}\n")
        return 0
    if done.kept is None:
        sys.stdout.write(f"{path} is whole: {done.turns} turns. Nothing was done.\n")
        return 0
    lines = [
        *done.damage,
        f"The new journal has {done.turns} turns, {done.snapshot_turn} of them in a snapshot.",
        told_lost(done),
        *_lost_history(done),
        f"The damaged journal is kept at {done.kept}",
    ]
    sys.stdout.write("".join(f"{harmless(line)}\n" for line in lines))
    return 0


def told_lost(done: SalvageResult) -> str:
    """Describe for people what the new journal lacks."""
    if done.gone:
        files = ", ".join(map(str, done.gone))
        behind = f", {done.unusable} of them whole," if done.unusable else ""
        return (
            f"Lost: all turns behind turn {done.turns}{behind} for {files} is missing or holds "
            "none of them; the journal does not say how many they were. The copy of the journal "
            "in the search's store, if it has one, may have them: restore the search from there. "
            "Else the next restore moves the rows of results that the new journal lacks to "
            "*.unrecorded.* and names them."
        )
    if not done.unusable:
        return "No turn behind the damage is whole; the turns in it are lost."
    return (
        f"Lost: turn {done.turns + 1}, and {done.unusable} whole turns behind it, which depend "
        "on it. Trials continue from the last checkpoints in the new journal."
    )


def _lost_history(done: SalvageResult) -> list[str]:
    if not done.lost_records:
        return []
    trials = ", ".join(done.missing) or "none"
    records = "1 record" if done.lost_records == 1 else f"{done.lost_records} records"
    return [
        (
            f"Lost: {records} of the history. The search no longer knows the finished trials "
            f"{trials}; their folders stay as they are."
        ),
        (
            "Other finished trials may appear in an earlier state. If the search has a store, "
            "the copy of the journal there may be whole."
        ),
    ]


# --- finding the journal --------------------------------------------------------------------------


@contextmanager
def _opened(given: str) -> Iterator[tuple[Path, str]]:
    """Open the experiment's journal in a folder or store; yields it, and what a copy lacks."""
    if not is_remote(given):
        yield _local(given), ""
        return
    with tempfile.TemporaryDirectory(prefix="tunemq-journal-") as scratch:
        path, signer = Path(scratch, FILE_NAME), known_journal_signer(given)
        with open_objects(canonical_address(given)) as objects:
            objects.probe(is_read_only=True)  # quickly says that it is unreachable
            found = fetch_journal(objects, path, signer, replay=replay_as_far_as_possible)
        yield path, found.lost


def _local(given: str) -> Path:
    if is_remote(given):
        raise ConfigError(
            f"{given} is a copy in a store, which needs no salvage: `tunemq journal check` "
            "prints what it lacks; `tunemq scheduler --take-over` and Tuner.restore use the "
            "rest."
        )
    path = Path(os.path.expanduser(given.removeprefix("file://"))).absolute()
    for one in (path / FILE_NAME, path):
        if numbers(one, TURNS_SUFFIX) or numbers(one, SNAPSHOT_SUFFIX):
            return one
    raise ConfigError(
        f"there is no journal at {path}: give the folder of a search, or the folder {FILE_NAME} "
        "in it."
    )
