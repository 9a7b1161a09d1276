"""Webhooks: events are written with what they tell, sent at least once under one id, and to public addresses only."""

import asyncio
import base64
import hashlib
import hmac
import json
import os
import shutil
import signal
import socket
import ssl
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from sqlalchemy import select, update

from contracts.errors import InvalidRequest
from contracts.ids import TenantId
from contracts.webhooks import EventKind, check_target
from store.clock import utc_now
from store.settings import Settings
from store.tables import AuditEntry, Session, Webhook, WebhookEvent, WeightJob
from tenants.budget_settings import BudgetName, set_budget
from tenants.budgets import Period
from tenants.limits import Limits
from tenants.prices import PricedQuantity
from tenants.sessions import TIMED_OUT, finish_session, list_lost_sessions, standing_session
from tenants.spending import Spender, Spending, spend
from tenants.suspensions import resume_tenant, suspend_tenant
from tenants.tenant_names import create_tenant
from tenants.webhook_events import MOST_WAITING, TenantEvent, record_events
from tenants.webhooks import WebhookSpec, rotate_secret, send_again, send_test, set_webhook, signing_secrets
from tenants.weight_jobs import cancel_job
from testing.certificates import Certificate
from tests.conftest import ROOT
from tests.workers.housekeeping.conftest import House
from workers.housekeeping.housekeeping import Housekeeping
from workers.housekeeping.schedule import StepName
from workers.webhooks import sender
from workers.webhooks.delivery import BACKOFF
from workers.webhooks.sender import Outcome, WebhookSender

LOOPBACK = "127.0.0.0/8"
GIVE_UP_SECONDS = 60


@dataclass
class Receiver:
    """A server that notes what it is sent, and answers as it is told; ``stop`` is a receiver that has died."""

    port: int = 0
    answer: Callable[[dict[str, Any]], str] = lambda _: "204 No Content"
    got: list[tuple[dict[str, str], dict[str, Any]]] = field(default_factory=list)
    tls: ssl.SSLContext | None = None
    _server: asyncio.Server | None = None
    has_got: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hook"

    @property
    def ids(self) -> list[str]:
        return [headers["webhook-id"] for headers, _ in self.got]

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, ssl=self.tls)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:]) if name}
        body = json.loads(await reader.readexactly(int(headers["content-length"])))
        status = self.answer(body)
        if status:
            self.got.append((headers, body))
            self.has_got.set()
            writer.write(f"HTTP/1.1 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode())
        writer.close()


@pytest_asyncio.fixture
async def receiver() -> AsyncIterator[Receiver]:
    made = Receiver()
    await made.start()
    yield made
    await made.stop()


def reaching(house: House, network: str = LOOPBACK) -> House:
    """Let webhooks reach the network, as an operator's setting does."""
    settings = house.runtime.settings.model_copy(update={"webhook_networks": (ip_network(network),)})
    house.runtime = replace(house.runtime, settings=settings)
    house.keeping = Housekeeping(house.runtime, lambda: True)
    return house


@pytest_asyncio.fixture
async def place(either_house: House) -> House:
    return reaching(either_house)


async def tenant(house: House, name: str) -> TenantId:
    async with house.database.write() as transaction:
        return await create_tenant(transaction, name=name, clock=house.clock)


async def webhook(house: House, owner: TenantId, url: str, *events: str, name: str = "bell") -> Webhook:
    async with house.database.write() as transaction:
        spec = WebhookSpec(url, events or ("*",), is_enabled=True)
        made = await set_webhook(
            transaction,
            owner,
            name,
            spec,
            networks=house.runtime.settings.webhook_networks,
            defaults=Limits.of(Settings()),
            now=house.now,
        )
    return made.webhook


async def happen(house: House, owner: TenantId, *subjects: str) -> None:
    async with house.database.write() as transaction:
        events = [TenantEvent(owner, EventKind.JOB_FINISHED, subject, {"n": subject}) for subject in subjects]
        await record_events(transaction, events, house.now)


async def send(house: House) -> None:
    """Send until nothing is due."""
    (outcome,) = (await house.keeping.sweep([StepName.SEND_WEBHOOKS], until_done=True)).values()
    if isinstance(outcome, BaseException):
        raise outcome


async def events_of(house: House, hook: Webhook) -> list[WebhookEvent]:
    async with house.database.read() as session:
        query = select(WebhookEvent).where(WebhookEvent.webhook_id == hook.id).order_by(WebhookEvent.id)
        return list(await session.scalars(query.execution_options(populate_existing=True)))


async def row_of(house: House, hook: Webhook) -> Webhook:
    async with house.database.read() as session:
        return await session.get_one(Webhook, hook.id, populate_existing=True)


async def test_a_receiver_that_is_killed_and_comes_back_gets_each_event_once_by_its_id(
    place: House, receiver: Receiver
) -> None:
    cats, dogs = await tenant(place, "cats"), await tenant(place, "dogs")
    other = Receiver()
    await other.start()
    hook = await webhook(place, cats, receiver.url)
    await webhook(place, dogs, other.url)
    await happen(place, cats, "one")
    await happen(place, dogs, "theirs")
    await send(place)
    await receiver.stop()
    await happen(place, cats, "two", "three")
    await happen(place, dogs, "theirs too")
    await send(place)
    # Whoever is alive has its events, although another tenant's receiver is not.
    assert [body["subject"] for _, body in other.got] == ["theirs", "theirs too"]
    await other.stop()
    waiting = (await events_of(place, hook))[1]
    assert (waiting.attempts, waiting.delivered_at, waiting.last_error) == (
        1,
        None,
        "the receiver could not be reached",
    )
    # The answer of one delivery is lost: it comes again, under the same id.
    await receiver.start()
    lost: list[str] = []

    def answer(body: dict[str, Any]) -> str:
        if body["subject"] == "two" and not lost:
            lost.append(body["id"])
            return ""
        return "200 OK"

    receiver.answer = answer
    for _ in range(4):
        place.now += timedelta(minutes=10)
        await send(place)
    assert [body["subject"] for _, body in receiver.got] == ["one", "two", "three"]
    assert lost == [receiver.got[1][1]["id"]]
    assert len(set(receiver.ids)) == 3
    assert all(one.due_at is None and one.delivered_at for one in await events_of(place, hook))


async def test_a_service_that_sends_no_webhooks_keeps_the_events_and_one_that_does_sends_them(
    place: House, receiver: Receiver
) -> None:
    """A copy that is tried beside the service tells no tenant's receiver anything."""
    hooks = []
    for name in ("cats", "dogs"):
        owner = await tenant(place, name)
        hooks.append(await webhook(place, owner, receiver.url))
        await happen(place, owner, name)
    sends = place.runtime
    settings = sends.settings.model_copy(update={"send_webhooks": False})
    place.runtime = replace(sends, settings=settings)
    place.keeping = Housekeeping(place.runtime, lambda: True)
    await send(place)
    kept = [one for hook in hooks for one in await events_of(place, hook)]
    assert (len(receiver.got), [(one.attempts, one.due_at is None) for one in kept]) == (0, [(0, False)] * 2)
    place.keeping = Housekeeping(sends, lambda: True)
    await send(place)
    assert sorted(body["subject"] for _, body in receiver.got) == ["cats", "dogs"]


_SENDER = """
import asyncio, sys
from ipaddress import ip_network
from dataclasses import replace
from pathlib import Path
from store.clock import utc_now
from store.database import Database, create_engine
from tests.workers.runtimes import make_runtime
from workers.webhooks.delivery import WebhookDelivery

async def deliver(url, folder, network):
    runtime = make_runtime(Database(create_engine(url)), Path(folder), utc_now)
    settings = runtime.settings.model_copy(update={"webhook_networks": (ip_network(network),)})
    await WebhookDelivery(replace(runtime, settings=settings)).deliver()

asyncio.run(deliver(*sys.argv[1:]))
"""
"""A process that sends what is due."""


async def test_an_event_whose_sender_is_killed_before_it_records_it_comes_again_under_its_id(
    place: House, receiver: Receiver, database_url: str, tmp_path: Path
) -> None:
    cats, dogs = await tenant(place, "cats"), await tenant(place, "dogs")
    other = Receiver()
    await other.start()
    hook, neighbours = await webhook(place, cats, receiver.url), await webhook(place, dogs, other.url)
    place.now = utc_now()
    await happen(place, cats, "one", "two")
    sender = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _SENDER, database_url, str(tmp_path), LOOPBACK, cwd=ROOT
    )

    def take_and_kill(_: dict[str, Any]) -> str:
        receiver.answer = lambda _: "204 No Content"
        sender.kill()
        return "204 No Content"

    receiver.answer = take_and_kill
    async with asyncio.timeout(120):
        assert await sender.wait() == -signal.SIGKILL
    assert [body["subject"] for _, body in receiver.got] == ["one"]
    assert [(one.attempts, one.delivered_at) for one in await events_of(place, hook)] == [(0, None), (0, None)]
    # Until the dead sender's lease is over nobody sends for it, and another tenant's webhook is served.
    await happen(place, dogs, "theirs")
    place.now = utc_now()
    await send(place)
    assert (len(receiver.got), [body["subject"] for _, body in other.got]) == (1, ["theirs"])
    place.now += timedelta(seconds=61)
    await send(place)
    await other.stop()
    assert [body["subject"] for _, body in receiver.got] == ["one", "one", "two"]
    assert receiver.ids[0] == receiver.ids[1] != receiver.ids[2]
    assert all(one.due_at is None and one.delivered_at for one in await events_of(place, hook))
    assert len(await events_of(place, neighbours)) == 1


async def test_a_delivery_is_a_cloud_event_signed_as_standard_webhooks_are(place: House, receiver: Receiver) -> None:
    cats = await tenant(place, "cats")
    hook = await webhook(place, cats, receiver.url)
    async with place.database.write() as transaction:
        kept = await transaction.get_one(Webhook, hook.id)
        old = signing_secrets(kept, place.now)[0]
        new = (await rotate_secret(transaction, kept, place.now)).secret
    raw: list[bytes] = []
    await happen(place, cats, "job-1")
    await send(place)
    ((headers, body),) = receiver.got
    assert {key: body[key] for key in ("specversion", "type", "source", "subject", "data")} == {
        "specversion": "1.0",
        "type": "weft.job.finished",
        "source": f"weft/tenants/{cats}",
        "subject": "job-1",
        "data": {"n": "job-1"},
    }
    assert headers["content-type"] == "application/cloudevents+json"
    assert headers["webhook-id"] == body["id"]
    raw.append((await events_of(place, hook))[0].body.encode())
    signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + raw[0]
    expected = [_signature(secret, signed) for secret in (new, old)]
    assert headers["webhook-signature"].split(" ") == expected
    # A day later the old secret signs no more.
    place.now += timedelta(days=1, seconds=1)
    await happen(place, cats, "job-2")
    await send(place)
    assert len(receiver.got[1][0]["webhook-signature"].split(" ")) == 1


def _signature(secret: str, content: bytes) -> str:
    made = hmac.new(base64.b64decode(secret.removeprefix("whsec_")), content, hashlib.sha256).digest()
    return f"v1,{base64.b64encode(made).decode()}"


async def test_a_change_that_is_rolled_back_tells_nobody_and_one_that_is_made_tells_who_asked(
    place: House, receiver: Receiver
) -> None:
    cats, dogs = await tenant(place, "cats"), await tenant(place, "dogs")
    wants = await webhook(place, cats, receiver.url, "job.finished")
    other_kind = await webhook(place, cats, receiver.url, "key.expiring", name="keys")
    other_tenant = await webhook(place, dogs, receiver.url)

    async def rolled_back() -> None:
        async with place.database.write() as transaction:
            await record_events(transaction, [TenantEvent(cats, EventKind.JOB_FINISHED, "never", {})], place.now)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await rolled_back()
    assert await events_of(place, wants) == []
    await happen(place, cats, "one")
    assert [len(await events_of(place, one)) for one in (wants, other_kind, other_tenant)] == [1, 0, 0]


@pytest.mark.parametrize(
    "url",
    [
        "http://169.254.169.254/latest",
        "https://169.254.169.254/latest",
        "https://10.1.2.3/",
        "https://127.0.0.1/",
        "https://[::1]/",
        "https://[::ffff:127.0.0.1]/",
        "https://[64:ff9b::a00:1]/",
        "https://[2002:a00:1::1]/",
        "https://[fe80::1]/",
        "https://0.0.0.0/",
        "http://example.com/",
        "ftp://example.com/",
        "https://user:word@example.com/",
        "https://example.com/#part",
        "https://",
        "https://example.com:99999/",
        "no url",
    ],
)
def test_a_url_that_is_no_public_one_is_refused_when_it_is_named(url: str) -> None:
    check_target("https://example.com:8443/hook?x=1", ())
    with pytest.raises(InvalidRequest, match="url: "):
        check_target(url, ())


@pytest.mark.parametrize("host", ["private.example", "2130706433", "0x7f.1", "localhost"])
async def test_a_name_that_leads_to_a_private_address_is_not_connected_to(
    house: House, receiver: Receiver, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    """The setting allows another network than the one that the host is in."""
    real = socket.getaddrinfo

    def resolve(name: str, port: int, **kinds: Any) -> list[Any]:
        return real("127.0.0.1" if name == "private.example" else name, port, **kinds)

    reaching(house, "10.0.0.0/8")
    hook = await webhook(house, await tenant(house, "cats"), f"http://{host}:{receiver.port}/")
    await happen(house, TenantId(hook.tenant_id), "one")
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    await send(house)
    (event,) = await events_of(house, hook)
    assert receiver.got == []
    # The tenant does not learn where the name leads.
    assert event.last_error == "the host has no address that webhooks may reach"


async def test_the_address_that_was_checked_is_the_one_that_is_connected_to(
    place: House, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name server that answers otherwise the second time is asked once."""
    asked: list[str] = []
    real = socket.getaddrinfo

    def resolve(name: str, port: int, **kinds: Any) -> list[Any]:
        if name == "turning.example":
            asked.append(name)
            name = "127.0.0.1" if len(asked) == 1 else "192.0.2.1"
        return real(name, port, **kinds)

    hook = await webhook(place, await tenant(place, "cats"), f"http://turning.example:{receiver.port}/hook")
    await happen(place, TenantId(hook.tenant_id), "one")
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    await send(place)
    assert (asked, len(receiver.got)) == (["turning.example"], 1)
    assert receiver.got[0][0]["host"] == f"turning.example:{receiver.port}"


async def test_names_that_are_looked_up_for_ever_hold_up_nobody_elses_deliveries(
    house: House, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tenant's name server does not answer. A look-up cannot be ended: it keeps its thread after the delivery."""
    real, answers, lookups = socket.getaddrinfo, threading.Event(), 8

    def resolve(name: str, port: int, **kinds: Any) -> list[Any]:
        if name == "hanging.example":
            answers.wait(GIVE_UP_SECONDS)
        return real("127.0.0.1", port, **kinds)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(sender, "_LOOKUPS", lookups)
    reaching(house)
    cats, dogs = await tenant(house, "cats"), await tenant(house, "dogs")
    url = f"http://hanging.example:{receiver.port}/hook"
    hooks = [await webhook(house, cats, url, name=f"bell-{number}") for number in range(10)]
    await happen(house, cats, "one")
    with monkeypatch.context() as impatient:
        impatient.setattr(sender, "SEND_SECONDS", 0.02)
        await send(house)
    await webhook(house, dogs, receiver.url)
    await happen(house, dogs, "theirs")
    await send(house)
    assert [body["subject"] for _, body in receiver.got] == ["theirs"]
    told = {event.last_error for hook in hooks for event in await events_of(house, hook)}
    assert told == {"no answer within 0 s", "the hosts of your earlier deliveries are still being looked up"}
    # Once it answers, everything is delivered.
    answers.set()
    async with asyncio.timeout(GIVE_UP_SECONDS):
        while len(receiver.got) < 1 + len(hooks):
            house.now += timedelta(hours=1)
            await send(house)


@pytest.mark.skipif(shutil.which("openssl") is None and "CI" not in os.environ, reason="needs openssl")
async def test_a_receiver_has_to_show_a_certificate_of_its_name_although_its_address_is_connected_to(
    house: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reaching(house)
    certificate = await asyncio.to_thread(Certificate.make, tmp_path, "bell.example")
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate.file))
    real = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda _, port, **kinds: real("127.0.0.1", port, **kinds))
    receiver = Receiver(tls=ssl.create_default_context(ssl.Purpose.CLIENT_AUTH))
    assert receiver.tls is not None
    receiver.tls.load_cert_chain(certificate.file, certificate.key)
    await receiver.start()
    cats = await tenant(house, "cats")
    right = await webhook(house, cats, f"https://bell.example:{receiver.port}/", name="right")
    wrong = await webhook(house, cats, f"https://knell.example:{receiver.port}/", name="wrong")
    await happen(house, cats, "one")
    await send(house)
    await receiver.stop()
    assert [headers["host"] for headers, _ in receiver.got] == [f"bell.example:{receiver.port}"]
    assert (await events_of(house, right))[0].delivered_at is not None
    assert (await events_of(house, wrong))[0].last_error == "the receiver's certificate is not valid for its host"


async def test_a_redirect_is_not_followed(place: House, receiver: Receiver) -> None:
    hook = await webhook(place, await tenant(place, "cats"), receiver.url)
    await happen(place, TenantId(hook.tenant_id), "one")
    receiver.answer = lambda _: f"302 Found\r\nLocation: {receiver.url}/elsewhere"
    await send(place)
    (event,) = await events_of(place, hook)
    assert (len(receiver.got), event.last_status) == (1, 302)
    assert "redirects" in str(event.last_error)


async def test_events_are_tried_again_ever_later_and_a_receiver_that_takes_none_is_switched_off(
    place: House, receiver: Receiver
) -> None:
    cats = await tenant(place, "cats")
    hook = await webhook(place, cats, receiver.url)
    await happen(place, cats, "one")
    receiver.answer = lambda _: "500 Internal Server Error"
    for wait in BACKOFF:
        await send(place)
        await send(place)
        place.now += wait * 0.99
        await send(place)
        place.now += wait * 0.22
    assert len(receiver.got) == len(BACKOFF)
    assert (await row_of(place, hook)).disabled_at is None
    await send(place)
    (event,) = await events_of(place, hook)
    assert (event.due_at, event.delivered_at, event.attempts) == (None, None, len(BACKOFF) + 1)
    assert "more than a day" in str((await row_of(place, hook)).disabled_reason)
    async with place.database.read() as session:
        entry = await session.scalar(select(AuditEntry).order_by(AuditEntry.id.desc()))
        assert (entry.action, entry.door, entry.tenant_id) == ("webhook_set", "service", cats)
    # Switched on again by its tenant, it gets what is sent once more.
    receiver.answer = lambda _: "200 OK"
    await webhook(place, cats, receiver.url)
    async with place.database.write() as transaction:
        await send_again(transaction, await transaction.get_one(WebhookEvent, event.id), place.now)
    await send(place)
    assert (await events_of(place, hook))[0].delivered_at is not None


async def test_a_receiver_that_says_gone_is_switched_off_at_once(place: House, receiver: Receiver) -> None:
    hook = await webhook(place, await tenant(place, "cats"), receiver.url)
    await happen(place, TenantId(hook.tenant_id), "one")
    receiver.answer = lambda _: "410 Gone"
    await send(place)
    assert "410" in str((await row_of(place, hook)).disabled_reason)


async def test_what_waits_for_a_webhook_is_bounded_and_another_tenants_events_are_recorded(
    house: House, receiver: Receiver
) -> None:
    reaching(house)
    cats, dogs = await tenant(house, "cats"), await tenant(house, "dogs")
    full, other = await webhook(house, cats, receiver.url), await webhook(house, dogs, receiver.url)
    await happen(house, cats, *(str(number) for number in range(MOST_WAITING + 3)))
    await happen(house, dogs, "theirs")
    assert len(await events_of(house, full)) == MOST_WAITING
    assert (await row_of(house, full)).missed == 3
    assert len(await events_of(house, other)) == 1
    assert (await row_of(house, other)).missed == 0


@dataclass
class Hanging:
    """Receivers that take connections and do not answer until they may go on."""

    url: str
    hung: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))
    go_on: asyncio.Event = field(default_factory=asyncio.Event)


@asynccontextmanager
async def hanging(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Hanging]:
    monkeypatch.setattr("workers.webhooks.sender.SEND_SECONDS", 120.0)
    made = Hanging("")

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        made.hung.release()
        await made.go_on.wait()
        writer.close()

    server = await asyncio.start_server(hang, "127.0.0.1", 0)
    made.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
    try:
        yield made
    finally:
        made.go_on.set()
        server.close()
        await server.wait_closed()


async def until_theirs_are_sent(
    house: House, cats: TenantId, dogs: TenantId, receivers: Hanging, receiver: Receiver
) -> asyncio.Task[tuple[int, bool]]:
    """Let an event of each tenant happen, the second once the first one's receivers hang. Return the round once it is sent."""
    await happen(house, cats, "one")
    round_of_all = asyncio.create_task(house.keeping._steps._webhooks.deliver())
    async with asyncio.timeout(100):
        await receivers.hung.acquire()
        await receivers.hung.acquire()
        house.now += timedelta(milliseconds=1)
        await happen(house, dogs, "theirs")
        # Sooner than either of the two is given up.
        await receiver.has_got.wait()
        assert (round_of_all.done(), receivers.hung.locked()) == (False, True), "two places are the most of one tenant"
    return round_of_all


async def test_an_event_waits_for_none_of_another_tenants_receivers_that_hang(
    house: House, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of a tenant's ten webhooks are sent to at a time. The other tenant's event comes once they hang."""
    reaching(house)
    cats, dogs = await tenant(house, "cats"), await tenant(house, "dogs")
    await webhook(house, dogs, receiver.url)
    async with hanging(monkeypatch) as receivers:
        for number in range(10):
            await webhook(house, cats, receivers.url, name=f"n{number}")
        round_of_all = await until_theirs_are_sent(house, cats, dogs, receivers, receiver)
        receivers.go_on.set()
        assert await asyncio.wait_for(round_of_all, GIVE_UP_SECONDS) == (1, False)


async def test_a_tenants_backlog_at_very_many_webhooks_hides_no_other_tenants(
    house: House, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tenant that an operator lets have 600 webhooks, whose receivers all hang, and a tenant whose event is due later."""
    reaching(house)
    cats, dogs = await tenant(house, "cats"), await tenant(house, "dogs")
    await webhook(house, dogs, receiver.url)
    async with hanging(monkeypatch) as receivers:
        made = await webhook(house, cats, receivers.url)
        same = {column.name: getattr(made, column.name) for column in Webhook.__table__.columns}
        del same["id"], same["name"]
        async with house.database.write() as transaction:
            transaction.add_all(Webhook(**same, name=f"n{number}") for number in range(600))
        round_of_all = await until_theirs_are_sent(house, cats, dogs, receivers, receiver)
        async with house.database.write() as transaction:
            await transaction.execute(update(Webhook).where(Webhook.tenant_id == cats).values(disabled_at=house.now))
        receivers.go_on.set()
        assert await asyncio.wait_for(round_of_all, GIVE_UP_SECONDS) == (1, False)


async def test_a_round_ends_in_time_and_says_that_more_may_be_due(
    house: House, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.webhooks.delivery._ROUND_SECONDS", 0.0)
    reaching(house)
    cats, dogs = await tenant(house, "cats"), await tenant(house, "dogs")
    for owner in (cats, dogs):
        await webhook(house, owner, receiver.url)
        await happen(house, owner, "one")
    assert await house.keeping._steps._webhooks.deliver() == (0, True)
    monkeypatch.undo()
    assert await house.keeping._steps._webhooks.deliver() == (2, False)


async def test_a_url_that_no_request_can_be_sent_to_fails_its_own_events_alone(
    place: House, receiver: Receiver
) -> None:
    """Resolvers read the address, HTTP clients do not. It is refused now; an earlier version took it."""
    cats, dogs = await tenant(place, "cats"), await tenant(place, "dogs")
    for host in ("127.0.0.001", "010.0.0.1", "1.1.1.999"):
        with pytest.raises(InvalidRequest, match="without leading zeros"):
            await webhook(place, cats, f"https://{host}/")
    mine, theirs = await webhook(place, cats, receiver.url), await webhook(place, dogs, receiver.url)
    async with place.database.write() as transaction:
        odd = receiver.url.replace("127.0.0.1", "127.0.0.001")
        await transaction.execute(update(Webhook).where(Webhook.id == mine.id).values(url=odd))
    await happen(place, cats, "one")
    await happen(place, dogs, "theirs")
    await send(place)
    (failed,) = await events_of(place, mine)
    assert (failed.attempts, failed.delivered_at) == (1, None)
    assert "set another one" in (failed.last_error or "")
    assert [event.delivered_at for event in await events_of(place, theirs)] == [place.now]


async def test_an_error_that_nobody_foresaw_at_one_webhook_takes_no_other_along(
    house: House, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other tenant's delivery ends later than the error comes, and its outcome is recorded before the step ends."""
    reaching(house)
    cats, dogs = await tenant(house, "cats"), await tenant(house, "dogs")
    mine, theirs = await webhook(house, cats, receiver.url + "cats"), await webhook(house, dogs, receiver.url)
    await happen(house, cats, "one")
    await happen(house, dogs, "theirs")
    whole, has_failed = WebhookSender.send, asyncio.Event()

    async def odd(self: WebhookSender, client: Any, owner: TenantId, url: str, *rest: Any) -> Outcome:
        if url.endswith("cats"):
            has_failed.set()
            raise TypeError("nobody foresaw this")
        await has_failed.wait()
        return await whole(self, client, owner, url, *rest)

    monkeypatch.setattr(WebhookSender, "send", odd)
    with pytest.raises(TypeError):
        await house.keeping._steps._webhooks.deliver()
    assert [event.delivered_at for event in await events_of(house, theirs)] == [house.now]
    assert [event.attempts for event in await events_of(house, mine)] == [0]


async def test_events_are_forgotten_and_webhooks_end_with_their_limit(place: House, receiver: Receiver) -> None:
    cats = await tenant(place, "cats")
    hook = await webhook(place, cats, receiver.url)
    for number in range(1, Settings().limit_webhooks):
        await webhook(place, cats, receiver.url, name=f"n{number}")
    with pytest.raises(InvalidRequest, match="your limit is 10"):
        await webhook(place, cats, receiver.url, name="one-more")
    await happen(place, cats, "one")
    place.now += timedelta(days=7, seconds=1)
    await place.keeping.sweep([StepName.FORGET_WEBHOOKS])
    assert await events_of(place, hook) == []


async def test_a_checkpoint_that_ends_soon_is_told_once_however_often_it_is_looked_at(place: House) -> None:
    cats, _, run = await place.run("cats")
    dogs, _, beside = await place.run("dogs")
    hook = await webhook(place, cats, "http://127.0.0.1:9/", "checkpoint.expiring")
    theirs = await webhook(place, dogs, "http://127.0.0.1:9/", "checkpoint.expiring")
    await place.checkpoint(cats, run, "soon", ttl=2 * 86400)
    await place.checkpoint(cats, run, "late", ttl=20 * 86400)
    await place.checkpoint(cats, run, "nameless", ttl=3600, listed=False)
    await place.checkpoint(dogs, beside, "kept")
    for hours in (1, 24, 0, 1):
        place.now += timedelta(hours=hours)
        await place.keeping.sweep([StepName.TELL_EXPIRIES], until_done=True)
    (event,) = await events_of(place, hook)
    assert json.loads(event.body)["data"]["path"] == f"tinker://{run}/sampler_weights/soon"
    assert await events_of(place, theirs) == []


async def test_each_change_tells_the_webhooks_of_its_tenant_and_no_others(place: House) -> None:
    """Sessions of two tenants are lost in one statement; the rest happens to one of them."""
    (cats, mine, _), (dogs, theirs, _) = await place.run("cats"), await place.run("dogs")
    hook, beside = [await webhook(place, owner, "http://127.0.0.1:9/") for owner in (cats, dogs)]
    await place.pass_time(place.runtime.settings.session_timeout + timedelta(minutes=1))
    await place.keeping.sweep([StepName.END_SESSIONS])
    job = WeightJob(id="job", tenant_id=cats, kind="merge", base_model="base", body=b"", checkpoint_id="c")
    job.created_at = place.now
    async with place.database.write() as transaction:
        transaction.add(job)
        await transaction.flush()
        await cancel_job(transaction, cats, "job", place.now)
        await set_budget(transaction, cats, BudgetName(Period.DAY), 100, place.now)
        for tokens in (70, 20, 5):
            used = Spending(Spender(cats, None), "base", place.now, {PricedQuantity.TRAIN_TOKENS: tokens})
            await spend(transaction, [used], place.now)
        await suspend_tenant(transaction, name="cats", reason="unpaid", now=place.now)
        await resume_tenant(transaction, name="cats", now=place.now)
        await resume_tenant(transaction, name="cats", now=place.now)
    told = [(one.type, json.loads(one.body)) for one in await events_of(place, hook)]
    assert [(kind, body["subject"]) for kind, body in told] == [
        ("session.lost", mine),
        ("job.finished", "job"),
        ("budget.alert", f"tenant/{cats}/day"),
        ("tenant.suspended", cats),
        ("tenant.resumed", cats),
    ]
    assert (told[1][1]["data"]["state"], told[2][1]["data"]["percent"]) == ("cancelled", 80)
    assert told[3][1]["data"]["reason"] == "unpaid"
    assert [json.loads(one.body)["subject"] for one in await events_of(place, beside)] == [theirs]


async def test_a_session_that_no_client_has_opened_ends_and_is_not_told_as_lost(place: House) -> None:
    """An OpenAI client sends no heartbeats: its standing session is open again with its next request."""
    (cats, mine, _), (dogs, _, _) = await place.run("cats"), await place.run("dogs")
    hook, beside = [await webhook(place, owner, "http://127.0.0.1:9/") for owner in (cats, dogs)]
    async with place.database.write() as transaction:
        own = [await standing_session(transaction, owner, "openai", place.clock) for owner in (cats, dogs)]
        await finish_session(transaction, cats, mine, reason="finished", detail=None, clock=place.clock)
    await place.pass_time(place.runtime.settings.session_timeout + timedelta(minutes=1))
    await place.keeping.sweep([StepName.END_SESSIONS])
    async with place.database.read() as reading:
        ended = set(await reading.scalars(select(Session.id).where(Session.end_reason == TIMED_OUT)))
        lost = [await list_lost_sessions(reading, owner, most=10) for owner in (cats, dogs)]
    assert ended > set(own)
    assert await events_of(place, hook) == []
    assert [one.type for one in await events_of(place, beside)] == [EventKind.SESSION_LOST]
    assert [len(some) for some in lost] == [0, 1]


async def test_the_test_event_goes_to_a_webhook_that_wants_others_only(place: House, receiver: Receiver) -> None:
    hook = await webhook(place, await tenant(place, "cats"), receiver.url, "key.expiring")
    async with place.database.write() as transaction:
        await send_test(transaction, await transaction.get_one(Webhook, hook.id), place.now)
    await send(place)
    assert [body["type"] for _, body in receiver.got] == ["weft.webhook.test"]
