"""Explain S3 errors to the person who set up the store: the cause, and the fix."""

from __future__ import annotations

from typing import Final

from tunemq_shared.base.retrying import StoreUnavailable
from tunemq_shared.objects.object_client import StoreInternalError, StoreRequestDenied
from tunemq_shared.objects.s3_address import S3Address

#: Errors for which a retry may help, besides all with status 5xx, 408 and 429.
_TRANSIENT: Final = frozenset(
    {
        "SlowDown",
        "SlowDownRead",
        "SlowDownWrite",
        "RequestTimeout",
        "OperationAborted",
        "IncompleteBody",
        "BadDigest",
        "XAmzContentSHA256Mismatch",
    }
)
_KEYS: Final = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or the credentials file)"
WRONG_KEYS: Final = frozenset(
    {
        "InvalidAccessKeyId",
        "SignatureDoesNotMatch",
        "InvalidToken",
        "ExpiredToken",
        "InvalidTokenId",
        "AuthorizationQueryParametersError",
    }
)
_WRONG_REGION: Final = frozenset(
    {
        "AuthorizationHeaderMalformed",
        "PermanentRedirect",
        "Redirect",
        "TemporaryRedirect",
        "IllegalLocationConstraintException",
        "InvalidRegion",
    }
)


def rejected(
    address: S3Address, action: str, code: str, status: int, message: str
) -> StoreUnavailable | StoreRequestDenied:
    """Make the error for a rejected request; `StoreUnavailable` if a retry may help.

    Args:
        address: The store.
        action: What was rejected, as in ``a/b cannot be written``.
        code: S3's, as in ``NoSuchBucket``.
        status: HTTP's.
        message: The server's own message.
    """
    where = f"{address.place} at {address.endpoint}: {action}"
    said = f"{code}: {message.rstrip('.')}" if message else code
    if code in _TRANSIENT or status >= 500 or status in (408, 429):
        # Statuses other than 500 mean that it is busy, full, or unreachable behind a proxy.
        kind = StoreInternalError if status == 500 and code not in _TRANSIENT else StoreUnavailable
        return kind(f"{where}: the server cannot do it now ({said}).")
    if code == "NoSuchBucket":
        advice = (
            f"there is no bucket {address.bucket!r}; make it, correct the name, or add "
            "create_bucket=true to the address"
        )
    elif code in WRONG_KEYS:
        advice = f"the server does not know these keys ({said}); {_KEYS} to valid ones"
    elif code in _WRONG_REGION:
        advice = f"the region {address.region!r} is wrong ({said}); set region in the address"
    elif code == "RequestTimeTooSkewed":
        advice = f"the clocks of this machine and of the server differ too much ({said}); set them"
    elif code == "AccessDenied" or status in (401, 403):
        advice = (
            f"these keys are not allowed to do that ({said}); allow them to read, write, list and "
            f"remove below {address.place}, or {_KEYS} to others"
        )
    else:
        advice = f"the server refused it ({said or status})"
    return StoreRequestDenied(f"{where}: {advice}.", code)


def unreachable(address: S3Address, action: str, reason: str) -> StoreUnavailable:
    """Make the error for a server that does not answer."""
    return StoreUnavailable(
        f"{address.place} at {address.endpoint}: {action}: the server cannot be reached "
        f"({reason}); check that it runs and that endpoint is its address."
    )


def untrusted(address: S3Address, action: str, reason: str) -> StoreRequestDenied:
    """Make the error for a failed TLS connection."""
    return StoreRequestDenied(
        f"{address.place} at {address.endpoint}: {action}: no secure connection can be made "
        f"({reason}); check http or https in endpoint, that ca_file (or "
        "AWS_CA_BUNDLE) names the CA that signed its certificate, and that this has not expired.",
        "",
    )


def no_s3(address: S3Address, action: str, reason: str) -> StoreRequestDenied:
    """Make the error for an answer that no S3 server gives."""
    return StoreRequestDenied(
        f"{address.place} at {address.endpoint}: {action}: what answers there does not speak S3 "
        f"({reason}); check host, port, and http or https in endpoint.",
        "",
    )
