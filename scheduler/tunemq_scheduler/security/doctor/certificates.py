"""Check whether a certificate of Redis or the store, or a trusted one, expires soon."""

from __future__ import annotations

import ssl
import time
from collections.abc import Mapping
from typing import Final

from tunemq_scheduler.security.certificate_expiry import certificates_of
from tunemq_scheduler.security.doctor.time_limit import within
from tunemq_scheduler.security.findings import Finding, ok, problem, warning
from tunemq_shared.base.errors import TuneError

#: Same as in the alerts.
_SOON_DAYS: Final = 14.0
_NOW_DAYS: Final = 2.0
#: Seconds to wait for one server.
_ANSWER_S: Final = 20.0
_CHECK: Final = "certificates"
#: OpenSSL's error code for an expired certificate.
_EXPIRED: Final = 10


def check_certificates(url: str, store: str, environ: Mapping[str, str]) -> list[Finding]:
    """Check when the certificates of Redis and of the store expire.

    Other checks report a server that does not answer.

    Args:
        url: Of Redis.
        store: The store's address; empty if unknown.
        environ: Names the store's certificates.
    """
    found: list[Finding] = []
    known: list[str] = []
    for one in certificates_of(url, store, environ):
        is_authority = one.name.endswith("_ca")
        what = f"the certificate of {one.place}"
        fix = "make a new one and restart the server that shows it: docs/security.md says how"
        if is_authority:
            what = f"a certificate in {one.place}, by which the farm trusts its server,"
            fix = (
                "make a new certificate of the authority, copy the file to all machines of the farm"
                " first, and then give the server one that it has signed: docs/security.md"
            )
        try:
            expires = within(_ANSWER_S, one.expires)
        except ssl.SSLCertVerificationError as error:
            if error.verify_code == _EXPIRED:
                found.append(problem(_CHECK, f"{what} (or of its authority) has expired", fix))
            continue
        except (OSError, ValueError, TuneError):
            continue
        if expires is None:
            continue
        days = (expires - time.time()) / 86400
        until = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(expires))
        said = f"{what} expires in {days:.1f} days, at {until}"
        if days < 0:
            said = f"{what} expired at {until}"
        if days < _NOW_DAYS:
            found.append(problem(_CHECK, said, fix))
        elif days < _SOON_DAYS:
            found.append(warning(_CHECK, said, fix))
        else:
            known.append(f"{one.place}: {days:.0f} days")
    return found or [ok(_CHECK, "; ".join(known) or "none in use")]
