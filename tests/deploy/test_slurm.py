"""A farm whose workers are SLURM jobs: a real scheduler, real workers, real searches.

`tests.support.farms.slurm` stands in for SLURM and sends the same signals.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.farms.farm_service import FarmService, Search, farm_service
from tests.support.farms.slurm import Job, Slurm
from tests.support.waiting import eventually

pytestmark = [pytest.mark.integration]

_BATCH = Path(__file__).parents[2] / "deploy" / "slurm" / "tunemq.sbatch"
_CLASS = "work.chain_class()"


class Cluster:
    """A farm's head, and a cluster for its workers."""

    def __init__(self, farm: FarmService) -> None:
        self.farm = farm
        home = farm.folder / "cluster"
        home.mkdir()
        self.slurm = Slurm(farm.folder / "slurm", home)
        self.worker = self.settings("worker", f"TUNEMQ_REDIS={farm.url}")

    def settings(self, name: str, *lines: str) -> Path:
        """A folder for a role."""
        folder = self.farm.folder / "cluster" / name
        folder.mkdir(mode=0o700)
        program = Path(sys.executable).parent / "tunemq"
        text = "\n".join([f"TUNEMQ_PROGRAM={program}", *lines, ""])
        (folder / "environment").write_text(text)
        return folder

    def add_workers(self, number: int, *options: str) -> list[Job]:
        """Submit `number` worker jobs, and wait until the farm lists their nodes."""
        jobs = self.slurm.sbatch(
            f"--array=1-{number}", *options, _BATCH, "worker", self.worker, "--lost-after", "60"
        )
        self.farm.has_nodes(*map(node_of, jobs))
        return jobs

    def restarted(self, job: Job, starts: int) -> None:
        """Wait until it runs again, and the farm lists it under the same name."""
        eventually(lambda: job.starts == starts, within=60, message=lambda: str(self))
        said = f"start {starts}, on"
        eventually(lambda: said in self.slurm.said(job), message=lambda: str(self))
        behind = "Ready: this worker has registered."
        eventually(
            lambda: behind in self.slurm.said(job).partition(said)[2],
            within=60,
            message=lambda: str(self),
        )

    def __str__(self) -> str:
        return f"{self.slurm}{self.farm}"


def node_of(job: Job) -> str:
    """The name of its node."""
    return f"slurm-{job.array_id}-{job.task}"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with farm_service(tmp_path) as farm:
        cluster = Cluster(farm)
        yield cluster
        cluster.slurm.close()


@pytest.mark.slow
def test_worker_drains_at_the_end_of_its_walltime_and_no_step_is_repeated(cluster):
    farm, slurm = cluster.farm, cluster.slurm
    (job,) = cluster.add_workers(1, "--time=8:00:00", "--cpus-per-task=2", "--mem=4096")
    node = farm.nodes()[node_of(job)]
    assert node.total["cpu"] == 2.0
    assert node.total["memory"] == 4096 * 2**20
    search = Search(name="exp", trials=2, steps=80, step_s=0.05, trainable=_CLASS)
    farm.submit(search)

    for start in (2, 3):  # twice: the second job saves restored trials again
        farm.wait_for_steps("exp", 2, 10 * (start - 1))
        slurm.walltime_nears(job)
        cluster.restarted(job, start)
    assert job.codes == [0, 0], str(cluster)
    assert job.ends == ["REQUEUED", "REQUEUED"]
    assert not job.was_killed
    assert min(job.left_s) > 20, job.left_s  # of 120: the worker's own grace is 100

    row = farm.wait_for("exp", "FINISHED", within=120)
    assert row.trials["TERMINATED"] == 2
    farm.check_results("exp")
    farm.check_steps("exp")


@pytest.mark.deploy
def test_scancel_and_preemption_drain_and_trials_continue_elsewhere(cluster):
    farm, slurm = cluster.farm, cluster.slurm
    first, second = cluster.add_workers(2, "--cpus-per-task=1")
    farm.submit(Search(name="exp", trials=2, steps=80, step_s=0.05, trainable=_CLASS))
    farm.wait_for_steps("exp", 2, 5)

    slurm.command("scancel", first.shown)
    eventually(lambda: first.codes == [0], within=60, message=lambda: str(cluster))
    assert (first.state, first.starts, first.was_killed) == ("CANCELLED", 1, False)
    eventually(lambda: node_of(first) not in farm.nodes(), message=lambda: str(cluster))

    slurm.preempt(second, grace_s=60)
    cluster.restarted(second, 2)
    assert (second.codes, second.ends) == ([0], ["PREEMPTED"]), str(cluster)

    farm.wait_for("exp", "FINISHED", within=120)
    farm.check_results("exp")
    farm.check_steps("exp")


@pytest.mark.deploy
def test_dead_machine_costs_only_unsaved_steps(cluster):
    farm, slurm = cluster.farm, cluster.slurm
    (job,) = cluster.add_workers(1, "--cpus-per-task=1")
    search = Search(name="exp", trials=1, steps=20, trainable="work.chain", has_gate=True)
    farm.submit(search)
    farm.open_gate("exp", 10)
    # Its results have arrived; the last checkpoint may still be uploading. It waits in step 11.
    eventually(lambda: len(farm.recorded("exp").get(0, [])) == 10, message=lambda: str(cluster))
    slurm.crash(job)
    cluster.restarted(job, 2)
    assert job.ends == ["NODE_FAIL"]
    farm.open_gate("exp", 20)
    farm.wait_for("exp", "FINISHED", within=120)
    farm.check_results("exp")
    (steps,) = farm.steps("exp").values()
    assert sorted(set(steps)) == list(range(1, 21))
    assert len(steps) <= 20 + 3, steps  # one in flight, one that waits, and one that was begun


@pytest.mark.deploy
def test_scheduler_whose_walltime_ends_is_replaced_by_its_next_start(cluster):
    farm, slurm = cluster.farm, cluster.slurm
    farm.kill_scheduler()
    folder = cluster.settings(
        "scheduler", f"TUNEMQ_REDIS={farm.url}", f"TUNEMQ_RESULTS={farm.results}"
    )
    (head,) = slurm.sbatch("--time=7-00", "--job-name=head", _BATCH, "scheduler", folder)
    eventually(lambda: "Serving the farm" in slurm.said(head), message=lambda: str(cluster))
    cluster.add_workers(1, "--cpus-per-task=2", f"--dependency=after:{head.id}")
    farm.submit(Search(name="exp", trials=2, steps=60, step_s=0.05, trainable=_CLASS))
    farm.wait_for_steps("exp", 2, 5)

    slurm.walltime_nears(head)
    eventually(
        lambda: slurm.said(head).count("Serving the farm") == 2,
        within=60,
        message=lambda: str(cluster),
    )
    assert (head.codes, head.ends) == ([0], ["REQUEUED"])
    farm.wait_for("exp", "FINISHED", within=120)
    farm.check_results("exp")
    farm.check_steps("exp")
