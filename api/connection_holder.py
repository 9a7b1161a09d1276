"""Holder of a connection: its address, until a request tells another. Listeners without a web framework know it, too."""

from collections.abc import Mapping
from ipaddress import IPv6Address, IPv6Network
from typing import Any

HOLDER = "weft.holder"
"""Key of the extension by which the server wants to be told whose request a connection has: ``scope["extensions"]``."""


def network_of(scope: Mapping[str, Any]) -> str:
    """Return the client's IPv4 address, or the /64 network of its IPv6 address, of which one client may have every address."""
    client = scope.get("client")
    host: str = client[0] if client else ""
    try:
        return str(IPv6Network((IPv6Address(host.partition("%")[0]), 64), strict=False)) if ":" in host else host
    except ValueError:
        return host
