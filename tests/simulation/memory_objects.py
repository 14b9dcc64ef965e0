"""An `ObjectStore` in memory, and one that records its calls."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from tunemq_shared.base.errors import CheckpointCorrupt
from tunemq_shared.base.retrying import CancelToken, ignore
from tunemq_shared.objects.object_store import NoSuchObject, ObjectInfo, ObjectStore


class MemoryObjects(ObjectStore):
    """All objects in a dict."""

    address = "memory:"

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}

    def probe(self, *, is_read_only: bool = False) -> None:
        pass

    def put_bytes(self, key: str, data: bytes) -> None:
        self.objects[key] = data

    def put_file(
        self,
        key: str,
        path: Path,
        *,
        size: int,
        sha256: str,
        is_unchanged: bool = False,
        cancel: CancelToken,
        on_trouble: Callable[[str], None] = ignore,
    ) -> None:
        data = path.read_bytes()
        if len(data) != size or hashlib.sha256(data).hexdigest() != sha256:
            raise CheckpointCorrupt(f"{path} is not what it was")
        self.put_bytes(key, data)

    def has(self, key: str, size: int) -> bool:
        return key in self.objects and len(self.objects[key]) == size

    def get_bytes(self, key: str, *, limit: int) -> bytes:
        if key not in self.objects:
            raise NoSuchObject(key)
        return self.objects[key]

    def get_file(
        self,
        key: str,
        path: Path,
        *,
        size: int,
        cancel: CancelToken,
        on_trouble: Callable[[str], None] = ignore,
    ) -> None:
        path.write_bytes(self.get_bytes(key, limit=size))

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            self.objects.pop(key, None)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        found = sorted(key for key in self.objects if key.startswith(prefix))
        return iter([ObjectInfo(key, len(self.objects[key]), 0.0) for key in found])

    def abort_uploads(self, is_over: Callable[[str], bool]) -> int:
        return 0

    def close(self) -> None:
        pass


class Delayed(MemoryObjects):
    """Read from another store at once; write and remove later, step by step.

    ``steps`` are the pending writes and removals, in their order.
    """

    def __init__(self, objects: MemoryObjects) -> None:
        super().__init__()
        self.steps: list[Callable[[], None]] = []
        self._real = objects
        self.objects = objects.objects

    def put_bytes(self, key: str, data: bytes) -> None:
        self.steps.append(lambda: self._real.put_bytes(key, data))

    def delete(self, keys: Iterable[str]) -> None:
        self.steps += [lambda key=key: self._real.delete([key]) for key in keys]
