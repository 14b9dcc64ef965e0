"""Selects the keys that a command uses for a journal's copy, from the environment's key file."""

from __future__ import annotations

import os
from pathlib import Path

from tunemq_shared.objects.store_address import name_in
from tunemq_shared.signing.key_files import KEYS_VARIABLE, journal_signer, read_key_file
from tunemq_shared.signing.message_signing import MessageSigner


def known_journal_signer(address: str) -> MessageSigner:
    """Return the signer for the search at this address, with the keys of ``$TUNEMQ_KEYS`` if set.

    Raises:
        ConfigError: that file cannot be used.
    """
    path = os.environ.get(KEYS_VARIABLE)
    if not path:
        return journal_signer()
    return journal_signer(read_key_file(Path(path).expanduser()).journal_keys(name_in(address)))
