"""What `tunemq scheduler` does: finds the search and its place, gets the farm, runs it there."""

from __future__ import annotations

import os

import msgspec

from tunemq_scheduler.farm.exits import exit_code
from tunemq_scheduler.farm.experiment import Run
from tunemq_scheduler.farm.holder import Holder
from tunemq_scheduler.farm.preparing import Place, named, newest_record, place_of, run_on_farm
from tunemq_scheduler.farm.script import load_tuner
from tunemq_scheduler.installed_packages import installed_packages_first
from tunemq_scheduler.tuner import Tuner, TunerParts
from tunemq_shared.errors import BugError, ConfigError, TuneError, UserError
from tunemq_shared.key_files import journal_seal
from tunemq_shared.live_keys import Role, find_keys
from tunemq_shared.prctl import keep_memory_private, leave_no_core_file
from tunemq_shared.safe_text import harmless
from tunemq_shared.standard_streams import tell
from tunemq_shared.store_address import is_remote, name_in


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """The command line of ``tunemq scheduler``; see there.

    Attributes:
        take_over: None where it was not asked for, empty where it was without an address.
    """

    url: str
    script: str
    keys: str | None = None
    results: str | None = None
    name: str | None = None
    journal_release: str = "local"
    insecure: bool = False
    take_over: str | None = None

    def __repr__(self) -> str:
        """Without its address, in which a password may stand."""
        return "Wanted(...)"


def run_service(wanted: Wanted) -> int:
    """Run the search; the exit code.

    Raises:
        KeyboardInterrupt: Ctrl-C; everything is saved.
        UserError: something given is of no use; says what to do.
        BugError: ours.
    """
    # The keys of the farm are in this process, and the script's code, too.
    keep_memory_private()
    leave_no_core_file()  # of what the script starts
    try:
        _run(wanted)
    except (UserError, BugError):
        raise
    except TuneError as problem:
        _tell(str(problem))
        return exit_code(problem)
    return 0


def _run(wanted: Wanted) -> None:
    keys = find_keys(wanted.keys, Role.SCHEDULER)
    keys.forget_submitters()  # nobody is answered here
    parts = _parts_of(load_tuner(wanted.script), wanted)
    place = _place_of(parts, wanted)
    if wanted.journal_release == "store" and not place.store:
        raise ConfigError(
            "--journal-release store needs a store that outlives this machine: give the search"
            " RunConfig(storage_path='s3://bucket/prefix')."
        )
    with installed_packages_first("celery", "kombu", "redis"):
        from tunemq_scheduler.farm.direct import DirectFarm
        from tunemq_scheduler.farm.lease import SchedulerLease
        from tunemq_scheduler.security.redis_probes import refuse_dangers
        from tunemq_scheduler.security.unsigned_start import refuse_unsigned

    refuse_dangers(wanted.url, is_insecure=wanted.insecure, tell=_tell)
    refuse_unsigned(wanted.url, keys, is_insecure=wanted.insecure, tell=_tell)
    if is_remote(place.store):
        from tunemq_scheduler.security.store_probes import refuse_open_store  # brings a client

        refuse_open_store(place.store, is_insecure=wanted.insecure, tell=_tell)
    me = Holder.this_process(parts.run.name or "")
    journal_keys = keys.journal_keys(name_in(place.store)) if place.store else ()
    record = newest_record(place, journal_seal(journal_keys))
    lease = SchedulerLease(wanted.url, me)
    try:
        lease.claim(record.term + 1 if record is not None else 1, _tell)
        how = Run(
            release_when_copied=wanted.journal_release == "store",
            may_kill=wanted.take_over is not None,
            journal_keys=journal_keys,
        )
        run_on_farm(parts, place, DirectFarm(wanted.url, lease, me, keys), how, _tell)
    finally:
        lease.close()


def _parts_of(tuner: Tuner, wanted: Wanted) -> TunerParts:
    parts = tuner.parts
    name = wanted.name or parts.run.name
    if wanted.take_over and not wanted.name:
        name = name_in(wanted.take_over)
    if not name:
        raise ConfigError(
            "the experiment needs a name, by which it is found again after a crash: --name, or"
            " RunConfig(name=...) in the script."
        )
    return named(parts, name)


def _place_of(parts: TunerParts, wanted: Wanted) -> Place:
    results, take_over = wanted.results, wanted.take_over or ""
    if results is not None:
        if is_remote(results):
            raise ConfigError(
                f"--results {results} is no folder of this machine; the store of a search is"
                " its RunConfig(storage_path=...)."
            )
        results = os.path.abspath(os.path.expanduser(results))
    if take_over and not is_remote(take_over):
        raise ConfigError(
            f"--take-over {take_over}: give the address of an experiment in a store,"
            " such as s3://bucket/prefix/name; nothing for one in --results."
        )
    return place_of(parts, results=results, take_over=take_over)


def _tell(text: str) -> None:
    tell(f"tunemq scheduler: {harmless(text)}")
