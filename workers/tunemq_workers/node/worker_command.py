"""``tunemq worker``: run this machine as a node of a farm.

The command checks its options, Redis and the keys before anything starts, and reports problems at
the terminal. Then it replaces itself with the node (`tunemq_workers.node.node_process`), which is a
separate program so that it keeps no memory for the command line.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from typing import TYPE_CHECKING, Final, NoReturn

from tunemq_shared.base.errors import ConfigError, RedisRejectsUser, RedisUnavailable
from tunemq_shared.base.known_variables import unknown_variables
from tunemq_shared.broker.redis_address import REDIS_VARIABLE, RedisAddress, parse_address
from tunemq_shared.signing.live_keys import KeyRole, find_keys
from tunemq_shared.system.process_attributes import keep_memory_private
from tunemq_shared.system.standard_streams import tell
from tunemq_workers.node import node_process
from tunemq_workers.node.worker_exit_codes import EXIT_UNAVAILABLE
from tunemq_workers.system import machine
from tunemq_workers.system.trial_user import find_account

if TYPE_CHECKING:
    from tunemq_workers.broker.redis_client import RedisReply

#: How long to wait for a Redis that does not answer: a farm's machines may start together.
_TIMEOUT_S: Final = 10.0
_RETRY_S: Final = 0.2
#: Where machines keep caches.
_SHARED: Final = "/var/cache"
_UNSAFE: Final = re.compile(r"[^\w.-]+")


def add_parser(groups: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the command line."""
    parser = groups.add_parser(
        "worker",
        help="run trials of a farm on this machine",
        description=(
            "Runs trials of a `tunemq scheduler` on the same Redis until it is told to stop. "
            "Ctrl-C or SIGTERM: trials save where they can within the grace, and continue "
            "elsewhere; again: at once. If the farm's checkpoints are in a store, the worker "
            "needs its address and keys as the scheduler does (TUNEMQ_S3_*, AWS_*)."
        ),
        epilog=(
            "Exit codes: 0 it was told to stop; 2 and 64 invalid arguments; 69 Redis cannot be "
            "reached or refuses; 70 a part of it failed; 76 another worker of its name took "
            "its place."
        ),
    )
    parser.add_argument(
        "--redis",
        metavar="URL",
        help=(
            f"the address of Redis, such as redis://host:6379/0; default: ${REDIS_VARIABLE}, "
            "which suits an address with a password"
        ),
    )
    parser.add_argument(
        "--name",
        help="this node's name, the same after a restart; default: the name of the host",
    )
    parser.add_argument(
        "--workdir",
        metavar="DIR",
        help=(
            "the folder for logs, copies of checkpoints and unsent events, on a disk of this "
            "machine; default: ~/.cache/tunemq/<name>; with --trial-user, "
            f"{_SHARED}/tunemq/<name>"
        ),
    )
    parser.add_argument(
        "--insecure",
        action="store_true",
        help=(
            "start although Redis lets others in, or the keys of the store are well known; the "
            "problems are shown"
        ),
    )
    node_process.add_options(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Check the command line, then become the node; returns only if Redis cannot be used.

    Raises:
        ConfigError: an option is invalid.
    """
    _check_kernel()
    for unknown in unknown_variables(os.environ):
        _tell(unknown)
    url = options.redis or os.environ.get(REDIS_VARIABLE, "")
    if not url:
        raise ConfigError(
            f"Redis address missing: pass --redis redis://host:6379/0 or set ${REDIS_VARIABLE}."
        )
    address = parse_address(url)
    if options.redis and address.password:
        _tell(
            "users who list this machine's processes see the password in --redis; set "
            f"${REDIS_VARIABLE} instead."
        )
    if keys := find_keys(options.keys, KeyRole.WORKER).path:
        options.keys = keys  # absolute, for readers of the node's command line
    name = options.name or machine.hostname()
    if options.trial_user:
        find_account(options.trial_user)
    if options.trial_env is None:
        options.trial_env = os.environ.get(node_process.TRIAL_ENV)
    if options.trial_env is not None:
        _check_trial_env(options.trial_env)
    workdir = os.path.abspath(options.workdir or _default_workdir(name, options.trial_user))
    keep_memory_private()
    try:
        registration = _find_redis(address)
    except RedisUnavailable as problem:
        _tell(str(problem))
        return EXIT_UNAVAILABLE
    from tunemq_workers.node.security_check import check_environment  # only this command needs it

    check_environment(
        address,
        registration,
        os.environ,
        trial_user=options.trial_user,
        is_insecure=options.insecure,
        tell=_tell,
    )
    os.environ[REDIS_VARIABLE] = url
    line = ["--name", name, "--workdir", workdir, "--farm"]
    return _become([*node_process.PROGRAM, *line, *node_process.given_options(options)])


def _check_kernel() -> None:
    """Check that the kernel can watch processes by descriptor, as all since Linux 5.4 can.

    Raises:
        ConfigError: it cannot.
    """
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as problem:
        raise ConfigError(
            f"the kernel of this machine (Linux {os.uname().release}) rejects pidfd_open "
            f"({problem.strerror}): a worker needs Linux 5.4 or newer, and in a container a "
            "seccomp profile that allows this call."
        ) from problem


def _become(program: list[str]) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(program[0], program)  # noqa: S606  no shell


def _find_redis(address: RedisAddress) -> RedisReply:
    """Wait for a Redis that is not there yet; raise at once if it rejects the connection.

    Returns:
        The reply to ``HELLO``.

    Raises:
        RedisUnavailable: Redis cannot be reached, or rejects the connection.
    """
    from tunemq_workers.broker.redis_client import (
        RedisClient,
        RedisCommandError,
        user_rejected,
    )

    started = time.monotonic()
    is_told = False
    while True:
        try:
            client = RedisClient(address)
            try:
                reply, registration = client.pipeline([["PING"], ["HELLO", 2]])
                if isinstance(reply, RedisCommandError):
                    raise user_rejected(address, "PING", reply)
            finally:
                client.close()
        except RedisUnavailable as problem:
            tried = time.monotonic() - started
            if isinstance(problem, RedisRejectsUser):
                raise
            if tried >= _TIMEOUT_S:
                raise RedisUnavailable(f"{problem} Tried for {tried:.0f} s.") from problem
            if not is_told:
                is_told = True
                _tell(f"{problem} Trying for {_TIMEOUT_S:g} s.")
            time.sleep(_RETRY_S)
        else:
            return registration


def _check_trial_env(text: str) -> None:
    """Warn about names that match no variable: they may be misspelt.

    Raises:
        ConfigError: a name is invalid.
    """
    from tunemq_workers.trials.localize_order import (  # only this option needs it
        parse_allowed,
        unmatched,
    )

    if missing := unmatched(parse_allowed(text)):
        _tell(
            f"--trial-env names {', '.join(missing)}, which no variable of this worker matches that"
            " trials may have; check the spelling."
        )


def _tell(text: str) -> None:
    tell(f"tunemq worker: {text}")


def _default_workdir(name: str, trial_user: str | None) -> str:
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if trial_user is not None:  # the account may not enter this user's cache
        caches = _SHARED
    return os.path.join(caches, "tunemq", _UNSAFE.sub("_", name).lstrip(".") or "node")
