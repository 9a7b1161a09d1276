"""A change whose answer is lost is not sent twice where a repeat would be answered as a mistake."""

from collections.abc import Awaitable, Callable
from decimal import Decimal
from typing import Any

import httpx
import pytest
from weft_client.admin_async import AsyncWeftAdmin
from weft_client.asynchronous import AsyncWeft
from weft_client.errors import OutcomeUnknown, ServiceUnavailable

CHANGES: dict[str, Callable[[AsyncWeftAdmin], Awaitable[Any]]] = {
    "change of a tenant": lambda weft: weft.tenants.change("t", share=2.0, if_match='"1"'),
    "run of housekeeping": lambda weft: weft.housekeeping.run(),
}
TENANTS: dict[str, Callable[[AsyncWeft], Awaitable[Any]]] = {
    "pause at a generation": lambda weft: weft.gates.pause("r", generation=3),
    "resume of a generation": lambda weft: weft.gates.resume("r", generation=3),
    "resume": lambda weft: weft.gates.resume("r"),
}
TWICE: dict[str, Callable[[AsyncWeft], Awaitable[Any]]] = {
    "pause": lambda weft: weft.gates.pause("r"),
}
ONCE: dict[str, Callable[[AsyncWeftAdmin], Awaitable[Any]]] = {
    "price": lambda weft: weft.prices.add("storage", Decimal(1)),
    "cancellation": lambda weft: weft.operations.cancel("o"),
    "failure": lambda weft: weft.operations.fail("o"),
    "requeue": lambda weft: weft.operations.requeue("o"),
    "end of a session": lambda weft: weft.sessions.end("s"),
    "move": lambda weft: weft.runs.move("r"),
    "eviction": lambda weft: weft.runs.evict("r"),
    "another secret of a webhook": lambda weft: weft.webhooks.rotate("t", "bell"),
    "test of a webhook": lambda weft: weft.webhooks.test("t", "bell"),
}
"""Changes whose repeats the service knows by their ``Idempotency-Key``."""


class FailingService:
    """Notes the requests that reach it, and fails each."""

    def __init__(self, failure: Exception) -> None:
        self.seen: list[str] = []
        self.keys: list[str | None] = []
        self.timeouts: list[float] = []
        self._failure = failure

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        self.seen.append(request.method)
        self.keys.append(request.headers.get("idempotency-key"))
        self.timeouts.append(request.extensions["timeout"]["read"])
        raise self._failure


def client(service: FailingService, retries: int) -> AsyncWeftAdmin:
    http = httpx.AsyncClient(transport=httpx.MockTransport(service), timeout=40)
    return AsyncWeftAdmin("http://nowhere", "tml-x", retries=retries, http=http)


def tenants_client(service: FailingService, retries: int) -> AsyncWeft:
    http = httpx.AsyncClient(transport=httpx.MockTransport(service), timeout=40)
    return AsyncWeft("http://nowhere", "tml-x", retries=retries, http=http)


async def check_sent_once(
    weft: AsyncWeft | AsyncWeftAdmin, service: FailingService, change: Callable[[Any], Any]
) -> None:
    async with weft:
        with pytest.raises(OutcomeUnknown, match="outcome_unknown"):
            await change(weft)
    assert len(service.seen) == 1


@pytest.mark.parametrize("change", CHANGES.values(), ids=list(CHANGES))
async def test_a_change_whose_answer_is_lost_is_not_sent_twice(change: Callable[[AsyncWeftAdmin], Any]) -> None:
    service = FailingService(httpx.ReadError("the answer is lost"))
    await check_sent_once(client(service, 3), service, change)


@pytest.mark.parametrize("change", TENANTS.values(), ids=list(TENANTS))
async def test_a_gates_change_at_a_generation_or_a_resume_is_not_sent_twice(change: Callable[[AsyncWeft], Any]) -> None:
    """The repeat would be told as somebody else's change, or end a later pause of somebody else."""
    service = FailingService(httpx.ReadError("the answer is lost"))
    await check_sent_once(tenants_client(service, 3), service, change)


@pytest.mark.parametrize("change", TWICE.values(), ids=list(TWICE))
async def test_a_pause_at_any_generation_is_sent_again(change: Callable[[AsyncWeft], Any]) -> None:
    service = FailingService(httpx.ReadError("the answer is lost"))
    async with tenants_client(service, 1) as weft:
        with pytest.raises(ServiceUnavailable):
            await change(weft)
    assert len(service.seen) == 2


async def test_a_run_of_housekeeping_may_take_an_hour() -> None:
    service = FailingService(httpx.ReadTimeout("too long"))
    async with client(service, 1) as weft:
        with pytest.raises(OutcomeUnknown):
            await weft.housekeeping.run()
        with pytest.raises(ServiceUnavailable):
            await weft.operations.cancel("o")
    assert [seconds >= 3600 for seconds in service.timeouts] == [True, False, False]


async def test_a_change_that_never_reached_the_service_is_sent_again() -> None:
    service = FailingService(httpx.ConnectError("nobody listens"))
    async with client(service, 1) as weft:
        with pytest.raises(ServiceUnavailable) as raised:
            await weft.tenants.change("t", share=2.0, if_match='"1"')
    assert not isinstance(raised.value, OutcomeUnknown)
    assert len(service.seen) == 2


async def test_a_request_that_sets_a_state_is_sent_again_when_its_answer_is_lost() -> None:
    service = FailingService(httpx.ReadError("the answer is lost"))
    async with client(service, 1) as weft:
        with pytest.raises(ServiceUnavailable):
            await weft.tenants.suspend("t")
    assert len(service.seen) == 2


@pytest.mark.parametrize("change", ONCE.values(), ids=list(ONCE))
async def test_a_change_with_a_key_is_sent_again_with_the_same_key(change: Callable[[AsyncWeftAdmin], Any]) -> None:
    service = FailingService(httpx.ReadError("the answer is lost"))
    async with client(service, 2) as weft:
        for _ in range(2):
            with pytest.raises(ServiceUnavailable):
                await change(weft)
    assert len(service.keys) == 6
    assert [len(set(service.keys[:3])), len(set(service.keys[3:])), len(set(service.keys))] == [1, 1, 2]
    assert None not in service.keys
