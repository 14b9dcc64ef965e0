"""Runs `tunemq scheduler`: takes the farm's lease and serves the farm until it ends."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from types import FrameType
from typing import Final

import msgspec

from tunemq_scheduler.api.farm_answer_types import ExperimentState
from tunemq_scheduler.base.import_precedence import installed_packages_first
from tunemq_scheduler.base.lease_holder import LeaseHolder
from tunemq_scheduler.farm.common.results_lock import hold_results
from tunemq_scheduler.farm.common.scheduler_exit_codes import exit_code
from tunemq_scheduler.farm.farm_settings import read_settings
from tunemq_scheduler.farm.monitoring.head_metrics import HeadWatch
from tunemq_scheduler.farm.monitoring.listen_address import AddressInUse
from tunemq_scheduler.farm.monitoring.metrics_server import MetricsServer
from tunemq_scheduler.farm.monitoring.metrics_snapshot import FarmSnapshot, waiting_snapshot
from tunemq_scheduler.storage.folders import OWN_FOLDER, farm_results_folder
from tunemq_shared.base.errors import BugError, ConfigError, TuneError, UserError
from tunemq_shared.base.unpickling import never_unpickle
from tunemq_shared.broker.redis_address import parse_address
from tunemq_shared.checkpoints.open_store import open_objects
from tunemq_shared.health.service_health import ServiceHealth
from tunemq_shared.objects.store_address import canonical_address, is_remote, without_settings
from tunemq_shared.signing.live_keys import KeyRole, find_keys
from tunemq_shared.system.process_attributes import keep_memory_private
from tunemq_shared.system.standard_streams import tell

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


class ServeArguments(msgspec.Struct, frozen=True, kw_only=True):
    """The command line of ``tunemq scheduler``; see `scheduler_command`."""

    url: str
    keys: str | None = None
    results: str | None = None
    store: str | None = None
    settings: str | None = None
    journal_release: str = "local"
    metrics: str | None = None
    metrics_hosts: tuple[str, ...] = ()
    insecure: bool = False
    take_over: tuple[str, ...] = ()

    def __repr__(self) -> str:
        """Hide the address, which may contain a password."""
        return "ServeArguments(...)"


def serve_farm(service: ServeArguments) -> int:
    """Serve a farm until SIGTERM or Ctrl-C; return the exit code.

    Raises:
        UserError: an argument or a setting is invalid; says what to do.
        BugError: a defect of TuneMQ.
    """
    # Experiment processes run as the same user, and nothing else would keep the farm's keys from
    # their code.
    keep_memory_private()
    never_unpickle()
    health = ServiceHealth.of_environment("scheduler")
    try:
        _serve(service, health)
    except (UserError, BugError):
        raise
    except TuneError as problem:
        _tell(str(problem))
        return exit_code(problem)
    finally:
        health.close()
    return 0


def _serve(service: ServeArguments, health: ServiceHealth) -> None:
    keys = find_keys(service.keys, KeyRole.SCHEDULER)
    settings = read_settings(
        service.settings, canonical_address(service.store) if service.store else ""
    )
    results = _made(farm_results_folder(service.results, service.store))
    store = _store(service.store, results, is_insecure=service.insecure)
    for address in settings.stores_of(None):
        try:
            open_objects(address).close()
        except TuneError as error:
            _tell(f"No search can use {without_settings(address)}: {error}")
    if service.journal_release == "store" and not is_remote(store):
        raise ConfigError(
            "--journal-release store needs a store that outlives this machine, such as"
            " --store s3://bucket/prefix."
        )
    with installed_packages_first("celery", "kombu", "redis"):
        from tunemq_scheduler.farm.common.scheduler_lease import (
            SchedulerLease,
            keep_term,
            read_term,
        )
        from tunemq_scheduler.farm.service.supervisor import FarmConfig, Supervisor
        from tunemq_scheduler.farm.service.take_over import (
            find_lost_searches,
            refuse_unknown_searches,
        )
        from tunemq_scheduler.security.redis_probes import refuse_dangers
        from tunemq_scheduler.security.signing_downgrade import refuse_unsigned

    refuse_dangers(service.url, is_insecure=service.insecure, tell=_tell)
    refuse_unsigned(service.url, keys, is_insecure=service.insecure, tell=_tell)
    lost = find_lost_searches(service.take_over, store, keys, _tell)
    farm = FarmConfig(
        url=service.url,
        keys=keys,
        address=parse_address(service.url).without_credentials(),
        results=results,
        store=store,
        journal_release=service.journal_release,
        settings=settings,
        lost=lost,
    )
    own = Path(results, OWN_FOLDER)
    # A scheduler on a full disk keeps no term.
    is_used = read_term(own / "term") or any((own / "experiments").glob("*"))
    held = hold_results(own, farm.address)
    reports = _Reports(service, health, results, store)
    me = LeaseHolder.this_process()
    lease = SchedulerLease(service.url, me)
    try:
        file = own / "term"
        at_least = 1 + max((read_term(file), *(one.term for one in lost.values())))
        term = lease.claim(at_least, _tell, reports.waits)
        if not (service.take_over or is_used):
            refuse_unknown_searches(service.url, results)
        keep_term(file, term)
        supervisor = Supervisor(
            farm, lease, me, _tell, reports.publish if reports.are_wanted else None
        )

        def stop(number: int, _frame: FrameType | None) -> None:
            health.stopping()
            supervisor.stop(f"Ended by {signal.Signals(number).name}")

        for number in _SIGNALS:
            signal.signal(number, stop)
        supervisor.serve()
    finally:
        lease.close()
        reports.close()
        os.close(held)


#: Seconds between two tries to serve metrics where another process has the port.
_METRICS_RETRY_S: Final = 10.0


class _Reports:
    """Reports the scheduler's health, and its metrics if they were asked for, until `close`.

    Raises:
        ConfigError: the metrics cannot be served.
    """

    def __init__(
        self, service: ServeArguments, health: ServiceHealth, results: str, store: str
    ) -> None:
        self._health = health
        self._service = service
        self._server: MetricsServer | None = None
        self._head: HeadWatch | None = None
        self._next_try = 0.0
        if service.metrics is not None:
            with installed_packages_first("prometheus_client"):
                self._listen()
            own = Path(results, OWN_FOLDER)
            self._head = HeadWatch(service.url, results, store, own, os.environ)

    def _listen(self) -> None:
        """Serve metrics; a farm must not stand still because another process has the port."""
        is_first, self._next_try = not self._next_try, time.monotonic() + _METRICS_RETRY_S
        try:
            server = MetricsServer(self._service.metrics or "", self._service.metrics_hosts)
        except AddressInUse as problem:
            if is_first:
                _tell(f"{problem} Without metrics until then: tried every {_METRICS_RETRY_S:g} s.")
            return
        self._server = server
        _tell(f"Metrics are at {server.address}")

    @property
    def are_wanted(self) -> bool:
        """Whether anybody receives them."""
        return self._head is not None or self._health.is_wanted

    def waits(self, status: str, full_s: float) -> None:
        """Report that the scheduler waits to begin; see `SchedulerLease.claim`."""
        if full_s:  # until the first snapshot, the server's answer says that the scheduler is away
            self._export(waiting_snapshot(full_s))
        self._health.beat(is_ready=False, status=status)

    def publish(self, farm: FarmSnapshot) -> None:
        """Report the state of a farm that is served."""
        self._export(farm)
        running = farm.experiments.get(ExperimentState.RUNNING, 0)
        waiting = farm.experiments.get(ExperimentState.QUEUED, 0)
        trouble = "Redis is away; " if farm.is_redis_away else ""
        trouble = trouble or ("Redis is full; " if farm.redis_full_s else "")
        status = f"{trouble}searches: {running} run, {waiting} wait; nodes: {len(farm.nodes)}"
        self._health.beat(is_ready=not trouble, status=status)

    def close(self) -> None:
        """Stop serving metrics."""
        if self._head is not None:
            self._head.close()
        if self._server is not None:
            self._server.close()

    def _export(self, newest: FarmSnapshot) -> None:
        if self._head is None:
            return
        if self._server is None and time.monotonic() >= self._next_try:
            self._listen()
        if self._server is not None:
            self._server.publish(msgspec.structs.replace(newest, head=self._head.seen()))


def _made(results: str) -> str:
    try:
        os.makedirs(results, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--results {results} cannot be made: {error.strerror}.") from error
    return results


def _store(given: str | None, results: str, *, is_insecure: bool) -> str:
    """Return the store's checked address; without one, the results folder.

    Raises:
        ConfigError: others can use it, too, and --insecure was not given.
        StoreError: it cannot be used.
    """
    if given is None:
        return results
    store = canonical_address(given)
    if is_remote(store):
        with open_objects(store) as objects:
            objects.probe()
        from tunemq_scheduler.security.store_probes import refuse_open_store  # imports a client

        refuse_open_store(store, is_insecure=is_insecure, tell=_tell)
    return store


def _tell(text: str) -> None:
    tell(f"tunemq scheduler: {text}")
