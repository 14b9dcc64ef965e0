"""`JournalCopy`: a thread that keeps a copy of an open journal in the experiment's object store.

Below ``journal/`` each time that a journal is opened has a folder of its own, numbered, so that a
scheduler that was thought dead and wakes writes to nothing that counts any more:

    000002/tuner.pkl/<from byte>-<to byte>                  pieces, each put once
    000002/000004.snapshot/<from byte>-<to byte>
    000002/000004.turns/<from byte>-<to byte>
    000002/history/<from byte>-<to byte>
    000002/ready                                            from now on this one counts

How each is signed: `tunemq_scheduler.journal.copied_objects`. Bringing a copy back:
`tunemq_scheduler.journal.fetch_copy`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

from tunemq_scheduler.journal.copied_objects import (
    READY,
    TUNER,
    CopiedObject,
    gaps,
    parse_key,
    signed_message,
)
from tunemq_scheduler.journal.journal_layout import FILE_NAME, HISTORY, snapshot_file, turns_file
from tunemq_scheduler.journal.journal_writer import Journal, JournalPosition
from tunemq_shared.base.errors import BugError, RunSuperseded, StoreError
from tunemq_shared.base.retrying import CancelToken, StoreUnavailable, TransferCancelled, retried
from tunemq_shared.objects.object_store import ObjectStore
from tunemq_shared.signing.message_signing import MessageSigner

#: The copy is behind by no more than so many seconds, or so many bytes, while the store answers.
PERIOD_S: Final = 0.5
BEHIND_BYTES: Final = 2**20
#: So often the copy is compared with what the store lists, which may have lost pieces in silence.
LOOK_S: Final = 60.0
#: The most bytes of a piece when there is much to copy.
_PIECE_BYTES: Final = 4 * 2**20
#: So many small pieces are put once more as one, so that a long search is not a heap of them.
_MERGED: Final = 64

_T = TypeVar("_T")


class JournalCopy:
    """Follows a journal until `close`; the store may be away, which keeps the search from nothing.

    **Threads.** `turn` and `notices` may be asked from any.

    Args:
        journal: open, and written by another thread.
        objects: those of the experiment; not closed here.
        seal: signs each object of the copy.
        copied: called in the thread of the copy when `turn` has grown.
        check: called before the copy is the one that counts, and others are removed; raises
            `RunSuperseded` where another run has the store: the copy ends there.
    """

    def __init__(
        self,
        journal: Journal,
        objects: ObjectStore,
        message_signer: MessageSigner,
        *,
        copied: Callable[[], None] = lambda: None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._journal = journal
        self._objects = objects
        self._message_signer = message_signer
        self._copied, self._check = copied, check
        self._turn = 0
        self._done: JournalPosition | None = None
        #: When the thread began to copy what it copies now; None while there is nothing to do.
        self._behind_since: float | None = None
        self._opening = 0
        self._is_ready = False
        #: Of each file that grows: up to which byte it is copied, and its small pieces.
        self._sent: dict[str, int] = {}
        self._small: dict[str, list[tuple[int, int]]] = {}
        #: The first segment that the newest snapshot in the copy needs.
        self._base = 0
        self._notices: deque[str] = deque()
        self._is_in_trouble = False
        #: When the copy is compared with what the store lists; 0: at once, after a trouble.
        self._look_at = time.monotonic() + LOOK_S
        self._failure: Exception | None = None
        self._due = threading.Event()
        self._closing = threading.Event()
        self._cancel = CancelToken()
        self._thread = threading.Thread(target=self._run, name="journal copy", daemon=True)
        journal.grown = self._grown
        self._thread.start()

    @property
    def turn(self) -> int:
        """So many turns are in the copy, whatever happens to this machine."""
        return self._turn

    @property
    def is_behind(self) -> bool:
        """Whether there are turns that the copy does not have."""
        return self._turn < self._journal.turn

    @property
    def behind_s(self) -> float:
        """For so long the copy has lacked the same turns."""
        since = self._behind_since
        return 0.0 if since is None else time.monotonic() - since

    @property
    def behind_bytes(self) -> int:
        """So many bytes of the journal the copy lacks, at least; of the newest segment all."""
        at, done = self._journal.position, self._done
        if done is None:
            return at.offset + at.history
        turns = at.offset - (done.offset if done.segment == at.segment else 0)
        return turns + max(0, at.history - done.history)

    def notices(self) -> list[str]:
        """What a person should know: that the store is away, and that it is back; each once.

        Raises:
            BugError: the thread has ended.
        """
        if self._failure is not None:
            raise BugError(
                f"the copy of the journal has ended: {self._failure!r}"
            ) from self._failure
        return [self._notices.popleft() for _ in range(len(self._notices))]

    def close(self, within_s: float = 5.0) -> bool:
        """Copy what is left; returns whether all is copied.

        Args:
            within_s: no longer than so, if the store does not answer.
        """
        self._closing.set()
        self._due.set()
        self._thread.join(within_s)
        self._cancel.cancel()
        self._thread.join(within_s)
        return not self.is_behind

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
                if is_due or self._journal.position != self._done:
                    self._behind_since = time.monotonic()
                    self._copy_new(is_last=is_last)
                    self._behind_since = None
                if is_last:
                    return
                self._due.wait(PERIOD_S)
        except (TransferCancelled, RunSuperseded):  # `close` says that not all is copied
            return
        except Exception as error:  # noqa: BLE001  the thread's edge: `notices` raises it where it is asked
            self._failure = error

    def _copy_new(self, *, is_last: bool) -> None:
        at = self._journal.position
        try:
            self._copy_up_to(at)
            if is_last or time.monotonic() >= self._look_at:
                self._send_missing()
        except StoreError:
            raise
        except FileNotFoundError:  # snapshots were taken meanwhile, and it is not needed any more
            self._due.set()
            return
        except OSError as error:
            self._in_trouble(f"{error.filename} cannot be read: {error.strerror}")
            return
        self._turn, self._done = at.turn, at
        self._copied()

    def _copy_up_to(self, at: JournalPosition) -> None:
        """The snapshot comes before its segment: `fetch` goes by that."""
        folder = self._journal.folder
        tuner = folder.parent / TUNER
        if not self._is_ready and tuner.exists():  # stays as it is while the journal is open
            self._send_all(tuner)
        self._send_grown(folder / HISTORY, at.history)
        if at.snapshot:
            self._send_all(snapshot_file(folder, at.snapshot))
        first = max(1, at.snapshot)
        for number in range(first, at.segment + 1):
            path = turns_file(folder, number)
            if number == at.segment:
                self._send_grown(path, at.offset)
            else:
                self._send_all(path)
        if not self._is_ready:
            self._tried(self._check)
            self._put_ready()
            self._is_ready = True
            self._remove(lambda opening, _name: opening < self._opening)
        if first > self._base:
            # The generation before stays, so that whoever fetches it just now is not disturbed.
            self._forget_before(self._base)
            self._base = first

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
                self._small.pop(name, None)  # what is merged lies side by side
            sent += len(data)
            self._sent[name] = sent
        if len(self._small.get(name, ())) >= _MERGED:
            self._merge(path, self._small.pop(name))

    def _send_missing(self) -> None:
        """Send again what the store does not list: a power cut may take what it said it has."""
        self._look_at = time.monotonic() + LOOK_S
        listed = self._tried(self._listed)
        if any(one.opening > self._opening for one, _ in listed):
            return  # the search went on elsewhere, and this copy was removed
        found = [one for one, size in listed if one.opening == self._opening and one.is_whole(size)]
        lost = 0
        for name, sent in self._sent.items():
            folder = self._journal.folder
            path = (folder.parent if name == TUNER else folder) / name
            for begin, end in gaps((one for one in found if one.file == name), sent):
                if not path.exists():  # newer files stand for it
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
        self._tried(lambda: self._objects.delete(keys))

    def _forget_before(self, first: int) -> None:
        """Remove what neither the newest snapshot needs nor the one before it."""
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
            self._objects.delete([one.key for one, _ in found if is_old(one.opening, one.file)])

        self._tried(remove)

    def _listed(self) -> list[tuple[CopiedObject, int]]:
        """The objects of all copies, and how many bytes each has."""
        found = ((parse_key(one.key), one.size) for one in self._objects.list(f"{FILE_NAME}/"))
        return [(one, size) for one, size in found if one is not None]

    def _put_ready(self) -> None:
        experiment_id = self._journal.header.experiment_id.encode()
        self._put(CopiedObject(self._opening, READY), experiment_id)

    def _put(self, one: CopiedObject, data: bytes) -> None:
        content = signed_message(
            self._message_signer, one, self._journal.header.experiment_id, data
        )
        self._tried(lambda: self._objects.put_bytes(one.key, content))

    def _piece(self, name: str, begin: int, end: int) -> CopiedObject:
        return CopiedObject(self._opening, name, begin, end)

    def _tried(self, call: Callable[[], _T]) -> _T:
        """What ``call`` returns, whenever the store can do it; a refusal may be lifted, too."""

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
            self._notices.append("the copy of the journal goes on")
            self._look_at = 0.0
        self._is_in_trouble = bool(trouble)


def _number(name: str, default: int) -> int:
    number = name.partition(".")[0]
    return int(number) if number.isdecimal() else default


def _read(path: Path, offset: int, size: int) -> bytes:
    with open(path, "rb") as file:
        file.seek(offset)
        return file.read(size)
