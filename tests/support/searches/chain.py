"""The trainable of tests that kill: whatever was lost, doubled or mixed up shows in its results.

A step's result is a hash over the seed, the configuration and every step before; it is held in the
checkpoint, beside a payload that is made of it. Each step that is executed is also a line in a file
of the trial's own, which nothing of ours touches, so that repeated work can be counted.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

#: Settings that a configuration may contain; they do not enter the chain.
_ABOUT: tuple[str, ...] = ("executed", "steps", "save_every", "payload", "step_s", "gate")


def link(before: str, config: dict[str, Any], step: int) -> str:
    """The chain's value after ``step``, from the value before it."""
    own = {key: value for key, value in sorted(config.items()) if key not in _ABOUT}
    return hashlib.sha256(f"{before}|{json.dumps(own)}|{step}".encode()).hexdigest()


def expected(config: dict[str, Any], steps: int) -> str:
    """The value after `steps` undisturbed steps."""
    value = ""
    for step in range(1, steps + 1):
        value = link(value, config, step)
    return value


def payload_of(value: str, size: int) -> bytes:
    """Bytes that only this value gives: two files of them are swapped, torn or mixed visibly."""
    return hashlib.shake_128(value.encode()).digest(size)


def save(folder: str, value: str, step: int, size: int) -> None:
    """Write the state after ``step``."""
    Path(folder, "payload").write_bytes(payload_of(value, size))
    Path(folder, "constant").write_bytes(bytes(size))
    Path(folder, "state.json").write_text(json.dumps({"value": value, "step": step}))


def load(folder: str, size: int) -> tuple[str, int]:
    """The value and the step that were saved.

    Raises:
        AssertionError: the files do not belong together.
    """
    state = json.loads(Path(folder, "state.json").read_text())
    assert Path(folder, "payload").read_bytes() == payload_of(state["value"], size), "mixed up"
    assert Path(folder, "constant").read_bytes() == bytes(size), "damaged"
    return state["value"], state["step"]


def executed(folder: str | Path) -> dict[int, list[int]]:
    """By trial number, the steps that were executed, in their order."""
    return {
        int(file.name): [int(line) for line in file.read_text().split()]
        for file in sorted(Path(folder).iterdir())
    }


def note(config: dict[str, Any], number: int, step: int) -> None:
    """Note in the trial's own file that ``step`` was executed."""
    with open(os.path.join(config["executed"], str(number)), "a", encoding="ascii") as file:
        file.write(f"{step}\n")


def open_gate(gate: str | Path, up_to: int) -> None:
    """Let trials with this gate do the steps up to that one.

    So a test that disturbs a search at a certain place finds it there, however late the test is.
    """
    waits = Path(f"{gate}.waits")
    waits.mkdir(exist_ok=True)
    waits.chmod(0o777)  # trials may run as another user
    new = Path(f"{gate}.new")
    new.write_text(str(up_to), encoding="ascii")
    new.replace(gate)


def wait_at_gate(config: dict[str, Any], step: int) -> None:
    """Wait until ``step`` may be done, where the configuration names a gate.

    A process that waits says so, for `waiting_at_gate`.
    """
    gate = config.get("gate")
    is_said = False
    while gate and step > int(Path(gate).read_text(encoding="ascii")):
        if not is_said:
            is_said = True
            Path(f"{gate}.waits", f"{os.getpid()}-{step}").touch()
        time.sleep(0.005)  # between two looks


def waiting_at_gate(gate: str | Path, step: int) -> int:
    """How many processes have waited at this gate to do ``step``."""
    return len(list(Path(f"{gate}.waits").glob(f"*-{step}")))


def chain(config: dict[str, Any]) -> None:
    """The function form; reads the settings in `_ABOUT` from ``config``."""
    import tunemq as tune

    size, number = config["payload"], int(tune.get_context().get_trial_id().rpartition("_")[2])
    value, done = "", 0
    checkpoint = tune.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            value, done = load(folder, size)
    for step in range(done + 1, config["steps"] + 1):
        wait_at_gate(config, step)
        time.sleep(config["step_s"])  # the step's work
        value = link(value, config, step)
        note(config, number, step)
        metrics = {"chain": value, "score": int(value[:8], 16) / 2**32, "at": step}
        if step % config["save_every"]:
            tune.report(metrics)
            continue
        # No temporary folder: a killed process would not remove it. One per process: after a node
        # was cut off two processes may run the same trial.
        folder = f"{config['executed']}_state/{number}-{os.getpid()}"
        os.makedirs(folder, exist_ok=True)
        save(folder, value, step, size)
        tune.report(metrics, checkpoint=tune.Checkpoint.from_directory(folder))


def chain_class() -> type:
    """The class form; saves as often as ``save_every`` says."""
    import tunemq as tune

    class Chain(tune.Trainable):
        def setup(self, config: dict[str, Any]) -> None:
            self.value = ""
            self.number = int(self.trial_id.rpartition("_")[2])

        def step(self) -> dict[str, Any]:
            step = self.iteration + 1
            wait_at_gate(self.config, step)
            time.sleep(self.config["step_s"])  # the step's work
            self.value = link(self.value, self.config, step)
            note(self.config, self.number, step)
            score = int(self.value[:8], 16) / 2**32
            return {"chain": self.value, "score": score, "done": step >= self.config["steps"]}

        def save_checkpoint(self, checkpoint_dir: str) -> None:
            save(checkpoint_dir, self.value, self.iteration, self.config["payload"])

        def load_checkpoint(self, checkpoint: Any) -> None:
            self.value, _ = load(checkpoint, self.config["payload"])

    return Chain
