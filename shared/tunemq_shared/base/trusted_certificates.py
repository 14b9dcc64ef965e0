"""Why a file of certificates to trust cannot be used, in words."""

from __future__ import annotations

import ssl


def why_not_trusted(file: str, error: OSError) -> str:
    """What to say when the file could not be loaded.

    Args:
        file: its path.
        error: what loading it raised; an `ssl.SSLError` where it is there and no such file.
    """
    what = error.strerror if not isinstance(error, ssl.SSLError) else "no certificate in it"
    return f"the file {file!r} with the certificates to trust cannot be used: {what}"
