"""The defences that tests may switch off, to show that something notices.

    TUNEMQ_DEFENCES_OFF=epoch_check,resend make test ARGS=tests/faults

Each is a constant, read once when a process starts; nobody but a test sets the variable. What each
is for, and which tests fail without it, stands in ``docs/reliability.md``; `make defences` runs
them.
"""

from __future__ import annotations

import os
from typing import Final

VARIABLE: Final = "TUNEMQ_DEFENCES_OFF"

_OFF: Final = frozenset(filter(None, os.environ.get(VARIABLE, "").split(",")))

#: What comes from an older incarnation of a trial is dropped.
EPOCH_CHECK: Final = "epoch_check" not in _OFF
#: Nodes keep their events until they are told that these are journalled.
RELEASE_WHEN_JOURNALLED: Final = "release_when_journalled" not in _OFF
#: Orders that were not confirmed, and events of a wire that was reset, are sent again.
RESEND: Final = "resend" not in _OFF
#: A checkpoint's sizes and hashes are checked before anybody reads it.
VERIFY_BEFORE_RESTORE: Final = "verify_before_restore" not in _OFF
#: A Redis that lost its data is noticed.
GENERATION: Final = "generation" not in _OFF
#: With a host ends its whole family.
FAMILY_KILL: Final = "family_kill" not in _OFF
#: Time in which the scheduler did not look counts for no node's silence.
GRACE_AFTER_GAP: Final = "grace_after_gap" not in _OFF
#: A turn counts as a whole or not at all.
COMMIT_RECORDS: Final = "commit_records" not in _OFF
#: A journal has one writer.
JOURNAL_LOCK: Final = "journal_lock" not in _OFF
#: What a node may hold that is not journalled is bounded.
BOUNDED_QUEUE: Final = "bounded_queue" not in _OFF
