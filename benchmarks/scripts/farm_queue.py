"""From the submission of an urgent experiment to its first trial, while many others wait.

    python farm_queue.py WAITING TIMES

As many experiments run as may, so that one of them has to give way.
"""

from __future__ import annotations

import sys
import time

from measured import tell
from served_farm import served_farm, wait_until

from tunemq_scheduler.farm.service.experiment_queue import ExperimentQueue

SEARCH = """
import time
from pathlib import Path
import tunemq as tune

class Train(tune.Trainable):
    def setup(self, config):
        (Path({folder!r}) / self.trial_id).touch()

    def step(self):
        time.sleep(0.01)
        return {{"loss": 1.0, "done": self.iteration >= {steps}}}

    def save_checkpoint(self, folder):
        Path(folder, "state").write_text("")

    def load_checkpoint(self, folder):
        pass

tuner = tune.Tuner(Train, run_config=tune.RunConfig(verbose=0))
"""


def main() -> None:
    """Measure."""
    waiting, times = int(sys.argv[1]), int(sys.argv[2])
    with served_farm() as farm:
        begun = farm.folder / "begun"
        begun.mkdir()
        many = farm.code("many", SEARCH.format(folder=str(begun), steps=100_000))
        urgent = farm.code("urgent", SEARCH.format(folder=str(begun), steps=1))
        queue = ExperimentQueue(farm.results / ".farm" / "experiments")
        for number in range(waiting):
            queue.add(f"many_{number:05}", owner=f"owner{number % 7}", code=many)
        farm.start(2, "max_running = 2\n")
        wait_until(lambda: len(list(begun.iterdir())) == 2)
        found = []
        for number in range(times):
            before = len(list(begun.iterdir()))
            started = time.monotonic()
            farm.submit(f"urgent_{number}", urgent, priority=1)
            prefix = farm.rows()[f"urgent_{number}"].id
            wait_until(lambda: list(begun.glob(f"{prefix}_*")))  # noqa: B023
            found.append(time.monotonic() - started)
            wait_until(lambda: farm.rows()[f"urgent_{number}"].state.is_over)  # noqa: B023
            wait_until(lambda: sum(one.state == "RUNNING" for one in farm.rows().values()) == 2)
            assert len(list(begun.iterdir())) > before
        tell({"first_trial_s": sorted(found)[len(found) // 2], "slowest_s": max(found)})


if __name__ == "__main__":
    main()
