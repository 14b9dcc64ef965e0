"""`refuse`: stops a scheduler or worker at its start, or shows warnings, by its findings."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tunemq_scheduler.security.findings import Finding, FindingLevel
from tunemq_shared.base.errors import ConfigError


def refuse(findings: Iterable[Finding], *, is_insecure: bool, tell: Callable[[str], None]) -> None:
    """Stop the start if a finding requires it; show all other findings.

    Args:
        findings: The results of the checks.
        is_insecure: ``--insecure`` was given: findings are only shown.
        tell: Shows a line to people.

    Raises:
        ConfigError: The start is refused; names all problems and their fixes.
    """
    wrong = [finding for finding in findings if finding.level is not FindingLevel.OK]
    reasons = [finding for finding in wrong if finding.refuses and not is_insecure]
    if reasons:
        said = " ".join(f"{finding.what} To fix it: {finding.fix}" for finding in reasons)
        raise ConfigError(f"{said} With --insecure it is used all the same.")
    for finding in wrong:
        tell(f"{finding.level.value}: {finding.what} To fix it: {finding.fix}")
