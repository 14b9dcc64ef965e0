"""What a check found: all is well, something to know, or what has to be mended, and how."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class FindingLevel(StrEnum):
    """How much a finding matters."""

    #: The check was done, and nothing is wrong.
    OK = "ok"
    #: It works, and there is something to know; nobody is kept from anything.
    WARNING = "warning"
    #: It has to be mended.
    PROBLEM = "problem"


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """What one check found.

    Attributes:
        check: its name, which stays the same from version to version: small words and hyphens, such
            as ``redis-password``.
        level: how much it matters.
        what: was found, in a sentence, with the field and the value; without any secret.
        fix: what to do, as a command or a line of a file where there is one; empty where all is
            well.
        refuses: the scheduler and workers do not start on it without ``--insecure``.
    """

    check: str
    level: FindingLevel
    what: str
    fix: str = ""
    refuses: bool = False

    def __post_init__(self) -> None:
        """A finding that somebody has to act on says how."""
        if (self.level is FindingLevel.OK) == bool(self.fix):
            raise ValueError(f"{self.check}: a fix is for what has to be mended, and for all of it")


def ok(check: str, what: str) -> Finding:
    """Nothing is wrong."""
    return Finding(check=check, level=FindingLevel.OK, what=what)


def warning(check: str, what: str, fix: str) -> Finding:
    """Something to know."""
    return Finding(check=check, level=FindingLevel.WARNING, what=what, fix=fix)


def problem(check: str, what: str, fix: str, *, refuses: bool = False) -> Finding:
    """Something to mend; with ``refuses``, nothing starts on it without ``--insecure``."""
    return Finding(check=check, level=FindingLevel.PROBLEM, what=what, fix=fix, refuses=refuses)
