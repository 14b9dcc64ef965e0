"""`Finding`: the result of a check: fine, a warning, or a problem with its fix."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class FindingLevel(StrEnum):
    """The severity of a finding."""

    #: The check ran and found nothing wrong.
    OK = "ok"
    #: It works, but a person should know about it.
    WARNING = "warning"
    #: A person has to fix it.
    PROBLEM = "problem"


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one check.

    Attributes:
        check: Its name, which is stable across versions: lower-case words and hyphens, such as
            ``redis-password``.
        level: Its severity.
        what: A sentence about what was found, with the field and the value; without any secret.
        fix: What to do, if possible as a command or a line of a file; empty if nothing is wrong.
        refuses: The scheduler and workers do not start with it, except with ``--insecure``.
    """

    check: str
    level: FindingLevel
    what: str
    fix: str = ""
    refuses: bool = False

    def __post_init__(self) -> None:
        """Check that exactly the findings that need action have a fix."""
        if (self.level is FindingLevel.OK) == bool(self.fix):
            raise ValueError(f"{self.check}: a fix is for what has to be fixed, and for all of it")


def ok(check: str, what: str) -> Finding:
    """Make a finding that nothing is wrong."""
    return Finding(check=check, level=FindingLevel.OK, what=what)


def warning(check: str, what: str, fix: str) -> Finding:
    """Make a finding that a person should know about."""
    return Finding(check=check, level=FindingLevel.WARNING, what=what, fix=fix)


def problem(check: str, what: str, fix: str, *, refuses: bool = False) -> Finding:
    """Make a finding that a person has to fix; ``refuses`` prevents a start."""
    return Finding(check=check, level=FindingLevel.PROBLEM, what=what, fix=fix, refuses=refuses)
