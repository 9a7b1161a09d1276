"""A sender's many requests wait for each other on the event loop; another sender's request is hardly delayed by them."""

import asyncio
import gc
import weakref
from collections import Counter
from collections.abc import Iterator
from itertools import count
from time import monotonic, thread_time

import pytest
from starlette.types import Message, Receive, Scope, Send

from api.fair_threads import FairThreads
from api.loop_time import BURST_SECONDS, START_SECONDS, LoopTime
from api.loop_turns import MOST_WAITING, LoopTurns
from contracts.ids import TenantId
from tenants.keys import revoke_key
from tests.api.conftest import Service, Tenant

WORK_SECONDS = 0.004
FLOOD = 48
ASKED = 30


class BusyApp:
    """Application whose requests each take ``WORK_SECONDS`` of the loop's time, in two steps."""

    def __init__(self) -> None:
        self.answered: Counter[str] = Counter()

    async def __call__(self, scope: Scope, _receive: Receive, send: Send) -> None:
        for _ in range(2):
            ends = thread_time() + WORK_SECONDS / 2
            while thread_time() < ends:
                pass
            await asyncio.sleep(0)
        self.answered[scope["path"]] += 1
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})


async def ask(
    turns: LoopTurns, key: str | None, path: str, address: str = "10.0.0.1", told: list[Message] | None = None
) -> int:
    """Send a request through ``turns`` from ``address`` and return the answer's status; ``told`` gets its messages."""
    status = 0

    async def send(message: Message) -> None:
        nonlocal status
        status = message.get("status", status)
        if told is not None:
            told.append(message)

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    headers = [] if key is None else [(b"x-api-key", key.encode())]
    await turns({"type": "http", "path": path, "headers": headers, "client": (address, 1)}, receive, send)
    return status


async def answered_beside(key: str | None, path: str) -> tuple[int, int]:
    """Return how many requests of a flood with ``key`` and of another tenant were answered before the other's last one."""
    app, loop_time = BusyApp(), LoopTime()
    loop_time.know("tml-flooding", TenantId("cats"))
    loop_time.know("tml-asking", TenantId("dogs"))
    turns = LoopTurns(app, loop_time=loop_time)

    async def flood() -> None:
        while True:
            await ask(turns, key, path)

    async with asyncio.timeout(120):
        flooding = [asyncio.create_task(flood()) for _ in range(FLOOD)]
        for _ in range(ASKED):
            assert await ask(turns, "tml-asking", "/asking") == 200
        for task in flooding:
            task.cancel()
        await asyncio.gather(*flooding, return_exceptions=True)
    return app.answered[path], app.answered["/asking"]


async def test_a_tenants_flood_takes_no_more_than_its_part_of_the_loop() -> None:
    flooded, asked = await answered_beside("tml-flooding", "/flooding")
    # Taken as they come, FLOOD of them are answered between any two of the others.
    assert asked == ASKED
    assert 0 < flooded < ASKED * FLOOD / 2


async def test_a_flood_of_unknown_keys_takes_no_more_than_its_part_of_the_loop() -> None:
    flooded, asked = await answered_beside("tml-made-up", "/flooding")
    assert asked == ASKED
    assert 0 < flooded < ASKED * FLOOD / 2


async def test_floods_without_a_key_from_many_addresses_share_one_part() -> None:
    app, loop_time = BusyApp(), LoopTime()
    loop_time.know("tml-asking", TenantId("dogs"))
    turns = LoopTurns(app, loop_time=loop_time)

    async def flood(number: int) -> None:
        while True:
            await ask(turns, None, "/flooding", f"10.0.{number}.1" if number % 2 else f"fd00::{number:x}")

    async with asyncio.timeout(120):
        flooding = [asyncio.create_task(flood(number)) for number in range(FLOOD)]
        for _ in range(ASKED):
            assert await ask(turns, "tml-asking", "/asking") == 200
        for task in flooding:
            task.cancel()
        await asyncio.gather(*flooding, return_exceptions=True)
    assert app.answered["/flooding"] < ASKED * FLOOD / 2


async def test_work_on_a_tenants_bodies_counts_to_its_part_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that parses shares the interpreter with the loop: a tenant's next body waits for it, another tenant's does not."""
    threads, used = FairThreads(4, LoopTime()), 0.5
    clock = count(step=used)
    # Each call on a thread reads the time when it begins and when it ends.
    monkeypatch.setattr("api.fair_threads.thread_time", lambda: next(clock))
    order: list[str] = []
    async with asyncio.timeout(60):
        await threads.run(TenantId("cats"), order.append, "cats' first")
        ended = monotonic()
        waits = asyncio.create_task(threads.run(TenantId("cats"), order.append, "cats' second"))
        await threads.run(TenantId("dogs"), order.append, "dogs'")
        await waits
    assert order == ["cats' first", "dogs'", "cats' second"]
    # A tenant alone has the whole time, others less.
    assert monotonic() - ended >= used - BURST_SECONDS


async def test_requests_that_wait_begin_together_and_those_that_have_begun_go_first() -> None:
    loop_time, began, rounds = LoopTime(), list[tuple[str, int]](), 0
    sender = loop_time.enter("tenant cats", is_stranger=False)
    loop_time.charge(sender, 4 * BURST_SECONDS)

    async def begin(name: str, *, has_begun: bool) -> None:
        await loop_time.turn(sender, START_SECONDS, has_begun=has_begun)
        began.append((name, rounds))

    async def count_rounds() -> None:
        nonlocal rounds
        while True:
            rounds += 1
            await asyncio.sleep(0)

    async with asyncio.timeout(60):
        counting = asyncio.create_task(count_rounds())
        waiting = [asyncio.create_task(begin(f"new {number}", has_begun=False)) for number in range(10)]
        await asyncio.sleep(0)
        await asyncio.gather(begin("begun", has_begun=True), *waiting)
        counting.cancel()
    assert [name for name, _ in began] == ["begun", *(f"new {number}" for number in range(10))]
    # One by one they would wait for timers, in which the loop goes round hundreds of times.
    assert began[-1][1] - began[0][1] < 5, "they began one by one"


async def test_a_tenant_keeps_its_part_beside_any_number_of_strangers() -> None:
    loop_time = LoopTime()
    tenant = loop_time.enter("tenant dogs", is_stranger=False)
    for number in range(200):
        loop_time.charge(loop_time.enter(f"address {number}", is_stranger=True), 0.5)
    loop_time._look(monotonic())
    assert loop_time.part_of(tenant) >= 1 / 3


async def test_probes_of_health_do_not_wait_behind_a_flood_from_their_address() -> None:
    app = BusyApp()
    turns = LoopTurns(app, loop_time=LoopTime())
    async with asyncio.timeout(60):
        flooding = [asyncio.create_task(ask(turns, None, "/flooding")) for _ in range(200)]
        await asyncio.sleep(0)
        assert await ask(turns, None, "/healthz") == 200
        before = app.answered["/flooding"]
        await asyncio.gather(*flooding)
    assert before < 100


async def test_requests_beyond_the_most_that_wait_are_told_to_come_again_and_the_others_are_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("api.loop_turns.PATIENCE_SECONDS", 300.0)
    app = BusyApp()
    turns = LoopTurns(app, loop_time=LoopTime())
    burst = [asyncio.create_task(ask(turns, None, "/flooding")) for _ in range(MOST_WAITING + 200)]
    async with asyncio.timeout(120):
        await asyncio.wait(burst[-100:])
        assert {task.result() for task in burst[-100:]} == {429}
        given_up, waiting = burst[200:-200], burst[:200]
        for task in given_up:
            task.cancel()
        assert set(await asyncio.gather(*waiting)) == {200}
        await asyncio.gather(*given_up, return_exceptions=True)
        assert await ask(turns, None, "/flooding") == 200


async def test_a_request_that_waits_too_long_for_its_turn_is_told_why_and_a_poll_and_another_tenant_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("api.loop_turns.PATIENCE_SECONDS", 0.05)
    loop_time = LoopTime()
    for name in ("cats", "dogs"):
        loop_time.know(f"tml-{name}", TenantId(name))
    # Hours of work: no turn comes within this test.
    loop_time.charge_tenant("cats", 10_000.0)
    app, told = BusyApp(), list[Message]()
    turns = LoopTurns(app, loop_time=loop_time)
    async with asyncio.timeout(60):
        poll = asyncio.create_task(ask(turns, "tml-cats", "/api/v1/retrieve_future"))
        for _ in range(3):
            assert await ask(turns, "tml-cats", "/asample", told=told) == 429
        assert await ask(turns, "tml-dogs", "/asample") == 200
    assert not poll.done()
    sender = loop_time.enter("tenant cats", is_stranger=False)
    assert len(sender.waiting) == 1, "who has gone waits no more"
    assert dict(told[0]["headers"])[b"retry-after"] == b"60"
    assert b"more than your part of this server's time" in told[1]["body"]
    poll.cancel()
    await asyncio.wait([poll])


async def test_a_poll_waits_where_other_requests_are_told_to_come_again() -> None:
    app = BusyApp()
    turns = LoopTurns(app, loop_time=LoopTime())
    flood = [asyncio.create_task(ask(turns, None, "/flooding")) for _ in range(MOST_WAITING + 100)]
    async with asyncio.timeout(120):
        await asyncio.wait(flood[-10:])
        assert {task.result() for task in flood[-10:]} == {429}
        poll = asyncio.create_task(ask(turns, None, "/api/v1/retrieve_future"))
        for task in flood:
            task.cancel()
        assert await poll == 200
        await asyncio.gather(*flood, return_exceptions=True)


async def test_a_key_counts_as_its_tenants_once_it_was_found_valid_and_no_longer_once_it_is_not(
    service: Service, cats: Tenant, dogs: Tenant
) -> None:
    loop_time = service.services.admission.loop_time
    session, theirs = await cats.session(), await dogs.session()
    for tenant, its in ((cats, session), (dogs, theirs)):
        assert (await tenant.http.post("/session_heartbeat", json={"session_id": its})).status_code == 200
    scope = {"type": "http", "path": "/", "headers": [(b"x-api-key", cats.key.encode())], "client": ("10.0.0.1", 1)}
    assert loop_time.name_of(scope) == (f"tenant {cats.id}", False)
    async with service.database.write() as transaction:
        await revoke_key(transaction, prefix=cats.key, clock=service.clock)
    assert (await cats.http.post("/session_heartbeat", json={"session_id": session})).status_code == 401
    assert loop_time.name_of(scope) == ("address 10.0.0.1", True)
    scope["headers"] = [(b"authorization", f"Bearer {dogs.key}".encode())]
    assert loop_time.name_of(scope) == (f"tenant {dogs.id}", False)


class Body:
    """Something large that a request holds."""


@pytest.fixture
def no_collection() -> Iterator[None]:
    """Nothing is collected: in a process with much memory in use it may be minutes until old objects are looked at."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collection")
async def test_what_a_request_held_is_freed_with_its_answer() -> None:
    """The request waited for something that failed, as for a body that could not be read, and was answered."""
    held: list[weakref.ref[Body]] = []

    async def app(_scope: Scope, _receive: Receive, send: Send) -> None:
        body, loop = Body(), asyncio.get_running_loop()
        held.append(weakref.ref(body))
        failing = [loop.create_future()]
        loop.call_soon(failing[0].set_exception, ValueError("unreadable"))
        try:
            await failing.pop()
        except ValueError:
            await send({"type": "http.response.start", "status": 200, "headers": []})

    assert await ask(LoopTurns(app, loop_time=LoopTime()), "tml-cats", "/body") == 200
    # The loop itself holds the future until its next turn.
    await asyncio.sleep(0)
    assert [one() for one in held] == [None]
