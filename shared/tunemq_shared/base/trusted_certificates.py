"""Explain why a file of trusted certificates cannot be used."""

from __future__ import annotations

import ssl


def why_not_trusted(file: str, error: OSError) -> str:
    """Explain why the file could not be loaded.

    Args:
        file: Its path.
        error: What loading it raised; an `ssl.SSLError` if the file has no certificate.
    """
    what = error.strerror if not isinstance(error, ssl.SSLError) else "no certificate in it"
    return f"the file {file!r} with the certificates to trust cannot be used: {what}"
