"""The JSON answer of `tunemq doctor --json`."""

from __future__ import annotations

import msgspec

from tunemq_scheduler.security.findings import Finding


class Examination(msgspec.Struct, frozen=True, kw_only=True):
    """All that was found."""

    findings: tuple[Finding, ...]
    problems: int
    warnings: int

    def of(self, check: str) -> list[Finding]:
        """The findings of a check that report a problem."""
        return [one for one in self.findings if one.check == check and one.fix]

    def __str__(self) -> str:
        lines = [f"{one.level} {one.check}: {one.what} | {one.fix}" for one in self.findings]
        return "\n".join(lines)
