"""``with_raw_response`` tells a method's answer as it came, and refuses in words what yields, or sends nothing."""

from collections.abc import Awaitable
from operator import attrgetter
from typing import Any

import httpx
import pytest
from weft_client.admin_async import AsyncWeftAdmin
from weft_client.admin_sync import WeftAdmin
from weft_client.asynchronous import AsyncWeft
from weft_client.synchronous import Weft

CLIENTS: dict[str, type[Any]] = {one.__name__: one for one in (AsyncWeft, Weft, AsyncWeftAdmin, WeftAdmin)}
YIELDING = [
    *((name, method) for name in ("AsyncWeft", "Weft") for method in ("gates.list", "samples.stream", "usage.export")),
    *((name, "gates.paused") for name in ("AsyncWeft", "Weft")),
    *((name, method) for name in ("AsyncWeftAdmin", "WeftAdmin") for method in ("tenants.list", "usage.export")),
]


class Service:
    """Counts its requests, and answers each with the weight of a run."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.asked += 1
        return httpx.Response(200, json={"id": "run", "weight": 3.0}, headers={"RateLimit": "told"})


@pytest.fixture
def service() -> Service:
    return Service()


async def called_raw(service: Service, client: str, method: str, *given: Any) -> Any:
    """Return what a client's ``with_raw_response`` returns for a method."""
    kind = httpx.AsyncClient if client.startswith("Async") else httpx.Client
    weft = CLIENTS[client]("http://nowhere", "tml-x", http=kind(transport=httpx.MockTransport(service)))
    found = weft.with_raw_response(attrgetter(method)(weft), *given)
    return await found if isinstance(found, Awaitable) else found


@pytest.mark.parametrize("client", ["AsyncWeft", "Weft"])
async def test_the_answer_is_told_beside_the_record(service: Service, client: str) -> None:
    raw = await called_raw(service, client, "runs.weigh", "run", 3.0)
    assert (raw.parsed.weight, raw.status, raw.headers["RateLimit"]) == (3.0, 200, "told")
    assert b'"weight"' in raw.content


@pytest.mark.parametrize(("client", "method"), YIELDING)
async def test_a_method_that_yields_is_refused_in_words_before_a_request(
    service: Service, client: str, method: str
) -> None:
    with pytest.raises(TypeError, match="yields over several answers"):
        await called_raw(service, client, method)
    assert service.asked == 0


@pytest.mark.parametrize("client", CLIENTS)
async def test_a_method_that_sends_nothing_is_refused_in_words(service: Service, client: str) -> None:
    with pytest.raises(TypeError, match="has sent no request"):
        await called_raw(service, client, "close")
