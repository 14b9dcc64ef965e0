"""``tunemq store serve``: a folder of this machine as the store of a farm."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Final

from tunemq_shared.http_address import TOKEN_FILE_VARIABLE

#: The port where nobody says otherwise.
PORT: Final = 7380


def add_parser(groups: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the commands to the command line."""
    group = groups.add_parser(
        "store",
        help="serve a folder as the store of a farm that has neither MinIO nor NFS",
        description="A store for small farms: a folder of one machine, over HTTP, with a token.",
    )
    commands = group.add_subparsers(dest="command", required=True, metavar="COMMAND")
    what = "serve a folder of this machine to all machines of the farm, until Ctrl-C or SIGTERM"
    parser = commands.add_parser(
        "serve",
        help=what,
        description=f"{what[0].upper()}{what[1:]}. Searches keep their checkpoints there with"
        " RunConfig(storage_path='http://HOST:PORT/PREFIX'). Whoever has the token may read, write"
        " and remove all that is in the folder; it travels as it is, so let only a network that you"
        " trust carry it, or put a proxy with https before it.",
        epilog="Exit codes: 0 it was told to stop; 64 something given is of no use.",
    )
    parser.add_argument("folder", metavar="DIR", type=Path, help="made if it is not there")
    parser.add_argument(
        "--listen",
        metavar="HOST:PORT",
        default=f":{PORT}",
        help="where to listen; no HOST for all of this machine's addresses, port 0 for any that is"
        " free; default: %(default)s",
    )
    parser.add_argument(
        "--token-file",
        metavar="FILE",
        type=Path,
        help="the token that clients need; made, for its owner only, if it is not there; default:"
        " DIR/.tunemq-store/token",
    )
    parser.set_defaults(run=serve)


def serve(options: argparse.Namespace) -> int:
    """Serve the folder.

    Raises:
        ConfigError: the folder, the address or the token's file cannot be used.
    """
    from tunemq_scheduler.store_server.server import StoreServer, serve
    from tunemq_scheduler.store_server.token_file import token_file_of, token_in

    token_file = (options.token_file or token_file_of(options.folder)).absolute()

    def tell(server: StoreServer) -> None:
        _say(
            f"Serving {options.folder.absolute()} at {server.address}\n"
            f"  searches:  RunConfig(storage_path={f'{server.address}/results'!r})\n"
            f"  machines:  {TOKEN_FILE_VARIABLE}=FILE, a copy of {token_file}\n"
        )

    serve(options.folder, options.listen, token_in(token_file), on_ready=tell)
    _say("Stopped.\n")
    return 0


def _say(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
