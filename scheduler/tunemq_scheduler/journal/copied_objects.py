"""The objects of a journal's copy in a store: their names, and the signature of each.

    000002/000004.turns/<from byte>-<to byte>       a piece of a file, behind the head of its seal
    000002/ready                                    the experiment's id, likewise

A name counts only exactly as it is written here, so each object has one name. Where the farm has
keys the scheduler alone can sign: a signature covers the search (the key is made for it), the
experiment's id, the copy's number, the file, and the place of the bytes in it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final, NamedTuple

from tunemq_scheduler.journal.journal_layout import FILE_NAME, HISTORY, is_numbered
from tunemq_shared.base.errors import JournalError
from tunemq_shared.signing.message_signing import (
    HEAD_BYTES,
    InvalidSignature,
    MessageSigner,
    unchecked_body,
)

#: Says that the copy holds all that its snapshot needs; has the experiment's id.
READY: Final = "ready"
#: The file beside the journal without which a search cannot be restored.
TUNER: Final = "tuner.pkl"
#: Joined pieces are not longer; what claims to be is not read into memory.
MOST_BYTES: Final = 128 * 2**20

_PIECE: Final = re.compile(r"([0-9]{15})-([0-9]{15})")
_NUMBER: Final = re.compile(r"[0-9]{6,18}")


class CopiedObject(NamedTuple):
    """The name of one object; of `READY` both bytes are 0."""

    opening: int
    file: str
    begin: int = 0
    end: int = 0

    @property
    def key(self) -> str:
        """Below the experiment's store."""
        return f"{FILE_NAME}/{self.name}"

    @property
    def name(self) -> str:
        """Below the journal's folder."""
        name = f"{self.opening:06d}/{self.file}"
        return name if self.file == READY else f"{name}/{self.begin:015d}-{self.end:015d}"

    def is_whole(self, size: int) -> bool:
        """Whether an object of this size holds all its bytes; a power cut may leave fewer."""
        return size > 0 if self.file == READY else size - (self.end - self.begin) in {1, HEAD_BYTES}


def parse_key(key: str) -> CopiedObject | None:
    """The object with this key; None for all that no copy has."""
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
    """The pieces that make up a file; of those that overlap the longest, the others were merged."""
    chosen: list[CopiedObject] = []
    for one in sorted(pieces, key=lambda one: (one.begin, -one.end)):
        if not chosen or one.begin >= chosen[-1].end:
            chosen.append(one)
    return chosen


def gaps(pieces: Iterable[CopiedObject], size: int) -> list[tuple[int, int]]:
    """From which byte to which the pieces lack those of a file of this size."""
    ordered = in_order(pieces)
    begins = [*(one.begin for one in ordered), size]
    ends = [0, *(one.end for one in ordered)]
    return [(end, begin) for end, begin in zip(ends, begins, strict=True) if end < begin]


def signed_message(
    message_signer: MessageSigner, one: CopiedObject, experiment_id: str, body: bytes
) -> bytes:
    """The content of an object."""
    return message_signer.close(body, *_context(one, experiment_id))


def opened(
    message_signer: MessageSigner, one: CopiedObject, experiment_id: str, content: bytes
) -> bytes:
    """What was sealed; without keys it is not checked who did.

    Raises:
        JournalError: the scheduler of this farm did not write that.
    """
    try:
        if not message_signer.is_signed:
            return unchecked_body(content)
        return message_signer.open(content, *_context(one, experiment_id))
    except InvalidSignature as error:
        raise JournalError(
            f"the copy of this journal is not to be trusted: the object {one.key} {error}. Restore "
            "the search from its folder on the scheduler's machine; or remove that object, if the "
            "scheduler did not write it, and see with `tunemq doctor` who may write there."
        ) from error


def _context(one: CopiedObject, experiment_id: str) -> tuple[bytes, ...]:
    # The first object that is read says of which experiment the others have to be.
    return (b"" if one.file == READY else experiment_id.encode(), one.name.encode())
