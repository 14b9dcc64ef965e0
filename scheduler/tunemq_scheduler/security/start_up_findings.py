"""What a scheduler or a worker does about findings when it starts: refuse, tell, or go on."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tunemq_scheduler.security.findings import Finding, FindingLevel
from tunemq_shared.base.errors import ConfigError


def refuse(findings: Iterable[Finding], *, is_insecure: bool, tell: Callable[[str], None]) -> None:
    """Return if one may start on this; what does not keep anybody from starting is told.

    Args:
        is_insecure: whether ``--insecure`` was given: then all is only told.
        tell: shows a line to people.

    Raises:
        ConfigError: one may not; says all that is wrong, and how to mend it.
    """
    wrong = [finding for finding in findings if finding.level is not FindingLevel.OK]
    reasons = [finding for finding in wrong if finding.refuses and not is_insecure]
    if reasons:
        said = " ".join(f"{finding.what} To mend it: {finding.fix}" for finding in reasons)
        raise ConfigError(f"{said} With --insecure it is used all the same.")
    for finding in wrong:
        tell(f"{finding.level.value}: {finding.what} To mend it: {finding.fix}")
