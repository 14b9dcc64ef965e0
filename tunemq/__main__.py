"""Entry point of the ``tunemq`` command."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tunemq import __version__


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    if given[:1] == ["report"]:
        # Programs call this command at each step, so it imports nothing else.
        from tunemq_shared.executables import report_command

        return report_command.main(given[1:])
    from tunemq_shared.system.standard_streams import fill_closed_streams, run_quietly

    fill_closed_streams()
    if given[:1] == ["health"]:
        # Containers call this command every few seconds.
        from tunemq_shared.health import health_command

        return run_quietly(lambda: health_command.main(given[1:]))
    # Scheduler and workers do not import each other: each provides its own commands.
    from tunemq_scheduler.cli import main
    from tunemq_shared.system.inherited_signals import take_default_signals
    from tunemq_workers.node import worker_command as worker

    if arguments is None:  # else the caller's process has its own
        take_default_signals()
    return main.main(__version__, given, others=[worker.add_parser])


if __name__ == "__main__":
    sys.exit(main())
