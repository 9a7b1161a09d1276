"""HTTP of webhooks: each request goes to an address that was looked up once and that webhooks may reach."""

import asyncio
import socket
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cached_property
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any
from urllib.parse import urlsplit

import httpx2

from contracts.ids import TenantId
from contracts.webhooks import Network, is_reachable

SEND_SECONDS = 10.0
"""Longest time of one delivery, with the look-up of its host."""
_LOOKUPS, _LOOKUPS_OF_TENANT = 64, 4
"""Look-ups at the same time, and those for one tenant. Each has a thread of its own, which a name server that hangs keeps
after the delivery has been given up.
"""
GONE = 410


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of one delivery: the receiver's status, or why there is none."""

    status: int | None
    error: str | None = None

    @property
    def is_taken(self) -> bool:
        """True if the receiver has taken the event."""
        return self.status is not None and 200 <= self.status < 300

    @property
    def told(self) -> str | None:
        """Failure in words, None if the event was taken."""
        if self.is_taken:
            return None
        if self.status is not None and 300 <= self.status < 400:
            return f"the receiver answered {self.status}; redirects are not followed"
        return self.error or f"the receiver answered {self.status}"


class Unreachable(Exception):
    """The host has no address that webhooks may reach. The text says no more, since it is told to the tenant."""


class HangingLookups(Exception):
    """Raised for a look-up beyond those that a tenant may have at the same time."""


class WebhookSender:
    """Sends documents to tenants' addresses."""

    def __init__(self, networks: Sequence[Network]) -> None:
        """Reach the public internet over TLS, and ``networks``."""
        self._networks = networks
        self._threads = ThreadPoolExecutor(_LOOKUPS, "webhook-lookup")
        self._lookups: Counter[TenantId] = Counter()
        """Look-ups that have not ended, by tenant."""

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        return ssl.create_default_context()

    @asynccontextmanager
    async def client(self) -> AsyncIterator[httpx2.AsyncClient]:
        """Open connections for the deliveries of one webhook: no proxy, no cookie, no redirect."""
        async with httpx2.AsyncClient(
            verify=self._tls, trust_env=False, follow_redirects=False, timeout=SEND_SECONDS
        ) as client:
            yield client

    async def address_of(self, tenant: TenantId, url: str) -> IPv4Address | IPv6Address:
        """Return the first address of the URL's host that may be reached.

        Raises ``OSError``, ``Unreachable``, ``HangingLookups``.
        """
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        for *_, place in await self._found(tenant, parts.hostname, port):
            # A scope, as in fe80::1%eth0, only local addresses have.
            address = ip_address(str(place[0]).partition("%")[0])
            if is_reachable(address, parts, self._networks):
                return address
        raise Unreachable

    async def _found(self, tenant: TenantId, host: str | None, port: int) -> list[Any]:
        """Look the host up for the tenant, whose look-up it stays until it has ended, however long anybody waits for it."""
        if self._lookups[tenant] >= _LOOKUPS_OF_TENANT:
            raise HangingLookups
        self._lookups[tenant] += 1
        loop = asyncio.get_running_loop()
        looking = loop.run_in_executor(self._threads, lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        looking.add_done_callback(lambda _: self._ended(tenant))
        return await asyncio.shield(looking)

    def _ended(self, tenant: TenantId) -> None:
        self._lookups[tenant] -= 1
        if not self._lookups[tenant]:
            del self._lookups[tenant]

    async def send(
        self, client: httpx2.AsyncClient, tenant: TenantId, url: str, headers: Mapping[str, str], body: str
    ) -> Outcome:
        """Send the tenant's document. The answer's body is not read."""
        try:
            async with asyncio.timeout(SEND_SECONDS):
                address = await self.address_of(tenant, url)
                request = _pinned(client, url, address, headers, body)
                answer = await client.send(request, stream=True)
                await answer.aclose()
                return Outcome(answer.status_code)
        except TimeoutError:
            return Outcome(None, f"no answer within {SEND_SECONDS:.0f} s")
        except HangingLookups:
            return Outcome(None, "the hosts of your earlier deliveries are still being looked up")
        except Unreachable:
            return Outcome(None, "the host has no address that webhooks may reach")
        except httpx2.InvalidURL:
            return Outcome(None, "the URL is none that a request can be sent to; set another one")
        except httpx2.HTTPError as error:
            return Outcome(None, _told(error))
        except (OSError, UnicodeError):
            return Outcome(None, "the host's name has no address")


def _pinned(
    client: httpx2.AsyncClient,
    url: str,
    address: IPv4Address | IPv6Address,
    headers: Mapping[str, str],
    body: str,
) -> httpx2.Request:
    """Return a request to ``address`` in the name of the URL's host, whose certificate the receiver has to show."""
    named = httpx2.URL(url)
    whole = {**headers, "Host": named.netloc.decode("ascii"), "Content-Type": "application/cloudevents+json"}
    whole |= {"User-Agent": "weft-webhooks", "Accept": "*/*", "Accept-Encoding": "identity"}
    return client.build_request(
        "POST",
        named.copy_with(host=str(address)),
        headers=whole,
        content=body.encode(),
        extensions={"sni_hostname": named.host},
    )


def _told(error: httpx2.HTTPError) -> str:
    if "CERTIFICATE_VERIFY_FAILED" in str(error):
        return "the receiver's certificate is not valid for its host"
    if isinstance(error, httpx2.TimeoutException):
        return f"no answer within {SEND_SECONDS:.0f} s"
    if isinstance(error, httpx2.ConnectError):
        return "the receiver could not be reached"
    return "the connection broke, or the answer was no HTTP"
