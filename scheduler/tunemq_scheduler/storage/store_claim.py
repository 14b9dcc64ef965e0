"""`StoreClaim`: whether a run may still change its experiment's store.

Each run writes a record of itself into the store (`tunemq_scheduler.storage.last_run`). A run
that was paused, cut off or presumed dead finds the record of a later run there, and does not change
the store from then on.
"""

from __future__ import annotations

import math
import time
from typing import Final

from tunemq_scheduler.storage.last_run import RunRecord, store_record, stored_record
from tunemq_shared.base.errors import ConfigError, JournalError, RunSuperseded, StoreError
from tunemq_shared.base.retrying import CancelToken, retried
from tunemq_shared.checkpoints.open_store import open_objects
from tunemq_shared.objects.store_address import without_settings
from tunemq_shared.signing.message_signing import MessageSigner

#: Seconds for which a record counts as current, so that many deletions need few reads.
FRESH_S: Final = 1.0
#: Seconds for which a request is retried.
_TIMEOUT_S: Final = 30.0


class StoreClaim:
    """The claim of one run to its experiment's store.

    **Threads.** All methods are safe in any thread.

    Args:
        address: the address of the experiment's store; empty if there is none.
        message_signer: signs the record, and the journals of this search.
    """

    def __init__(self, address: str, message_signer: MessageSigner) -> None:
        self._address, self._message_signer = address, message_signer
        self._record: RunRecord | None = None
        #: The record of the run that took over the store.
        self._later: RunRecord | None = None
        self._read_at = -math.inf

    @property
    def is_superseded(self) -> bool:
        """Whether an earlier read found another run."""
        return self._later is not None

    def write(self, record: RunRecord) -> None:
        """Claim the store for this run, or update this run's record.

        Raises:
            ConfigError: another search has the store: both began before either had claimed it.
            RunSuperseded: another run has claimed it since this one did.
            JournalError: the record in the store cannot be read.
            StoreError: the store cannot be reached.
        """
        self.expire()
        self.check()
        if self._address:
            stored = self.stored() if self._record is None else None
            if stored is not None and _is_other(stored, record):
                raise ConfigError(
                    f"Another search has {without_settings(self._address)}: {stored.holder}."
                    " Both would write to the same journal there; start this one again, under"
                    " another name."
                )
            with open_objects(self._address) as objects:
                retried(
                    lambda: store_record(objects, record, self._message_signer),
                    CancelToken(_TIMEOUT_S),
                )
        self._record, self._read_at = record, _now()

    def stored(self, cancel: CancelToken | None = None) -> RunRecord | None:
        """Return the record of the last run that claimed the store.

        Raises:
            JournalError: it cannot be read, or has no valid signature of the scheduler.
            StoreError: the store cannot be reached.
        """
        with open_objects(self._address) as objects:
            return retried(
                lambda: stored_record(objects, self._message_signer),
                cancel or CancelToken(_TIMEOUT_S),
            )

    def check(self, cancel: CancelToken | None = None) -> None:
        """Check that this run had the store at most a second ago; read the record if necessary.

        Args:
            cancel: ends the attempts to read it early.

        Raises:
            RunSuperseded: another run has it.
            StoreError: the record cannot be read.
        """
        self.check_known()
        if self._address and self._record is not None:
            self._read(cancel)
            self.check_known()

    def expire(self) -> None:
        """Make the next `check` read the record, however recent the last read is."""
        self._read_at = -math.inf

    def check_known(self) -> None:
        """Check the result of earlier reads only, without a request.

        Raises:
            RunSuperseded: `check` found another run.
        """
        if self._later is not None:
            is_other = self._record is not None and _is_other(self._later, self._record)
            raise RunSuperseded(
                f"Another {'search' if is_other else 'run of this search'} claimed"
                f" {without_settings(self._address)}: {self._later.holder}. This run ends and"
                " leaves the store to that one; what this run recorded is in its own results"
                " folder."
            )

    def _read(self, cancel: CancelToken | None) -> None:
        """Read the record, unless it is fresh; no caller waits for another's read."""
        began = _now()
        if self._record is None or began - self._read_at <= FRESH_S:
            return
        try:
            stored = self.stored(cancel)
        except JournalError as error:
            raise StoreError(str(error)) from error
        if stored is not None and stored.holder.token != self._record.holder.token:
            self._later = stored
        self._read_at = began


def _is_other(stored: RunRecord, ours: RunRecord) -> bool:
    """Whether the stored record is of another search; older TuneMQ wrote no id."""
    return stored.experiment_id not in {"", ours.experiment_id}


def _now() -> float:
    """Return a time in seconds that also advances while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
