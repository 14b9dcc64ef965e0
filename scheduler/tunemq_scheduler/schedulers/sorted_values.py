"""`SortedValues`: values in order, of which any can be added, removed and counted quickly."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, Final, Generic, TypeVar

#: The most values of a chunk. Adding one to a list of 100,000 would move 400 KB on average.
_MOST: Final = 8192

# Numbers, or tuples that begin with one.
V = TypeVar("V", bound=Any)


class SortedValues(Generic[V]):
    """Values in order, the smallest first; equal ones may occur.

    They are kept in chunks, so that a change moves few of them.

    Args:
        values: the first values, in any order.
    """

    __slots__ = ("_chunks", "_count", "_lasts")

    def __init__(self, values: Iterable[V] = ()) -> None:
        ordered = sorted(values)
        half = _MOST // 2
        self._chunks = [ordered[at : at + half] for at in range(0, len(ordered), half)]
        #: The greatest value of each chunk.
        self._lasts = [chunk[-1] for chunk in self._chunks]
        self._count = len(ordered)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[V]:
        return chain.from_iterable(self._chunks)

    def __getitem__(self, place: int) -> V:
        """Return the value at a place, from 0; the greatest at -1."""
        if place == -1:
            return self._lasts[-1]
        if place < self._count // 2:
            for chunk in self._chunks:
                if place < len(chunk):
                    return chunk[place]
                place -= len(chunk)
        from_end = place - self._count
        for chunk in self._chunks[::-1]:
            from_end += len(chunk)
            if 0 <= from_end < len(chunk):
                return chunk[from_end]
        raise IndexError(place)

    def add(self, value: V) -> None:
        """Add a value."""
        self._count += 1
        if not self._chunks:
            self._chunks, self._lasts = [[value]], [value]
            return
        at = min(bisect.bisect_right(self._lasts, value), len(self._chunks) - 1)
        chunk = self._chunks[at]
        bisect.insort(chunk, value)
        if len(chunk) > _MOST:
            self._chunks.insert(at + 1, chunk[_MOST // 2 :])
            self._lasts.insert(at + 1, chunk[-1])
            del chunk[_MOST // 2 :]
        self._lasts[at] = chunk[-1]

    def remove(self, value: V) -> bool:
        """Remove a value once; return whether it was there."""
        at = bisect.bisect_left(self._lasts, value)
        if at == len(self._chunks):
            return False
        chunk = self._chunks[at]
        place = bisect.bisect_left(chunk, value)
        if chunk[place] != value:
            return False
        self._count -= 1
        del chunk[place]
        if chunk:
            self._lasts[at] = chunk[-1]
        else:
            del self._chunks[at], self._lasts[at]
        return True

    def below(self, value: V) -> int:
        """Return how many values are smaller than this."""
        at = bisect.bisect_left(self._lasts, value)
        if at == len(self._chunks):
            return self._count
        return sum(map(len, self._chunks[:at])) + bisect.bisect_left(self._chunks[at], value)

    def up_to(self, value: V) -> int:
        """Return how many values are smaller than this, or equal."""
        at = bisect.bisect_right(self._lasts, value)
        if at == len(self._chunks):
            return self._count
        return sum(map(len, self._chunks[:at])) + bisect.bisect_right(self._chunks[at], value)
