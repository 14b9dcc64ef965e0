"""Two thousand trials on 32 devices of all kinds, which fail, come back, and vanish with nodes.

The test keeps a separate record of every start and checks it each time, and the `JournalAuditor`
follows every event.
"""

from __future__ import annotations

import random
from typing import Final, NamedTuple

import pytest

from tests.unit.scheduler.scripted_runner import Story
from tunemq.testing.comparable_state import comparable
from tunemq.testing.journal_auditor import JournalAuditor
from tunemq_scheduler.core import commands as c
from tunemq_scheduler.core.placement.placement import could_hold
from tunemq_scheduler.core.runner_settings import DO_NOT_RETRY, EXCLUDE_NODE, LogRule
from tunemq_scheduler.core.runner_snapshot import dump
from tunemq_scheduler.core.trial_runner import TrialRunner
from tunemq_shared.protocol import messages as m
from tunemq_shared.protocol.device_use import DeviceUse

SLACK: Final = 1e-6
#: Seeds of the farms, and trials of each. The last seed once found missing data in snapshots.
SEEDS, TRIALS = (0, 1, 2, 10), 500
#: Number of trials that wait at once; share of the trials after which no fault happens.
WAITING, CALM_BEHIND = 24, 0.95
#: Largest number of devices that are bad at once.
MOST_BAD: Final = 6
BUG, BAD_NODE = "double free", "uncorrectable NVLink error"
XID: Final = "XID 79: the GPU has fallen off the bus"


class Kind(NamedTuple):
    """A GPU model; ``words`` are those by which users request it."""

    model: str
    memory: float
    words: str
    is_part: bool = False


A100 = Kind("NVIDIA A100-SXM4-80GB", 80e9, "A100")
A40 = Kind("NVIDIA A40", 48e9, "A40")
H100 = Kind("NVIDIA H100 80GB HBM3", 80e9, "H100")
T4 = Kind("Tesla T4", 16e9, "T4")
LARGE_PART = Kind("NVIDIA H100 80GB HBM3 MIG 3g.40gb", 40e9, "H100", is_part=True)
SMALL_PART = Kind("NVIDIA A100-SXM4-80GB MIG 1g.10gb", 10e9, "A100", is_part=True)
MACHINES: Final = {
    "same": [A100] * 8,
    "mixed": [H100] * 4 + [T4] * 4,
    "large parts": [H100] * 2 + [LARGE_PART] * 6,
    "small parts": [A40] * 4 + [SMALL_PART] * 4,
}
REQUESTS: Final = (
    {"cpu": 1.0},
    {"cpu": 4.0},
    {"cpu": 1.0, "accelerator_type:T4": 0.001},
    {"cpu": 1.0, "gpu": 0.1},
    {"cpu": 1.0, "gpu": 0.333333},
    {"cpu": 1.0, "gpu": 0.5},
    {"cpu": 1.0, "gpu": 0.7},
    {"cpu": 1.0, "gpu": 0.5, "accelerator_type:H100": 0.001},
    {"cpu": 1.0, "gpu": 1.0},
    {"cpu": 1.0, "gpu": 1.0, "accelerator_type:A100": 0.001},
    {"cpu": 1.0, "gpu": 1.0, "gpu_memory": 40e9},
    {"cpu": 1.0, "gpu_memory": 4e9},
    {"cpu": 1.0, "gpu_memory": 30e9, "accelerator_type:H100": 0.001},
    {"cpu": 2.0, "gpu": 2.0},
    {"cpu": 2.0, "gpu": 2.0, "accelerator_type:H100": 0.001},
    {"cpu": 4.0, "gpu": 4.0, "gpu_memory": 40e9},
    {"cpu": 8.0, "gpu": 8.0},
)


class SimulatedTrialProcess(NamedTuple):
    """A trial process on a node, whether or not the scheduler receives messages of that node."""

    node: str
    trial: str
    attempt: int
    devices: dict[str, float]


class GpuFarm(Story):
    """Four machines, and a runner that gets their events turn by turn."""

    def __init__(self, seed: int) -> None:
        super().__init__(
            cpus=0.0,
            max_failures=2,
            max_node_losses=-1,
            log_rules=(LogRule(BUG, DO_NOT_RETRY), LogRule(BAD_NODE, EXCLUDE_NODE)),
        )
        self.auditor = JournalAuditor(self.settings, every=5)
        self.auditor.turn(self.journal_records)
        self.chance = random.Random(seed)
        self.kinds: dict[str, Kind] = {}
        self.current: dict[str, m.NodeJoined] = {}
        self.silent: set[str] = set()
        self.bad: dict[str, set[str]] = {}
        self.processes: dict[tuple[str, int], SimulatedTrialProcess] = {}
        #: Trials that will never start again, and those that will not on these machines.
        self.doomed: dict[str, int] = {}
        self.shuns: dict[str, set[str]] = {}
        self.lives = 0
        self.seen: dict[str, int] = {}
        for machine in MACHINES:
            self.boot(machine)

    # --- the scheduler ----------------------------------------------------------------------------

    def tell(self, event: m.Event, *answers: m.AlgorithmAnswer) -> list[c.Command]:
        commands = super().tell(event, *answers)
        if hasattr(self, "auditor"):
            assert self.auditor.event(event, answers) == commands
        for command in commands:
            if isinstance(command, c.StartTrial):
                self.start_process(command)
        return commands

    def place(self) -> None:
        while (first := next(iter(self.runner.waiting()), None)) is not None:
            self.tell(m.TrialChosen(first.trial_id))

    def suggest(self) -> None:
        request = self.chance.choice(REQUESTS)
        n = self.runner.suggested
        self.tell(m.ConfigSuggested(n, f"t{n}", b"", "", dict(request)))

    def restart(self) -> None:
        """Replace the scheduler by one that loads the snapshot of the old one."""
        runner = self.runner
        self.runner = TrialRunner.load(self.settings, dump(runner), dict(runner.finished))
        assert comparable(self.runner) == comparable(runner)

    # --- the books --------------------------------------------------------------------------------

    def start_process(self, order: c.StartTrial) -> None:
        node = self.runner.nodes[order.instance_id]
        process = SimulatedTrialProcess(
            order.instance_id, order.trial, order.attempt, dict(order.devices)
        )
        assert order.instance_id not in self.silent
        assert not order.devices.keys() & self.bad[order.instance_id], "it is withheld"
        assert node.node not in self.shuns.get(order.trial, ())
        assert order.trial not in self.doomed
        self.processes[order.trial, order.attempt] = process
        self.check_devices(order.resources, process)
        taken = dict.fromkeys(order.devices, 0.0)
        for other in self.processes.values():
            if other.node == process.node:
                for uuid in taken.keys() & other.devices.keys():
                    taken[uuid] += other.devices[uuid]
        assert all(share <= 1 + SLACK for share in taken.values()), taken

    def check_devices(self, request: dict[str, float], process: SimulatedTrialProcess) -> None:
        wanted, memory = request.get("gpu", 0.0), request.get("gpu_memory", 0.0)
        kinds = [self.kinds[uuid] for uuid in process.devices]
        shares = list(process.devices.values())
        if wanted >= 1:
            assert shares == [1.0] * int(wanted)
        elif wanted:
            assert shares == [wanted]
        elif memory:
            assert shares == [pytest.approx(memory / kinds[0].memory)]
        else:
            assert not shares
        assert len(kinds) < 2 or not any(kind.is_part for kind in kinds)
        assert all(kind.memory >= memory for kind in kinds)
        models = [name.partition(":")[2] for name in request if name.startswith("accelerator")]
        assert all(models[0] == kind.words for kind in kinds if models)

    # --- trials -----------------------------------------------------------------------------------

    def one_ends(self) -> None:
        heard = [one for one in self.processes.values() if one.node not in self.silent]
        if not heard:
            return
        process = self.chance.choice(heard)
        trial = self.runner.live.get(process.trial)
        if trial is not None and trial.attempt == process.attempt and trial.status == "RUNNING":
            if self.chance.random() < 0.3:
                self.report(process.trial, trial.last_step + 1, attempt=process.attempt)
            self.report_how_it_ends(process)
        if process.devices:
            uses = (
                DeviceUse(uuid, self.kinds[uuid].model, seconds=1.0, share=share)
                for uuid, share in process.devices.items()
            )
            self.tell(m.DevicesUsed(process.trial, process.attempt, tuple(uses)))
        self.tell(m.SlotFreed(process.trial, process.attempt))
        del self.processes[process.trial, process.attempt]

    def report_how_it_ends(self, process: SimulatedTrialProcess) -> None:
        how, trial, attempt = self.chance.random(), process.trial, process.attempt
        if how > 0.25 or self.is_calm:
            self.finish(trial, attempt)
            return
        if how < 0.04:
            self.tell(m.LogMatched(trial, attempt, BUG, "free(): double free detected", 0.0))
            self.doomed[trial] = attempt
        elif how < 0.1 and self.may_shun(trial, process.node):
            self.tell(m.LogMatched(trial, attempt, BAD_NODE, f"GPU 3: {BAD_NODE}", 0.0))
            self.shuns.setdefault(trial, set()).add(self.runner.nodes[process.node].node)
        if how < 0.15:
            self.die(trial, attempt)
        else:
            self.tell(m.TrialFailed(trial, attempt, "user", "ValueError: no", "", 0.0))
        if trial in self.doomed:
            summary = self.runner.summary(trial)
            assert (summary.status, summary.attempt) == ("ERROR", attempt), (
                "though it may fail twice"
            )
            assert BUG in summary.reason

    def may_shun(self, trial: str, node: str) -> bool:
        """Whether there is another machine for it."""
        without = {*self.shuns.get(trial, ()), self.runner.nodes[node].node}
        request = self.runner.live[trial].resources
        others = [one for name, one in self.current.items() if name not in without]
        return any(could_hold(one, request) for one in others)

    # --- machines ---------------------------------------------------------------------------------

    def boot(self, machine: str) -> None:
        self.lives += 1
        prefix = {True: "MIG", False: "GPU"}
        gpus = []
        for place, kind in enumerate(MACHINES[machine]):
            uuid = f"{prefix[kind.is_part]}-{machine}-{place}"
            self.kinds[uuid] = kind
            gpus.append(m.Gpu(uuid, kind.model, kind.memory))
        node = f"{machine}.{self.lives}"
        bad = {gpus[0].uuid: XID} if not self.chance.randrange(4) else {}
        self.bad[node] = set(bad)
        self.current[machine] = joined = m.NodeJoined(
            node, machine, machine, "127.0.0.1", {"cpu": 32.0}, tuple(gpus), withheld=bad
        )
        self.tell(joined)

    def withhold(self, node: str, bad: set[str]) -> None:
        self.bad[node] = bad
        self.tell(m.DevicesWithheld(node, dict.fromkeys(sorted(bad), XID)))

    def a_device_goes_bad_or_is_back(self) -> None:
        joined = self.chance.choice(list(self.current.values()))
        node, uuid = joined.instance_id, self.chance.choice(joined.gpus).uuid
        count = sum(len(self.bad[one.instance_id]) for one in self.current.values())
        if node in self.silent:
            return
        if uuid in self.bad[node] or self.chance.random() < 0.4:
            some = self.chance.sample(sorted(self.bad[node]), len(self.bad[node]) // 2)
            self.withhold(node, set(some))
        elif count < MOST_BAD:
            self.withhold(node, {*self.bad[node], uuid})

    def a_node_is_lost_or_back(self) -> None:
        joined = self.chance.choice(list(self.current.values()))
        node = joined.instance_id
        if node in self.silent and self.chance.random() < 0.7:
            self.silent.discard(node)
            self.hear_again(node)
            return
        if node not in self.silent:
            self.silent.add(node)
            self.lose(node)
        if self.chance.random() < 0.3:
            self.silent.discard(node)
            self.processes = {key: one for key, one in self.processes.items() if one.node != node}
            self.lose(node, is_dead=True)
            self.boot(joined.node)

    # --- the whole --------------------------------------------------------------------------------

    @property
    def is_calm(self) -> bool:
        return self.runner.suggested >= CALM_BEHIND * TRIALS

    def run(self) -> None:
        turns = 0
        while not self.runner.is_finished:
            turns += 1
            assert turns < 20 * TRIALS, [
                (trial.trial_id, trial.status, trial.resources)
                for trial in self.runner.live.values()
            ]
            self.turn(turns)
        assert not self.processes
        self.auditor.check()
        self.auditor.same_as(self.runner)

    def turn(self, number: int) -> None:
        while self.runner.suggested < TRIALS and self.runner.counts["PENDING"] < WAITING:
            self.suggest()
        if self.runner.suggested == TRIALS and not self.runner.exhausted:
            self.tell(m.SearchExhausted())
        if self.is_calm:
            self.make_good()
        elif number % 4 == 1:
            self.a_device_goes_bad_or_is_back()
        elif number % 31 == 0:
            self.a_node_is_lost_or_back()
        elif number % 30 == 0:
            self.restart()
        if number % 4 == 0:
            self.tell(m.Tick(self.runner.elapsed + 4.0))
        self.place()
        self.one_ends()

    def make_good(self) -> None:
        for node in sorted(self.silent):
            self.hear_again(node)
        self.silent.clear()
        for joined in self.current.values():
            if self.bad[joined.instance_id]:
                self.withhold(joined.instance_id, set())


@pytest.mark.parametrize("seed", SEEDS)
def test_f23_simulated_farm_of_32_devices_oversubscribes_none_and_ends_all_trials(
    seed: int,
) -> None:
    farm = GpuFarm(seed)
    farm.run()
    events = [type(entry.event).__name__ for entry in farm.journal_records]
    counts = farm.runner.counts
    assert counts["TERMINATED"] + counts["ERROR"] == TRIALS
    assert events.count("DevicesWithheld") > 40
    assert events.count("NodeReturned") > 3
    assert len(farm.doomed) > 5
    assert len(farm.shuns) > 5
    assert farm.runner.placement.total == {"cpu": 128.0, "gpu": 32.0}
    assert farm.runner.placement.free == farm.runner.placement.total
