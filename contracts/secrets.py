"""Masking of secrets in text for people: passwords in URLs, API keys, and tokens that the service has signed."""

import re

_USER_INFO = re.compile(r"(?<=://)[^/\s]*@")
_KEY = re.compile(r"(tml-[0-9a-f]{12})-[A-Za-z0-9_-]{20,}")
_TOKEN = re.compile(r"eyJ[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+")


def mask_secrets(text: str) -> str:
    """Return ``text`` without user names and passwords in URLs, the first part only of every API key, and no token."""
    if "://" in text:
        text = _USER_INFO.sub("…@", text)
    if "eyJ" in text:
        text = _TOKEN.sub("eyJ…", text)
    return _KEY.sub(r"\1-…", text) if "tml-" in text else text
