"""``tunemq ls``, ``show``, ``logs``, ``stop``, ``pause``, ``resume``, ``retry``, ``rm``, ``why``.

These commands work on a farm's experiments; `tunemq_scheduler.cli.submit_command` makes them.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from tunemq_scheduler.api import farm_answer_types as a
from tunemq_scheduler.cli.shared_arguments import (
    add_command,
    add_experiment,
    named,
    run,
    tell,
    whole_number,
    write_json,
)
from tunemq_scheduler.output.terminal.harmless import write_output
from tunemq_shared.base.depth_and_integer_limits import MOST_IN_MESSAGES
from tunemq_shared.base.safe_text import harmless
from tunemq_shared.protocol import farm_requests as r

if TYPE_CHECKING:
    from tunemq_scheduler.api.farm_client import FarmClient

_TRIAL = "id or name of the trial"


def add_parser(groups: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the commands to the command line."""
    ls = add_command(groups, "ls", list_experiments, "list the experiments of a farm")
    ls.add_argument("--owner", dest="whose", default="", help="only those of this owner")
    ls.add_argument("--active", action="store_true", help="only those that have not ended")

    show = add_command(groups, "show", show_experiment, "show an experiment and its trials")
    add_experiment(show)
    show.add_argument(
        "--trials",
        type=whole_number(0, MOST_IN_MESSAGES),
        default=30,
        metavar="N",
        help="the largest number of trials to show; default: 30",
    )

    logs = add_command(
        groups,
        "logs",
        show_log,
        "show the output of an experiment, or of one of its trials",
        more="Without a trial: the progress of the experiment.",
    )
    add_experiment(logs, trial=_TRIAL)
    logs.add_argument("-f", "--follow", action="store_true", help="follow the output until it ends")
    logs.add_argument(
        "--tail",
        type=whole_number(0, MOST_IN_MESSAGES),
        metavar="BYTES",
        help="only the whole lines in its last BYTES bytes",
    )

    stop = add_command(groups, "stop", stop_it, "stop an experiment, or one of its trials")
    add_experiment(stop, trial=f"{_TRIAL}; default: all of the experiment")
    add_experiment(add_command(groups, "pause", pause, "pause an experiment and free its slots"))
    add_experiment(
        add_command(
            groups,
            "resume",
            resume,
            "continue an experiment that was paused or that failed; of a stopped one, what had not"
            " begun",
        )
    )
    retry = add_command(
        groups,
        "retry",
        retry_it,
        "run failed trials (ERROR) again",
        more="Trials that a stop ended stay ended.",
    )
    add_experiment(retry, trial=f"{_TRIAL}; default: all failed trials")
    rm = add_command(groups, "rm", remove, "remove an ended experiment from the list")
    add_experiment(rm)
    rm.add_argument("--files", action="store_true", help="also remove results and checkpoints")
    rm.add_argument("--yes", action="store_true", help="do not ask before removing files")
    why = add_command(
        groups,
        "why",
        tell_why,
        "explain why a trial or an experiment waits, or ended",
        more=(
            "For a trial also each decision about it. NAME may be the folder of an experiment or "
            "of a trial, such as ./results/first, or the address of an experiment in a store: "
            "its journal is read, and no farm is asked."
        ),
    )
    add_experiment(why, trial=_TRIAL)
    why.set_defaults(run=explain)


def list_experiments(client: FarmClient, options: argparse.Namespace) -> int:
    """Print a table of experiments."""
    request = r.ListExperiments(owner=options.whose, is_all=not options.active)
    found = client.ask(request, a.ExperimentList)
    if options.json:
        write_json(found)
    elif found.experiments:
        from tunemq_scheduler.cli.farm_tables import show_experiments

        show_experiments(found.experiments)
    else:
        tell("there are no experiments")
    return 0


def show_experiment(client: FarmClient, options: argparse.Namespace) -> int:
    """Print one experiment and its trials."""
    request = r.ShowExperiment(name=options.experiment, trials=options.trials)
    detail = client.ask(request, a.ExperimentDetail)
    if options.json:
        write_json(detail)
    else:
        from tunemq_scheduler.cli.farm_tables import show_detail

        show_detail(detail)
    return 0


def show_log(client: FarmClient, options: argparse.Namespace) -> int:
    """Print a log, once or as it grows."""
    from tunemq_scheduler.api.log_following import follow, log_pages

    name, trial = named(options)
    offset = -options.tail if options.tail else 0
    if options.json:
        if options.follow:
            tell(
                "--follow and --json exclude each other; a program asks again, from the "
                'position in "end"'
            )
        for page in log_pages(client, name, trial, offset=offset):
            write_json(_page_for_programs(page, name, trial))
        return 0
    if options.follow:
        try:
            page = follow(client, name, trial, offset=offset, show=_print, tell=tell)
        except KeyboardInterrupt:
            return 130
        tell(f"{name} is {page.state}" + (f": {page.reason}" if page.reason else ""))
        return 0
    for page in log_pages(client, name, trial, offset=offset):
        _print(page.data)
    return 0


def stop_it(client: FarmClient, options: argparse.Namespace) -> int:
    """Stop an experiment or a trial."""
    name, trial = named(options)
    return _done(client, r.StopExperiment(name=name, trial=trial), options)


def pause(client: FarmClient, options: argparse.Namespace) -> int:
    """Pause an experiment."""
    return _done(client, r.PauseExperiment(name=options.experiment), options)


def resume(client: FarmClient, options: argparse.Namespace) -> int:
    """Continue an experiment."""
    return _done(client, r.ResumeExperiment(name=options.experiment), options)


def retry_it(client: FarmClient, options: argparse.Namespace) -> int:
    """Run trials in ERROR again."""
    name, trial = named(options)
    return _done(client, r.RetryTrials(name=name, trial=trial), options)


def remove(client: FarmClient, options: argparse.Namespace) -> int:
    """Forget an experiment."""
    name = options.experiment
    if options.files and not options.yes and not _agreed(name):
        tell("nothing was removed")
        return 1
    return _done(client, r.RemoveExperiment(name=name, with_files=options.files), options)


def explain(options: argparse.Namespace) -> int:
    """Explain a trial or an experiment by its journal if that is named, else by its farm."""
    from tunemq_scheduler.cli.explained_results import explain_results, is_place

    if not is_place(options.experiment):
        return run(tell_why, options)
    _show_explanation(explain_results(options.experiment, options.trial), options)
    return 0


def tell_why(client: FarmClient, options: argparse.Namespace) -> int:
    """Explain why an experiment or trial waits or ended."""
    name, trial = named(options)
    why = client.ask(r.ExplainState(name=name, trial=trial), a.Explanation)
    _show_explanation(why, options)
    return 0


def _show_explanation(why: a.Explanation, options: argparse.Namespace) -> None:
    if options.json:
        write_json(why)
    else:
        sys.stdout.writelines(f"{harmless(line)}\n" for line in why.lines)


def _done(client: FarmClient, request: r.FarmRequest, options: argparse.Namespace) -> int:
    done = client.ask(request, a.RequestDone)
    if options.json:
        write_json(done)
    else:
        sys.stdout.write(f"{harmless(done.text)}\n")
    return 0


def _agreed(name: str) -> bool:
    sys.stdout.write(f"Permanently remove the results and checkpoints of {name}? [y/N] ")
    sys.stdout.flush()
    try:
        return input().strip().lower() in {"y", "yes"}
    except EOFError:  # no terminal, and no --yes
        return False


def _print(data: bytes) -> None:
    write_output(sys.stdout, data)


def _page_for_programs(page: a.LogPage, name: str, trial: str) -> dict[str, object]:
    return {
        "experiment": name,
        "trial": trial,
        "text": page.data.decode(errors="replace"),
        "offset": page.offset,
        "end": page.end,
        "size": page.size,
        "is_over": page.is_over,
        "state": page.state,
        "reason": page.reason,
    }
