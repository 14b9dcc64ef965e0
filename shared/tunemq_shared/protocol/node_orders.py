"""Orders to a node: which trials it runs, and all that it needs for them.

`tunemq_shared.protocol.messages` defines the terms, and re-exports these names.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from tunemq_shared.protocol.message_limits import Count, Finite
from tunemq_shared.protocol.result_conditions import Condition, Horizon
from tunemq_shared.protocol.trial_limits import TrialLimitSpec

#: A text for paths, variables and arguments, which no operating system takes with a null character.
Text = Annotated[str, msgspec.Meta(pattern=r"\A[^\0]*\Z")]


class Order(msgspec.Struct, frozen=True, array_like=True):
    """The base of all orders."""


class BlobRef(Order, frozen=True):
    """A content-addressed blob: pickled code, shared parameters, or a folder of code.

    ``path`` is its file. A blob with a ``store`` is fetched first: it is ``blobs/<sha256>`` in the
    store at that address, and has no path until then.
    """

    sha256: Text
    size: Count
    path: Text
    store: Text = ""


class CheckpointRef(Order, frozen=True):
    """A checkpoint to restore from.

    ``sha256`` is that of its manifest in the store, empty while it is not committed; ``written``
    that of its manifest on the disk of the node that wrote it, empty if there is none.
    """

    key: Text
    sha256: Text
    step: int
    written: Text = ""


class Environment(Order, frozen=True):
    """The environment of an experiment's trial processes: one forkserver per distinct value.

    Without a ``python`` it is the node's own interpreter. ``inherits``: the variables are added to
    the node's. Relative entries of ``sys_path`` are below the folder of the experiment's bundle.
    """

    python: Text
    preload: tuple[Text, ...]
    variables: dict[Text, Text]
    sys_path: tuple[Text, ...]
    inherits: bool = False


class TrialSpec(Order, frozen=True):
    """All that a node needs to start a trial process.

    ``store`` is the address of the experiment's store. ``restore`` are the checkpoints to continue
    from; the first usable one counts. ``cache`` is the folder in which the node keeps copies of
    checkpoints; if it is empty, the node chooses. ``sync_timeout_s`` bounds each transfer, and each
    wait for one; ``uploads_waiting`` is how many written checkpoints may wait behind the one that
    is being uploaded. ``limits`` are those at which the node kills the process; ``time_spent_s`` is
    the ``time_total_s`` of the trial's last recorded result, in earlier attempts. ``devices`` are
    the GPUs that it may see, by UUID, and its share of each; empty if it has none, or if the node
    knows its GPUs by number only. ``bundle`` is the folder of code that comes first on its import
    path; ``blobs`` is what ``code`` needs in addition. A relative ``folder`` is below the node's
    own, and for this attempt only; ``is_shared``: a lost attempt may still run in the absolute one,
    on another machine. ``log_patterns`` are regular expressions that the node matches with the
    lines of its output (`LogMatched`).
    """

    experiment: Text
    events_key: Text
    trial_name: Text
    trial_number: int
    folder: Text
    code: BlobRef
    config: bytes
    resources: dict[Text, Finite]
    environment: Environment
    store: Text
    stop: tuple[Condition, ...] = ()
    required_metrics: tuple[Text, ...] = ()
    finite_metrics: tuple[Text, ...] = ()
    restore: tuple[CheckpointRef, ...] = ()
    last_step: int = 0
    checkpoint_frequency: int = 0
    checkpoint_at_end: bool = False
    seed: int = 0
    reuse: bool = False
    stop_grace_s: Finite = 5.0
    cache: Text = ""
    sync_timeout_s: Finite = 1800.0
    uploads_waiting: int = 1
    limits: TrialLimitSpec = TrialLimitSpec()
    time_spent_s: Finite = 0.0
    devices: dict[Text, Finite] = {}
    bundle: BlobRef | None = None
    blobs: tuple[BlobRef, ...] = ()
    log_patterns: tuple[Text, ...] = ()
    is_shared: bool = False


class TrialOrder(Order, frozen=True):
    """What a node is to do about one trial; the node kills a running trial that is not listed.

    ``run_until``: how far the trial may go before the scheduler decides again. ``stop``: end now,
    saving if a checkpoint is due. ``pause``: save and end, to continue later. The scheduler omits
    ``start`` once the node has confirmed a version that held it, and before that as long as it does
    not fit; a trial begins when its ``start`` has arrived. ``kill``: end at once; unlike for
    an unlisted trial, `SlotFreed` follows even if there was no process. ``at_checkpoint``: a trial
    that cannot save when asked to ``pause`` runs on until its next save, unless it is killed first.
    """

    trial: Text
    attempt: Count
    run_until: Horizon
    stop: bool = False
    start: TrialSpec | None = None
    pause: bool = False
    kill: bool = False
    at_checkpoint: bool = False

    def paused(self, *, at_checkpoint: bool = False) -> TrialOrder:
        """The order with ``pause`` set; ``at_checkpoint``: the trial may first run to its save."""
        may_run_on = at_checkpoint and (self.at_checkpoint or not self.pause)
        return msgspec.structs.replace(self, pause=True, at_checkpoint=may_run_on)


class Assignment(Order, frozen=True):
    """All that a node is to run; the newest (term, version) counts.

    ``untouched`` are experiments, by the keys of their events, that the assignment does not cover:
    their trial processes stay as they are, because their experiment process has not decided yet.
    ``store`` is the address of the farm's store, which the node tests once; empty if the store is
    not on a server.
    """

    protocol: int
    instance_id: Text
    term: int
    version: int
    orders: tuple[TrialOrder, ...]
    untouched: tuple[Text, ...] = ()
    store: Text = ""
