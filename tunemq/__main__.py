"""The ``tunemq`` command."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tunemq import __version__


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    from tunemq_scheduler.tools import command

    return command.main(__version__, arguments)


if __name__ == "__main__":
    sys.exit(main())
