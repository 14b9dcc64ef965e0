"""`LogPolicy`: what to do about a failed trial that printed a certain line."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from tunemq_scheduler.core.runner_settings import DO_NOT_RETRY, EXCLUDE_NODE
from tunemq_shared.base.errors import ConfigError

#: The most policies of an experiment, and the most characters of a pattern: the node compares
#: every line of every trial with all of them.
MOST_POLICIES: Final = 20
LONGEST_PATTERN: Final = 500


@dataclass(frozen=True)
class LogPolicy:
    """A rule for failed trials that printed a matching line: no retry, or a retry on another node.

    The node searches each line of the trial's ``stdout`` and ``stderr`` for the pattern, whichever
    of the trial's processes printed it; of a long line only the first 4 KiB. A match has no effect
    unless the trial fails. If a pattern takes too long, the node drops it and logs a warning. With
    ``fit(debug=True)`` policies have no effect.

    Attributes:
        pattern (str): a regular expression for Python's `re`, of at most 500 characters.
        action (str): ``"do_not_retry"`` ends the trial in ERROR, regardless of ``max_failures``.
            ``"exclude_node"`` retries it on another node and never on that one; see
            ``FailureConfig(max_excluded_nodes=...)``.

    Raises:
        ConfigError: a field is invalid; the message names the field, its value and valid values.

    Example:
        >>> from tunemq import FailureConfig, LogPolicy
        >>> policy = LogPolicy("CUDA error: uncorrectable ECC", "exclude_node")
        >>> FailureConfig(max_failures=2, log_policies=[policy]).log_policies[0].action
        'exclude_node'
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
            raise _bad("pattern", pattern, f"it is not a regular expression: {error}") from error
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
            raise ConfigError(
                f"{where} has {one!r}, which is not a LogPolicy; write LogPolicy(...)."
            )
    if len(given) > MOST_POLICIES:
        raise ConfigError(
            f"{where} has {len(given)} policies, and {MOST_POLICIES} are possible; join patterns "
            "of one action with |."
        )
    patterns = [one.pattern for one in given]
    for pattern in patterns:
        if patterns.count(pattern) > 1:
            raise ConfigError(f"{where} has the pattern {pattern!r} more than once; keep one.")


def _bad(name: str, value: object, fix: str) -> ConfigError:
    return ConfigError(f"LogPolicy({name}={value!r}) is invalid: {fix}.")
