"""``tunemq run``: runs a search in which each trial is a command."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final

from tunemq_scheduler.output.terminal.harmless import harmless_json
from tunemq_shared.base.decoding_errors import NO_JSON
from tunemq_shared.base.errors import ConfigError, MetricError, TrialError
from tunemq_shared.base.safe_text import harmless

#: Exit code if no trial has a result.
EXIT_NOTHING_FOUND: Final = 1

_USAGE = "tunemq run [OPTIONS] [--] PROGRAM [ARGUMENTS]"
_DESCRIPTION = """\
Runs PROGRAM once for each configuration of the search space, several at a time, on this machine.
In its arguments {lr} stands for the parameter lr, {opt.lr} for lr in the group opt, and {{ for a
brace. It prints its results as lines such as "loss=0.3", or calls `tunemq report loss=0.3`.

  tunemq run --space space.yaml --metric loss --num-samples 20 -- ./train.sh --lr {lr}

Everything after -- is passed to PROGRAM. Without -- the options of tunemq run may also follow
PROGRAM, and PROGRAM gets the rest.
"""
_EPILOG = """\
SPACE is a YAML or JSON file with one parameter in a line:
  lr: {loguniform: [1e-4, 1e-1]}      layers: {choice: [1, 2, 3]}      epochs: 20
Domains: uniform, quniform, loguniform, qloguniform, randint, qrandint, lograndint, qlograndint,
randn, qrandn, choice, grid_search.

PROGRAM has these variables: TUNEMQ_PARAM_LR and so on, TUNEMQ_CONFIG (a JSON file with all
parameters), TUNEMQ_TRIAL_ID, TUNEMQ_TRIAL_DIR, TUNEMQ_CHECKPOINT (the folder to continue from,
empty at first) and TUNEMQ_CHECKPOINT_DIR (where to write a checkpoint before printing its result).

Exit codes: 0 there is a best configuration; 1 no trial has a result; 2 or 64 invalid arguments;
130 Ctrl-C. See docs/executables.md.
"""
#: Parts of names of metrics that are minimised by default.
_LESS_IS_BETTER: Final = ("loss", "err")


def add_parser(groups: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the command line."""
    parser = groups.add_parser(
        "run",
        help="search for the best configuration of any program",
        usage=_USAGE,
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,  # -h may be the program's
    )
    parser.add_argument("--help", action="help", help="show this help and exit")

    def add(option: str, metavar: str, what: str, kind: Callable[[str], Any] = str) -> None:
        parser.add_argument(option, metavar=metavar, help=what, type=kind, action=_Once)

    whole, number = _number(int), _number(float)
    add("--space", "FILE", "the search space; needed if the arguments name parameters")
    add("--metric", "NAME", "the metric to optimise; default: none, every trial runs to its end")
    add("--mode", "MODE", "min or max; default: min if the metric's name contains `loss` or `err`")
    add(
        "--num-samples", "N", "number of samples from the space; of a grid, number of passes", whole
    )
    add("--search", "NAME", "random (the default), optuna or bohb; options as for --scheduler")
    add("--scheduler", "NAME", "fifo (the default), or NAME and arguments: asha,max_t=81")
    add(
        "--max-concurrent", "N", "number of trials that run at once; default: as many as fit", whole
    )
    add("--cpus", "N", "CPUs for each trial; default: 1", number)
    add("--gpus", "N", "GPUs for each trial; fractions such as 0.5 are allowed", number)
    add("--resources", "NAME=N,...", "other resources for each trial, such as memory=2e9")
    add("--max-failures", "N", "number of retries of a failed trial, from its checkpoint", whole)
    add("--time-budget", "SECONDS", "time limit of the whole search", number)
    add("--seed", "N", "seed of the configurations", whole)
    add("--name", "NAME", "name of the search and its folder")
    add("--results", "DIR", "folder for results; default: $TUNEMQ_RESULTS or ~/tunemq_results")
    add("--storage", "ADDRESS", "address of the checkpoints, such as s3://bucket/prefix")
    add(
        "--metrics-from",
        "SOURCE",
        "where results come from: stdout (the default), report, or a file of JSON lines",
    )
    add("--pattern", "REGEX", "pattern of lines with metrics, such as 'loss (?P<loss>\\S+)'")
    add("--cwd", "DIR", "working folder of PROGRAM; default: this one")
    parser.add_argument(
        "--json",
        action="store_true",
        help="print the best configuration as JSON instead of a table",
    )
    parser.set_defaults(run=run, command_line=[])


def divided(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the arguments of `tunemq` from those after ``--``, which are a program's."""
    given = list(arguments)
    if given[:1] != ["run"] or "--" not in given:
        return given, []
    at = given.index("--")
    return given[:at], given[at + 1 :]


def take_command(options: argparse.Namespace, unknown: list[str], behind: list[str]) -> None:
    """Store the program's command line in the options.

    Raises:
        ConfigError: It cannot be told from the options, or is missing.
    """
    if unknown and behind:
        raise ConfigError(
            f"{shlex.join(unknown)} is not an option of tunemq run; put the arguments of "
            "PROGRAM after --."
        )
    options.command_line = behind or unknown
    if not options.command_line or options.command_line[0].startswith("-"):
        given = f", and {options.command_line[0]} is not an option" if options.command_line else ""
        raise ConfigError(f"the program to run is missing{given}: {_USAGE}; see tunemq run --help.")
    for name in ("metric", "mode", "name", "results", "storage", "search", "scheduler"):
        value = getattr(options, name)
        if value is not None and "{" in value:
            raise ConfigError(
                f"--{name} {value} was read as an option of tunemq run. If it is the program's, "
                f"put -- before the program: {_USAGE}."
            )


def run(options: argparse.Namespace) -> int:
    """Run the search and print its best result; returns the exit status.

    Raises:
        UserError: An argument is invalid; says what to do.
    """
    tuner = tuner_for(options)
    if not options.json:
        sys.stdout.write(f"Each trial runs: {harmless(shlex.join(options.command_line))}\n")
        sys.stdout.flush()
    grid = tuner.fit()
    best = None
    if options.metric is not None:
        try:
            best = grid.get_best_result()
        except (MetricError, TrialError) as problem:
            sys.stderr.write(f"tunemq run: {harmless(str(problem))}\n")
    if options.json:
        told = {
            "folder": grid.experiment_path,
            "trials": len(grid),
            "errors": grid.num_errors,
            "best": None
            if best is None
            else {
                "trial_id": best.trial_id,
                "config": best.config,
                "metrics": best.metrics,
                "folder": best.path,
            },
        }
        sys.stdout.write(f"{harmless_json(json.dumps(told))}\n")
    is_found = best is not None if options.metric is not None else grid.num_terminated > 0
    return 0 if is_found else EXIT_NOTHING_FOUND


def tuner_for(options: argparse.Namespace) -> Any:
    """Make the Tuner that the options describe.

    Raises:
        UserError: An argument is invalid; says what to do.
    """
    from tunemq_scheduler.api.tuner import Tuner
    from tunemq_scheduler.schedulers import create_scheduler
    from tunemq_scheduler.search import create_searcher
    from tunemq_scheduler.search.space_file import read_space_file
    from tunemq_scheduler.settings.config import FailureConfig, RunConfig, TuneConfig
    from tunemq_scheduler.storage.folders import RESULTS_VARIABLE
    from tunemq_shared.executables.executable import executable
    from tunemq_shared.trainable.resources import with_resources

    trainable: Any = executable(
        options.command_line,
        metrics_from=options.metrics_from or "stdout",
        pattern=options.pattern,
        cwd=options.cwd,
    )
    if request := _request(options):
        trainable = with_resources(trainable, request)
    if options.results is not None and options.storage is not None:
        os.environ[RESULTS_VARIABLE] = os.path.abspath(options.results)
    return Tuner(
        trainable,
        param_space=read_space_file(options.space) if options.space is not None else {},
        tune_config=TuneConfig(
            metric=options.metric,
            mode=_mode(options),
            search_alg=_made("--search", create_searcher, options.search),
            scheduler=_made("--scheduler", create_scheduler, options.scheduler),
            num_samples=1 if options.num_samples is None else options.num_samples,
            max_concurrent_trials=options.max_concurrent,
            time_budget_s=options.time_budget,
            seed=options.seed,
        ),
        run_config=RunConfig(
            name=options.name,
            storage_path=options.storage or options.results,
            failure_config=FailureConfig(max_failures=options.max_failures or 0),
            verbose=0 if options.json else 1,
        ),
    )


class _Once(argparse.Action):
    """Stores a value and rejects a second one, which may be meant for the program."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        del parser, option_string
        if getattr(namespace, self.dest) is not None:
            raise argparse.ArgumentError(
                self, "was given twice; if one is the program's, put -- before the program"
            )
        setattr(namespace, self.dest, values)


def _number(kind: type[int | float]) -> Callable[[str], int | float]:
    def read(text: str) -> int | float:
        try:
            return kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not a {'whole ' if kind is int else ''}number; if it is the "
                "program's, put -- before the program"
            ) from None

    return read


def _mode(options: argparse.Namespace) -> Any:
    if options.mode is not None or options.metric is None:
        return options.mode
    if any(part in options.metric.lower() for part in _LESS_IS_BETTER):
        return "min"
    raise ConfigError(
        f"--metric {options.metric}: say with --mode min or --mode max whether less or more is "
        "better."
    )


def _request(options: argparse.Namespace) -> dict[str, float]:
    request = _pairs("--resources", options.resources or "")
    if options.gpus is not None:
        request["gpu"] = options.gpus
    # As in scripts: a trial without a resource request takes one CPU.
    cpus = options.cpus if options.cpus is not None else (1 if request else None)
    return request if cpus is None else {"cpu": cpus, **request}


def _made(option: str, create: Callable[..., Any], given: str | None) -> Any:
    """Create the object with the name before the first comma, with the options after it."""
    if given is None:
        return None
    name, _, rest = given.partition(",")
    try:
        return create(name, **_pairs(option, rest))
    except TypeError as error:
        raise ConfigError(f"{option} {given}: {error}.") from error


def _pairs(option: str, text: str) -> dict[str, Any]:
    pairs: dict[str, Any] = {}
    for pair in filter(None, text.split(",")):
        name, equals, value = pair.partition("=")
        if not equals:
            raise ConfigError(f"{option}: {pair!r} is not NAME=VALUE, such as max_t=81.")
        try:
            pairs[name] = json.loads(value)
        except NO_JSON:
            pairs[name] = value
    return pairs
