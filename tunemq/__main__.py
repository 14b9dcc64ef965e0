"""The ``tunemq`` command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from tunemq import __version__


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="tunemq",
        description="Hyperparameter search on machines you own.",
        epilog="A search is started from a script: see the README. This command has no others yet.",
    )
    parser.add_argument("--version", action="version", version=f"tunemq {__version__}")
    parser.parse_args(arguments)
    parser.print_help()
    return 0


if __name__ == "__main__":
    sys.exit(main())
