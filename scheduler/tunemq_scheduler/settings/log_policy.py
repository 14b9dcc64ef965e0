"""`LogPolicy`: what a line that a trial prints means, as users say it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from tunemq_scheduler.core.runner_settings import DO_NOT_RETRY, EXCLUDE_NODE
from tunemq_shared.base.errors import ConfigError

#: So many policies an experiment may have, each with a pattern of at most so many characters: every
#: line of every trial is compared with all of them.
MOST_POLICIES: Final = 20
LONGEST_PATTERN: Final = 500


@dataclass(frozen=True)
class LogPolicy:
    """What a line that a trial prints means, should the trial fail.

    Each line of its ``stdout`` and ``stderr`` is searched for the pattern, whichever of its
    processes printed it; of a longer line the first 4 KiB. As long as the trial does not fail
    nothing follows from a match. A pattern that takes too long on a node is left out there, and a
    warning says so. With ``fit(debug=True)`` there are no policies.

    Attributes:
        pattern: a regular expression of Python's `re`.
        action: ``"do_not_retry"``: the trial ends in ERROR, whatever ``max_failures`` says.
            ``"exclude_node"``: it is not placed on that node any more, and tried again on another
            one; see ``FailureConfig(max_excluded_nodes=...)``.
    """

    pattern: str
    action: Literal["do_not_retry", "exclude_node"]

    def __post_init__(self) -> None:
        """Check both fields.

        Raises:
            ConfigError: naming the field, its value and what it may be.
        """
        pattern: Any = self.pattern
        if not isinstance(pattern, str) or not pattern:
            raise _bad("pattern", pattern, "give a regular expression")
        if len(pattern) > LONGEST_PATTERN:
            shown = f"{pattern[:40]}..."
            raise _bad("pattern", shown, f"give at most {LONGEST_PATTERN} characters")
        try:
            found = re.compile(pattern).search("")
        except (re.error, OverflowError, RecursionError) as error:
            raise _bad("pattern", pattern, f"it is no regular expression: {error}") from error
        if found is not None:
            fix = "it matches every line; give one that does not match an empty one"
            raise _bad("pattern", pattern, fix)
        if self.action not in (DO_NOT_RETRY, EXCLUDE_NODE):
            fix = f"choose one of {DO_NOT_RETRY!r}, {EXCLUDE_NODE!r}"
            raise _bad("action", self.action, fix)


def check_policies(given: Any) -> None:
    """Check the policies of a `FailureConfig`.

    Raises:
        ConfigError: naming the field, its value and what it may be.
    """
    where = "FailureConfig(log_policies=...)"
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise ConfigError(f"{where} is {given!r}; give a list of LogPolicy.")
    for one in given:
        if not isinstance(one, LogPolicy):
            raise ConfigError(f"{where} has {one!r}, which is no LogPolicy; write LogPolicy(...).")
    if len(given) > MOST_POLICIES:
        raise ConfigError(
            f"{where} has {len(given)} policies, and {MOST_POLICIES} are possible; join patterns "
            "of one action with |."
        )
    patterns = [one.pattern for one in given]
    for pattern in patterns:
        if patterns.count(pattern) > 1:
            raise ConfigError(
                f"{where} has the pattern {pattern!r} more than once; leave all but one out."
            )


def _bad(name: str, value: object, fix: str) -> ConfigError:
    return ConfigError(f"LogPolicy({name}={value!r}) is not usable: {fix}.")
