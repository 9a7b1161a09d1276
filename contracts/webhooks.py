"""Webhooks: kinds of events, the form in which they are sent, and the addresses to which they may be."""

import base64
import hmac
import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from enum import StrEnum
from hashlib import sha256
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from types import MappingProxyType
from urllib.parse import SplitResult, urlsplit

from contracts.errors import InvalidRequest

Network = IPv4Network | IPv6Network

SECRET_PREFIX = "whsec_"
EVERY = "*"
"""Name that stands for every kind of event."""
_LONGEST_URL = 2000
_FOUR_NUMBERS = re.compile(r"\d+\.\d+\.\d+\.\d+")
_SCHEMES = ("https", "http")
# IPv4 addresses in disguise: NAT64 and Teredo, 6to4, and IPv4-compatible ones.
_TRANSLATED = tuple(map(IPv6Network, ("64:ff9b::/96", "64:ff9b:1::/48", "2001::/32", "2002::/16", "::/96")))


class EventKind(StrEnum):
    """Kind of an event."""

    BUDGET_ALERT = "budget.alert"
    SESSION_LOST = "session.lost"
    RUN_FAILED = "run.failed"
    JOB_FINISHED = "job.finished"
    CHECKPOINT_EXPIRING = "checkpoint.expiring"
    KEY_EXPIRING = "key.expiring"
    TENANT_SUSPENDED = "tenant.suspended"
    TENANT_RESUMED = "tenant.resumed"
    WEBHOOK_TEST = "webhook.test"


MEANINGS: Mapping[EventKind, str] = MappingProxyType(
    {
        EventKind.BUDGET_ALERT: "a budget has crossed 80 % or all of its amount",
        EventKind.SESSION_LOST: "a session was ended because its client was silent",
        EventKind.RUN_FAILED: "a model could not be made",
        EventKind.JOB_FINISHED: "a merge or an import is done, has failed or was cancelled",
        EventKind.CHECKPOINT_EXPIRING: "a checkpoint with a name expires within a day",
        EventKind.KEY_EXPIRING: "an API key expires within three days",
        EventKind.TENANT_SUSPENDED: "an operator has suspended the tenant, or changed how",
        EventKind.TENANT_RESUMED: "the tenant's suspension has ended",
        EventKind.WEBHOOK_TEST: "somebody has asked for a test",
    }
)


def event_document(
    *, id: str, kind: EventKind, tenant: str, subject: str, at: datetime, data: Mapping[str, object]
) -> str:
    """Return the event as a CloudEvent in JSON."""
    document = {
        "specversion": "1.0",
        "id": id,
        "source": f"weft/tenants/{tenant}",
        "type": f"weft.{kind}",
        "subject": subject,
        "time": at.isoformat(),
        "datacontenttype": "application/json",
        "data": dict(data),
    }
    return json.dumps(document, default=_plain, separators=(",", ":"))


def _plain(value: object) -> str:
    return value.isoformat() if isinstance(value, datetime) else str(value)


def signed_headers(event_id: str, body: str, secrets: Sequence[str], now: datetime) -> dict[str, str]:
    """Return the headers of a delivery as Standard Webhooks has them: one signature for each secret."""
    stamp = str(int(now.timestamp()))
    content = f"{event_id}.{stamp}.{body}".encode()
    signatures = [
        hmac.digest(base64.b64decode(secret.removeprefix(SECRET_PREFIX)), content, sha256) for secret in secrets
    ]
    told = " ".join(f"v1,{base64.b64encode(one).decode()}" for one in signatures)
    return {"webhook-id": event_id, "webhook-timestamp": stamp, "webhook-signature": told}


def check_target(url: str, allowed: Sequence[Network]) -> None:
    """Raise ``InvalidRequest`` for a URL to which no webhook may be sent, as far as its text tells."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        raise InvalidRequest("url: this is no URL") from None
    if not url.isascii() or not url.isprintable() or " " in url or len(url) > _LONGEST_URL:
        raise InvalidRequest(f"url: a URL has at most {_LONGEST_URL} characters, all printable ASCII, and no spaces")
    if parts.scheme not in _SCHEMES or not parts.hostname:
        raise InvalidRequest("url: this must begin with https:// and a host")
    if parts.username is not None or parts.password is not None or parts.fragment:
        raise InvalidRequest("url: leave out user, password and fragment; the signature tells the receiver who sends")
    if parts.scheme == "http" and not allowed:
        raise InvalidRequest("url: this must begin with https://")
    literal = _literal(parts.hostname)
    if literal is None and _FOUR_NUMBERS.fullmatch(parts.hostname):
        # Resolvers read 010.1, HTTP clients refuse it.
        raise InvalidRequest("url: write an IPv4 address as four numbers from 0 to 255, without leading zeros")
    if literal is not None and not is_reachable(literal, parts, allowed):
        raise InvalidRequest("url: webhooks may not be sent to this address; name one of the public internet")


def is_reachable(address: IPv4Address | IPv6Address, target: SplitResult, allowed: Sequence[Network]) -> bool:
    """Return whether a webhook to ``target`` may be sent to the address: a public one over TLS, or one of ``allowed``."""
    address = getattr(address, "ipv4_mapped", None) or address
    if any(address in network for network in allowed):
        return True
    if target.scheme != "https" or not address.is_global or address.is_multicast or address.is_reserved:
        return False
    if isinstance(address, IPv6Address):
        return not (address.is_site_local or any(address in one for one in _TRANSLATED))
    return True


def _literal(host: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(host)
    except ValueError:
        return None
