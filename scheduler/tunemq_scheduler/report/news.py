"""What is said, once and loudly, about checkpoints that are damaged or will never be safe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tunemq_shared import messages as m

#: How many of those that went with a node are named.
_NAMED: Final = 5


def told_of_lost(node: m.NodeLost, keys: Sequence[str]) -> str:
    """One line about checkpoints that were on the disk of a node, and nowhere else, when it went.

    Args:
        keys: theirs; at least one.
    """
    named = ", ".join(keys[:_NAMED]) + (", ..." if len(keys) > _NAMED else "")
    what = "1 checkpoint was" if len(keys) == 1 else f"{len(keys)} checkpoints were"
    return f"{what} not in the store yet when their node was lost ({node.reason}): {named}"


def told_of(event: m.CheckpointLost | m.CheckpointDamaged) -> str:
    """One line for the person at the terminal; names every checkpoint that it is about first."""
    about = f"checkpoint {event.key} of trial {event.trial}"
    if isinstance(event, m.CheckpointLost):
        return f"{about} will never be in the store: {event.reason}"
    then = f"goes on from {event.instead} instead" if event.instead else "has none instead"
    return f"{about} is damaged; the trial {then}: {event.reason}"
