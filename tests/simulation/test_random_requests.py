"""Ten thousand random requests on random mixed farms, and invariants of every placement."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.scheduler.scripted_runner import Story
from tunemq.testing.journal_auditor import JournalAuditor
from tunemq_scheduler.core.placement.placement import Placement
from tunemq_scheduler.core.trials.waiting_trials import MAX_TIMES_PASSED_OVER
from tunemq_shared.protocol import messages as m

SLACK = 1e-6
#: Model and memory of the devices that there are; the last are of nodes that do not list theirs.
MODELS = [("NVIDIA A100-SXM4-80GB", 80e9), ("Tesla T4", 16e9), ("NVIDIA H100", 80e9), ("", 0.0)]
#: Number of farms, and of requests on each.
FARMS, REQUESTS = 100, 100


class Machine(NamedTuple):
    """A node as it is drawn."""

    resources: dict[str, float]
    gpus: tuple[m.Gpu, ...]

    def devices(self) -> dict[str, tuple[str, float]]:
        if self.gpus:
            return {gpu.uuid: (gpu.model, gpu.memory) for gpu in self.gpus}
        return {str(place): ("", 0.0) for place in range(int(self.resources.get("gpu", 0)))}


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    resources = {"cpu": float(draw(st.integers(1, 16)))}
    if draw(st.booleans()):
        resources["licence"] = float(draw(st.integers(1, 3)))
    count = draw(st.sampled_from([0, 0, 1, 2, 4, 8]))
    if not count:
        return Machine(resources, ())
    resources["gpu"] = float(count)
    model, memory = draw(st.sampled_from(MODELS))
    if not model:
        return Machine(resources, ())
    other, other_memory = (
        draw(st.sampled_from(MODELS[:-1]))
        if draw(st.booleans())
        else (
            model,
            memory,
        )
    )
    return Machine(
        resources,
        tuple(
            m.Gpu(f"gpu-{place}", *((other, other_memory) if place % 3 == 2 else (model, memory)))
            for place in range(count)
        ),
    )


@st.composite
def requests(draw: st.DrawFn) -> dict[str, float]:
    request: dict[str, float] = {}
    if draw(st.booleans()):
        request["cpu"] = draw(st.sampled_from([0.5, 1.0, 2.0, 4.0]))
    if draw(st.integers(0, 4)) == 0:
        request["licence"] = 1.0
    kind = draw(st.sampled_from(["none", "whole", "part", "memory", "large"]))
    if kind == "whole":
        request["gpu"] = float(draw(st.integers(1, 8)))
    elif kind == "part":
        request["gpu"] = draw(st.sampled_from([0.1, 0.25, 0.3, 0.5, 0.7, 0.333333]))
    elif kind == "memory":
        request["gpu_memory"] = draw(st.sampled_from([4e9, 6e9, 12e9, 40e9, 7e9 / 3]))
    elif kind == "large":
        request |= {"gpu": draw(st.sampled_from([0.5, 1.0, 2.0])), "gpu_memory": 20e9}
    if kind != "none" and draw(st.integers(0, 3)) == 0:
        request[f"accelerator_type:{draw(st.sampled_from(['A100', 'T4', 'H100']))}"] = 0.001
    return request or {"cpu": 1.0}


class Books:
    """A simple record of used resources."""

    def __init__(self, farm: dict[str, Machine]) -> None:
        self.farm = farm
        self.amounts = {node: dict(one.resources) for node, one in farm.items()}
        self.shares = {node: dict.fromkeys(one.devices(), 1.0) for node, one in farm.items()}
        self.held: list[tuple[str, dict[str, float], dict[str, float]]] = []

    def takes(self, node: str, request: dict[str, float], devices: dict[str, float]) -> None:
        """Note a placement, and check it."""
        for name, amount in self._plain(request).items():
            self.amounts[node][name] -= amount
            assert self.amounts[node][name] >= -SLACK
        wanted = request.get("gpu", 0.0)
        if wanted >= 1:
            assert len(devices) == wanted
            assert set(devices.values()) == {1.0}
        elif wanted:
            assert list(devices.values()) == [wanted]
        else:
            assert len(devices) == bool(request.get("gpu_memory"))
        suitable = self._suitable(node, request)
        for uuid, share in devices.items():
            assert uuid in suitable
            self.shares[node][uuid] -= share
            assert self.shares[node][uuid] >= -SLACK
        self.held.append((node, request, devices))

    def gives_back(self, place: int) -> tuple[str, dict[str, float], dict[str, float]]:
        node, request, devices = self.held.pop(place)
        for name, amount in self._plain(request).items():
            self.amounts[node][name] += amount
        for uuid, share in devices.items():
            self.shares[node][uuid] += share
        return node, request, devices

    def fits(self, node: str, request: dict[str, float], *, is_empty: bool = False) -> bool:
        amounts = self.farm[node].resources if is_empty else self.amounts[node]
        if any(
            amounts.get(name, 0.0) < amount - SLACK for name, amount in self._plain(request).items()
        ):
            return False
        needs_device = request.keys() - self._plain(request).keys()
        if not needs_device:
            return True
        suitable = self._suitable(node, request)
        free = [1.0 if is_empty else self.shares[node][uuid] for uuid in suitable]
        wanted = request.get("gpu", 0.0)
        if wanted >= 1:
            return sum(share > 1 - SLACK for share in free) >= wanted
        if wanted:
            return max(free, default=0.0) >= wanted - SLACK
        if memory := request.get("gpu_memory"):
            devices = self.farm[node].devices()
            return any(
                share * devices[uuid][1] >= memory - 1e3
                for uuid, share in zip(suitable, free, strict=True)
            )
        return bool(suitable)

    def _suitable(self, node: str, request: dict[str, float]) -> list[str]:
        models = [name.partition(":")[2] for name in request if name.startswith("accelerator")]
        memory = request.get("gpu_memory", 0.0)
        return [
            uuid
            for uuid, (model, size) in self.farm[node].devices().items()
            if size >= memory and (not models or models[0] in model)
        ]

    @staticmethod
    def _plain(request: dict[str, float]) -> dict[str, float]:
        return {
            name: amount
            for name, amount in request.items()
            if not name.startswith(("gpu", "accelerator"))
        }


@pytest.mark.parity(53, 60)
@settings(max_examples=FARMS, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_requests_that_fit_are_placed_and_nothing_is_oversubscribed(data: st.DataObject) -> None:
    farm = {
        f"n{place}": one
        for place, one in enumerate(data.draw(st.lists(machines(), min_size=1, max_size=8)))
    }
    kinds = data.draw(st.lists(requests(), min_size=3, max_size=8))
    chance = data.draw(st.randoms(use_true_random=False))
    placement, books = Placement(), Books(farm)
    for name, one in farm.items():
        placement.add_node(name, one.resources, one.gpus)
    waiting: list[dict[str, float]] = []
    for _ in range(REQUESTS):
        waiting.append(chance.choice(kinds))
        while books.held and chance.random() < 0.4:
            placement.give_back(*books.gives_back(chance.randrange(len(books.held))))
        for request in list(waiting):
            fitting = [node for node in farm if books.fits(node, request)]
            node = placement.fit(request, chance.choice(list(farm)))
            assert (node in fitting) if fitting else (node is None), (request, fitting, node)
            if chance.random() < 0.2:
                assert (placement.why_not_now(request) is None) == bool(fitting)
                could = any(books.fits(one, request, is_empty=True) for one in farm)
                assert (placement.why_never(request) is None) == could
            if node is not None:
                books.takes(node, request, placement.take(node, request))
                waiting.remove(request)
    while books.held:
        placement.give_back(*books.gives_back(len(books.held) - 1))
    assert placement.free == placement.total


class Farm(Story):
    """A runner on a drawn farm, which places every trial that fits, longest waiting first."""

    def __init__(self, farm: dict[str, Machine], **settings_: Any) -> None:
        super().__init__(cpus=0.0, **settings_)
        for name, one in farm.items():
            self.tell(m.NodeJoined(name, name, "host", "127.0.0.1", one.resources, one.gpus))
        self.running: list[str] = []

    def ask(self, request: dict[str, float]) -> str:
        n = self.runner.suggested
        self.tell(m.ConfigSuggested(n, f"t{n}", b"", "", request))
        return f"t{n}"

    def place(self) -> None:
        while (first := next(iter(self.runner.waiting()), None)) is not None:
            self.choose(first.trial_id)
            self.running.append(first.trial_id)

    def end(self, trial: str) -> None:
        self.running.remove(trial)
        self.finish(trial)
        self.free(trial)


@settings(max_examples=30, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_large_request_starts_among_an_endless_stream_of_small_ones(data: st.DataObject) -> None:
    farm = {
        f"n{place}": one
        for place, one in enumerate(data.draw(st.lists(machines(), min_size=1, max_size=4)))
    }
    books = Books(farm)
    kinds = [
        request
        for request in data.draw(st.lists(requests(), min_size=4, max_size=8))
        if any(books.fits(node, request, is_empty=True) for node in farm)
    ]
    chance = data.draw(st.randoms(use_true_random=False))
    small = {"cpu": 0.5}
    story = Farm(farm)
    for _ in range(200):
        if story.runner.has_place(story.runner.live[story.ask(small)]):
            story.place()
        else:
            break
    large = {story.ask(request) for request in kinds}
    freed = 0
    # Each large request has its turn; before it, all slots that are used at once are freed.
    most = (MAX_TIMES_PASSED_OVER + len(story.running) + 1) * (len(kinds) + 1)
    while large - set(story.running):
        story.ask(small)
        story.place()
        done = large & set(story.running)
        large -= done
        if not large:
            break
        story.end(story.running[0] if chance.random() < 0.9 else chance.choice(story.running))
        freed += 1
        assert freed <= most, (large, story.runner.placement.reserved)
    auditor = JournalAuditor(story.settings)
    auditor.turn(story.journal_records)
    auditor.check()
    auditor.same_as(story.runner)


def test_trials_of_eight_gpus_start_among_a_stream_of_one_gpu() -> None:
    story = Farm({f"n{n}": Machine({"cpu": 64.0, "gpu": 8.0}, ()) for n in range(4)})
    for _ in range(100):
        story.ask({"gpu": 1.0})
    story.place()
    waits = [story.ask({"gpu": 8.0}) for _ in range(3)]
    freed = 0
    for trial in waits:
        freed = 0
        while trial not in story.running:
            story.ask({"gpu": 1.0})
            story.end(story.running[0])
            story.place()
            freed += 1
        assert freed <= MAX_TIMES_PASSED_OVER + 32, trial
    assert freed > 8, "they had to wait at all"
