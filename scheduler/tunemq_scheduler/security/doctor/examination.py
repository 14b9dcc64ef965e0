"""`examine`: all checks of a farm, in the order in which a person reads their findings.

No check prevents the others: a service that does not answer is a finding.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from tunemq_scheduler.api.farm_answer_types import (
    ExperimentList,
    ExperimentState,
    FarmDescription,
    NodeList,
)
from tunemq_scheduler.api.farm_client import FarmClient
from tunemq_scheduler.security.doctor.certificates import check_certificates
from tunemq_scheduler.security.doctor.disk_checks import check_blobs, check_folder
from tunemq_scheduler.security.doctor.key_checks import (
    check_keys,
    check_private_files,
    private_copy,
    private_files,
    secrets_in,
)
from tunemq_scheduler.security.doctor.node_checks import RequiredVersions, check_nodes
from tunemq_scheduler.security.doctor.node_reports import read_farm
from tunemq_scheduler.security.doctor.process_argument_checks import (
    KnownSecrets,
    check_arguments,
    running_processes,
)
from tunemq_scheduler.security.doctor.report_checks import (
    check_backup,
    check_scheduler_reports,
    check_searches,
)
from tunemq_scheduler.security.doctor.time_limit import within
from tunemq_scheduler.security.findings import Finding, FindingLevel, ok, problem, warning
from tunemq_scheduler.security.redis_probes import WRITES, probe, reach_of_others
from tunemq_scheduler.security.store_probes import probe_store
from tunemq_scheduler.security.store_role_probes import StoreKeys, StoreRole, try_store
from tunemq_scheduler.storage.folders import BACKUP_NOTE, OWN_FOLDER
from tunemq_scheduler.transport.redis.redis_connection import RedisConnection, RedisIsReplica
from tunemq_shared.base.errors import (
    NoScheduler,
    RedisUnavailable,
    StoreError,
    TransportError,
    TuneError,
)
from tunemq_shared.base.known_variables import unknown_variables
from tunemq_shared.base.retrying import StoreUnavailable
from tunemq_shared.broker.redis_address import parse_address
from tunemq_shared.objects.s3_address import find_keys
from tunemq_shared.objects.store_address import canonical_address, is_remote
from tunemq_shared.protocol.farm_requests import ListExperiments, ListNodes
from tunemq_shared.signing.key_files import KeyFile

#: Seconds to wait for the scheduler's answer.
_ANSWER_S: Final = 10.0
_NEED_NODES: Final = (ExperimentState.RUNNING, ExperimentState.QUEUED)
#: Seconds to wait for all checks of the store, and for those of one folder.
_STORE_S: Final = 60.0
_FOLDER_S: Final = 20.0
_START_SCHEDULER: Final = (
    "start it again with the command that it ran with (tunemq scheduler; systemctl start"
    " tunemq-scheduler): it takes over what runs; its log says why it ended"
)
_AS_SCHEDULER: Final = (
    "run this where the scheduler runs, with its $TUNEMQ_REDIS and --keys scheduler.toml"
)
_REACH_STORE: Final = (
    "see that the server runs and is reached from here, and that its address (--store) and its keys"
    " (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY) are those of the scheduler"
)
_NOT_ASKED: Final = warning(
    "scheduler",
    "the scheduler and the nodes were not checked, because the key file cannot be used",
    "fix the key file, then run `tunemq doctor` again",
)


class DoctorTarget(msgspec.Struct, frozen=True, kw_only=True):
    """The farm to examine.

    Attributes:
        url: Of its Redis.
        keys: The path of the scheduler's key file; empty if nothing is signed.
        store: The address of its store; empty: the scheduler's, if there is one.
        results: The folder of all experiments; empty: the scheduler's, if there is one.
        results_if_unknown: That folder if the scheduler does not answer.
        store_if_unknown: The store's address if the scheduler does not answer.
        environ: Names keys and certificates; the store's keys in it are the scheduler's.
        role_keys: The store's keys of other roles.
    """

    url: str
    keys: str
    store: str
    results: str
    results_if_unknown: str
    store_if_unknown: str = ""
    environ: Mapping[str, str]
    role_keys: tuple[StoreKeys, ...] = ()

    def __repr__(self) -> str:
        """Nothing of its content, which may be secret."""
        return "DoctorTarget(...)"


def examine(farm: DoctorTarget) -> list[Finding]:
    """Run all checks.

    Raises:
        ConfigError: An address is invalid.
    """
    with private_copy(farm.keys) as keys_read:
        found = _examine(farm, keys_read)
    return [
        msgspec.structs.replace(one, what=one.what.replace(keys_read, farm.keys))
        if keys_read != farm.keys
        else one
        for one in found
    ]


def _examine(farm: DoctorTarget, keys_read: str) -> list[Finding]:
    redis = parse_address(farm.url)
    store = canonical_address(farm.store, farm.environ) if farm.store else ""
    unknown = farm.store_if_unknown
    unknown = canonical_address(unknown, farm.environ) if unknown else ""
    keys, found = check_keys(keys_read, "" if keys_read else reach_of_others(farm.url))
    found += _check_variables(farm.environ)
    found += check_private_files(private_files(farm.keys, redis, farm.environ))
    found += check_arguments(KnownSecrets(redis, _secrets(keys, farm.environ)), running_processes())
    try:
        found += probe(farm.url)
    except TransportError as error:
        store = store or unknown
        found += [_unreachable(error), *check_certificates(farm.url, store, farm.environ)]
        disks = _check_disks(farm.results or farm.results_if_unknown)
        return [*found, *check_store(store, farm), *disks]
    description = None
    if any(one.check == WRITES and one.level is FindingLevel.PROBLEM for one in found):
        pass  # nothing can answer and nodes seem gone: consequences of that one problem
    elif farm.keys and keys.is_empty:
        found.append(_NOT_ASKED)
    else:
        description, searches, told = _ask_scheduler(farm, keys_read, keys)
        found += told
        found += _look_at_nodes(farm.url, keys, description, searches)
    store = store or (description.store if description else unknown)
    found += check_certificates(farm.url, store, farm.environ)
    is_in_use = description is not None and store == description.store
    found += check_store(store, farm, is_in_use=is_in_use)
    its_results = description.results if description else ""
    return found + _check_disks(farm.results or its_results or farm.results_if_unknown)


def allowed_by_insecure(findings: Iterable[Finding]) -> list[Finding]:
    """Reduce findings that ``--insecure`` permits to warnings."""
    return [
        msgspec.structs.replace(one, level=FindingLevel.WARNING)
        if one.level is FindingLevel.PROBLEM and one.refuses
        else one
        for one in findings
    ]


def _ask_scheduler(
    farm: DoctorTarget, keys_read: str, keys: KeyFile
) -> tuple[FarmDescription | None, tuple[str, ...], list[Finding]]:
    """Ask the scheduler for the farm's description, searches that need nodes, and its reports."""
    owner = next(iter(keys.submitters), "")
    try:
        with FarmClient(
            farm.url, owner=owner, keys=keys_read or None, timeout_s=_ANSWER_S
        ) as client:
            description = client.farm()
            listed = client.ask(ListNodes(), NodeList)
            active = client.ask(ListExperiments(is_all=False), ExperimentList).experiments
    except NoScheduler as error:
        return None, (), [problem("scheduler", str(error), _START_SCHEDULER)]
    except TuneError as error:
        return None, (), [problem("scheduler", str(error), _AS_SCHEDULER)]
    alive = ok("scheduler", description.scheduler)
    searches = tuple(f"{row.name} ({row.state})" for row in active if row.state in _NEED_NODES)
    told = [alive, *check_searches(active), *check_scheduler_reports(listed)]
    return description, searches, told


def _look_at_nodes(
    url: str, keys: KeyFile, description: FarmDescription | None, searches: Sequence[str]
) -> list[Finding]:
    line = RedisConnection(url)
    try:
        farm_report = read_farm(line, keys.events_signer())
    except RedisUnavailable as error:
        return [_unreachable(error)]
    except TransportError as error:
        return [warning("nodes", f"nodes cannot be looked at: {error}", _AS_SCHEDULER)]
    finally:
        line.close()
    return check_nodes(farm_report, RequiredVersions.of_farm(description), searches)


def check_store(address: str, farm: DoctorTarget, *, is_in_use: bool = False) -> list[Finding]:
    """Check that the farm's roles can use its store, and others cannot, within a time limit.

    Args:
        address: Of the store; empty if unknown.
        farm: The farm to examine.
        is_in_use: A running scheduler uses this store.
    """
    if not address:
        return [
            warning(
                "store",
                "the store was not looked at: no scheduler says where it is",
                "tunemq doctor --store ADDRESS, or start the scheduler",
            )
        ]
    if not is_remote(address):
        return _check_folders("store", "the store", address, is_in_use=is_in_use)
    every = [StoreKeys(StoreRole.SCHEDULER, farm.environ), *farm.role_keys]
    try:
        return within(
            _STORE_S, lambda: [*try_store(address, every), *probe_store(address, farm.environ)]
        )
    except (StoreUnavailable, TimeoutError) as error:
        what = f"store unreachable: {address.partition('?')[0]}: {error}"
        return [problem("store", what, _REACH_STORE)]
    except StoreError as error:
        return [problem("store", str(error), _REACH_STORE)]


def _check_variables(environ: Mapping[str, str]) -> list[Finding]:
    found = [
        warning("variables", unknown, "correct its name, or unset it")
        for unknown in unknown_variables(environ)
    ]
    return found or [ok("variables", "all that begin with TUNEMQ_ are known")]


def _check_disks(results: str) -> list[Finding]:
    note = Path(results, OWN_FOLDER, BACKUP_NOTE)
    return _check_folders("results-disk", "the results in", results, backup_note=note)


def _check_folders(
    check: str,
    what: str,
    folder: str,
    *,
    backup_note: Path | None = None,
    is_in_use: bool = False,
) -> list[Finding]:
    """Check the disk of a folder, and the note of the last backup."""

    def look() -> list[Finding]:
        disk = check_folder(check, what, folder, is_in_use=is_in_use)
        blobs = check_blobs(folder) if check == "store" else []
        return [disk, *blobs, *(check_backup(backup_note) if backup_note else ())]

    try:
        return within(_FOLDER_S, look)
    except TimeoutError as error:
        return [
            problem(
                check,
                f"{what} {folder} does not answer: {error}",
                "see that the file system is there (df, mount): a folder on a network hangs while"
                " its server is away",
            )
        ]


def _secrets(keys: KeyFile, environ: Mapping[str, str]) -> set[str]:
    """The secrets that are known on this machine."""
    found = set(secrets_in(keys))
    try:
        store = find_keys(environ)
    except TuneError:
        return found  # there are none
    return found | {store.secret_key, store.session_token}


def _unreachable(error: TransportError) -> Finding:
    if isinstance(error, RedisIsReplica):
        return problem(
            "redis",
            str(error),
            "put the address of its primary into $TUNEMQ_REDIS (or --redis), or make this one the"
            " primary: redis-cli REPLICAOF NO ONE",
        )
    return problem(
        "redis",
        str(error),
        "see that redis-server runs and is reached from here, and that $TUNEMQ_REDIS (or --redis)"
        " has its address with the user and the password of the scheduler",
    )
