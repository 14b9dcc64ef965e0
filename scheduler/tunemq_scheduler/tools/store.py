"""``tunemq store serve``: a folder of this machine as the store of a farm."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Final

from tunemq_shared.errors import ConfigError
from tunemq_shared.http_address import TOKEN_FILE_VARIABLE
from tunemq_shared.prctl import leave_no_core_file

#: The port where nobody says otherwise.
PORT: Final = 7380
#: Whoever wants other machines to reach it says so.
DEFAULT_LISTEN: Final = f"127.0.0.1:{PORT}"


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
        " and remove all that is in the folder. Without --tls-certificate it travels as it is, so"
        " let only a network that you trust carry it.",
        epilog="Exit codes: 0 it was told to stop; 64 something given is of no use.",
    )
    parser.add_argument("folder", metavar="DIR", type=Path, help="made if it is not there")
    parser.add_argument(
        "--listen",
        metavar="HOST:PORT",
        default=DEFAULT_LISTEN,
        help="where to listen; no HOST for all of this machine's addresses, port 0 for any that is"
        " free; default: %(default)s, which no other machine reaches",
    )
    parser.add_argument(
        "--token-file",
        metavar="FILE",
        type=Path,
        help="the token that clients need; made, for its owner only, if it is not there; default:"
        " DIR/.tunemq-store/token",
    )
    parser.add_argument(
        "--tls-certificate",
        metavar="FILE",
        type=Path,
        help="speak https only, with this certificate (PEM); clients name it, or who signed it,"
        " with ?ca_file=FILE in the address",
    )
    parser.add_argument("--tls-key", metavar="FILE", type=Path, help="its key (PEM)")
    parser.add_argument(
        "--host-name",
        metavar="NAME",
        action="append",
        default=[],
        help="a name by which clients know this server, beside its addresses and this machine's own"
        " name: requests for other names are refused; may be given more than once",
    )
    parser.set_defaults(run=serve)


def serve(options: argparse.Namespace) -> int:
    """Serve the folder.

    Raises:
        ConfigError: the folder, the address, a name, the certificate or the token's file cannot be
            used.
    """
    from tunemq_scheduler.store_server.server import StoreServer, serve, tls_context
    from tunemq_scheduler.store_server.token_file import token_file_of, token_in

    leave_no_core_file()
    token_file = (options.token_file or token_file_of(options.folder)).absolute()

    tls = None
    if options.tls_certificate is not None or options.tls_key is not None:
        if options.tls_certificate is None or options.tls_key is None:
            raise ConfigError("--tls-certificate and --tls-key go together; give both.")
        tls = tls_context(options.tls_certificate, options.tls_key)

    def tell(server: StoreServer) -> None:
        _say(
            f"Serving {options.folder.absolute()} at {server.address}\n"
            f"  searches:  RunConfig(storage_path={f'{server.address}/results'!r})\n"
            f"  machines:  {TOKEN_FILE_VARIABLE}=FILE, a copy of {token_file}\n"
        )
        if tls is None and not server.is_on_loopback:
            _say(
                "It is reached without TLS: whoever sees the network reads the token. Let only a"
                " network that you trust carry it, or give --tls-certificate and --tls-key.\n"
            )

    serve(
        options.folder,
        options.listen,
        token_in(token_file),
        tls=tls,
        names=options.host_name,
        on_ready=tell,
    )
    _say("Stopped.\n")
    return 0


def _say(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
