"""The objects of a journal's copy in a store: their names, and the signature of each.

    000002/000004.turns/<from byte>-<to byte>       a piece of a file, after its signature's header
    000002/ready                                    the experiment's id, likewise

Only the exact spelling of a name is valid, so each object has one name. If the farm has keys, only
the scheduler can sign: a signature covers the search (which has its own key), the experiment's id,
the copy's number, the file, and the position of the bytes in it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final, NamedTuple

from tunemq_scheduler.journal.journal_files import FILE_NAME, HISTORY, is_numbered
from tunemq_shared.base.errors import JournalError
from tunemq_shared.signing.message_signing import (
    HEAD_BYTES,
    InvalidSignature,
    MessageSigner,
    unchecked_body,
)

#: Marks a copy that holds all that its snapshot needs; contains the experiment's id.
READY: Final = "ready"
#: The file beside the journal without which a search cannot be restored.
TUNER: Final = "tuner.pkl"
#: The most bytes of merged pieces; longer objects are not read into memory.
MOST_BYTES: Final = 128 * 2**20

_PIECE: Final = re.compile(r"([0-9]{15})-([0-9]{15})")
_NUMBER: Final = re.compile(r"[0-9]{6,18}")


class CopiedObject(NamedTuple):
    """The name of one object; for `READY`, `begin` and `end` are 0."""

    opening: int
    file: str
    begin: int = 0
    end: int = 0

    @property
    def key(self) -> str:
        """The object's key below the experiment's store."""
        return f"{FILE_NAME}/{self.name}"

    @property
    def name(self) -> str:
        """The object's name below the journal's folder."""
        name = f"{self.opening:06d}/{self.file}"
        return name if self.file == READY else f"{name}/{self.begin:015d}-{self.end:015d}"

    def is_whole(self, size: int) -> bool:
        """Whether an object of this size has all its bytes; a power cut may leave fewer."""
        return size > 0 if self.file == READY else size - (self.end - self.begin) in {1, HEAD_BYTES}


def parse_key(key: str) -> CopiedObject | None:
    """Return the object with this key; None for a key that no copy uses."""
    match key.split("/"):
        case [top, opening, file] if file == READY:
            piece = "0" * 15 + "-" + "0" * 15
        case [top, opening, file, piece] if file in {HISTORY, TUNER} or is_numbered(file):
            pass
        case _:
            return None
    place = _PIECE.fullmatch(piece)
    if top != FILE_NAME or not _NUMBER.fullmatch(opening) or place is None:
        return None
    found = CopiedObject(int(opening), file, int(place[1]), int(place[2]))
    is_in_order = file == READY or found.begin < found.end <= found.begin + MOST_BYTES
    return found if found.opening and is_in_order and found.key == key else None


def in_order(pieces: Iterable[CopiedObject]) -> list[CopiedObject]:
    """Return the pieces that make up a file, without those that were merged into longer ones."""
    chosen: list[CopiedObject] = []
    for one in sorted(pieces, key=lambda one: (one.begin, -one.end)):
        if not chosen or one.begin >= chosen[-1].end:
            chosen.append(one)
    return chosen


def gaps(pieces: Iterable[CopiedObject], size: int) -> list[tuple[int, int]]:
    """Return the byte ranges that the pieces lack of a file of this size."""
    ordered = in_order(pieces)
    begins = [*(one.begin for one in ordered), size]
    ends = [0, *(one.end for one in ordered)]
    return [(end, begin) for end, begin in zip(ends, begins, strict=True) if end < begin]


def signed_message(
    message_signer: MessageSigner, one: CopiedObject, experiment_id: str, body: bytes
) -> bytes:
    """Return the content of an object: the signed bytes."""
    return message_signer.close(body, *_context(one, experiment_id))


def opened(
    message_signer: MessageSigner, one: CopiedObject, experiment_id: str, content: bytes
) -> bytes:
    """Return the signed bytes of an object; without keys the signature is not checked.

    Raises:
        JournalError: the object does not have a valid signature of this farm's scheduler.
    """
    try:
        if not message_signer.is_signed:
            return unchecked_body(content)
        return message_signer.open(content, *_context(one, experiment_id))
    except InvalidSignature as error:
        raise JournalError(
            f"the copy of this journal cannot be trusted: the object {one.key} {error}. Restore "
            "the search from its folder on the scheduler's machine; or remove that object, if "
            "the scheduler did not write it, and run `tunemq doctor` to find out who may write "
            "there."
        ) from error


def _context(one: CopiedObject, experiment_id: str) -> tuple[bytes, ...]:
    # The first object that is read determines the experiment's id for all others.
    return (b"" if one.file == READY else experiment_id.encode(), one.name.encode())
