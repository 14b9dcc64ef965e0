"""The program of a node process: it reads the command line and runs a node.

    python -P -m tunemq_workers.node.node_process --redis URL --name NAME --workdir DIR

It starts the consumer forkserver before it imports anything else, because Celery takes longest to
load, and passes everything else to `tunemq_workers.node.node_setup`. All logs are in the working
folder: ``node.log``, ``consumer.log`` and one for each forkserver. The node's own output shows only
why it cannot start. A node of a farm (``--farm``, see `tunemq_workers.node.worker_command`) also
prints the events that a person at its terminal wants to see.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

from tunemq_shared.base.errors import ConfigError
from tunemq_shared.base.unpickling import never_unpickle
from tunemq_shared.broker.redis_address import REDIS_VARIABLE, parse_address
from tunemq_shared.health.service_health import ServiceHealth
from tunemq_shared.signing.key_files import KEYS_VARIABLE
from tunemq_shared.signing.live_keys import KeyRole, LiveKeys, find_keys
from tunemq_shared.system.process_attributes import keep_memory_private
from tunemq_shared.system.standard_streams import tell
from tunemq_workers.broker.consumer_launcher import start_forkserver
from tunemq_workers.node.worker_exit_codes import EXIT_FENCED, EXIT_USAGE, GRACE_S
from tunemq_workers.processes.child_process import LOGS, log_path
from tunemq_workers.system.trial_user import UserAccount, find_account, leave_login, own_files

#: The command that starts a node.
PROGRAM: Final = (sys.executable, "-P", "-m", "tunemq_workers.node.node_process")
#: The environment variable with the default of ``--trial-env``.
TRIAL_ENV: Final = "TUNEMQ_TRIAL_ENV"
#: The options of a node that a worker's command passes on, and what argparse has to know of them.
_OPTIONS: Final[dict[str, dict[str, Any]]] = {
    "keys": {
        "metavar": "FILE",
        "help": (
            "the farm's keys, worker.toml of `tunemq keys new`, without which any client of "
            f"its Redis may give this worker orders; default: ${KEYS_VARIABLE}"
        ),
    },
    "cpus": {"type": float, "help": "how many to offer; default: those that it may use"},
    "gpus": {
        "metavar": "WHICH",
        "help": (
            "GPUs to offer: a number, or UUIDs or indices with commas between them, such as "
            "0,1; default: all that $CUDA_VISIBLE_DEVICES allows. A trial sees only its own"
        ),
    },
    "resources": {
        "default": "{}",
        "metavar": "JSON",
        "help": "further resources to offer, name to amount",
    },
    "grace": {
        "type": float,
        "metavar": "SECONDS",
        "help": (
            "seconds that trials get to save and end when the node is told to stop; default: "
            f"{GRACE_S:g}"
        ),
    },
    "lost-after": {
        "type": float,
        "metavar": "SECONDS",
        "help": "trials save and end when no scheduler was heard for so long; default: 30 minutes",
    },
    "cache": {
        "metavar": "DIR",
        "help": "for copies of checkpoints that are in a store, of this worker only; default: cache"
        " in the --workdir",
    },
    "cache-bytes": {
        "metavar": "SIZE",
        "help": "the most bytes of the copies, such as 20GiB; default: a tenth of --disk-bytes",
    },
    "uploads-bytes": {
        "metavar": "SIZE",
        "help": "trials wait before they write another checkpoint while so much is not uploaded"
        " yet; default: a tenth of --disk-bytes",
    },
    "disk-bytes": {
        "metavar": "SIZE",
        "help": "how much of its disk this worker may use, where it shares the disk or a container"
        " limits it; default: 0, all of it. Copies of checkpoints, uploads that wait, code and data"
        " of searches, and files of trials that did not reach the store may take a tenth of it"
        " each. It does not limit logs and the folders of other trials",
    },
    "trial-user": {
        "metavar": "USER",
        "help": (
            "the user that trials run as, if root starts this: a name, or UID:GID; default: "
            "the worker's own. A trial that runs as the worker's user may read its keys"
        ),
    },
    "trial-env": {
        "metavar": "NAMES",
        "help": (
            "the only variables of the worker that trials get, besides PATH, HOME and a few "
            "that programs need: names and patterns, such as WANDB_*,HTTPS_PROXY; default: "
            f"${TRIAL_ENV}, else all but the farm's keys"
        ),
    },
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a node until it is stopped, and return its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(given)
    if options.farm:
        keep_memory_private()
    health = None
    try:
        parse_address(options.redis)
        # An embedded node signs nothing: only its own script reaches its Redis.
        keys = find_keys(options.keys, KeyRole.WORKER) if options.farm else LiveKeys.none()
        watched = None if options.watch_pid is None else os.pidfd_open(options.watch_pid)
        account = find_account(options.trial_user) if options.trial_user else None
        if account is not None:
            leave_login()
        if options.farm or account is not None:
            _prepare_workdir(options, account)
        os.makedirs(options.workdir, mode=0o700, exist_ok=True)
        os.makedirs(os.path.join(options.workdir, LOGS), mode=0o700, exist_ok=True)
        if options.farm:  # on an embedded farm these variables are the script's
            health = ServiceHealth.of_environment("worker")
    except ConfigError as problem:
        tell(str(problem))
        return EXIT_USAGE
    except ProcessLookupError:
        return 0  # the process that this node belongs to has already ended
    never_unpickle()
    instance_id = os.urandom(8).hex()
    log = log_path(options.workdir, "consumer")
    start_consumers = partial(start_forkserver, options.redis, instance_id, log)
    consumers = start_consumers()
    # Imported while the forkserver loads Celery.
    from tunemq_workers.node.node_setup import run_node

    try:
        code = run_node(
            options, instance_id, start_consumers, consumers, watched, account, keys, health
        )
    except ConfigError as problem:
        tell(str(problem))
        return EXIT_USAGE
    finally:
        if health is not None:
            with own_files():
                health.close()
    if code == EXIT_FENCED and health is not None:
        os.environ.update(health.variables)
        # Same pid, so that a service manager sees no exit; everything else starts again.
        # As its own user, or glibc drops variables such as LD_LIBRARY_PATH (secure execution).
        with own_files():
            os.execv(PROGRAM[0], [*PROGRAM, *given])  # noqa: S606  no shell
    return code


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a node that `given_options` passes on."""
    for name, arguments in _OPTIONS.items():
        parser.add_argument(f"--{name}", **arguments)


def given_options(options: argparse.Namespace) -> list[str]:
    """Return the arguments for those of the options of `add_options` that were given."""
    line: list[str] = []
    for name in _OPTIONS:
        value = getattr(options, name.replace("-", "_"))
        if value is not None:
            line += [f"--{name}", str(value)]
    return line


def _prepare_workdir(options: argparse.Namespace, account: UserAccount | None) -> None:
    """Make the working folder, lock it for as long as this process lives, and share its part.

    With a user for trials ``options.workdir`` and ``options.cache`` lead through no link then.

    Raises:
        ConfigError: it cannot be made, another node works there, or trials' user cannot.
    """
    from tunemq_workers.node import trial_user_folders
    from tunemq_workers.work_folder import LOCK, OF_TRIALS, check_ours

    folder = os.path.abspath(options.workdir)
    if account is not None:
        folder = options.workdir = trial_user_folders.claim_workdir(account, folder, OF_TRIALS)
    else:
        try:
            os.makedirs(folder, mode=0o700, exist_ok=True)
        except OSError as problem:
            raise ConfigError(
                f"--workdir {folder} cannot be made: {problem.strerror}."
            ) from problem
    if options.farm:
        check_ours(folder)
        _lock(folder, LOCK)
    if account is not None:
        options.cache = trial_user_folders.give_folders(account, folder, OF_TRIALS, options.cache)
    if options.farm and options.cache is not None:
        _lock_cache(os.path.abspath(options.cache))


def _lock(folder: str, name: str) -> None:
    path, flags = os.path.join(folder, name), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, 0o600)
    except OSError as problem:
        raise ConfigError(
            f"{path} cannot be opened: {problem.strerror}. Remove it, or choose another --workdir."
        ) from problem
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as problem:
        holder = os.read(descriptor, 32).decode(errors="replace").strip()
        raise ConfigError(
            f"another worker (process {holder or 'unknown'}) works in {folder}; choose another "
            "--name for this one, or another --workdir."
        ) from problem
    # Never empty, because the pid marks the folder as a worker's.
    os.ftruncate(descriptor, os.pwrite(descriptor, b"%d\n" % os.getpid(), 0))
    # It stays open, and so locked, to the end.


def _lock_cache(folder: str) -> None:
    """Lock the folder itself, in which trials may write; a folder that cannot be is named later."""
    with suppress(OSError):
        os.makedirs(folder, mode=0o700, exist_ok=True)  # others could hold the lock
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # stays open, as above
        except BlockingIOError as problem:
            raise ConfigError(
                f"another worker uses --cache {folder}, and would lose checkpoints there; choose "
                "another --cache for this one."
            ) from problem


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tunemq_workers.node.node_process", description="One worker's node."
    )
    redis = os.environ.get(REDIS_VARIABLE)
    parser.add_argument(
        "--redis",
        required=not redis,
        default=redis,
        metavar="URL",
        help=f"where Redis is; default: ${REDIS_VARIABLE}",
    )
    parser.add_argument("--name", required=True, help="this node's name, the same after a restart")
    parser.add_argument("--workdir", required=True, metavar="DIR", help="for logs and what spills")
    parser.add_argument(
        "--farm",
        action="store_true",
        help="a node of a farm: tell the terminal what happens, and start anew when fenced",
    )
    parser.add_argument(
        "--watch-pid", type=int, metavar="PID", help="end at once when this process ends"
    )
    parser.add_argument(
        "--prewarm",
        metavar="PATH",
        help="a file with an Environment whose forkserver is started before the first trial needs"
        " it; removed when it was read",
    )
    add_options(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
