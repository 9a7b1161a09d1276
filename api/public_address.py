"""The service's address as its clients reach it, for links that an answer carries.

A request's ``Host`` header is whatever its sender wrote. A link must not lead where a forged one points, because the
program that follows the link sends its secret there.
"""

import ipaddress
import re

from fastapi import Request

from contracts.errors import InvalidRequest
from store.settings import Settings

_HOST = re.compile(r"(?P<name>[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?")


def public_address(request: Request, settings: Settings) -> str:
    """Return the service's URL for this request's sender, without a slash at its end.

    The setting ``public_url`` wins. Without it the request's host is taken if it is loopback, the address that the
    connection came in on, or one of ``trusted_hosts``. The scheme is the connection's, or what a proxy of
    ``trusted_proxies`` forwarded. Raises ``InvalidRequest`` for any other host.
    """
    if settings.public_url is not None:
        return settings.public_url.rstrip("/")
    host = request.headers.get("host", "")
    found = _HOST.fullmatch(host)
    if found is None or not _is_own(found["name"].lower(), request, settings):
        raise InvalidRequest(
            f"the host {host[:100]!r} is not known as this service's own, so no link is made for it; "
            "the operator sets WEFT_PUBLIC_URL, or names the host in WEFT_TRUSTED_HOSTS"
        )
    return f"{request.url.scheme}://{host}"


def _is_own(name: str, request: Request, settings: Settings) -> bool:
    if name == "localhost" or name in {trusted.lower() for trusted in settings.trusted_hosts}:
        return True
    try:
        address = ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    server = request.scope.get("server")
    return address.is_loopback or (server is not None and str(address) == server[0])
