"""`JournalCopy`: a thread that copies an open journal to the experiment's object store.

Below ``journal/`` each opening of a journal has its own numbered folder, so that a scheduler which
was presumed dead and continues cannot write to the copy that counts:

    000002/tuner.pkl/<from byte>-<to byte>                  pieces, each written once
    000002/000004.snapshot/<from byte>-<to byte>
    000002/000004.turns/<from byte>-<to byte>
    000002/history/<from byte>-<to byte>
    000002/ready                                            makes this copy the one that counts

Signatures: `tunemq_scheduler.journal.copy_layout`. Fetching a copy:
`tunemq_scheduler.journal.fetch_copy`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Final, TypeVar

from tunemq_scheduler.journal.copy_layout import (
    READY,
    TUNER,
    CopiedObject,
    gaps,
    parse_key,
    signed_message,
)
from tunemq_scheduler.journal.journal_files import FILE_NAME, HISTORY, snapshot_file, turns_file
from tunemq_scheduler.journal.journal_writer import Journal, JournalPosition
from tunemq_shared.base.errors import BugError, RunSuperseded, StoreError
from tunemq_shared.base.retrying import (
    CancelToken,
    StoreUnavailable,
    TransferCancelled,
    ignore,
    retried,
)
from tunemq_shared.objects.object_store import ObjectStore
from tunemq_shared.signing.message_signing import MessageSigner

#: The most seconds and bytes by which the copy is behind, while the store answers.
PERIOD_S: Final = 0.5
BEHIND_BYTES: Final = 2**20
#: Seconds to wait at the end for a store that does not answer.
SHORT_S: Final = 5.0
#: Seconds between comparisons with the store's listing; the store may silently lose pieces.
LOOK_S: Final = 60.0
#: The most bytes of a piece when there is much to copy.
_PIECE_BYTES: Final = 4 * 2**20
#: The number of small pieces that are merged into one, so that their number stays limited.
_MERGED: Final = 64
#: The most seconds for which the copy waits for the results before a snapshot, after the journal
#: has removed turns that the copy lacks, as when the store was away.
_RESULTS_WITHIN_S: Final = 600.0

_T = TypeVar("_T")


@dataclass(eq=False)
class JournalCopy:
    """Copies a journal until `close`; an unavailable store does not delay the search.

    **Threads.** `turn` and `notices` are safe in any thread.

    Attributes:
        journal: open, and written by another thread.
        objects: the experiment's store; not closed here.
        message_signer: signs each object of the copy.
        copied: called in the copying thread when `turn` has grown.
        check: called before the copy becomes the one that counts and others are deleted; raises
            `RunSuperseded` if another run has the store, which ends the copy.
        may_copy: whether the copy may begin with this snapshot instead of the turns before it;
            False while the store lacks files that were written because of those turns.
    """

    journal: Journal
    objects: ObjectStore
    message_signer: MessageSigner
    _: KW_ONLY
    copied: Callable[[], None] = lambda: None
    check: Callable[[], None] = lambda: None
    may_copy: Callable[[int], bool] = lambda _snapshot: True

    def __post_init__(self) -> None:
        """Start the thread."""
        self._turn = 0
        self._done: JournalPosition | None = None
        #: Since when the thread has been copying; None while there is nothing to copy.
        self._behind_since: float | None = None
        self._opening = 0
        self._is_ready = False
        #: For each growing file: the copied bytes, and the small pieces.
        self._sent: dict[str, int] = {}
        self._small: dict[str, list[tuple[int, int]]] = {}
        #: The newest copied snapshot.
        self._snapshot = 0
        #: The first segment that the newest copied snapshot needs.
        self._base = 0
        #: The segments that are copied to their ends.
        self._whole: set[int] = set()
        self._notices: deque[str] = deque()
        self._is_in_trouble = False
        #: Since when the journal lacks turns that the copy needs; None while it has them.
        self._lacking_since: float | None = None
        #: When to compare the copy with the store's listing; 0 means at once, after a failure.
        self._look_at = time.monotonic() + LOOK_S
        self._failure: Exception | None = None
        self._due = threading.Event()
        self._closing = threading.Event()
        self._cancel = CancelToken()
        self._thread = threading.Thread(target=self._run, name="journal copy", daemon=True)
        self.journal.grown = self._grown
        self._thread.start()

    @property
    def turn(self) -> int:
        """The number of turns in the copy, which survive the loss of this machine."""
        return self._turn

    @property
    def is_behind(self) -> bool:
        """Whether the journal has turns that the copy lacks."""
        return self._turn < self.journal.turn

    @property
    def behind_s(self) -> float:
        """The seconds for which the copy has lacked the same turns."""
        since = self._behind_since
        return 0.0 if since is None else time.monotonic() - since

    @property
    def behind_bytes(self) -> int:
        """The number of journal bytes that the copy lacks, at least; without older segments."""
        at, done = self.journal.position, self._done
        if done is None:
            return at.offset + at.history
        turns = at.offset - (done.offset if done.segment == at.segment else 0)
        return turns + max(0, at.history - done.history)

    def notices(self) -> list[str]:
        """Return notices for the user, each once: the store is unavailable, or available again.

        Raises:
            BugError: the thread has ended.
        """
        if self._failure is not None:
            raise BugError(
                f"the copy of the journal has ended: {self._failure!r}"
            ) from self._failure
        return [self._notices.popleft() for _ in range(len(self._notices))]

    def close(self, within_s: float = SHORT_S, *, tell: Callable[[str], None] = ignore) -> bool:
        """Copy the rest; return whether all is copied.

        Args:
            within_s: the most seconds to wait if the store does not answer.
            tell: shows a line after `SHORT_S` of waiting.
        """
        self._closing.set()
        self._due.set()
        self._thread.join(min(within_s, SHORT_S))
        if within_s > SHORT_S and self._thread.is_alive():
            tell(f"Waiting for the journal to reach {self.objects.address}.")
            self._thread.join(within_s - SHORT_S)
        self.give_up()
        self._thread.join(SHORT_S)
        return not self.is_behind

    def give_up(self) -> None:
        """Make `close` return soon, without the rest; safe in signal handlers."""
        self._cancel.cancel()

    def _grown(self, position: JournalPosition) -> None:
        done = self._done
        is_little = (
            done is not None
            and position.segment == done.segment
            and position.offset - done.offset < BEHIND_BYTES
        )
        if not is_little:
            self._due.set()

    def _run(self) -> None:
        try:
            self._behind_since = time.monotonic()
            self._opening = self._tried(self._next_opening)
            while True:
                is_last = self._closing.is_set()
                self._due.clear()
                is_due = is_last or time.monotonic() >= self._look_at
                if is_due or self.journal.position != self._done:
                    self._behind_since = self._behind_since or time.monotonic()
                    if self._copy_new(is_last=is_last):
                        self._behind_since = None
                if is_last:
                    return
                self._due.wait(PERIOD_S)
        except (TransferCancelled, RunSuperseded):  # `close` reports the missing rest
            return
        except Exception as error:  # noqa: BLE001  the thread's edge: `notices` raises it where it is asked
            self._failure = error

    def _copy_new(self, *, is_last: bool) -> bool:
        """Copy new turns; return whether the copy has all of them."""
        at = self.journal.position
        try:
            if not self._copy_up_to(at, is_last=is_last):
                return False
            if is_last or time.monotonic() >= self._look_at:
                self._send_missing()
        except StoreError:
            raise
        except FileNotFoundError:  # later snapshots have replaced it
            self._closing.wait(PERIOD_S)
            self._due.set()
            return False
        except OSError as error:
            self._in_trouble(f"{error.filename} cannot be read: {error.strerror}")
            return False
        self._turn, self._done = at.turn, at
        self.copied()
        return True

    def _copy_up_to(self, at: JournalPosition, *, is_last: bool) -> bool:
        """Copy up to a position; each snapshot precedes its segment, as `fetch_copy` expects.

        Returns:
            Whether that was possible; False while a snapshot waits for results.
        """
        folder = self.journal.folder
        tuner = folder.parent / TUNER
        if not self._is_ready and tuner.exists():  # constant while the journal is open
            self._send_all(tuner)
        if at.snapshot > self._snapshot:
            if not self._is_ready or self.may_copy(at.snapshot):
                self._begin_with(at)
            elif self._lacks_turns(at):
                if not (is_last or self._has_waited_for_results()):
                    return False
                self._notices.append(
                    "the copy of the journal continues with a snapshot, but the store lacks"
                    " results before it: see the errors about folders that were not copied"
                )
                self._begin_with(at)
        first = max(1, self._snapshot)
        for number in range(first, at.segment + 1):
            path = turns_file(folder, number)
            if number == at.segment:
                self._send_grown(path, at.offset)
            elif number not in self._whole:
                self._send_all(path)
                self._whole.add(number)
        if not self._is_ready:
            self._tried(self.check)
            self._put_ready()
            self._is_ready = True
            self._remove(lambda opening, _name: opening < self._opening)
        if first > self._base:
            # The previous snapshot's files stay, so that a fetch in progress is not disturbed.
            self._forget_before(self._base)
            self._base = first
        return True

    def _begin_with(self, at: JournalPosition) -> None:
        """Copy the newest snapshot, which the copy begins with from now on."""
        self._send_grown(self.journal.folder / HISTORY, at.history)
        self._send_all(snapshot_file(self.journal.folder, at.snapshot))
        self._snapshot, self._lacking_since = at.snapshot, None

    def _lacks_turns(self, at: JournalPosition) -> bool:
        """Whether the journal has removed turns before its snapshot that are not copied yet."""
        segments = range(max(1, self._snapshot), at.snapshot)
        return any(
            number not in self._whole and not turns_file(self.journal.folder, number).exists()
            for number in segments
        )

    def _has_waited_for_results(self) -> bool:
        if self._lacking_since is None:
            self._lacking_since = time.monotonic()
            self._notices.append(
                "the copy of the journal waits until the results of its trials are in the store"
            )
        return time.monotonic() - self._lacking_since >= _RESULTS_WITHIN_S

    def _send_all(self, path: Path) -> None:
        self._send_grown(path, path.stat().st_size)

    def _send_grown(self, path: Path, end: int) -> None:
        name = path.name
        sent = self._sent.get(name, 0)
        while sent < end:
            data = _read(path, sent, min(end - sent, _PIECE_BYTES))
            self._put(self._piece(name, sent, sent + len(data)), data)
            if len(data) < BEHIND_BYTES:
                self._small.setdefault(name, []).append((sent, sent + len(data)))
            else:
                self._small.pop(name, None)  # merged pieces must be adjacent
            sent += len(data)
            self._sent[name] = sent
        if len(self._small.get(name, ())) >= _MERGED:
            self._merge(path, self._small.pop(name))

    def _send_missing(self) -> None:
        """Upload again what the store does not list: a power cut may destroy confirmed writes."""
        self._look_at = time.monotonic() + LOOK_S
        listed = self._tried(self._listed)
        if any(one.opening > self._opening for one, _ in listed):
            return  # the search runs elsewhere now, and that run deleted this copy
        found = [one for one, size in listed if one.opening == self._opening and one.is_whole(size)]
        lost = 0
        for name, sent in self._sent.items():
            folder = self.journal.folder
            path = (folder.parent if name == TUNER else folder) / name
            for begin, end in gaps((one for one in found if one.file == name), sent):
                if not path.exists():  # newer files replace it
                    break
                lost += 1
                for at in range(begin, end, _PIECE_BYTES):
                    until = min(at + _PIECE_BYTES, end)
                    self._put(self._piece(name, at, until), _read(path, at, until - at))
        if not any(one.file == READY for one in found):
            lost += 1
            self._put_ready()
        if lost:
            pieces = "a piece" if lost == 1 else f"{lost} pieces"
            self._notices.append(
                f"the store had lost {pieces} of the copy of the journal, as after a power cut of "
                "its machine; they were sent again"
            )

    def _merge(self, path: Path, small: list[tuple[int, int]]) -> None:
        begin, end = small[0][0], small[-1][1]
        self._put(self._piece(path.name, begin, end), _read(path, begin, end - begin))
        keys = [self._piece(path.name, *one).key for one in small]
        self._tried(lambda: self.objects.delete(keys))

    def _forget_before(self, first: int) -> None:
        """Delete what neither the newest snapshot nor the one before it needs."""
        old = {name for name in self._sent if _number(name, first) < first}
        if old:
            self._remove(lambda opening, name: opening == self._opening and name in old)
            for name in old:
                self._sent.pop(name, None)
                self._small.pop(name, None)

    # --- the store --------------------------------------------------------------------------------

    def _next_opening(self) -> int:
        return 1 + max((one.opening for one, _ in self._listed()), default=0)

    def _remove(self, is_old: Callable[[int, str], bool]) -> None:
        def remove() -> None:
            found = self._listed()
            self.objects.delete([one.key for one, _ in found if is_old(one.opening, one.file)])

        self._tried(remove)

    def _listed(self) -> list[tuple[CopiedObject, int]]:
        """Return the objects of all copies, and the size of each in bytes."""
        found = ((parse_key(one.key), one.size) for one in self.objects.list(f"{FILE_NAME}/"))
        return [(one, size) for one, size in found if one is not None]

    def _put_ready(self) -> None:
        experiment_id = self.journal.header.experiment_id.encode()
        self._put(CopiedObject(self._opening, READY), experiment_id)

    def _put(self, one: CopiedObject, data: bytes) -> None:
        content = signed_message(self.message_signer, one, self.journal.header.experiment_id, data)
        self._tried(lambda: self.objects.put_bytes(one.key, content))

    def _piece(self, name: str, begin: int, end: int) -> CopiedObject:
        return CopiedObject(self._opening, name, begin, end)

    def _tried(self, call: Callable[[], _T]) -> _T:
        """Call until the store succeeds, and return the result; even rejections are retried."""

        def once() -> _T:
            try:
                return call()
            except TransferCancelled:
                raise
            except StoreError as error:
                raise StoreUnavailable(str(error)) from error

        return retried(once, self._cancel, self._in_trouble)

    def _in_trouble(self, trouble: str) -> None:
        if trouble and not self._is_in_trouble:
            self._notices.append(f"the copy of the journal waits for its store: {trouble}")
        elif not trouble and self._is_in_trouble:
            self._notices.append("the copy of the journal continues")
            self._look_at = 0.0
        self._is_in_trouble = bool(trouble)


def _number(name: str, default: int) -> int:
    number = name.partition(".")[0]
    return int(number) if number.isdecimal() else default


def _read(path: Path, offset: int, size: int) -> bytes:
    with open(path, "rb") as file:
        file.seek(offset)
        return file.read(size)
