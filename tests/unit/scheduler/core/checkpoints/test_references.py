"""References between checkpoints, and which objects a deletion removes."""

from __future__ import annotations

import pytest

from tunemq_scheduler.core.checkpoints.object_references import ObjectReferences
from tunemq_scheduler.core.commands import DeleteCheckpoint, DeleteObjects
from tunemq_shared.protocol.messages import CheckpointCommitted


def committed(key: str, *shared: str) -> CheckpointCommitted:
    return CheckpointCommitted("t", 1, 1, 1, key, "hash", 1, shared)


def test_unreferenced_checkpoint_is_deleted_as_a_whole() -> None:
    assert ObjectReferences().condemn("t", "t/a", committed("t/a")) == [
        DeleteCheckpoint("t", "t/a", ())
    ]


def test_object_stays_until_the_last_manifest_that_refers_to_it_is_deleted() -> None:
    references = ObjectReferences()
    references.add(["t/a/x", "t/a/y"])
    references.add(["t/a/x"])
    assert references.condemn("t", "t/a") == [DeleteCheckpoint("t", "t/a", ("x", "y"))]
    assert references.condemn("t", "t/b", committed("t/b", "t/a/x", "t/a/y")) == [
        DeleteCheckpoint("t", "t/b"),
        DeleteObjects(("t/a/y",)),
    ]
    assert references.condemn("t", "t/c", committed("t/c", "t/a/x")) == [
        DeleteCheckpoint("t", "t/c"),
        DeleteObjects(("t/a/x",)),
    ]


def test_object_of_a_live_checkpoint_outlives_a_deleted_reference_to_it() -> None:
    references = ObjectReferences()
    references.add(["t/a/x"])
    gone = references.condemn("t", "t/b", committed("t/b", "t/a/x"))
    assert gone == [DeleteCheckpoint("t", "t/b")]


@pytest.mark.parity(113)
def test_pinned_checkpoint_is_deleted_with_its_last_pin() -> None:
    references = ObjectReferences()
    references.pin(["t/a"])
    references.pin(["t/a"])
    assert references.condemn("t", "t/a", committed("t/a")) == []
    assert [one.key for one in references.condemned()] == ["t/a"]
    assert references.unpin(["t/a"]) == []
    assert references.unpin(["t/a"]) == [DeleteCheckpoint("t", "t/a")]
    assert references.condemned() == []


def test_manifest_may_refer_only_to_a_pinned_base_or_to_referenced_objects() -> None:
    references = ObjectReferences()
    references.add(["t/old/x"])
    assert references.may_refer(["t/base/anything", "t/old/x"], ["t/base"])
    assert not references.may_refer(["t/other/x"], ["t/base"])
    assert not references.may_refer(["t/old/y"], ["t/base"])
