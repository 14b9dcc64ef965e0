"""Builds a node from its command line, and runs it."""

from __future__ import annotations

import argparse
import logging
import math
import os
import platform
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Final

import cloudpickle
import msgspec

from tunemq_shared.base.byte_sizes import parse_bytes
from tunemq_shared.base.decoding_errors import UNDECODABLE
from tunemq_shared.base.errors import ConfigError
from tunemq_shared.broker.redis_address import parse_address
from tunemq_shared.health.node_metrics import GpuMetrics, NodeDescription
from tunemq_shared.health.service_health import ServiceHealth
from tunemq_shared.protocol.message_limits import LINE_CHARACTERS
from tunemq_shared.protocol.messages import PROTOCOL_VERSION, Environment
from tunemq_shared.protocol.registration import NodeRegistration
from tunemq_shared.protocol.rejection_counter import RejectionCounter
from tunemq_shared.signing.live_keys import LiveKeys
from tunemq_shared.system.process_attributes import become_subreaper, set_name
from tunemq_shared.system.processes import parent_of
from tunemq_workers import work_folder
from tunemq_workers.broker.node_signing import NodeSigning
from tunemq_workers.checkpoints.checkpoint_cache import CacheLimits
from tunemq_workers.forkservers import interpreters
from tunemq_workers.forkservers.forkserver_pool import ForkserverPool
from tunemq_workers.gpu.drivers.nvml import open_driver
from tunemq_workers.gpu.gpu_availability import GpuAvailability
from tunemq_workers.gpu.gpu_discovery import VISIBLE, OfferedGpus, offered_gpus
from tunemq_workers.gpu.gpu_locks import GpuLocks, take_gpus
from tunemq_workers.gpu.gpu_meter import GpuMeter
from tunemq_workers.gpu.gpu_snapshots import GpuSnapshot, GpuWatch
from tunemq_workers.node.node_loop import NodeLoop
from tunemq_workers.node.terminal_log import OneLineFormatter, open_terminal
from tunemq_workers.node.trial_user_folders import keep_rights
from tunemq_workers.node.worker_exit_codes import EXIT_BROKEN, GRACE_S, LOST_AFTER_S
from tunemq_workers.node.worker_health import WorkerHealth
from tunemq_workers.processes.child_process import LOGS, ChildProcess, log_path, start_child
from tunemq_workers.processes.memory_groups import MemoryCgroups
from tunemq_workers.runtime.disk_jobs import DiskJobs
from tunemq_workers.runtime.reactor import Reactor, do_nothing
from tunemq_workers.runtime.untrusted_sockets import interrupt_lingering
from tunemq_workers.system import machine
from tunemq_workers.system.credentials import STORE_KEYS
from tunemq_workers.system.node_metrics_collector import MachineWatch
from tunemq_workers.system.trial_user import UserAccount, act_for
from tunemq_workers.transfers.transfer_client import TransferClient
from tunemq_workers.trials.localize_order import BLOBS, parse_allowed, trial_variables
from tunemq_workers.work_folder import keep_logs_short

_log = logging.getLogger(__name__)

#: Seconds in which signals count as one: `timeout` signals its child, and then the child's group.
_SAME_SIGNAL_S: Final = 0.5


def run_node(
    options: argparse.Namespace,
    instance_id: str,
    start_consumers: Callable[[], ChildProcess],
    consumers: ChildProcess,
    watched: int | None,
    account: UserAccount | None = None,
    keys: LiveKeys | None = None,
    health: ServiceHealth | None = None,
) -> int:
    """Run a node with the options of `tunemq_workers.node.node_process`, and return its exit code.

    Args:
        options: the command line.
        instance_id: names this start of the node.
        start_consumers: starts a forkserver for consumers.
        consumers: the first such forkserver, already running.
        watched: a pidfd; when its process ends, the node ends at once.
        account: the user that trials run as; by default this process's own user.
        keys: the farm's keys; None where messages are not signed.
        health: reports the node's health; None if there is no one to report to.

    Raises:
        ConfigError: an option has an invalid value.
    """
    resources, gpus = _offered(options)
    # An embedded node ends with its script, which saves trials before that.
    grace_s = _seconds("--grace", options.grace, GRACE_S if options.farm else 0.0)
    lost_after_s = _seconds("--lost-after", options.lost_after, LOST_AFTER_S, least=1)
    prewarmed = _environment(options.prewarm)
    allowed = None if options.trial_env is None else parse_allowed(options.trial_env)
    cache = os.path.abspath(options.cache or os.path.join(options.workdir, "cache"))
    limits = CacheLimits(
        _bytes("--cache-bytes", options.cache_bytes),
        _bytes("--uploads-bytes", options.uploads_bytes),
        _bytes("--disk-bytes", options.disk_bytes) or 0,
    )
    locks = _lock(options, gpus)
    set_name("tunemq-node")
    become_subreaper()
    work_folder.remove_leftovers(os.path.join(options.workdir, LOGS))
    _open_log(options.workdir)
    terminal = open_terminal() if options.farm else None
    redis = parse_address(options.redis)  # its certificates may be readable by this user only
    if account is not None:  # limits this process's file rights to those of trials
        act_for(account)
    elif options.farm and os.geteuid() == 0:
        _log.warning("node.trials_as_root")
    hostname, node_ip = machine.hostname(), machine.node_ip(redis.host)
    registration = NodeRegistration(
        PROTOCOL_VERSION,
        options.name,
        instance_id,
        hostname,
        node_ip,
        os.getpid(),
        resources,
        platform.python_version(),
        cloudpickle.__version__,
        gpus.gpus,
        began=time.time(),
    )
    signing = NodeSigning(instance_id, keys)
    reactor, children = Reactor(), set[int]()
    disk = DiskJobs(reactor)
    pool = ForkserverPool(
        reactor,
        children,
        folder=options.workdir,
        hostname=hostname,
        node_ip=node_ip,
        has_gpus=bool(gpus.gpus),
        account=account,
        groups=MemoryCgroups(instance_id),
    )
    start = partial(
        _start, options, "tunemq_workers.transfers.transfer_process", "transfers", STORE_KEYS
    )
    folder = os.path.abspath(options.workdir)
    meter = GpuMeter(gpus.gpus)
    availability, gpu_metrics = _keep(gpus, reactor, meter, locks)
    watch = (
        _watch_machine(registration, folder, cache, gpu_metrics, signing.rejected)
        if options.farm
        else None
    )
    loop = NodeLoop(
        instance_id=instance_id,
        registration=registration,
        redis=redis,
        reactor=reactor,
        disk=disk,
        transfers=TransferClient(reactor, start=start, children=children),
        forkservers=pool,
        folder=folder,
        cache=cache,
        limits=limits,
        variables=trial_variables(account, allowed),
        children=children,
        start_scanner=partial(
            _start, options, "tunemq_workers.logs.log_policy_scanner", "log_scanner"
        ),
        start_consumers=start_consumers,
        consumers=consumers,
        signing=signing,
        lost_after_s=lost_after_s,
        grace_s=grace_s,
        availability=availability,
        meter=meter,
        watch=watch,
        health=WorkerHealth(health or ServiceHealth("worker"), reactor),
    )
    _log.info("node.started name=%s instance_id=%s redis=%s", options.name, instance_id, redis)
    listed = ", ".join(f"{name} {amount:g}" for name, amount in resources.items())
    named = ", ".join(f"{gpu.uuid} ({gpu.model or 'unknown'})" for gpu in gpus.gpus)
    _log.info("node.offers resources=%s gpus=%s", listed, named or "none by name")
    _end_on_events(reactor, loop, grace_s, watched)
    _end_without_workdir(watch, reactor, loop, folder, grace_s)
    if prewarmed is not None:
        pool.prewarm(prewarmed)
    keep_logs_short(reactor, disk, os.path.join(options.workdir, LOGS))
    if account is not None:
        shared = {os.path.join(options.workdir, name) for name in work_folder.OF_TRIALS}
        keep_rights(reactor, disk, shared | {cache})
    try:
        return loop.run()
    except BaseException:  # noqa: BLE001 - the exit code and the log report it
        _log.critical("node.broken", exc_info=True)
        return EXIT_BROKEN
    finally:
        if terminal is not None:
            terminal.close()


def _end_on_events(reactor: Reactor, loop: NodeLoop, grace_s: float, watched: int | None) -> None:
    """End the node on SIGTERM or Ctrl-C, when a thread dies, and when the watched process ends.

    The first signal leaves trials the grace, a later one ends the node at once.
    """
    first_at: list[float] = []

    def on_signal(number: int, _frame: object) -> None:
        now, name = time.monotonic(), signal.Signals(number).name
        if not first_at:
            first_at.append(now)
            reactor.post(partial(loop.stop, name, grace_s=grace_s))
        elif now - first_at[0] > _SAME_SIGNAL_S:
            reactor.post(partial(loop.abandon, f"{name} again"))

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    interrupt_lingering()
    threading.excepthook = partial(_on_thread_death, reactor, loop)
    if watched is not None:
        reactor.watch(watched, lambda _: loop.abandon("the process that it belongs to has ended"))


def _end_without_workdir(
    watch: MachineWatch | None, reactor: Reactor, loop: NodeLoop, folder: str, grace_s: float
) -> None:
    # The next start makes all that was in it; until then no helper process can start there.
    if watch is not None:
        gone = f"its --workdir {folder} was removed; start it again"
        end = partial(loop.stop, gone, EXIT_BROKEN, grace_s=grace_s)
        watch.on_removed = partial(reactor.post, end)


def _on_thread_death(reactor: Reactor, loop: NodeLoop, death: threading.ExceptHookArgs) -> None:
    """Log why a thread ended, and end the node, which cannot work without it."""
    name = death.thread.name if death.thread else "?"
    problem = (death.exc_type, death.exc_value or death.exc_type(), death.exc_traceback)
    _log.critical("thread.broken name=%s", name, exc_info=problem)
    reactor.post(partial(loop.abandon, f"thread {name} broke", EXIT_BROKEN))


def _watch_machine(
    registration: NodeRegistration,
    folder: str,
    cache: str,
    gpu_metrics: Callable[[], tuple[GpuMetrics, ...]],
    rejected: RejectionCounter,
) -> MachineWatch:
    about = NodeDescription(
        registration.node,
        registration.hostname,
        registration.python,
        {"cloudpickle": registration.cloudpickle},
        tuple(gpu.uuid for gpu in registration.gpus),
    )
    folders = os.path.join(folder, BLOBS), cache
    watch = MachineWatch(interpreters.our_version(), folder, gpu_metrics, about, rejected, folders)
    watch.start()
    return watch


def _start(
    options: argparse.Namespace, module: str, log: str, needs: frozenset[str] = frozenset()
) -> ChildProcess:
    """Start a helper process for trial files, with the rights that trials have."""
    rights = ("--trial-user", options.trial_user) if options.trial_user else ()
    return start_child(module, rights, log_path(options.workdir, log), needs=needs)


def _open_log(folder: str) -> None:
    path = log_path(folder, "node")
    file = logging.FileHandler(path)
    file.setFormatter(
        OneLineFormatter("%(asctime)s.%(msecs)03d %(levelname)s %(message)s", "%Y-%m-%dT%H:%M:%S")
    )
    logging.basicConfig(level=logging.INFO, handlers=[file])
    os.chmod(path, 0o600)


def _offered(options: argparse.Namespace) -> tuple[dict[str, float], OfferedGpus]:
    cpus = _checked("--cpus", options.cpus, "processors, such as 4")
    others = _resources(options.resources)
    gpus = _gpus(options, others)
    if gpus.number:
        others["gpu"] = float(gpus.number)
    return machine.offered(cpus, others), gpus


def _gpus(options: argparse.Namespace, others: dict[str, float]) -> OfferedGpus:
    if "gpu" in others:
        if options.gpus is not None:
            raise ConfigError(
                f"--gpus is {options.gpus}, and --resources offers gpu={others['gpu']:g}; "
                "remove one of them."
            )
        return OfferedGpus()
    return offered_gpus(options.gpus, os.environ.get(VISIBLE), open_driver)


def _lock(options: argparse.Namespace, gpus: OfferedGpus) -> GpuLocks | None:
    """Lock the GPUs that a farm's worker offers against other nodes.

    An embedded node offers all GPUs that it sees and shares them with other searches, so it locks
    each GPU only while a trial uses it. The lock names the script's process, which users know: the
    parent of this process's parent.
    """
    if options.farm or gpus.driver is None:
        take_gpus(gpus.gpus, f"worker {options.name}")
        return None
    return GpuLocks(f"search of process {parent_of(os.getppid()) or os.getppid()}")


def _keep(
    gpus: OfferedGpus, reactor: Reactor, meter: GpuMeter, locks: GpuLocks | None
) -> tuple[GpuAvailability, Callable[[], tuple[GpuMetrics, ...]]]:
    """Return what decides which GPUs may be used, and a function that returns GPU metrics."""
    if gpus.driver is None or not gpus.gpus:  # no GPU that the node knows by its UUID
        return GpuAvailability((), reactor, do_nothing), tuple
    watch = GpuWatch(gpus.driver, gpus.gpus, reactor.post)
    availability = GpuAvailability(gpus.gpus, reactor, watch.poll_within, locks=locks)

    def on_snapshot(snapshot: GpuSnapshot) -> None:
        meter.seen(snapshot, watch.gpu_metrics)
        availability.seen(snapshot)

    watch.on_snapshot = on_snapshot
    watch.start()
    return availability, partial(_gpu_metrics, watch, availability)


def _gpu_metrics(watch: GpuWatch, availability: GpuAvailability) -> tuple[GpuMetrics, ...]:
    """Return the metrics of each GPU, with the processes of others that use it."""
    foreign = availability.foreign
    return tuple(
        msgspec.structs.replace(one, foreign=foreign.get(one.uuid, "")[:LINE_CHARACTERS])
        for one in watch.gpu_metrics
    )


def _checked(option: str, given: float | None, what: str) -> float | None:
    if given is not None and not (math.isfinite(given) and given >= 0):
        raise ConfigError(f"{option} is {given}; give a number of {what}.")
    return given


def _seconds(option: str, given: float | None, default: float, least: float = 0) -> float:
    checked = _checked(option, given, "seconds, such as 10")
    if checked is not None and checked < least:
        raise ConfigError(f"{option} is {checked:g}; give {least:g} seconds or more.")
    return default if checked is None else checked


def _resources(text: str) -> dict[str, float]:
    try:
        amounts = msgspec.json.decode(text, type=dict[str, float])
    except ValueError as problem:  # also text that cannot be encoded
        raise ConfigError(
            f"--resources is {text!r}: {problem}; "
            """give a JSON object of names and amounts, such as '{"gpu": 2}'."""
        ) from problem
    for name, amount in amounts.items():
        if amount < 0:
            raise ConfigError(f"--resources offers {amount} of {name!r}; give at least 0.")
    return amounts


def _bytes(option: str, text: str | None) -> int | None:
    """Return the bytes that an option gives; None if it is not given."""
    number = None if text is None else parse_bytes(text)
    if number is None and text is not None:
        raise ConfigError(f"{option} is {text!r}; give bytes, such as 20GiB or 500MB.")
    return number


def _environment(path: str | None) -> Environment | None:
    """Read and remove a file with an `Environment`; None if an earlier node has read it."""
    if path is None:
        return None
    try:
        with open(path, "rb") as file:
            content = file.read()
        os.unlink(path)
    except FileNotFoundError:  # an earlier node has read it
        return None
    except OSError as problem:
        raise ConfigError(f"--prewarm is {path!r}: {problem.strerror}.") from problem
    try:
        return msgspec.json.decode(content, type=Environment)
    except UNDECODABLE as problem:
        raise ConfigError(
            f"--prewarm is {path!r}, which holds no Environment: {problem}."
        ) from problem
