"""Parse addresses of S3 stores, and find their credentials.

    s3://bucket/prefix?endpoint=http://host:9000&region=us-east-1&path_style=true&ca_file=/ca.pem

Settings that the address lacks come from the environment. An address never contains credentials,
because it is written into journals, logs and messages, and means the same on all machines of a
farm. But it may have ``profile=NAME``: then each machine takes the credentials of that name from
its credentials file, and never those of the environment. A machine that reaches its store's server
another way, for instance through a forwarded port, sets ``TUNEMQ_S3_REACHED_AT``, which is not part
of any address.
"""

from __future__ import annotations

import configparser
import difflib
import re
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

import msgspec

from tunemq_shared.base.errors import ConfigError, StoreError
from tunemq_shared.base.safe_names import is_safe_name

SCHEME: Final = "s3://"

#: The settings of an address; the aliases are those of pyarrow, and so of Ray.
_SETTINGS: Final = {
    "endpoint": "endpoint",
    "endpoint_override": "endpoint",
    "scheme": "scheme",
    "region": "region",
    "ca_file": "ca_file",
    "tls_ca_file_path": "ca_file",
    "path_style": "path_style",
    "create_bucket": "create_bucket",
    "allow_bucket_creation": "create_bucket",
    "profile": "profile",
}
_SECRET: Final = re.compile(r"key|secret|token|password|credential|signature", re.IGNORECASE)
_BUCKET: Final = re.compile(
    r"(?=.{3,63}$)[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*"
)
_PROFILE: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_IP: Final = re.compile(r"\d+\.\d+\.\d+\.\d+")
_DEFAULT_FILE: Final = "~/.aws/credentials"
#: Default credentials of servers, or those that their tutorials suggest.
DEFAULT_KEYS: Final = (
    ("minioadmin", "minioadmin"),
    ("minio", "minio123"),
    ("rustfsadmin", "rustfsadmin"),
)
_FLAGS: Final = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}

_ENDPOINT_VARIABLES: Final = ("TUNEMQ_S3_ENDPOINT", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
_REACHED_AT_VARIABLE: Final = "TUNEMQ_S3_REACHED_AT"
_REGION_VARIABLES: Final = ("AWS_REGION", "AWS_DEFAULT_REGION")
_CA_VARIABLES: Final = ("AWS_CA_BUNDLE", "SSL_CERT_FILE")
_KEY_VARIABLES: Final = (
    ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"),
    ("MINIO_ACCESS_KEY", "MINIO_SECRET_KEY"),
    ("MINIO_ROOT_USER", "MINIO_ROOT_PASSWORD"),
)
_PROFILE_VARIABLES: Final = ("AWS_PROFILE", "AWS_DEFAULT_PROFILE")
#: All variables that determine a process's credentials for the store.
KEY_VARIABLES: Final = frozenset(
    {
        *(name for pair in _KEY_VARIABLES for name in pair),
        "AWS_SESSION_TOKEN",
        "AWS_SHARED_CREDENTIALS_FILE",
        *_PROFILE_VARIABLES,
    }
)


class S3Credentials(NamedTuple):
    """Credentials for a server; never printed."""

    access_key: str
    secret_key: str
    session_token: str = ""

    def __repr__(self) -> str:
        return "S3Credentials(...)"


class S3Address(msgspec.Struct, frozen=True, kw_only=True):
    """A prefix in a bucket of a server, without secrets.

    ``endpoint`` is ``http[s]://host[:port]``. ``ca_file`` is empty if each machine uses its own.
    ``create_bucket``: the first probe creates a missing bucket. ``profile`` names the credentials
    in the credentials file; empty for the machine's own.
    """

    bucket: str
    prefix: str
    endpoint: str
    region: str
    path_style: bool
    ca_file: str = ""
    create_bucket: bool = False
    profile: str = ""

    def __str__(self) -> str:
        """The address in the form that means the same on every machine."""
        settings = {
            "endpoint": self.endpoint,
            "region": self.region,
            "path_style": "true" if self.path_style else "false",
        }
        if self.ca_file:
            settings["ca_file"] = self.ca_file
        if self.create_bucket:
            settings["create_bucket"] = "true"
        if self.profile:
            settings["profile"] = self.profile
        return f"{self.place}?{urlencode(settings, safe=':/')}"

    @property
    def place(self) -> str:
        """Bucket and prefix, for messages."""
        return f"{SCHEME}{self.bucket}/{quote(self.prefix, safe='/ ')}".rstrip("/")


def parse_address(text: str, environ: Mapping[str, str]) -> S3Address:
    """Parse an address, with missing settings from this machine's environment.

    Raises:
        ConfigError: It is invalid; the message never quotes what might be a secret.
    """
    parts = urlsplit(text)
    if "@" in parts.netloc:
        raise ConfigError(
            f"the storage address s3://...@{parts.netloc.rpartition('@')[2]} has keys in it; leave "
            f"them out and set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY instead."
        )
    bucket, prefix = parts.netloc, unquote(parts.path).strip("/")
    place = f"{SCHEME}{bucket}{parts.path}"
    if not _BUCKET.fullmatch(bucket) or _IP.fullmatch(bucket):
        raise ConfigError(
            f"the storage {place!r}: {bucket!r} is not the name of a bucket; that has 3 to 63 "
            "small letters, digits, dots and hyphens, as in s3://my-bucket/prefix."
        )
    if parts.fragment or (prefix and not is_safe_name(prefix)):
        raise ConfigError(
            f"the storage {place!r}: {unquote(parts.path)!r} is not a prefix; it has visible names "
            "between single slashes, and no '.', '..' or '#'."
        )
    given = _settings(place, parts.query)
    endpoint = _endpoint(place, given, environ)
    return S3Address(
        bucket=bucket,
        prefix=prefix,
        endpoint=endpoint,
        region=given.get("region") or _first(environ, _REGION_VARIABLES) or "us-east-1",
        path_style=_flag(place, given, "path_style", default=not is_amazon(endpoint)),
        ca_file=given.get("ca_file", ""),
        create_bucket=_flag(place, given, "create_bucket", default=False),
        profile=_profile(place, given),
    )


def parse_beside(text: str, store: S3Address, environ: Mapping[str, str]) -> S3Address:
    """Parse an address as processes that use ``store`` understand it.

    In the same bucket, settings that ``text`` lacks come from ``store``. An address with another
    endpoint is another bucket, whatever the bucket's name.

    Raises:
        ConfigError: See `parse_address`.
    """
    address = parse_address(text, environ)
    given = _settings(address.place, urlsplit(text).query)
    if address.bucket != store.bucket:
        return address
    if "endpoint" in given and address.endpoint != store.endpoint:
        return address
    names = ("endpoint", "region", "path_style", "ca_file", "profile")
    missing = {name: getattr(store, name) for name in names if name not in given}
    return msgspec.structs.replace(address, **missing)


def as_reached_from_here(address: S3Address, environ: Mapping[str, str]) -> S3Address:
    """The address to connect to from this machine, which may differ from the shared one.

    An address with a profile stays as it is: ``TUNEMQ_S3_REACHED_AT`` is about the server of this
    machine's own credentials.

    Raises:
        ConfigError: ``TUNEMQ_S3_REACHED_AT`` is invalid.
    """
    text = environ.get(_REACHED_AT_VARIABLE, "")
    if not text or address.profile:
        return address
    place = f"{address.place} at ${_REACHED_AT_VARIABLE}"
    return msgspec.structs.replace(address, endpoint=_endpoint(place, {"endpoint": text}, {}))


def find_ca_file(address: S3Address, environ: Mapping[str, str]) -> str:
    """Find the file with the certificates to trust; empty for the system's default ones.

    Without TLS there is no certificate to check, and reading a file of certificates takes 50 ms.

    Raises:
        ConfigError: The file does not exist, or has no certificate.
    """
    if not address.endpoint.startswith("https://"):
        return ""
    file = address.ca_file or _first(environ, _CA_VARIABLES)
    if file:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(file)
        except OSError as error:  # ssl.SSLError derives from it
            is_empty = isinstance(error, ssl.SSLError)
            why = "no certificate in it" if is_empty else error.strerror
            raise ConfigError(
                f"the storage {address.place}: the file {file!r} with the certificates to trust "
                f"cannot be used: {why}; correct ca_file, or "
                f"{' or '.join(_CA_VARIABLES)}."
            ) from None
    return file


def is_amazon(endpoint: str) -> bool:
    """Whether the server is Amazon's own."""
    return urlsplit(endpoint).netloc.endswith(("amazonaws.com", "amazonaws.com.cn"))


def are_default_keys(environ: Mapping[str, str]) -> bool:
    """Whether `find_keys` finds well-known default credentials; False if it finds none."""
    try:
        return find_keys(environ)[:2] in DEFAULT_KEYS
    except StoreError:
        return False


def own_profiles(environ: Mapping[str, str]) -> set[str]:
    """The profiles in the credentials file that hold this machine's own credentials."""
    return {environ[name] for name in _PROFILE_VARIABLES if environ.get(name)}


def find_keys(environ: Mapping[str, str], profile: str = "") -> S3Credentials:
    """Find credentials in the environment, else in the credentials file.

    Args:
        environ: The environment variables.
        profile: The profile of an address. Its credentials come only from the credentials file:
            this machine's own ones belong to other stores.

    Raises:
        StoreError: There are none, or half of them; names the variables and files that were
            checked.
    """
    if profile:
        return _keys_in_file(environ, profile)
    for names in _KEY_VARIABLES:
        values = [environ.get(name, "") for name in names]
        if all(values):
            # A session token belongs to the credentials that it was issued with.
            token = environ.get("AWS_SESSION_TOKEN", "") if names is _KEY_VARIABLES[0] else ""
            return S3Credentials(values[0], values[1], token)
        if any(values):
            has, lacks = names if values[0] else names[::-1]
            raise StoreError(f"{has} is set and {lacks} is not; the store needs both.")
    return _keys_in_file(environ)


def _keys_in_file(environ: Mapping[str, str], of_address: str = "") -> S3Credentials:
    home = environ.get("HOME", "")
    default = Path(home, ".aws", "credentials") if home else None
    named = environ.get("AWS_SHARED_CREDENTIALS_FILE", "")
    file = Path(named).expanduser() if named else default
    profile = of_address or _first(environ, _PROFILE_VARIABLES) or "default"
    if of_address and (file is None or not file.is_file()):
        raise StoreError(
            f"there are no keys for the store with profile={profile}: {file or _DEFAULT_FILE} is"
            f" not there; write [{profile}] with aws_access_key_id and aws_secret_access_key into"
            " it, on each machine that uses the store."
        )
    if file is None or not (named or file.is_file()):
        raise StoreError(
            "there are no keys for the store: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or "
            f"write them into {file or _DEFAULT_FILE}, on each machine that uses it."
        )
    # No default section: a profile has its own credentials, or none.
    found = configparser.RawConfigParser(default_section="")
    try:
        found.read_string(file.read_text(encoding="utf-8"), str(file))
    except (OSError, ValueError, configparser.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not a credentials file"
        fix = "" if of_address else ", or set AWS_ACCESS_KEY_ID"
        raise StoreError(
            f"the keys for the store cannot be read from {file}: {reason}; "
            f"correct that file or AWS_SHARED_CREDENTIALS_FILE{fix}."
        ) from None  # a parser's message quotes lines, and those hold keys
    section = dict(found.items(profile)) if found.has_section(profile) else {}
    keys = [section.get(name, "") for name in ("aws_access_key_id", "aws_secret_access_key")]
    if not all(keys):
        fix = "correct profile= in the address" if of_address else "name another with AWS_PROFILE"
        raise StoreError(
            f"{file} has no aws_access_key_id and aws_secret_access_key for the profile "
            f"{profile!r}; add them there, or {fix}."
        )
    return S3Credentials(keys[0], keys[1], section.get("aws_session_token", ""))


def _settings(place: str, query: str) -> dict[str, str]:
    given: dict[str, str] = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        setting = _SETTINGS.get(name)
        if setting is None and _SECRET.search(name):
            raise ConfigError(
                f"the storage {place!r} has {name!r}: keys do not belong into an address; "
                "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY instead."
            )
        if setting is None:
            near = difflib.get_close_matches(name, _SETTINGS, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(_SETTINGS)}."
            raise ConfigError(f"the storage {place!r} has an unknown setting {name!r}; {hint}")
        if setting in given:
            raise ConfigError(f"the storage {place!r} sets {setting!r} twice; leave one out.")
        given[setting] = value
    return given


def _endpoint(place: str, given: Mapping[str, str], environ: Mapping[str, str]) -> str:
    text = given.get("endpoint") or _first(environ, _ENDPOINT_VARIABLES) or "s3.amazonaws.com"
    if "://" not in text:
        text = f"{given.get('scheme') or 'https'}://{text}"
    try:
        parts = urlsplit(text)
        is_usable = bool(parts.hostname) and parts.port != 0
    except ValueError:  # an invalid port
        is_usable = False
    if (
        not is_usable
        or parts.scheme not in ("http", "https")
        or parts.path.strip("/")
        or parts.query
        or parts.fragment
        or "@" in parts.netloc
    ):
        shown = text.rpartition("@")[2]
        raise ConfigError(
            f"the storage {place!r}: endpoint {shown!r} must be http://host:port or "
            "https://host:port, without a path and without keys."
        )
    return f"{parts.scheme}://{parts.netloc}"


def _profile(place: str, given: Mapping[str, str]) -> str:
    profile = given.get("profile", "")
    if "profile" in given and (not _PROFILE.fullmatch(profile) or profile.lower() == "default"):
        raise ConfigError(
            f"the storage {place!r}: profile={profile!r} must be the name of a profile in the"
            " credentials file, of letters, digits, '.', '_' and '-', 64 at most, and another than"
            " 'default': without a profile the machine's own keys are used."
        )
    return profile


def _flag(place: str, given: Mapping[str, str], name: str, *, default: bool) -> bool:
    if name not in given:
        return default
    try:
        return _FLAGS[given[name].lower()]
    except KeyError:
        raise ConfigError(
            f"the storage {place!r}: {name}={given[name]} must be true or false."
        ) from None


def _first(environ: Mapping[str, str], names: tuple[str, ...]) -> str:
    return next((environ[name] for name in names if environ.get(name)), "")
