"""What `tunemq scheduler` does without a script: gets the farm and serves it until it is ended."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import Final
from urllib.parse import urlsplit

import msgspec

from tunemq_scheduler.farm.exits import exit_code
from tunemq_scheduler.farm.holder import Holder
from tunemq_scheduler.farm.metrics_server import MetricsServer
from tunemq_scheduler.farm.settings import read_settings
from tunemq_scheduler.folders import results_folder
from tunemq_scheduler.installed_packages import installed_packages_first
from tunemq_shared.errors import BugError, ConfigError, TuneError, UserError
from tunemq_shared.prctl import keep_memory_private
from tunemq_shared.store_address import canonical_address, is_remote
from tunemq_shared.stores import open_objects

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


class Service(msgspec.Struct, frozen=True, kw_only=True):
    """The command line of ``tunemq scheduler`` without a script; see there."""

    url: str
    results: str | None = None
    store: str | None = None
    settings: str | None = None
    journal_release: str = "local"
    metrics: str | None = None


def serve_farm(service: Service) -> int:
    """Serve a farm until SIGTERM or Ctrl-C; the exit code.

    Raises:
        UserError: something given is of no use; says what to do.
        BugError: ours.
    """
    # Experiments' processes are its user's, too, and nothing else would keep the farm's keys from
    # their code.
    keep_memory_private()
    try:
        _serve(service)
    except (UserError, BugError):
        raise
    except TuneError as problem:
        _tell(str(problem))
        return exit_code(problem)
    return 0


def _serve(service: Service) -> None:
    settings = read_settings(service.settings)
    results = _results(service.results)
    store = _store(service.store, results)
    if service.journal_release == "store" and not is_remote(store):
        raise ConfigError(
            "--journal-release store needs a store that outlives this machine, such as"
            " --store s3://bucket/prefix."
        )
    with installed_packages_first("celery", "kombu", "redis"):
        from tunemq_scheduler.farm.lease import SchedulerLease
        from tunemq_scheduler.farm.supervisor import Farm, Supervisor

    farm = Farm(
        url=service.url,
        address=_without_password(service.url),
        results=results,
        store=store,
        journal_release=service.journal_release,
        settings=settings,
    )
    metrics = None if service.metrics is None else _metrics(service.metrics)
    me = Holder.this_process("")
    lease = SchedulerLease(service.url, me)
    try:
        lease.claim(1, _tell)
        supervisor = Supervisor(
            farm, lease, me, _tell, None if metrics is None else metrics.publish
        )

        def stop(number: int, _frame: FrameType | None) -> None:
            supervisor.stop(f"Ended by {signal.Signals(number).name}")

        for number in _SIGNALS:
            signal.signal(number, stop)
        supervisor.serve()
    finally:
        lease.close()
        if metrics is not None:
            metrics.close()


def _metrics(listen: str) -> MetricsServer:
    with installed_packages_first("prometheus_client"):
        server = MetricsServer(listen)
    _tell(f"Metrics are at {server.address}")
    return server


def _results(given: str | None) -> str:
    if given is not None and is_remote(given):
        raise ConfigError(
            f"--results {given} is no folder of this machine; what all machines reach is --store."
        )
    results = str(results_folder(given))
    try:
        os.makedirs(results, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--results {results} cannot be made: {error.strerror}.") from error
    return results


def _store(given: str | None, results: str) -> str:
    """The address of the store, which can be used; the folder of results where none is given."""
    if given is None:
        return results
    store = canonical_address(given)
    if is_remote(store):
        with open_objects(store) as objects:
            objects.probe()
    return store


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def _tell(text: str) -> None:
    sys.stderr.write(f"tunemq scheduler: {text}\n")
    sys.stderr.flush()
