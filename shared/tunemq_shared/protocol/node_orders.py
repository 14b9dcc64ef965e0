"""Orders to a node: what it is to host, and all that it needs for that.

The words are those of `tunemq_shared.protocol.messages`, which has these names, too.
"""

from __future__ import annotations

import msgspec

from tunemq_shared.protocol.conditions import Condition, Horizon
from tunemq_shared.protocol.trial_limits import TrialLimitSpec


class Order(msgspec.Struct, frozen=True, array_like=True):
    """The base of all that is ordered."""


class BlobRef(Order, frozen=True):
    """A content-addressed blob: pickled code, shared parameters, or a folder of code.

    ``path`` is its file. With a ``store`` it is to be fetched first: it is ``blobs/<sha256>`` in
    the store at that address, and has no path until then.
    """

    sha256: str
    size: int
    path: str
    store: str = ""


class CheckpointRef(Order, frozen=True):
    """A checkpoint to restore from.

    ``sha256`` is that of its manifest in the store, empty while it is not committed; ``written``
    that of its manifest on the disk of the node that wrote it, empty where there is none.
    """

    key: str
    sha256: str
    step: int
    written: str = ""


class Environment(Order, frozen=True):
    """What hosts of an experiment are forked from: one forkserver for each distinct value.

    Without a ``python`` it is the node's own interpreter. ``inherits``: the variables are added to
    those of the node. Relative entries of ``sys_path`` are below the folder of the experiment's
    bundle.
    """

    python: str
    preload: tuple[str, ...]
    variables: dict[str, str]
    sys_path: tuple[str, ...]
    inherits: bool = False


class TrialSpec(Order, frozen=True):
    """All that a node needs to start a host.

    ``store`` is the address of the experiment's store. ``restore`` are the checkpoints to go on
    from, the first usable one counts. ``cache`` is the folder in which the node keeps copies of
    checkpoints; where it is empty the node chooses. ``sync_timeout_s`` bounds each transfer, and
    each wait for one; ``uploads_waiting`` is how many written checkpoints may wait behind the one
    that is being uploaded. ``limits`` are what the host is killed for; ``time_spent_s`` is the
    ``time_total_s`` of the trial's last recorded result, in attempts before this one.
    ``devices`` are the GPUs that it may see, by UUID, and its share of each; empty where it has
    none, or where its node's GPUs are known by their number only. ``bundle`` is the folder of code
    that comes first where it imports from, ``blobs`` is what ``code`` needs beside itself. A
    ``folder`` that is relative is one below the node's own. ``log_patterns`` are regular
    expressions that the lines of its output are compared with (`LogMatched`).
    """

    experiment: str
    events_key: str
    trial_name: str
    trial_number: int
    folder: str
    code: BlobRef
    config: bytes
    resources: dict[str, float]
    environment: Environment
    store: str
    stop: tuple[Condition, ...] = ()
    required_metrics: tuple[str, ...] = ()
    finite_metrics: tuple[str, ...] = ()
    restore: tuple[CheckpointRef, ...] = ()
    last_step: int = 0
    checkpoint_frequency: int = 0
    checkpoint_at_end: bool = False
    seed: int = 0
    reuse: bool = False
    stop_grace_s: float = 5.0
    cache: str = ""
    sync_timeout_s: float = 1800.0
    uploads_waiting: int = 1
    limits: TrialLimitSpec = TrialLimitSpec()
    time_spent_s: float = 0.0
    devices: dict[str, float] = {}
    bundle: BlobRef | None = None
    blobs: tuple[BlobRef, ...] = ()
    log_patterns: tuple[str, ...] = ()


class TrialOrder(Order, frozen=True):
    """What a node is to do about one trial. A trial that it hosts and that is not listed is killed.

    ``run_until``: how far the trial may go before the scheduler has to be heard. ``stop``: end now,
    saving if that is due. ``pause``: save and end, to go on later. ``start`` is left out once the
    node has confirmed a version that held it. ``kill``: end at once; unlike for what is not listed
    `SlotFreed` follows even where there was no host. ``at_checkpoint``: who cannot save when asked
    to ``pause`` goes on until it has saved; it has so much time as nobody kills it.
    """

    trial: str
    attempt: int
    run_until: Horizon
    stop: bool = False
    start: TrialSpec | None = None
    pause: bool = False
    kill: bool = False
    at_checkpoint: bool = False

    def paused(self, *, at_checkpoint: bool = False) -> TrialOrder:
        """The order, and to pause; ``at_checkpoint``: if need be, not before it has saved."""
        may_run_on = at_checkpoint and (self.at_checkpoint or not self.pause)
        return msgspec.structs.replace(self, pause=True, at_checkpoint=may_run_on)


class Assignment(Order, frozen=True):
    """A node's mail: all that it is to host; the newest (term, version) counts.

    ``untouched`` are experiments, by the keys of their events, of which it says nothing: their
    hosts stay as they are, because whoever decides about them has not said yet what they are to do.
    ``store`` is the address of the farm's store, which the node tries once; empty where there is
    none on a server.
    """

    protocol: int
    instance_id: str
    term: int
    version: int
    orders: tuple[TrialOrder, ...]
    untouched: tuple[str, ...] = ()
    store: str = ""
