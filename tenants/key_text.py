"""Text of API keys: ``tml-<id>-<secret><checksum>``. The checksum tells a typing error without the database.

Keys of before the checksum are shorter and stay valid.
"""

import base64
import hashlib
import secrets
import string
import zlib

KEY_PREFIX = "tml-"
"""Start of every key; the SDK refuses others."""
_PREFIX_BYTES = 6
_SECRET_BYTES = 32
HASH_BYTES = 32
_SHOWN = len(KEY_PREFIX) + 2 * _PREFIX_BYTES
_SECRET_CHARACTERS = 43
_CHECK_CHARACTERS = 6
_WHOLE = _SHOWN + 1 + _SECRET_CHARACTERS + _CHECK_CHARACTERS
_DIGITS = string.digits + string.ascii_letters


def new_prefix() -> str:
    """Return the first part of a new key, which finds the key's row and names it to people."""
    return KEY_PREFIX + secrets.token_hex(_PREFIX_BYTES)


def new_secret() -> bytes:
    """Return 256 random bits."""
    return secrets.token_bytes(_SECRET_BYTES)


def key_text(shown: str, secret: bytes) -> str:
    """Return the whole key with that shown part and a secret of 32 bytes."""
    text = f"{shown}-{base64.urlsafe_b64encode(secret).rstrip(b'=').decode()}"
    return text + _checksum(text)


def shown_prefix(key: str) -> str:
    """Return the part of a key that names it to people and is no secret."""
    return key[:_SHOWN]


def is_mistyped(key: str) -> bool:
    """Return whether the key has a checksum that is wrong, so that no row can have it."""
    return len(key) == _WHOLE and _checksum(key[:-_CHECK_CHARACTERS]) != key[-_CHECK_CHARACTERS:]


def hash_of(key: str) -> bytes:
    """Return the hash under which a key is stored. 256 random bits need no slow hash."""
    return hashlib.sha256(key.encode()).digest()


def _checksum(text: str) -> str:
    """Return the CRC-32 of the text as six digits to the base 62."""
    number, digits = zlib.crc32(text.encode()), []
    for _ in range(_CHECK_CHARACTERS):
        number, digit = divmod(number, len(_DIGITS))
        digits.append(_DIGITS[digit])
    return "".join(reversed(digits))
