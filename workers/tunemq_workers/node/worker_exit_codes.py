"""How a node ends: with which exit codes, 0 being that it was told to, and how gently."""

from __future__ import annotations

from typing import Final

#: The command line is of no use.
EXIT_USAGE: Final = 64
#: Redis is away, or lets nobody in (EX_UNAVAILABLE).
EXIT_UNAVAILABLE: Final = 69
#: A part of the node broke (EX_SOFTWARE).
EXIT_BROKEN: Final = 70
#: The node was fenced (EX_TEMPFAIL): a new instance may start.
EXIT_FENCED: Final = 75
#: Another node of its name took its place: started anew, the two would drive each other out.
EXIT_REPLACED: Final = 76

#: Trials save and end when no scheduler was heard for so long.
LOST_AFTER_S: Final = 1800.0
#: How long hosts get to save and end by themselves when a farm's node is told to stop.
GRACE_S: Final = 10.0
