"""What is said, once and loudly, about checkpoints that are damaged or will never be safe."""

from __future__ import annotations

from tunemq_shared import messages as m


def told_of(event: m.CheckpointLost | m.CheckpointDamaged) -> str:
    """One line for the person at the terminal; names every checkpoint that it is about first."""
    about = f"checkpoint {event.key} of trial {event.trial}"
    if isinstance(event, m.CheckpointLost):
        return f"{about} will never be in the store: {event.reason}"
    then = f"goes on from {event.instead} instead" if event.instead else "has none instead"
    return f"{about} is damaged; the trial {then}: {event.reason}"
