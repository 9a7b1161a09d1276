"""Tokens that the service signs: short-lived JSON Web Tokens (RFC 7519, HMAC with SHA-256) that clients send back.

The secret is a file of the data folder, which all processes share. Whoever has a database alone can sign nothing.
"""

import base64
import hashlib
import hmac
import json
import os
import secrets
from collections.abc import Mapping
from datetime import datetime, timedelta
from pathlib import Path

from contracts.errors import InvalidRequest
from store.clock import Clock
from store.data_folder import DataFolder

TOKEN_PREFIX = "eyJ"
"""Start of every token: a JSON object as base64. No API key starts so."""
_SECRET_FILE = "token-secret"
_SECRET_BYTES = 32
_HEADER = {"alg": "HS256", "typ": "JWT"}
_STEP = timedelta(minutes=5)
_LONGEST = 4096


class TokenSigner:
    """Signs claims for some time, and checks tokens that come back."""

    def __init__(self, folder: DataFolder, clock: Clock) -> None:
        """Read the data folder's secret; make one if there is none."""
        self._secret = _read_or_make(folder.path(_SECRET_FILE))
        self._clock = clock

    def sign(self, claims: Mapping[str, str], *, purpose: str, lifetime: timedelta) -> str:
        """Return a token that is valid for at least ``lifetime``. Equal claims within five minutes have equal tokens."""
        seconds = _STEP.total_seconds()
        issued = int(self._clock().timestamp() // seconds * seconds)
        expires = issued + int((lifetime + _STEP).total_seconds())
        body = {**claims, "aud": purpose, "iat": issued, "exp": expires}
        signed = f"{_encode(_HEADER)}.{_encode(body)}"
        return f"{signed}.{_text(self._mac(signed))}"

    def claims(self, token: str, *, purpose: str) -> dict[str, str] | None:
        """Return the token's claims, None unless this service signed it for ``purpose`` and it has not expired."""
        signed, _, signature = token[:_LONGEST].rpartition(".")
        if not token.isascii() or not hmac.compare_digest(_text(self._mac(signed)), signature):
            return None
        encoded = signed.partition(".")[2]
        body = json.loads(base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4)))
        if body["aud"] != purpose or datetime.fromtimestamp(body["exp"], self._clock().tzinfo) <= self._clock():
            return None
        return {name: value for name, value in body.items() if isinstance(value, str)}

    def derived(self, *parts: str) -> bytes:
        """Return 32 bytes that nobody without the secret can tell from random ones; equal parts give equal bytes."""
        # No token has this form: each begins with ``TOKEN_PREFIX``.
        return self._mac("\0".join(("derived", *parts)))

    def _mac(self, signed: str) -> bytes:
        return hmac.digest(self._secret, signed.encode(), hashlib.sha256)


def _encode(content: Mapping[str, object]) -> str:
    return _text(json.dumps(content, separators=(",", ":")).encode())


def _text(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).rstrip(b"=").decode()


def _read_or_make(file: Path) -> bytes:
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        made = file.with_name(f"{file.name}.{secrets.token_hex(8)}")
        with open(os.open(made, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as written:
            written.write(secrets.token_bytes(_SECRET_BYTES))
            written.flush()
            os.fsync(written.fileno())
        try:
            # Whoever links first has made the secret; it is never seen half written.
            os.link(made, file)
        except FileExistsError:
            pass
        finally:
            made.unlink()
    secret = file.read_bytes()
    if len(secret) != _SECRET_BYTES:
        raise InvalidRequest(
            f"{file} has {len(secret)} bytes instead of {_SECRET_BYTES}: remove it, and a new secret is made"
        )
    return secret
