"""``gates.paused`` begins its block in time, and asks seldom, whatever the service answers to its looks at the gate."""

import asyncio
import json
from collections.abc import Callable
from types import SimpleNamespace

import httpx
import pytest
from weft_client.asynchronous import AsyncWeft
from weft_client.synchronous import Weft

HOLD_SECONDS = 30.0
MOST_LOOKS = 20


class PausingService:
    """A service with one gate, in front of which samples stay in flight. ``look`` answers who describes the gate."""

    def __init__(self, look: httpx.Response | None = None) -> None:
        self.seen: list[tuple[str, str, object]] = []
        self._look = look

    @property
    def looks(self) -> int:
        return [method for method, _, _ in self.seen].count("GET")

    def __call__(self, request: httpx.Request) -> httpx.Response:
        name = request.url.path.rpartition("/")[2]
        self.seen.append((request.method, name, json.loads(request.content)["generation"] if request.content else None))
        if request.method == "GET" and self._look is not None:
            return self._look
        told, generation = ("open", 5) if name == "resume" else ("pausing", 4)
        rest = {"in_flight": 1, "versions": {}, "replicas": {}}
        gate = {"adapter": "r", "base_model": "base", "state": told, "generation": generation, **rest}
        return httpx.Response(200, json=gate)


async def _with_asyncio(service: PausingService) -> str:
    http = httpx.AsyncClient(transport=httpx.MockTransport(service))
    async with AsyncWeft("http://nowhere", "tml-x", http=http) as weft, weft.gates.paused("r") as state:
        return state.state


def _without_asyncio(service: PausingService) -> str:
    http = httpx.Client(transport=httpx.MockTransport(service))
    with Weft("http://nowhere", "tml-x", http=http) as weft, weft.gates.paused("r") as state:
        return state.state


Block = Callable[[PausingService], str]


@pytest.fixture(params=["with asyncio", "without"])
def block(request: pytest.FixtureRequest) -> Block:
    """Run a block by one half of the client, and return the gate's state at its beginning."""
    if request.param == "without":
        return _without_asyncio
    return lambda service: asyncio.run(_with_asyncio(service))


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that the client has slept: they alone pass, and at once."""
    seconds: list[float] = []

    async def sleep(time: float) -> None:
        seconds.append(time)

    for part in ("sampling", "transport"):
        monkeypatch.setattr(f"weft_client.{part}_async.asyncio", SimpleNamespace(sleep=sleep))
        monkeypatch.setattr(f"weft_client.{part}_sync.time", SimpleNamespace(sleep=seconds.append))
    for half in ("async", "sync"):
        monkeypatch.setattr(f"weft_client.sampling_{half}.monotonic", lambda: sum(seconds))
    return seconds


@pytest.mark.parametrize("retry_after", [{"Retry-After": "60"}, {}], ids=["a minute", "no time"])
@pytest.mark.parametrize("status", [429, 503])
def test_a_block_whose_looks_are_put_off_runs_in_time_and_its_gate_is_resumed(
    block: Block, slept: list[float], status: int, retry_after: dict[str, str]
) -> None:
    told = {"detail": "the rate is used up", "code": "over_rate", "retryable": True}
    service = PausingService(httpx.Response(status, json=told, headers=retry_after))
    assert block(service) == "pausing"
    assert sum(slept) <= HOLD_SECONDS
    assert service.seen[0][:2] == ("POST", "pause")
    assert service.seen[-1] == ("POST", "resume", 4)
    assert service.looks <= (2 if retry_after else MOST_LOOKS)


def test_a_block_looks_seldom_at_a_gate_that_takes_long(block: Block, slept: list[float]) -> None:
    service = PausingService()
    assert block(service) == "pausing"
    assert sum(slept) == pytest.approx(HOLD_SECONDS)
    assert service.looks <= MOST_LOOKS
