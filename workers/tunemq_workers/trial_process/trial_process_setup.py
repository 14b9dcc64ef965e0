"""`TrialEnvironment`: sets up the process of a trial, from process group to random seeds."""

from __future__ import annotations

import builtins
import contextlib
import faulthandler
import os
import resource
import signal
import sys
from collections.abc import Mapping
from types import FrameType, ModuleType

import msgspec

from tunemq_shared.base import failpoints
from tunemq_shared.checkpoints.checkpoint_markers import remove_leftovers
from tunemq_shared.protocol.messages import TrialSpec
from tunemq_shared.protocol.trial_limits import TrialLimitSpec
from tunemq_shared.system import process_attributes
from tunemq_workers.logs import output_files
from tunemq_workers.processes.forkserver_messages import DUMP_SIGNAL
from tunemq_workers.processes.process_tree import MARK
from tunemq_workers.trial_process import seeding, thread_limits
from tunemq_workers.trial_process.script_objects_for_spawn import give_scripts_objects_by_value


def leave_the_forkserver(forkserver: int) -> None:
    """Detach a forked child from the forkserver with this pid: signals, group, memory priority."""
    with contextlib.suppress(OSError):  # the parent has done it already
        os.setpgid(0, 0)
    # The forkserver's may be private; a trial's is not.
    process_attributes.keep_memory_private(False)
    process_attributes.become_subreaper()
    process_attributes.die_with_parent(forkserver)
    # While a forkserver kills process trees it has a real-time priority, and its children start
    # with the default one: take over its nice value. A negative one needs a privilege.
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, forkserver))
    # If memory runs out, the kernel kills a trial rather than the forkserver or the node.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "wb") as file:
        file.write(b"500")
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGCONT, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    # Ctrl-C is for the script. The handler does nothing; SIG_IGN would be inherited by programs
    # that the trial executes.
    signal.signal(signal.SIGINT, _ignore)
    # Otherwise multiprocessing would import the forkserver as the main module of its children.
    main = ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    give_scripts_objects_by_value()


def _ignore(_signal: int, _frame: FrameType | None) -> None:
    pass


class TrialEnvironment(msgspec.Struct, frozen=True):
    """The part of the environment that all trial processes of a forkserver share.

    Args:
        sys_path: The import path.
        variables: The environment variables that preloaded modules have set.
        libraries: The preloaded libraries that have threads to limit.
    """

    sys_path: list[str]
    variables: dict[str, str]
    libraries: thread_limits.LoadedLibraries

    def prepare(self, start: TrialSpec, *, process: str, gpus: tuple[str, ...]) -> None:
        """Set up this process for the trial ``start``, its first or a later one.

        ``process`` marks the programs that the trial executes; ``gpus`` are the devices that it may
        see.

        Raises:
            OSError: its folder is missing, or its output files cannot be made.
        """
        os.chdir(start.folder)
        remove_leftovers(start.folder)  # of an attempt that was killed during a save
        output_files.redirect(start.folder)
        faulthandler.enable(file=2)
        # The thread that gets the signal handles it in C, without the GIL and independently of
        # Python handlers.
        faulthandler.register(DUMP_SIGNAL, file=2, all_threads=True)
        given = start.environment.variables
        limit = thread_limits.for_resources(start.resources)
        _set_variables(
            self._variables(start, process, gpus) | thread_limits.variables(limit, given)
        )
        sys.path[:] = self.sys_path
        sys.argv[:] = [start.trial_name]
        process_attributes.set_name(start.trial_name)
        _set_limits(start.limits)
        self.libraries.limit(limit, given)
        seeding.seed_trial(start.seed, start.trial_number)

    def _variables(self, start: TrialSpec, process: str, gpus: tuple[str, ...]) -> dict[str, str]:
        given = start.environment.variables
        variables = {name: v for name, v in given.items() if not name.startswith("TUNEMQ_")}
        variables |= self.variables
        variables[MARK] = process
        if failpoints.VARIABLE in os.environ:
            variables[failpoints.VARIABLE] = os.environ[failpoints.VARIABLE]
        if gpus:
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        elif not start.resources.get("gpu"):
            variables["CUDA_VISIBLE_DEVICES"] = ""
        return variables


def _set_limits(limits: TrialLimitSpec) -> None:
    """Set the limits that the kernel counts per process; child processes inherit them."""
    _limit(resource.RLIMIT_CORE, limits.core_bytes)
    if limits.open_files:
        _limit(resource.RLIMIT_NOFILE, limits.open_files)


def _limit(kind: int, most: int) -> None:
    """Set a limit, at most to the hard limit of this process."""
    _, hard = resource.getrlimit(kind)
    allowed = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(kind, (allowed, allowed))


def changed_variables(before: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that were set since ``before``, except our own thread limits."""
    return {
        name: value
        for name, value in os.environ.items()
        if before.get(name) != value and name not in thread_limits.VARIABLES
    }


def _set_variables(wanted: dict[str, str]) -> None:
    """Make ``wanted`` the whole environment, with as few calls into C as possible."""
    for name in [name for name in os.environ if name not in wanted]:
        del os.environ[name]
    for name, value in wanted.items():
        if os.environ.get(name) != value:
            os.environ[name] = value
