"""``tunemq nodes``: lists a farm's nodes, and drains, resumes or retires them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tunemq_scheduler.api import farm_answer_types as a
from tunemq_scheduler.cli.shared_arguments import add_command, tell, write_json
from tunemq_shared.base.errors import ConfigError
from tunemq_shared.base.safe_text import harmless
from tunemq_shared.protocol import farm_requests as r
from tunemq_shared.protocol.rejection_counter import OFTEN_HONEST

if TYPE_CHECKING:
    from tunemq_scheduler.api.farm_client import FarmClient

_REQUESTS = {"drain": r.DrainNode, "resume": r.ResumeNode, "retire": r.RetireNode}


def add_parser(groups: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the command line."""
    parser = add_command(
        groups,
        "nodes",
        nodes,
        "list the nodes of a farm; drain, resume or retire one",
        more=(
            "drain: no new trial is placed there; its trials save and continue on other nodes. "
            "resume: use it again. retire: drain it, then end its worker."
        ),
    )
    parser.add_argument(
        "change", nargs="?", choices=tuple(_REQUESTS), help="default: list the nodes"
    )
    parser.add_argument("node", nargs="?", metavar="NODE", help="its name or its instance")


def nodes(client: FarmClient, options: argparse.Namespace) -> int:
    """Print a table of nodes, or change one."""
    if options.change is not None:
        return _changed(client, options)
    found = client.ask(r.ListNodes(), a.NodeList)
    if options.json:
        write_json(found)
    elif found.nodes:
        from tunemq_scheduler.cli.farm_tables import show_nodes

        show_nodes(found.nodes)
    else:
        tell("there are no nodes; start some with: tunemq worker --redis URL")
    if not options.json:
        _tell_of(found.rejected)
    return 0


def _tell_of(rejected: Sequence[a.RejectionRow]) -> None:
    """Print rejected messages, except those that also occur on honest farms."""
    for row in rejected:
        if row.reason not in OFTEN_HONEST:
            who = f"node {row.node}" if row.node else "the scheduler"
            messages = "1 message" if row.times == 1 else f"{row.times} messages"
            tell(f"{who} rejected {messages} of the kind {row.kind}: {row.reason}")


def _changed(client: FarmClient, options: argparse.Namespace) -> int:
    if options.node is None:
        raise ConfigError(f"name the node: tunemq nodes {options.change} NODE")
    done = client.ask(_REQUESTS[options.change](node=options.node), a.RequestDone)
    if options.json:
        write_json(done)
    else:
        sys.stdout.write(f"{harmless(done.text)}\n")
    return 0
