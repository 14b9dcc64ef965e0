"""A class trainable that records the calls of its methods."""

from __future__ import annotations

from pathlib import Path

import pytest

from tunemq_shared.trainable.trainable import Trainable


class Counter(Trainable):
    """Counts steps, ``from`` the configured number on; the configuration may ``refuse`` a reset."""

    log: list = []  # noqa: RUF012  shared by all objects of a test, and emptied by its fixture

    def setup(self, config):
        self.log.append("setup")
        self.total = config.get("from", 0)

    def step(self):
        self.total += 1
        return {"total": self.total}

    def save_checkpoint(self, checkpoint_dir):
        Path(checkpoint_dir, "total").write_text(str(self.total))

    def load_checkpoint(self, checkpoint):
        self.total = int(Path(checkpoint, "total").read_text())

    def reset_config(self, new_config):
        self.log.append("reset")
        self.total = new_config.get("from", 0)
        return "refuse" not in new_config

    def cleanup(self):
        self.log.append("cleanup")


@pytest.fixture(autouse=True)
def log(monkeypatch):
    """The calls that the counters record; test modules import it and list it in ``__all__``."""
    log: list = []
    monkeypatch.setattr(Counter, "log", log)
    return log
