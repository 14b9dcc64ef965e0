"""`make defences`: switch each defence off, and see that a test notices.

For each defence of `tunemq_shared.defences` this runs the tests that stand for it twice: as it is,
which must pass, and with the defence switched off, when at least one must fail. A defence that
nothing notices the loss of protects nothing, or is not tested.

    python -m tests.defences [NAME ...]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

import psutil

from tunemq_shared import defences
from tunemq_shared.prctl import adopt_orphans

ROOT: Final = Path(__file__).parent.parent

#: Defence -> file -> the tests in it that fail without the defence.
TESTS: Final[dict[str, dict[str, tuple[str, ...]]]] = {
    "epoch_check": {
        "tests/unit/scheduler/test_runner.py": (
            "test_what_an_older_incarnation_says_changes_nothing",
        ),
        "tests/unit/scheduler/test_runner_away.py": (
            "test_f08_what_a_node_says_of_a_trial_that_went_on_elsewhere_changes_nothing",
        ),
        "tests/simulation/test_faulty_farms.py": (
            "test_f08_f11_nodes_are_cut_off_and_go_on_with_what_nobody_took_over",
        ),
    },
    "release_when_journalled": {
        "tests/integration/test_node.py": (
            "test_what_is_not_journalled_is_sent_again_when_the_wire_was_wiped",
        ),
        "tests/faults/test_f06_redis_wiped.py": (
            "test_f06_results_that_nobody_had_read_are_sent_again",
        ),
    },
    "resend": {
        "tests/integration/test_node.py": (
            "test_what_is_not_journalled_is_sent_again_when_the_wire_was_wiped",
        ),
        "tests/faults/test_f12_mail_adversities.py": ("test_f12_a_lost_order_is_made_good",),
    },
    "verify_before_restore": {
        "tests/contracts/test_store.py": (
            "TestLocalStore::test_a_flipped_bit_in_a_large_file_is_found",
        ),
        "tests/faults/test_store_damage.py": (
            "test_f20_damage_in_the_store_is_found_and_the_previous_checkpoint_used[flip]",
        ),
    },
    "generation": {
        "tests/faults/test_f06_redis_wiped.py": ("test_f06_a_wipe_is_found_within_a_look",),
    },
    "family_kill": {
        "tests/faults/test_host_families.py": (
            "test_f02_a_killed_host_takes_its_whole_family_along",
            "test_a_trial_that_ends_by_itself_leaves_no_daemon_behind",
        ),
    },
    "grace_after_gap": {
        "tests/unit/scheduler/test_lease_watch.py": (
            "test_time_in_which_nobody_looked_does_not_count",
        ),
        "tests/faults/test_f05_single_node.py": (
            "test_f05_time_without_redis_counts_for_no_nodes_silence",
        ),
    },
    "commit_records": {
        "tests/faults/test_f18_torn_journal.py": (
            "test_f18_a_journal_cut_at_each_byte_of_its_last_three_records_is_a_prefix",
        ),
    },
    "journal_lock": {
        "tests/unit/scheduler/test_journal.py": (
            "test_a_second_opener_is_told_who_has_it_until_that_is_gone",
            "test_the_same_process_is_a_second_opener_too",
        ),
    },
    "bounded_queue": {
        "tests/unit/workers/test_outbox.py": (
            "test_a_full_outbox_says_so_until_something_is_journalled",
        ),
        "tests/faults/test_f07_bounded_outbox.py": (
            "test_f07_trials_wait_when_their_node_has_no_room_for_results_and_go_on_when_it_has",
        ),
    },
}


def main() -> int:
    """Run the command line; 0 when every defence was missed by a test."""
    parser = argparse.ArgumentParser(prog="make defences", description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", choices=[[], *TESTS], help="only these")
    names = parser.parse_args().names or list(TESTS)
    adopt_orphans()  # without its defence a family survives its host, and would survive this
    width = max(map(len, TESTS))
    failed = 0
    for name in names:
        begun = time.monotonic()
        tests = tests_of(name)
        sound, _ = _run(tests, "")
        missed, output = _run(tests, name)
        verdict = "noticed" if sound == 0 and missed == 1 else "NOT NOTICED"
        if sound != 0:
            verdict = "ITS TESTS FAIL EVEN WITH IT"
        failed += verdict != "noticed"
        print(f"{name:{width}}  {verdict} in {time.monotonic() - begun:.0f} s", flush=True)
        for line in output.splitlines():
            if line.startswith("FAILED "):
                print(f"{'':{width}}    {line.split(' - ')[0]}", flush=True)
    return 1 if failed else 0


def tests_of(name: str) -> tuple[str, ...]:
    """The tests that stand for a defence, as pytest wants them."""
    return tuple(f"{file}::{test}" for file, tests in TESTS[name].items() for test in tests)


def _run(tests: tuple[str, ...], off: str) -> tuple[int, str]:
    """Pytest's exit status, and what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:randomly", "--no-header", *tests],
        env={**os.environ, defences.VARIABLE: off},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    for left in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            left.kill()
    return done.returncode, done.stdout


if __name__ == "__main__":
    sys.exit(main())
