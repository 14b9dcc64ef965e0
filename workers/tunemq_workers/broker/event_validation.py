"""Check every event of a trial process before the node passes it on.

The process runs user code, which may replace clocks, write to the process's socket or do worse. So
the node checks everything: an event's kind, its trial and attempt, and the type, range and length
of each field. An invalid event ends its own trial and nothing else. The scheduler receives only
valid events.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from typing import Annotated, Any, Final, Literal, get_args

import msgspec
from msgspec import Meta

from tunemq_shared.base.decoding_errors import UNDECODABLE
from tunemq_shared.base.errors import MetricError, TransportError
from tunemq_shared.checkpoints.checkpoint_sink import checkpoint_key
from tunemq_shared.objects.store_address import is_remote
from tunemq_shared.protocol import messages as m
from tunemq_shared.protocol.message_limits import Count, Finite
from tunemq_shared.trial.metrics import DEEPEST, check_comparable, check_expected
from tunemq_shared.trial.results import ALWAYS_THERE, LATEST, measured, split_derived
from tunemq_workers.logs.log_policy_search import tag_of
from tunemq_workers.runtime.frames import MAX_EVENT_BYTES
from tunemq_workers.runtime.trial_process_state import TrialProcess

_Name = Annotated[str, Meta(max_length=4096)]
_Text = Annotated[str, Meta(max_length=2**20)]
_HostName = Annotated[str, Meta(max_length=255)]
_Number = Annotated[int, Meta(ge=1, le=2**53)]
_SignedCount = Annotated[int, Meta(ge=-(2**53), le=2**53)]
#: NaN is outside every range, infinity above this one.
_Time = Annotated[float, Meta(ge=0.0, le=LATEST)]
_Nothing = Annotated[str, Meta(max_length=0)]

_Plain = bool | int | float | str | None
_Nested = _Plain | list[_Plain] | dict[str, _Plain]
_Metrics = dict[str, _Plain | list[_Nested] | dict[str, _Nested]]

#: The bounds of each field. A new field of these events needs an entry here.
_FIELDS: Final[dict[str, Any]] = {
    "trial": _Name,
    "attempt": Count,
    "pid": Annotated[int, Meta(ge=1, le=2**22)],
    "hostname": _HostName,
    "node_ip": _HostName,
    "at": _Time,
    "gpus": Annotated[tuple[_HostName, ...], Meta(max_length=1024)],
    "printed": tuple[Count, Count],
    "step": Count,
    "metrics": _Metrics,
    "timestamp": _Time,
    "time_this_iter_s": Finite,
    "time_total_s": Finite,
    "time_since_restore": Finite,
    "iterations_since_restore": _Number,
    "timesteps_total": _SignedCount | None,
    "episodes_total": _SignedCount | None,
    "timesteps_since_restore": _SignedCount,
    "done": bool,
    "is_saved": bool,
    "n": _Number,
    "key": _Name,
    "sha256": Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")],
    "size": Count,
    # Only the node's uploads share objects between checkpoints, and only the node adds output.
    "shared": Annotated[tuple[str, ...], Meta(max_length=0)],
    "output": _Nothing,
    "is_shared": Literal[False],
    "what": Literal["", "save"],
    "reason": _Text,
    "instead": _Name,
    # The node itself reports the other kinds: some of them count against the node.
    "kind": Literal[
        "user", "metric", "load", "fetch", "restore", "storage", "memory", "cuda_memory"
    ],
    "error": _Text,
    "traceback": _Text,
}

#: The most reports of damaged checkpoints of one process: each is shown to people.
_MOST_DAMAGED: Final = 100
#: Length, in characters, to which a message shortens an invalid value.
_SHOWN: Final = 300
#: Limit in bytes for deeply nested metrics, because Python checks their values one by one.
_LONGEST_DEEP: Final = 128 * 2**10
#: Where msgspec found the error; the first element of an event is its kind. Before it, the error
#: may quote text of the trial's process.
_PLACE: Final = re.compile(r" - at `(?:key` in `)?\$\[(\d{1,3})\][^`]*`\Z")


def _bounded(kind: type[m.Message], **instead: Any) -> Any:
    """Return a struct like ``kind`` whose decoder rejects fields outside their bounds."""
    bounds = _FIELDS | instead
    fields: list[Any] = [
        (field.name, bounds[field.name])
        if field.default is msgspec.NODEFAULT
        else (field.name, bounds[field.name], field.default)
        for field in msgspec.structs.fields(kind)
    ]
    return msgspec.defstruct(
        kind.__name__,
        fields,
        array_like=True,
        tag=kind.__struct_config__.tag,
        frozen=True,
        forbid_unknown_fields=True,
        gc=False,
    )


_Result: Final = _bounded(m.ResultReported)
_ResultOfAnyDepth: Final = _bounded(m.ResultReported, metrics=dict[str, Any])
_Started: Final = _bounded(m.TrialStarted)
_Committed: Final = _bounded(m.CheckpointCommitted)
_Damaged: Final = _bounded(m.CheckpointDamaged)
_Paused: Final = _bounded(m.TrialPaused)
_Waits: Final = _bounded(m.TrialWaits)
_Event = _Result | _Started | _Committed | _Damaged | _Waits
_Ending = _bounded(m.TrialFinished) | _bounded(m.TrialFailed) | _Paused
_decode_event: Final = msgspec.msgpack.Decoder(_Event).decode
_decode_deep: Final = msgspec.msgpack.Decoder(_ResultOfAnyDepth).decode
_decode_ending: Final = msgspec.msgpack.Decoder(_Ending).decode
_decode_written: Final = msgspec.msgpack.Decoder(_bounded(m.CheckpointWritten)).decode

#: The events by the kind that stands first in each.
_KINDS: Final = {str(kind.__struct_config__.tag).encode(): kind for kind in get_args(m.NodeEvent)}

_RESULT: Final = str(m.ResultReported.__struct_config__.tag).encode()

_log = logging.getLogger(__name__)

#: Special values for the next step: no result was sent yet; no result may follow.
_FIRST: Final = -1
_NONE: Final = -2


class EventValidator:
    """Check the events of one attempt, in the order in which its process sends them.

    Args:
        process: the trial process with its order.
        emit: takes (events stream, encoded event) for events that need more work.
        emit_result: takes the same for results, which need none; most events are results.
        reject: takes the reason for which an event is invalid.
    """

    def __init__(
        self,
        process: TrialProcess,
        emit: Callable[[str, bytes], object],
        emit_result: Callable[[str, bytes], object],
        reject: Callable[[str], object],
    ) -> None:
        self._process, self._key, self._stream = process, process.key, process.start.events_key
        self._emit, self._emit_result, self._reject = emit, emit_result, reject
        self._required, self._required_derived = split_derived(process.start.required_metrics)
        self._finite, self._finite_derived = split_derived(process.start.finite_metrics)
        #: The step of the next result; 0 before the process reported its start.
        self._due = 0
        #: Number of the last checkpoint.
        self._n = 0
        #: How many checkpoints were reported as damaged.
        self._damaged = 0

    def take(self, payload: bytes) -> None:
        """Pass on a valid event, or reject it."""
        try:
            is_result = self._checked(payload)
        except Exception as error:  # noqa: BLE001  a trial's message must not end the node of others
            self._stop(_reason(payload, error))
        else:
            (self._emit_result if is_result else self._emit)(self._stream, payload)

    def end(self, payload: bytes) -> bool:
        """Pass on the attempt's last event, or reject it; return whether it was valid."""
        try:
            self._check_end(payload)
        except Exception as error:  # noqa: BLE001  as above
            self._stop(_reason(payload, error))
            return False
        self._due = _NONE
        self._emit(self._stream, payload)
        return True

    def _checked(self, payload: bytes) -> bool:
        """Return whether a valid event is a result.

        Raises:
            TransportError: it is invalid; the message says why.
        """
        if len(payload) > MAX_EVENT_BYTES:
            raise TransportError(
                f"{_named(payload)} has {len(payload)} bytes; {MAX_EVENT_BYTES} are possible"
            )
        try:
            event = _decoded(_decode_event, payload)
        except UNDECODABLE as error:
            event = _deeper(payload, error)
        if (
            type(event) is _Result
            and event.step == self._due > 0
            and (event.trial, event.attempt) == self._key
            and not self._wrong_metrics(event)
        ):
            self._due += 1
            return True
        if problem := self._problem(event):
            raise TransportError(f"{_named(payload)} {problem}")
        if isinstance(event, _Result | _ResultOfAnyDepth):
            self._due = event.step + 1
            return True
        return False

    def _check_end(self, payload: bytes) -> None:
        try:
            event = _decoded(_decode_ending, payload)
        except UNDECODABLE as error:
            raise TransportError(_explained(payload, error)) from error
        problem = self._wrong_attempt(event)
        if not problem and isinstance(event, _Paused) and not self._process.was_to_pause:
            problem = "comes although the trial was not told to pause"
        if problem:
            raise TransportError(f"{_named(payload)} {problem}")

    def _stop(self, problem: str) -> None:
        """Reject an event and all events after it."""
        self._due = _NONE
        self._reject(problem)

    def _problem(self, event: Any) -> str:
        """Describe the error in an event whose fields are within their bounds; "" if none."""
        if problem := self._wrong_attempt(event):
            return problem
        if isinstance(event, _Started):
            if self._due:
                return "comes twice"
            self._due = _FIRST
            return ""
        if problem := self._wrong_time():
            return problem
        if isinstance(event, _Waits):
            return ""
        if isinstance(event, _Committed):
            return self._wrong_checkpoint(event)
        if isinstance(event, _Damaged):
            return self._wrong_damage(event)
        due = self._due
        if event.step < 1 or event.step != due != _FIRST:
            expected = "from 1 on" if due == _FIRST else f"{due}"
            return (
                f"has the step (training_iteration) {event.step}, expected {expected}: a trial's "
                "process counts its results one by one"
            )
        return self._wrong_metrics(event)

    def _wrong_metrics(self, event: Any) -> str:
        """Say which metric the search could not compare; "" if none.

        The trial process checked this before, unless user code prevented that.
        """
        compared = (*self._process.start.stop, *self._process.order.run_until)
        try:
            check_expected(event.metrics, self._required, self._finite, step=event.step)
            if self._required_derived or self._finite_derived:
                derived = self._required_derived, self._finite_derived
                check_expected(measured(event), *derived, step=event.step)
            if compared:
                keys = tuple(one.key for one in compared if one.key not in ALWAYS_THERE)
                check_comparable(event.metrics, keys, step=event.step)
        except MetricError as error:
            return f"has a metric that cannot be compared: {error}"
        return ""

    def _wrong_attempt(self, event: Any) -> str:
        if (event.trial, event.attempt) == self._key:
            return ""
        trial, attempt = self._key
        return (
            f"names trial {event.trial[:_SHOWN]!r}, attempt {event.attempt}, and its process runs "
            f"trial {trial!r}, attempt {attempt}"
        )

    def _wrong_time(self) -> str:
        if self._due == 0:
            return "comes before the process has said that the trial started"
        return "comes after the trial's end" if self._due == _NONE else ""

    def _wrong_checkpoint(self, event: Any) -> str:
        if is_remote(self._process.start.store):
            return "is for the node to send: the node uploads this trial's checkpoints"
        problem = wrong_key(self._process, event, self._n)
        self._n = event.n
        return problem

    def _wrong_damage(self, event: Any) -> str:
        restorable = {ref.key for ref in self._process.start.restore}
        own = checkpoint_key(os.path.basename(self._process.start.folder), self._key[1], 0)
        if event.key not in restorable and not event.key.startswith(own.rstrip("0")):
            return f"names the checkpoint {event.key[:_SHOWN]!r} (key), which is not this trial's"
        if event.instead and event.instead not in restorable:
            return f"names the checkpoint {event.instead[:_SHOWN]!r} (instead), not one to restore"
        self._damaged += 1
        if self._damaged > _MOST_DAMAGED:
            return f"is one of more than {_MOST_DAMAGED} that name a damaged checkpoint"
        return ""


def read_written(process: TrialProcess, payload: bytes, last: int) -> m.CheckpointWritten:
    """Decode and check the event of a written checkpoint.

    Args:
        process: the trial process.
        payload: the encoded event.
        last: number of the process's previous checkpoint.

    Raises:
        TransportError: the event is invalid; the message names the field.
    """
    try:
        said = _decoded(_decode_written, payload)
    except UNDECODABLE as error:
        raise TransportError(_explained(payload, error)) from error
    if (said.trial, said.attempt) != process.key:
        raise TransportError(
            f"{_named(payload)} names trial {said.trial!r}, attempt {said.attempt}."
        )
    if problem := wrong_key(process, said, last):
        raise TransportError(f"{_named(payload)} {problem}")
    return m.CheckpointWritten(*msgspec.structs.astuple(said))


def wrong_key(process: TrialProcess, said: Any, last: int) -> str:
    """Describe the error in a checkpoint's number or key; "" if none."""
    if said.n <= last:
        return f"has the number (n) {said.n}, and {last} came before"
    own = checkpoint_key(os.path.basename(process.start.folder), said.attempt, said.n)
    if said.key != own:
        return f"has the key {said.key[:_SHOWN]!r}, and {own!r} is this checkpoint's"
    return ""


def _decoded(decode: Callable[[bytes], Any], payload: bytes) -> Any:
    """Decode an event of a kind that `tag_of` finds, as it does where TuneMQ encoded the event.

    Raises:
        ValidationError: msgspec finds another kind there, or none.
    """
    event = decode(payload)
    if tag_of(payload) not in _KINDS:
        raise msgspec.ValidationError("the length of its kind is encoded in another way")
    return event


def _deeper(payload: bytes, error: Exception) -> Any:
    """Decode a result whose metrics are nested more deeply than `_Metrics` allows.

    Raises:
        TransportError: the event is no result, or the values are not metrics.
    """
    if tag_of(payload) != _RESULT:
        raise TransportError(_explained(payload, error)) from error
    if len(payload) > _LONGEST_DEEP:
        raise TransportError(
            f"{_named(payload)} has {len(payload)} bytes and metrics nested more than two deep;"
            f" report at most {_LONGEST_DEEP} bytes of such metrics, or flat ones"
        ) from error
    try:
        event = _decode_deep(payload)
    except UNDECODABLE as deeper:
        raise TransportError(_explained(payload, deeper)) from error
    if problem := _unusable(event.metrics, 0):
        raise TransportError(f"{_named(payload)} has in its field 'metrics' {problem}") from error
    return event


def _unusable(value: Any, depth: int) -> str:
    """Say why a value is not a metric; "" if it is one."""
    if isinstance(value, _Plain):
        return ""
    if not isinstance(value, dict | list):
        return f"a {type(value).__name__}"
    if depth > DEEPEST:
        return f"values nested more than {DEEPEST} deep"
    inner = value
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            return "a name that is no text"
        inner = list(value.values())
    return next(filter(None, (_unusable(one, depth + 1) for one in inner)), "")


def _explained(payload: bytes, error: Exception) -> str:
    """Return msgspec's error with the field's name instead of its number."""
    said = str(error)
    found = _PLACE.search(said)
    if found is None:
        return f"{_named(payload)} cannot be read: {said[:_SHOWN]}"
    kind = _KINDS.get(tag_of(payload))
    place = int(found[1])
    names = ("kind", *(kind.__struct_fields__ if kind is not None else ()))
    name = names[place] if place < len(names) else f"number {place}"
    return f"{_named(payload)} has an unusable field {name!r}: {said[: found.start()][:_SHOWN]}"


def _reason(payload: bytes, error: Exception) -> str:
    """Return why an event is rejected."""
    if isinstance(error, TransportError):
        return str(error)
    _log.error("event.not_checked", exc_info=error)
    return f"{_named(payload)} cannot be checked ({type(error).__name__})"


def _named(payload: bytes) -> str:
    """Return the event as the subject of a sentence for people."""
    kind = _KINDS.get(tag_of(payload))
    return f"{kind.__name__} of the trial's process" if kind else "an event of the trial's process"
