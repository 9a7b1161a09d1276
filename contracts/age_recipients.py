"""Recipients of age encryption (https://age-encryption.org): native ``age1…`` keys and SSH public keys."""

from collections.abc import Sequence
from typing import Any

import pyrage

from contracts.errors import InvalidRequest

MOST_RECIPIENTS = 10
"""Most recipients of one export, as in the SDK's documentation."""
_LONGEST = 2_000
"""Characters of the longest recipient, an SSH key of RSA with 4096 bits and a comment."""

_SHOWN = 8
"""Characters of a refused recipient that its error tells."""


def check_recipients(texts: Sequence[str] | None, field: str = "age_encryption_recipients") -> list[str] | None:
    """Return the recipients if each can be encrypted to, None without any. Raises ``InvalidRequest`` naming ``field``."""
    if not texts:
        return None
    if len(texts) > MOST_RECIPIENTS:
        raise InvalidRequest(f"{field} must be at most {MOST_RECIPIENTS} recipients; got {len(texts)}")
    for text in texts:
        parse_recipient(text, field)
    return list(texts)


def parse_recipient(text: str, field: str = "age_encryption_recipients") -> Any:
    """Return pyrage's recipient of ``text``. Raises ``InvalidRequest`` naming ``field``.

    The error has the beginning of ``text`` only, which may be a secret key: errors are kept, and operators read them.
    """
    kind = pyrage.ssh if text.startswith("ssh-") else pyrage.x25519
    try:
        if len(text) > _LONGEST:
            raise ValueError("too long")
        return kind.Recipient.from_str(text)
    except (pyrage.RecipientError, ValueError) as error:
        raise InvalidRequest(
            f"{field} must be age1… keys, or SSH public keys: ssh-ed25519, or ssh-rsa of 2048 to 4096 bits; one begins with "
            f"{text[:_SHOWN]!r}"
        ) from error
