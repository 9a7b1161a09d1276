"""A client waits before a repeat as long as the service asks for, and else longer each time."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace

import httpx
import pytest
from weft_client.asynchronous import AsyncWeft
from weft_client.errors import BudgetSpent, OverLimit, ServiceUnavailable, WeftClientError
from weft_client.streams import Accepted, Done, Event
from weft_client.synchronous import Weft


class Refusing:
    """A service that refuses every request alike."""

    def __init__(self, status: int, retry_after: str | None) -> None:
        self._status, self._headers = status, {} if retry_after is None else {"Retry-After": retry_after}

    def __call__(self, request: httpx.Request) -> httpx.Response:
        told = {"detail": "later", "code": "a_code", "retryable": True}
        return httpx.Response(self._status, json=told, headers=self._headers)


async def _with_asyncio(service: Refusing, retries: int, kind: type[WeftClientError]) -> None:
    http = httpx.AsyncClient(transport=httpx.MockTransport(service))
    async with AsyncWeft("http://nowhere", "tml-x", retries=retries, http=http) as weft:
        with pytest.raises(kind):
            await weft.jobs.list()
        with pytest.raises(kind):
            await anext(aiter(weft.samples.stream("sampler", [1], seq_id=1)))


def _without_asyncio(service: Refusing, retries: int, kind: type[WeftClientError]) -> None:
    http = httpx.Client(transport=httpx.MockTransport(service))
    with Weft("http://nowhere", "tml-x", retries=retries, http=http) as weft:
        with pytest.raises(kind):
            weft.jobs.list()
        with pytest.raises(kind):
            next(iter(weft.samples.stream("sampler", [1], seq_id=1)))


class BreakingOff:
    """A service whose streams break off after these texts, one for each request; the last text ends all further ones."""

    def __init__(self, *texts: str) -> None:
        self.asked, self._texts = 0, texts

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.asked += 1
        text = self._texts[min(self.asked, len(self._texts)) - 1]
        return httpx.Response(200, headers={"Content-Type": "text/event-stream"}, content=text.encode())


async def _followed_with_asyncio(service: BreakingOff) -> list[Event]:
    http = httpx.AsyncClient(transport=httpx.MockTransport(service))
    async with AsyncWeft("http://nowhere", "tml-x", http=http) as weft:
        return [event async for event in weft.samples.stream("sampler", [1], seq_id=1)]


def _followed_without_asyncio(service: BreakingOff) -> list[Event]:
    http = httpx.Client(transport=httpx.MockTransport(service))
    with Weft("http://nowhere", "tml-x", http=http) as weft:
        return list(weft.samples.stream("sampler", [1], seq_id=1))


@pytest.fixture(params=["with asyncio", "without"])
def follow(request: pytest.FixtureRequest) -> Callable[[BreakingOff], list[Event]]:
    """Follow a stream to its end by one half of the client."""
    if request.param == "without":
        return _followed_without_asyncio
    return lambda service: asyncio.run(_followed_with_asyncio(service))


Attempt = Callable[[Refusing, int, type[WeftClientError]], None]


@pytest.fixture(params=["with asyncio", "without"])
def attempt(request: pytest.FixtureRequest) -> Attempt:
    """Send a request and a stream by one half of the client; both fail in the end."""
    if request.param == "without":
        return _without_asyncio
    return lambda service, retries, kind: asyncio.run(_with_asyncio(service, retries, kind))


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that the client has slept, none of which pass."""
    seconds: list[float] = []

    async def sleep(time: float) -> None:
        seconds.append(time)

    monkeypatch.setattr("weft_client.transport_async.asyncio", SimpleNamespace(sleep=sleep))
    monkeypatch.setattr("weft_client.transport_sync.time", SimpleNamespace(sleep=seconds.append))
    return seconds


@pytest.mark.parametrize("status", [429, 503])
def test_the_time_that_the_service_asks_for_is_waited(attempt: Attempt, slept: list[float], status: int) -> None:
    attempt(Refusing(status, "7"), 3, WeftClientError)
    assert slept == [7.0] * 6


@pytest.mark.parametrize("retry_after", [None, "Fri, 02 Jan 2026 00:00:00 GMT"])
def test_a_service_that_asks_for_no_seconds_is_asked_more_and_more_rarely(
    attempt: Attempt, slept: list[float], retry_after: str | None
) -> None:
    attempt(Refusing(429, retry_after), 8, OverLimit)
    longest = [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 20.0, 20.0]
    assert len(slept) == 16
    assert all(most / 2 <= seconds <= most for seconds, most in zip(slept, longest * 2, strict=True))


def test_a_spent_budget_is_waited_for_and_told_in_the_end(attempt: Attempt, slept: list[float]) -> None:
    attempt(Refusing(402, None), 2, BudgetSpent)
    assert len(slept) == 4


ACCEPTED = 'event: accepted\ndata: {"request_id": "r"}\n\n'
DONE = 'event: done\ndata: {"request_id": "r", "sequences": []}\n\n'
ENDING = 'event: error\ndata: {"error": "x", "code": "unavailable", "retryable": true}\n\n'
Follow = Callable[[BreakingOff], list[Event]]


@pytest.mark.parametrize("told", [ACCEPTED, ": still here\n\n"], ids=["accepted", "a sign of life"])
def test_a_stream_that_breaks_off_again_and_again_is_asked_for_soon(
    follow: Follow, slept: list[float], told: str
) -> None:
    """The service keeps a sample for a few seconds whose client has gone."""
    service = BreakingOff(ACCEPTED, *[told] * 9, ACCEPTED + DONE)
    assert [type(event) for event in follow(service)] == [Accepted, Done]
    assert (service.asked, len(slept)) == (11, 10)
    assert all(0.25 <= seconds <= 0.5 for seconds in slept)


@pytest.mark.parametrize("told", ["", "<html>\n</html>\n", ACCEPTED + ENDING], ids=["nothing", "a page", "ending"])
def test_a_service_that_streams_nothing_is_given_up(follow: Follow, slept: list[float], told: str) -> None:
    with pytest.raises(ServiceUnavailable if told != ACCEPTED + ENDING else WeftClientError):
        follow(BreakingOff(told))
    assert len(slept) == 5
    assert slept[-1] >= 4.0
