"""A runner, nodes and a store whose every step is drawn; see `test_checkpoint_references`."""

from __future__ import annotations

import hashlib
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.simulation.memory_objects import Delayed, MemoryObjects
from tunemq_scheduler.core import commands as c
from tunemq_scheduler.core.runner_settings import RunnerSettings
from tunemq_scheduler.core.trial_runner import TrialRunner
from tunemq_scheduler.core.trials.kept_checkpoints import CheckpointManager, RetentionPolicy
from tunemq_shared.base.retrying import CancelToken
from tunemq_shared.checkpoints import object_checkpoints
from tunemq_shared.checkpoints.manifest import (
    COMMITTED,
    FILES,
    MANIFEST,
    CheckpointInfo,
    FileEntry,
    make_manifest,
)
from tunemq_shared.checkpoints.object_checkpoints import UploadedCheckpoint
from tunemq_shared.protocol import messages as m

#: Largest number of uncommitted checkpoints of a trial on a node.
ROOM = 3
FILE_COUNT = 3
NODES = 2
MOST_TRIALS = 6

PICK = st.integers(0, 1000)
RARELY = st.integers(0, 3).map(lambda drawn: drawn == 3)


def pick(among: Sequence[Any], place: int) -> Any:
    return among[place % len(among)]


@dataclass(eq=False)
class SimulatedTrialProcess:
    trial: str
    attempt: int
    node: Node
    contents: list[int]
    step: int = 0
    n: int = 0


@dataclass(eq=False)
class Upload:
    written: m.CheckpointWritten
    uploaded: UploadedCheckpoint | None = None
    steps: list[Callable[[], None]] = field(default_factory=list)


@dataclass(eq=False)
class Node:
    instance_id: str
    #: Events of the node that the scheduler has not read yet.
    events: deque[m.NodeEvent] = field(default_factory=deque)
    processes: dict[str, SimulatedTrialProcess] = field(default_factory=dict)
    queues: dict[str, deque[Upload]] = field(default_factory=dict)
    bases: dict[tuple[str, int], str] = field(default_factory=dict)


class Cloned(CheckpointManager):
    """The checkpoints of a trial that starts from another trial's, as in exploitation."""

    donor: CheckpointManager | None = None

    def refs(self, node: str, first_attempt: int = 0) -> tuple[m.CheckpointRef, ...]:
        donor, self.donor = self.donor, None
        return donor.refs("") if donor is not None else super().refs(node, first_attempt)


class Farm(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.objects = MemoryObjects()
        self.scratch = tempfile.TemporaryDirectory()
        self.root = Path(self.scratch.name)
        self.contents: dict[str, list[int]] = {}
        self.counter = 0
        #: The objects that each inspected manifest refers to, and its own key.
        self.manifests: dict[str, set[str]] = {}
        self.nodes: list[Node] = []
        self.lives = 0
        #: Removals that the scheduler has ordered, and the remaining steps of each that has begun.
        self.removals: list[c.Command] = []
        self.removing: list[list[Callable[[], None]]] = []
        #: Steps of cancelled uploads that still take effect.
        self.late: list[Callable[[], None]] = []
        #: Whether an upload was cut off, so that there is something to collect.
        self.is_littered = False

    @initialize(
        num_to_keep=st.sampled_from([1, 2, None]),
        in_experiment=st.sampled_from([None, 2]),
        is_cloned=st.booleans(),
    )
    def begin(self, num_to_keep: int | None, in_experiment: int | None, is_cloned: bool) -> None:
        keep = RetentionPolicy(
            num_to_keep=num_to_keep, score_attribute="score", in_experiment=in_experiment
        )
        restore: tuple[m.CheckpointRef, ...] = ()
        if is_cloned:
            key = "restored/checkpoint_0-000001"
            written = self.write("restored", 0, 1, 5, key, [0] * FILE_COUNT)
            folder = self.root / key
            uploaded = object_checkpoints.upload(self.objects, key, folder, None, CancelToken())
            restore = (m.CheckpointRef(key, uploaded.sha256, written.step),)
        for_ever = {"max_failures": -1, "max_storage_failures": -1, "max_node_losses": -1}
        self.runner = TrialRunner(RunnerSettings(**for_ever, keep=keep, restore=restore))
        for _ in range(NODES):
            self.join()
        for _ in range(2):
            self.suggest()
            self.start(0, damaged=0, donor=0, clones=False)

    # --- the scheduler's side ---------------------------------------------------------------------

    def tell(self, event: m.Event, *answers: m.AlgorithmAnswer) -> None:
        is_wanted = isinstance(event, m.CheckpointCommitted) and self.is_wanted(event)
        commands = self.runner.handle(event, answers)
        is_recorded = any(isinstance(one, c.NotifyCheckpoint) for one in commands)
        assert is_recorded or not is_wanted, f"{event} was refused"
        for command in commands:
            match command:
                case c.StartTrial():
                    self.order = command
                case c.PauseTrial() | c.StopTrial():
                    self.end_process(command)
                case c.DeleteCheckpoint() | c.DeleteObjects():
                    self.removals.append(command)
                case _:
                    pass

    def is_wanted(self, event: m.CheckpointCommitted) -> bool:
        """Whether the upload was journalled, and has not been cancelled since."""
        trial = self.runner.live.get(event.trial)
        written = trial.checkpoints.get(event.key) if trial is not None else None
        return written is not None and written.is_wanted

    @precondition(lambda self: self.runner.suggested < MOST_TRIALS)
    @rule()
    def suggest(self) -> None:
        n = self.runner.suggested
        self.tell(m.ConfigSuggested(n, f"t_{n}", b"", "", {"cpu": 1.0}))
        self.runner.live[f"t_{n}"].checkpoints = Cloned(self.runner.settings.keep)

    @precondition(lambda self: any(self.runner.waiting()))
    @rule(which=PICK, damaged=st.sampled_from([0] * 8 + [1, 2]), donor=PICK, clones=st.booleans())
    def start(self, which: int, damaged: int, donor: int, clones: bool) -> None:
        trial = pick(list(self.runner.waiting()), which)
        if clones:
            trial.checkpoints.donor = pick(list(self.runner.live.values()), donor).checkpoints
        self.tell(m.TrialChosen(trial.trial_id))
        self.begin_process(self.order, damaged)

    @precondition(lambda self: self.runner.live)
    @rule(which=PICK, is_meant=RARELY)
    def forget(self, which: int, is_meant: bool) -> None:
        if is_meant:
            self.tell(m.CheckpointsForgotten(pick(list(self.runner.live), which)))

    @precondition(lambda self: any(node.events for node in self.nodes))
    @rule(which=PICK, decision=st.sampled_from([None] * 20 + [m.PAUSE, m.STOP]))
    def read_event(self, which: int, decision: str | None) -> None:
        node = pick([node for node in self.nodes if node.events], which)
        event = node.events.popleft()
        answers: list[m.AlgorithmAnswer] = []
        if isinstance(event, m.ResultReported) and decision is not None:
            answers.append(m.DecisionMade(event.trial, event.step, decision, "drawn"))
        self.tell(event, *answers)

    @rule()
    def read_everything(self) -> None:
        for node in list(self.nodes):
            while node.events:
                self.tell(node.events.popleft())

    @precondition(lambda self: self.removals)
    @rule(which=PICK)
    def begin_removal(self, which: int) -> None:
        removal = self.removals.pop(which % len(self.removals))
        objects = Delayed(self.objects)
        if isinstance(removal, c.DeleteCheckpoint):
            object_checkpoints.delete_checkpoint(objects, removal.key, removal.keep)
        else:
            object_checkpoints.delete_objects(objects, removal.keys)
        self.removing.append(objects.steps)

    @precondition(lambda self: self.removing)
    @rule(which=PICK)
    def continue_removing(self, which: int) -> None:
        steps = pick(self.removing, which)
        if steps:
            steps.pop(0)()
        if not steps:
            self.removing.remove(steps)

    @rule()
    def remove_everything(self) -> None:
        while self.removals:
            self.begin_removal(0)
        while self.removing:
            self.continue_removing(0)

    @precondition(lambda self: not (self.removals or self.removing))
    @rule()
    def collect(self) -> None:
        live = self.runner.live_checkpoints()
        object_checkpoints.collect(self.objects, live, self.runner.is_busy)

    # --- nodes ------------------------------------------------------------------------------------

    def join(self) -> None:
        self.lives += 1
        node = Node(f"node.{self.lives}")
        self.nodes.append(node)
        self.tell(m.NodeJoined(node.instance_id, "node", "process", "127.0.0.1", {"cpu": 2.0}))

    @rule(which=PICK, stragglers=st.booleans(), is_meant=RARELY)
    def lose_node(self, which: int, stragglers: bool, is_meant: bool) -> None:
        if not is_meant:
            return
        node = pick(self.nodes, which)
        self.nodes.remove(node)
        self.is_littered = True
        for queue in node.queues.values():
            self.late += queue[0].steps[:1] if queue and stragglers else []
        self.tell(m.NodeLost(node.instance_id, "drawn", is_dead=True))
        self.join()

    def begin_process(self, order: c.StartTrial, damaged: int) -> None:
        node = next(one for one in self.nodes if one.instance_id == order.instance_id)
        process = SimulatedTrialProcess(
            order.trial, order.attempt, node, [0] * FILE_COUNT, step=order.last_step
        )
        node.processes[order.trial] = process
        keys = [ref.key for ref in order.restore]
        for key, instead in zip(keys[:damaged], [*keys[1:], ""], strict=False):
            event = m.CheckpointDamaged(order.trial, order.attempt, key, "drawn", instead)
            node.events.append(event)
        if damaged < len(keys):
            key = keys[damaged]
            # References do not distinguish a repeated step from a new one: the count continues.
            process.contents = list(self.contents[key])
            node.bases[process.trial, process.attempt] = key
        elif keys:
            failed = m.TrialFailed(process.trial, process.attempt, "restore", "drawn", "", 0.0)
            self.gone(process, failed)

    def processes(self) -> list[SimulatedTrialProcess]:
        return [process for node in self.nodes for process in node.processes.values()]

    def gone(self, process: SimulatedTrialProcess, *events: m.NodeEvent) -> None:
        del process.node.processes[process.trial]
        process.node.events += [*events, m.SlotFreed(process.trial, process.attempt)]

    def end_process(self, order: c.PauseTrial | c.StopTrial) -> None:
        for process in self.processes():
            if (process.trial, process.attempt) == (order.trial, order.attempt):
                is_pause = isinstance(order, c.PauseTrial)
                said = [m.TrialPaused(process.trial, process.attempt)] if is_pause else []
                self.gone(process, *said)

    @precondition(lambda self: self.processes())
    @rule(which=PICK, is_death=st.booleans(), is_meant=RARELY)
    def end(self, which: int, is_death: bool, is_meant: bool) -> None:
        if not is_meant:
            return
        process = pick(self.processes(), which)
        if is_death:
            self.gone(process, m.TrialProcessDied(process.trial, process.attempt, 1, 9, None, 0.0))
        else:
            self.gone(process, m.TrialFinished(process.trial, process.attempt))

    @precondition(lambda self: self.processes())
    @rule(
        which=PICK,
        file=st.integers(0, FILE_COUNT),
        score=st.sampled_from([0.1, 0.5, 0.9]),
        times=st.integers(1, 2),
    )
    def save(self, which: int, file: int, score: float, times: int) -> None:
        for _ in range(times):
            self.save_once(pick(self.processes(), which), file, score)

    def save_once(self, process: SimulatedTrialProcess, file: int, score: float) -> None:
        queue = process.node.queues.setdefault(process.trial, deque())
        if len(queue) >= ROOM:
            return
        process.step += 1
        process.n += 1
        if file < FILE_COUNT:  # else all files stay as they are
            self.counter += 1
            process.contents[file] = self.counter
        key = f"{process.trial}/checkpoint_{process.attempt}-{process.n:06d}"
        written = self.write(
            process.trial, process.attempt, process.n, process.step, key, process.contents
        )
        seconds = float(process.step)
        metrics = {"score": score}
        event = m.ResultReported(
            process.trial,
            process.attempt,
            process.step,
            metrics,
            0.0,
            1.0,
            seconds,
            seconds,
            process.step,
        )
        process.node.events += [event, written]
        queue.append(Upload(written))
        if len(queue) == 1:
            self.begin_upload(process.node, process.trial)

    def write(
        self, trial: str, attempt: int, n: int, step: int, key: str, contents: list[int]
    ) -> m.CheckpointWritten:
        """Put a checkpoint on a node's disk."""
        folder = self.root / key
        (folder / FILES).mkdir(parents=True)
        files: list[FileEntry] = []
        for place, content in enumerate(contents):
            data = f"content {content}".encode()
            (folder / FILES / f"{place}").write_bytes(data)
            files.append(FileEntry(f"{place}", len(data), hashlib.sha256(data).hexdigest()))
        info = CheckpointInfo(trial=trial, attempt=attempt, n=n, step=step, metrics={}, state={})
        manifest = make_manifest(info, tuple(files), ())
        (folder / MANIFEST).write_bytes(manifest)
        self.contents[key] = list(contents)
        sha256 = hashlib.sha256(manifest).hexdigest()
        return m.CheckpointWritten(trial, attempt, n, step, key, sha256, 1)

    # --- uploads ----------------------------------------------------------------------------------

    def uploading(self) -> list[tuple[Node, str]]:
        return [
            (node, trial) for node in self.nodes for trial, queue in node.queues.items() if queue
        ]

    def begin_upload(self, node: Node, trial: str) -> None:
        upload = node.queues[trial][0]
        written = upload.written
        base = node.bases.get((trial, written.attempt))
        path = self.root / base / COMMITTED if base is not None else None
        objects = Delayed(self.objects)
        upload.uploaded = object_checkpoints.upload(
            objects, written.key, self.root / written.key, path, CancelToken()
        )
        # The checkpoint exists once the upload ends; a retry on this node may ask for it earlier.
        (self.root / written.key / COMMITTED).unlink()
        upload.steps = objects.steps

    @precondition(lambda self: self.uploading())
    @rule(which=PICK)
    def continue_uploading(self, which: int) -> None:
        node, trial = pick(self.uploading(), which)
        queue = node.queues[trial]
        upload = queue[0]
        upload.steps.pop(0)()
        if upload.steps:
            return
        queue.popleft()
        said, done = upload.written, upload.uploaded
        assert done is not None
        (self.root / said.key / COMMITTED).write_bytes(done.manifest)
        node.events.append(
            m.CheckpointCommitted(
                trial, said.attempt, said.n, said.step, said.key, done.sha256, 1, done.shared
            )
        )
        node.bases[trial, said.attempt] = said.key
        if queue:
            self.begin_upload(node, trial)

    @precondition(lambda self: self.uploading())
    @rule(which=PICK)
    def upload_to_the_end(self, which: int) -> None:
        node, trial = pick(self.uploading(), which)
        upload = node.queues[trial][0]
        while upload.steps:
            self.continue_uploading(self.uploading().index((node, trial)))

    @precondition(lambda self: self.uploading())
    @rule(which=PICK, straggles=st.booleans(), is_meant=RARELY)
    def give_up(self, which: int, straggles: bool, is_meant: bool) -> None:
        if not is_meant:
            return
        node, trial = pick(self.uploading(), which)
        lost = node.queues.pop(trial)
        self.is_littered |= straggles
        self.late += lost[0].steps[:1] if straggles else []
        for upload in lost:
            said = upload.written
            node.events.append(m.CheckpointLost(trial, said.attempt, said.key, "drawn", 0.0))
        if trial in node.processes:
            process = node.processes[trial]
            self.gone(process, m.TrialFailed(trial, process.attempt, "storage", "drawn", "", 0.0))

    @precondition(lambda self: self.late)
    @rule(which=PICK)
    def arrive_late(self, which: int) -> None:
        self.late.pop(which % len(self.late))()

    # --- invariants -------------------------------------------------------------------------------

    def needed(self) -> set[str]:
        """All that has to be in the store."""
        needed: set[str] = set()
        for key, sha256 in self.runner.live_checkpoints().items():
            if key not in self.manifests:
                manifest = object_checkpoints.read_manifest(self.objects, key, sha256)
                self.manifests[key] = {f"{key}/{MANIFEST}", *manifest.objects.values()}
            needed |= self.manifests[key]
        return needed

    @invariant()
    def nothing_that_is_kept_lacks_anything(self) -> None:
        missing = self.needed() - self.objects.objects.keys()
        assert not missing, f"{sorted(missing)} went though it is needed"

    def teardown(self) -> None:
        try:
            if hasattr(self, "runner"):
                self.settle()
        finally:
            self.scratch.cleanup()

    def settle(self) -> None:
        self.tell(m.SearchExhausted())
        self.tell(m.StopRequested(None, "the test has ended"))
        while self.uploading() or any(node.events for node in self.nodes):
            self.read_everything()
            if self.uploading():
                self.continue_uploading(0)
        assert self.runner.is_finished
        assert self.runner.uploading == 0
        self.remove_everything()
        for step in self.late:
            step()
        self.nothing_that_is_kept_lacks_anything()
        assert self.is_littered or set(self.objects.objects) == self.needed(), "not all was removed"
        live = self.runner.live_checkpoints()
        object_checkpoints.collect(self.objects, live, self.runner.is_busy)
        assert set(self.objects.objects) == self.needed(), "unneeded objects are left"
