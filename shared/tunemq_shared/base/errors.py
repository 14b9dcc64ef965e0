"""Every error that TuneMQ raises, in one tree.

    TuneError                                  the base; Ray Tune's base has the same name
    ├─ UserError                               bad input: names the field, the value and the fix
    │   ├─ ConfigError                         an option of Tuner, TuneConfig, RunConfig, ...
    │   │   ├─ TunerVersionMismatch            another version pickled the Tuner
    │   │   └─ StoreNotAllowed                 a submitted search may not use this store
    │   ├─ SearchSpaceError                    a search space that cannot be sampled
    │   ├─ MetricError                         a reported metric that is missing or not finite
    │   ├─ TrainableError                      a trainable that cannot run or be shipped
    │   ├─ ResourceError                       a trial asks for more than any node has
    │   └─ CheckpointError                     not a usable checkpoint
    ├─ TrialError                              a trial ended in ERROR; carries its failures
    ├─ ExecutableFailed                        a trial's program exited with a code other than 0
    ├─ SearchFailed                            a search algorithm or trial scheduler raised
    ├─ TransportError                          Redis is unreachable or sends unreadable data
    │   └─ RedisUnavailable                    ... for this many seconds, at that address
    │       └─ RedisRejectsUser                ... which answers, but rejects our user
    ├─ SchedulerSuperseded                     another scheduler took over the farm
    │   └─ RunSuperseded                       another run continued the search
    ├─ NoScheduler                             the farm has no scheduler, or it does not answer
    ├─ RequestRejected                         the farm's scheduler rejected the request
    ├─ StoreError                              a checkpoint cannot be written or read
    │   ├─ CheckpointCorrupt                   sizes or hashes do not match the manifest
    │   └─ BlobCorrupt                         code or parameters are missing or damaged
    ├─ JournalError                            the experiment's journal cannot be written or read
    │   ├─ JournalCorrupt                      a damaged record with intact ones after it
    │   ├─ JournalFull                         the disk has no space for the journal
    │   ├─ JournalLocked                       another process has this experiment open
    │   └─ JournalVersionMismatch              another version of TuneMQ wrote the journal
    └─ BugError                                a defect of TuneMQ; please report it
        ├─ IllegalTransition                   a command that the trial's state forbids
        └─ InvariantBroken                     two parts of the state disagree

Errors for which callers expect a builtin (``ValueError``, ``RuntimeError``) inherit from it too.
The docstring of a class is its default message.
"""

from __future__ import annotations

from collections.abc import Sequence


class TuneError(Exception):
    """Something went wrong in TuneMQ."""

    def __init__(self, message: str | None = None) -> None:
        super().__init__(message if message is not None else (self.__doc__ or "").strip())


class UserError(TuneError, ValueError):
    """The input is invalid."""


class ConfigError(UserError):
    """An option has a value that is invalid."""


class TunerVersionMismatch(ConfigError):
    """Another version of TuneMQ, Python or cloudpickle pickled this Tuner."""


class StoreNotAllowed(ConfigError):
    """A submitted search may not use this store."""


class SearchSpaceError(UserError):
    """The search space cannot be sampled."""


class MetricError(UserError):
    """A reported metric is missing or is not a finite number."""


class TrainableError(UserError):
    """The trainable cannot be run or shipped."""


class ResourceError(UserError):
    """A trial asks for more than any node has."""


class CheckpointError(UserError):
    """This is not a usable checkpoint."""


class TrialError(TuneError, RuntimeError):
    """A trial ended in ERROR."""


class ExecutableFailed(TuneError, RuntimeError):
    """A trial's program failed."""


class SearchFailed(TuneError, RuntimeError):
    """A search algorithm, trial scheduler, stopper or callback raised."""


class TransportError(TuneError):
    """The transport of messages failed."""


class RedisUnavailable(TransportError, ConnectionError):
    """Redis cannot be reached."""


class RedisRejectsUser(RedisUnavailable):
    """Redis answers, but rejects the login or a right that this process cannot work without."""


class SchedulerSuperseded(TuneError, RuntimeError):
    """Another scheduler runs on this farm."""


class RunSuperseded(SchedulerSuperseded):
    """Another run of this search has its store."""


class NoScheduler(TuneError, RuntimeError):
    """No scheduler runs on this farm."""


class RequestRejected(TuneError, RuntimeError):
    """The farm's scheduler does not do what it was asked."""


class StoreError(TuneError, OSError):
    """A checkpoint cannot be written or read."""


class CheckpointCorrupt(StoreError):
    """A checkpoint's files do not match its manifest."""


class BlobCorrupt(StoreError):
    """A blob is missing, or is not what its name says."""


class JournalError(TuneError):
    """The experiment's journal cannot be written or read."""


class JournalCorrupt(JournalError):
    """A damaged record in the journal has whole ones behind it."""

    def __init__(self, path: str, offset: int, reason: str) -> None:
        self.path, self.offset, self.reason = path, offset, reason
        super().__init__(
            f"{path} is damaged at byte {offset}: {reason}. `tunemq journal salvage` writes what "
            "can be read into a new journal, and keeps this one."
        )

    def __reduce__(self) -> tuple[type[JournalCorrupt], tuple[str, int, str]]:
        return type(self), (self.path, self.offset, self.reason)


class JournalFull(JournalError):
    """The disk has no room for the journal."""


class JournalLocked(JournalError):
    """Another process has this experiment open."""


class JournalVersionMismatch(JournalError):
    """Another version of TuneMQ wrote the journal."""


class BugError(TuneError, RuntimeError):
    """A defect of TuneMQ; please report it."""


class IllegalTransition(BugError):
    """A command that a trial's state forbids; carries the trial's last events."""

    def __init__(self, trial: str, start: str, finish: str, story: Sequence[str] = ()) -> None:
        self.trial, self.start, self.finish, self.story = trial, start, finish, tuple(story)
        told = "".join(f"\n  {line}" for line in self.story)
        super().__init__(
            f"trial {trial} cannot go from {start} to {finish}; its last events:{told}"
        )

    def __reduce__(self) -> tuple[type[IllegalTransition], tuple[str, str, str, tuple[str, ...]]]:
        return type(self), (self.trial, self.start, self.finish, self.story)


class InvariantBroken(BugError):
    """Two parts of the state disagree."""
