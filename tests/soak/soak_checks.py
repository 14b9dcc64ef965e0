"""Checks after `make soak` that hold for all faults."""

from __future__ import annotations

import hashlib
import json
import os
import runpy
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import redis

from tests.soak.lineages import Lineages
from tests.soak.soak_farm import SoakFarm
from tests.support.journal_records import read_records
from tests.support.searches.chain import executed
from tests.support.searches.chain_searches import (
    checkpoint_objects,
    manifests_are_complete,
    needed_objects,
)
from tunemq.testing.journal_auditor import JournalAuditor
from tunemq.testing.journal_replay import compare, outcome, replay_lock_step
from tunemq_scheduler.cli.experiment_checkpoints import opened
from tunemq_scheduler.core import commands as c
from tunemq_scheduler.core.trial_runner import TrialRunner
from tunemq_scheduler.experiment.start_checks import prepare
from tunemq_scheduler.journal.journal_files import FILE_NAME
from tunemq_scheduler.journal.journal_reader import read_header
from tunemq_shared.broker import redis_keys
from tunemq_shared.checkpoints.open_store import open_objects
from tunemq_shared.code.config_packing import unpack_config
from tunemq_shared.protocol import messages as m


def check_search(farm: SoakFarm) -> str:
    """Check the results and remains of a search that has ended; return a summary.

    Raises:
        AssertionError: a promise was broken.
    """
    header = read_header(farm.experiment / FILE_NAME)
    journal_records = list(read_records(farm.experiment / FILE_NAME))
    auditor = JournalAuditor(header.settings, every=1000)
    records: list[c.NotifyResult] = []
    lineages = Lineages()
    for entry in journal_records:
        commands = auditor.event(entry.event, entry.answers)
        lineages.handled(auditor.runner, entry.event, commands)
        records += [one for one in commands if isinstance(one, c.NotifyResult)]
    auditor.check()
    runner = auditor.runner
    assert runner.is_finished
    assert len(runner.finished) == farm.trials, (len(runner.finished), farm.trials)
    configs = _configs(farm, journal_records)
    told = [_trials_are_complete(farm, runner, configs, lineages)]
    told.append(_work(farm, records))
    if farm.algorithm == "pbt":
        assert lineages.exploits, "no trial took over the state of another one"
        told.append(f"{lineages.exploits} states taken over, {lineages.lost} of them older")
    if farm.algorithm != "fifo":
        told.append(_decisions_replay(farm, header, journal_records))
    _files_agree(farm, records)
    told.append(_store_is_whole(farm))
    told.append(_no_key_is_left(farm))
    told.append(_no_file_is_left(farm))
    events = Counter(type(entry.event).__name__ for entry in journal_records)
    told.append(f"{len(journal_records)} events, {events['ExperimentResumed']} schedulers more")
    told.append(f"{runner.repeated} results repeated, {runner.stale} of former attempts")
    return ", ".join(told)


def _configs(farm: SoakFarm, journal_records: list[m.JournalRecord]) -> dict[str, dict[str, Any]]:
    """The configurations of all trials, which must be those of an undisturbed search."""
    prepared = _prepared(farm)
    configs = {}
    for entry in journal_records:
        event = entry.event
        if isinstance(event, m.ConfigSuggested):
            config = unpack_config(event.config)
            again = prepared.search.suggest(event.n, event.trial)
            assert again.config == config, (event.trial, again.config, config)
            prepared.search.on_trial_complete(event.trial)
            configs[event.trial] = config
    assert len(configs) == farm.trials
    return configs


def _prepared(farm: SoakFarm) -> Any:
    sys.path.insert(0, str(farm.script.parent))  # where the script's own modules are
    try:
        script = runpy.run_path(str(farm.script))
    finally:
        sys.path.remove(str(farm.script.parent))
    tuner = script["tuner"]
    return prepare(tuner._trainable, tuner._param_space, tuner._tune_config, tuner._run_config)


def _trials_are_complete(
    farm: SoakFarm, runner: TrialRunner, configs: dict[str, dict[str, Any]], lineages: Lineages
) -> str:
    """Check that each trial ended as it should, with the last of its results."""
    for trial in configs:
        summary, step = runner.summary(trial), lineages.steps(trial)
        assert summary.status == "TERMINATED", (trial, summary.status, summary.reason)
        assert summary.last_result is not None
        assert summary.last_result.step == step
        if farm.algorithm in {"fifo", "pbt"}:
            # The last state of another trial leaves nothing to do.
            begun = 0 if summary.inherited is None else summary.inherited.step
            assert max(step, begun) == farm.config["steps"], (trial, step, begun)
    return f"{len(configs)} trials"


def _work(farm: SoakFarm, records: list[c.NotifyResult]) -> str:
    done = sum(len(steps) for steps in executed(farm.executed).values())
    return f"{len(records)} results identical, {done - len(records)} steps more executed"


def _decisions_replay(farm: SoakFarm, header: Any, journal_records: list[m.JournalRecord]) -> str:
    prepared = _prepared(farm)
    algorithms = prepared.algorithms()
    algorithms._lock_step = True
    plan = _plan(prepared)
    again = replay_lock_step(header.settings, plan, algorithms, journal_records)
    compare(outcome(header.settings, journal_records), again)
    return f"{len(again.decisions)} decisions the same in lock-step"


def _plan(prepared: Any) -> Any:
    from tunemq_scheduler.base.experiment_plan import ExperimentPlan

    return ExperimentPlan(
        experiment="soak",
        experiment_id="0",
        events_key="",
        folder="",
        trainable_name=prepared.trainable_name,
        code=m.BlobRef("", 0, ""),
        environment=m.Environment("", (), {}, ()),
        stop=prepared.stop,
    )


def _files_agree(farm: SoakFarm, records: list[c.NotifyResult]) -> None:
    """Each trial's result.json has every recorded result once, in order."""
    wanted: dict[str, list[tuple[int, str]]] = {}
    for record in records:
        told = record.result.step, record.result.metrics["chain"]
        wanted.setdefault(record.trial, []).append(told)
    for trial, told in wanted.items():
        (file,) = farm.experiment.glob(f"*_{trial}/result.json")
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        assert [(line["training_iteration"], line["chain"]) for line in lines] == told, trial


def _store_is_whole(farm: SoakFarm) -> str:
    os.environ.update(farm.minio.environ)
    os.environ["TUNEMQ_S3_ENDPOINT"] = f"http://127.0.0.1:{farm.to_store.port}"
    with opened(str(farm.experiment)) as kept:
        there, needed = checkpoint_objects(kept), needed_objects(kept)
        manifests_are_complete(kept)
        assert there == needed, f"orphans: {there - needed}, missing: {needed - there}"
        assert open_objects(kept.address).abort_uploads(lambda _key: True) == 0
        for one in kept.all():
            target = farm.folder / "verified" / one.key
            target.parent.mkdir(parents=True, exist_ok=True)
            kept.store.get_checkpoint(one.key, one.committed.sha256, target)
    return f"{len(needed)} objects in the store, no orphan"


def _is_code(file: Path) -> bool:
    """Whether it is code that a worker has fetched, all of it, or has unpacked."""
    if "code" in file.parts[-4:-2]:  # and what Python compiled of it
        return True
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    return (file.parent.name, file.name) == ("blobs", digest)


def _no_key_is_left(farm: SoakFarm) -> str:
    client = redis.Redis(unix_socket_path=farm.redis.path)
    own = {
        redis_keys.GENERATION,
        redis_keys.NODES,
        redis_keys.TERM,
        redis_keys.STREAMS,
        redis_keys.FARM,
        redis_keys.REQUESTS,
    }
    own.add(redis_keys.events("farm"))
    keys = [key for key in client.keys("*") if key.decode() not in own]
    endless = [key for key in keys if client.ttl(key) == -1]
    assert endless == [], endless
    return f"{len(keys)} keys in Redis, each with an expiry"


def _no_file_is_left(farm: SoakFarm) -> str:
    """Workers leave logs and, whole, code for next time; nor are temporary files left."""
    left = [file for file in farm.files_of_workers() if file.name != "lock" and not _is_code(file)]
    left += farm.experiment.rglob("*.part")
    assert left == [], left[:20]
    return "no file left over"
