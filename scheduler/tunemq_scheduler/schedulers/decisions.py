"""What a trial scheduler may answer: a decision about the trial, and actions on any trial."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Self

from msgspec.structs import replace

from tunemq_scheduler.core.trial_decisions import REASON_CHARACTERS
from tunemq_shared.base.errors import ConfigError, SearchFailed
from tunemq_shared.base.safe_text import encodable, text_of
from tunemq_shared.code.config_packing import pack_config
from tunemq_shared.protocol import messages as m
from tunemq_shared.trainable.resources import PlacementGroupFactory


class SchedulerDecision(str):
    """A decision with a reason: ``return TrialScheduler.STOP.because("too slow")``.

    It equals the plain string, which a scheduler may return as well.
    """

    __slots__ = ("reason",)
    reason: str

    def __new__(cls, decision: str, reason: str = "") -> Self:
        """Create a decision with a reason."""
        verdict = super().__new__(cls, decision)
        verdict.reason = reason
        return verdict

    def because(self, reason: str) -> SchedulerDecision:
        """Return the same decision with a reason, which is journalled and shown."""
        return SchedulerDecision(self, reason)


#: The decisions about the trial that reported, by their words.
DECISIONS: Final = {word: SchedulerDecision(word) for word in (m.CONTINUE, m.PAUSE, m.STOP)}
#: Ray Tune's word for "no decision".
NOOP: Final = "NOOP"


@dataclass(frozen=True)
class Action:
    """The base class of actions, which a scheduler's methods may return for any trial.

    Attributes:
        trial: the trial, or its id.
        reason: why; journalled and shown.
    """

    trial: Any
    reason: str = ""
    word: ClassVar[str] = ""

    @property
    def trial_id(self) -> str:
        """The trial's id."""
        return id_of(self.trial)

    def event(self, default_reason: str) -> m.ActionTaken:
        """Return the event to journal."""
        reason = reason_text(self.reason) or default_reason
        return m.ActionTaken(self.trial_id, self.word, reason)


class Stop(Action):
    """End a trial for good, whether it runs, waits or is paused; results behind it are dropped."""

    word = m.STOP


class Pause(Action):
    """Save a trial and free its slot; one that waits for a slot ceases to wait."""

    word = m.PAUSE


class Resume(Action):
    """Let a paused trial wait for a slot as a PENDING trial."""

    word = m.RESUME


@dataclass(frozen=True)
class Exploit(Action):
    """Let a trial continue from the state of another one, as a new lineage; copies no files.

    A running trial ends its process and waits for a slot; a paused one stays paused. Its next step
    is the one behind that of the checkpoint.

    Attributes:
        source: the trial whose state it takes, or its id; it may be the trial itself.
        checkpoint: one of the source's checkpoints in the store, or its key; None for the newest
            that the source's results so far announced, for which the trial waits.
        config: its new configuration; None to keep its own.
    """

    source: Any = None
    checkpoint: Any = None
    config: dict[str, Any] | None = None
    word = m.EXPLOIT

    def event(self, default_reason: str) -> m.ActionTaken:
        """Return the event to journal."""
        key = "" if self.checkpoint is None else getattr(self.checkpoint, "key", self.checkpoint)
        return replace(
            super().event(default_reason),
            source=id_of(self.source),
            checkpoint=str(key),
            config=b"" if self.config is None else _packed(self.config),
        )


@dataclass(frozen=True)
class SetConfig(Action):
    """Give a trial another configuration; a running one saves, and continues with it.

    Attributes:
        config: its new configuration, whole.
    """

    config: dict[str, Any] = field(default_factory=dict)
    word = m.SET_CONFIG

    def event(self, default_reason: str) -> m.ActionTaken:
        """Return the event to journal."""
        return replace(super().event(default_reason), config=_packed(self.config))


@dataclass(frozen=True)
class SetResources(Action):
    """Give a trial another resource request; a running one saves, and is placed again.

    Attributes:
        resources: the new request, whole, such as ``{"cpu": 2, "gpu": 1}``.
    """

    resources: dict[str, float] = field(default_factory=dict)
    word = m.SET_RESOURCES

    def event(self, default_reason: str) -> m.ActionTaken:
        """Return the event to journal."""
        needed = PlacementGroupFactory([self.resources]).required_resources
        return replace(super().event(default_reason), resources=needed)


def _packed(config: Any) -> bytes:
    """Pack a configuration.

    Raises:
        ConfigError: it is no dict.
    """
    if not isinstance(config, dict):
        raise ConfigError(f"config={config!r} of an action is invalid: give the whole dict.")
    return pack_config(config)


def reason_text(reason: object) -> str:
    """Return a reason that can be journalled: a text of bounded length; None is no reason."""
    text = "" if reason is None else encodable(text_of(reason))
    return text if len(text) <= REASON_CHARACTERS else f"{text[: REASON_CHARACTERS - 1]}…"


def id_of(trial: Any) -> str:
    """Return the id of a trial that was given as an object or by its id."""
    return str(getattr(trial, "trial_id", trial))


#: What a scheduler's method may return: nothing, a decision, an action, or several of these.
Answer = str | Action | Iterable[str | Action] | None


def read_answer(
    scheduler: object, method: str, answer: object, trial: str = ""
) -> tuple[SchedulerDecision, list[Action]]:
    """Split a scheduler's answer into the decision about a trial, and actions on others.

    Args:
        scheduler: the trial scheduler, for messages.
        method: the method that answered, for messages.
        answer: what it returned.
        trial: the trial that it decides about; empty if the method decides about none.

    Raises:
        SearchFailed: the answer is none of those allowed; the message names the scheduler, the
            method and the allowed answers.
    """
    decision, actions = DECISIONS[m.CONTINUE], list[Action]()
    parts = answer if isinstance(answer, list | tuple) else (answer,)
    for part in parts:
        if isinstance(part, Action) and part.word:
            if part.trial_id == trial and part.word in DECISIONS:
                decision = SchedulerDecision(part.word, part.reason)
            elif part.trial_id != trial or part.word != m.RESUME:
                actions.append(part)
        elif isinstance(part, SchedulerDecision) and trial:
            decision = part
        elif isinstance(part, str) and trial and part in DECISIONS:
            decision = DECISIONS[part]
        elif part != NOOP and not (part is None and not trial):
            raise SearchFailed(_refusal(scheduler, method, part, decides=bool(trial)))
    return decision, actions


def _refusal(scheduler: object, method: str, part: object, *, decides: bool) -> str:
    kinds = (Stop, Pause, Resume, Exploit, SetConfig, SetResources)
    actions = ", ".join(kind.__name__ for kind in kinds)
    allowed = f"one of {', '.join(DECISIONS)}, or " if decides else "None, or "
    return (
        f"{type(scheduler).__name__}.{method} returned {part!r}; "
        f"it must return {allowed}a list with actions ({actions})."
    )
