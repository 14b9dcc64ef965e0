"""Exit codes of a node (0: it was asked to stop), and default delays before trials end."""

from __future__ import annotations

from typing import Final

#: The command line is invalid (EX_USAGE).
EXIT_USAGE: Final = 64
#: Redis is away, or rejects the connection (EX_UNAVAILABLE).
EXIT_UNAVAILABLE: Final = 69
#: A part of the node failed (EX_SOFTWARE).
EXIT_BROKEN: Final = 70
#: The node was fenced (EX_TEMPFAIL): a new instance may start.
EXIT_FENCED: Final = 75
#: Another node of the same name replaced it; a restart would make the two replace each other
#: forever.
EXIT_REPLACED: Final = 76

#: Trials save and end when no scheduler answered for this long.
LOST_AFTER_S: Final = 1800.0
#: How long trials get to save and end by themselves when a farm's node is asked to stop.
GRACE_S: Final = 10.0
