"""Find files with secrets of a farm: every user's trials could read them in a bundle.

A file counts by its name, or by the beginning of its text: it has a password or key that this
process uses, or looks like one of those that the documentation has people write. Python modules are
not read: they may name such settings, and a search fails without its modules.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import quote

from tunemq_shared.base.errors import ConfigError, StoreError
from tunemq_shared.broker.redis_address import REDIS_VARIABLE, parse_address
from tunemq_shared.objects import s3_address
from tunemq_shared.objects.store_address import is_remote
from tunemq_shared.signing.key_files import KEYS_VARIABLE, read_key_file

#: Bytes of a file that are searched.
_READ_BYTES: Final = 2**16
#: Shorter secrets occur in other text by chance.
_SHORTEST: Final = 8
_MODULE: Final = ".py"
#: How many files a message names.
_NAMED: Final = 10

#: Of `.env` files, and of what `deploy/redis/passwords.sh` and `docker compose cp` write: their
#: contents look like any other text.
_NAMES: Final = re.compile(
    r"\.env(rc)?|\.env\.(?!.*(example|sample|template|dist)$).*|.*[.-]password|secret-key",
    re.DOTALL,
)

# No repetition is without a bound, so that a search takes time in proportion to the text.
_BLANK, _QUOTES = rb"[ \t]{0,8}", rb"(?:\\{0,2}[\"']){1,3}"
#: The beginning of a value that stands for another one: <password>, $NAME, {name}, ..., password.
_PLACEHOLDER: Final = (
    rb"(?!<|`|\${1,2}[\w({]|\{|%[s(]|\.\.\.|\*\*\*|process\.env\W"
    rb"|(?:password|none|null|true|false)(?!\w)|~(?:\s|$))"
)
_CALL: Final = rb"(?![a-z_][\w.]{0,64}[(\[])"
_FIRST: Final = rb"[^\s\"'\\,;=#)\]}]"
_VALUE: Final = rb"(?:%b%b%b|%b%b%b)" % (
    *(_QUOTES, _PLACEHOLDER, _FIRST),
    *(_PLACEHOLDER, _CALL, _FIRST),
)
#: NAME=value, NAME: value, environ["NAME"] = "value", and the two lines of Kubernetes.
_ASSIGNED: Final = (
    rb"[\"'\\\]]{0,4}(?:%b(?:=|:(?![-?+=]))|,?\s{1,32}[\"']?value[\"']?%b:)%b"
    % (_BLANK, _BLANK, _BLANK)
    + _VALUE
)
_VARIABLES: Final = (
    "SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "MINIO_SECRET_KEY",
    "MINIO_ROOT_PASSWORD",
    "REDIS_PASSWORD",
    "REDISCLI_AUTH",
    "ADMIN_PASSWORD",
)


class _Sign(NamedTuple):
    """A text that a secret has: ``hint`` in lower case, which is quick to find, and a pattern."""

    hint: bytes
    pattern: re.Pattern[bytes]
    why: str


def _sign(hint: str, pattern: bytes, why: str) -> _Sign:
    return _Sign(hint.lower().encode(), re.compile(pattern, re.IGNORECASE), why)


_SIGNS: Final = (
    _sign(
        "=",
        rb"(?<!\w)[0-9a-f]{16}(?:%b)?%b=%b%b[a-z0-9+/]{43}=" % (_QUOTES, _BLANK, _BLANK, _QUOTES),
        "has signing keys of a farm",
    ),
    _sign(
        "://",
        rb"(?:rediss?|redis\+socket|unix)://[^\s:/@\"'\\]{0,128}:%b[^\s@/\"'\\]{1,512}@"
        % _PLACEHOLDER,
        "has an address of Redis with a password",
    ),
    _sign(
        "requirepass",
        rb"requirepass[ \t]{1,8}" + _VALUE,
        "sets requirepass",
    ),
    _sign(
        "private key-----",
        rb"-----BEGIN [A-Z ]{0,32}PRIVATE KEY-----",
        "has a private key",
    ),
    *(_sign(name, name.encode() + _ASSIGNED, f"sets {name}") for name in _VARIABLES),
)
PATTERNS: Final = tuple(sign.pattern for sign in _SIGNS)


class SecretFile(NamedTuple):
    """A file that is left out: its name below the folder, and why, after "it"."""

    name: str
    why: str


def own_secrets(
    environ: Mapping[str, str], *, password: str = "", keys: str = "", store: str = ""
) -> frozenset[bytes]:
    """Collect the passwords and keys that this process uses, as other files may have them.

    Settings that cannot be used have none: other code reports them.

    Args:
        environ: The environment variables.
        password: Of Redis, beside that of the environment.
        keys: The path of the key file, if not that of the environment.
        store: The address of the farm's store, which may name a profile.
    """
    found = (
        secret.encode(errors="surrogateescape")
        for secret in (password, *_of_settings(environ, keys, store))
        if len(secret) >= _SHORTEST and secret.lower() != "password"
    )
    return frozenset(one for secret in found for one in (secret, quote(secret, safe="").encode()))


def why_secret(data: bytes, own: Collection[bytes]) -> str:
    """Say why a file that begins with ``data`` is secret, after "it"; empty if it is not.

    Args:
        data: The beginning of the file.
        own: See `own_secrets`.
    """
    if b"\0" in data:
        return ""
    if any(secret in data for secret in own):
        return "has a password or key that this process uses"
    lower = data.lower()
    return next(
        (sign.why for sign in _SIGNS if sign.hint in lower and sign.pattern.search(data)), ""
    )


def why_secret_file(name: str, path: Path, own: Collection[bytes]) -> str:
    """Say why a file is secret, after "it"; empty if it is not.

    Args:
        name: Of the file, or of a link to it.
        path: Of the file.
        own: See `own_secrets`.

    Raises:
        OSError: It cannot be read.
    """
    if _NAMES.fullmatch(name) or _NAMES.fullmatch(path.name):
        return "has the name of a file of secrets"
    if path.suffix == _MODULE:
        return ""
    with path.open("rb") as file:
        return why_secret(file.read(_READ_BYTES), own)


def left_out(files: list[SecretFile], ignore_file: Path) -> str:
    """Tell the user which files were left out, why, and how to include one."""
    named = ", ".join(f"{file.name!r} (it {file.why})" for file in files[:_NAMED])
    more = f" and {len(files) - _NAMED} more" if len(files) > _NAMED else ""
    return (
        f"files that seem to hold secrets are not sent, because all users' trials could read them:"
        f" {named}{more}. To send one all the same, write a line such as"
        f" {'!' + files[0].name!r} into {str(ignore_file)!r}; it counts in place of a .gitignore"
        " beside it, so copy that to it first."
    )


def _of_settings(environ: Mapping[str, str], keys: str, store: str) -> Iterator[str]:
    with suppress(ConfigError):
        yield parse_address(environ.get(REDIS_VARIABLE, "")).password
    with suppress(StoreError):
        yield from s3_address.find_keys(environ)[1:]
    with suppress(StoreError, ConfigError):
        if is_remote(store) and (profile := s3_address.parse_address(store, environ).profile):
            yield from s3_address.find_keys(environ, profile)[1:]
    with suppress(ConfigError):
        if path := keys or environ.get(KEYS_VARIABLE, ""):
            file = read_key_file(Path(path).expanduser())
            for its in (file.orders, file.events, file.journals, *file.submitters.values()):
                yield from (base64.b64encode(key.secret).decode() for key in its)
