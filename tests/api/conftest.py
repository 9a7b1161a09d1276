"""A whole API over a real database, served by a real uvicorn on a free port; the clock can be moved."""

import asyncio
import json
import logging
import math
import shutil
import socket
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
import uvicorn
from fastapi import FastAPI
from sqlalchemy import Engine, update

from api.app import create_app
from api.services import ApiServices
from contracts.base_model import read_base_model_facts
from contracts.errors import WeftError
from contracts.ids import CheckpointId, RequestId, RunId, TenantId
from contracts.ledger_records import Completion, NewOperation
from contracts.operations import LoraSettings, OperationKind, OptimStep, Payload, Result
from contracts.paths import Segment
from contracts.vocabulary import BaseVocabulary
from ledger.ledger import Ledger
from ledger.payload_files import PayloadFiles
from ledger.publication import LocalPublication
from ledger.runtime import Runtime
from ledger.token_feed import TokenFeed
from ledger.wakeups import Wakeups
from store.data_folder import DataFolder
from store.database import Database, create_engine
from store.settings import Settings
from store.tables import Run, RunState
from telemetry.readiness import Readiness
from telemetry.telemetry import Telemetry
from tenants import checkpoints, keys
from tenants.rights import KeyRights, Role
from tenants.runs import NewRun
from tenants.sessions import NewSession, create_session
from tenants.tenant_names import create_tenant
from testing.runs import create_run
from tests.ledger_heads import ready_heads
from tests.payloads import digest, stored

BASE = "test/tiny"


@dataclass
class MovableClock:
    """A clock that stands still until it is moved."""

    now: datetime = field(default_factory=lambda: datetime(2026, 1, 1, tzinfo=UTC))

    def __call__(self) -> datetime:
        return self.now

    def move(self, **by: float) -> None:
        self.now += timedelta(**by)


class WatchedWakeups(Wakeups):
    """Wake-ups that also tell when somebody listens."""

    def __init__(self) -> None:
        super().__init__()
        self._listened: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)

    @contextmanager
    def listen(self, *topics: str, event: asyncio.Event | None = None) -> Iterator[asyncio.Event]:
        with super().listen(*topics, event=event) as listening:
            for topic in topics:
                self._listened[topic].set()
            yield listening

    async def until_listened(self, topic: str) -> None:
        async with asyncio.timeout(10):
            await self._listened[topic].wait()


@dataclass
class Service:
    """The running API and the parts behind it, for looking and for playing the worker."""

    url: str
    app: FastAPI
    services: ApiServices
    clock: MovableClock
    wakeups: WatchedWakeups

    @property
    def database(self) -> Database:
        return self.services.runtime.database

    @property
    def engines(self) -> list[Engine]:
        """Engines of the database's reads and writes, and of its surveys, for those who listen."""
        surveys = self.database.surveys
        return [self.database.engine.sync_engine] + ([] if surveys is None else [surveys.engine.sync_engine])

    @property
    def ledger(self) -> Ledger:
        return self.services.runtime.ledger

    async def run_next(self, outcome: Result | WeftError) -> None:
        """Do what a trainer does: finish every operation that is ready."""
        async with self.database.read() as session:
            ready = await ready_heads(self.ledger, session, BASE)
        async with self.database.write() as transaction:
            await self.ledger.complete(transaction, [Completion(one, outcome) for one in ready])


@dataclass
class Tenant:
    """A tenant with a key and an HTTP client that sends it."""

    service: Service
    id: TenantId
    key: str
    http: httpx.AsyncClient

    async def session(self) -> str:
        async with self.service.database.write() as transaction:
            new = NewSession([], None, "0.38.0", None, None)
            return await create_session(transaction, self.id, new, self.service.clock)

    async def run(self, *, session: str | None = None, model_seq_id: int = 0) -> RunId:
        """A ready run whose next seq_id is 1."""
        session = session or await self.session()
        async with self.service.database.write() as transaction:
            lora = LoraSettings(rank=8, seed=1)
            new = NewRun(session, model_seq_id, BASE, lora, {"colour": "black"})  # type: ignore[arg-type]
            run = await create_run(transaction, self.id, new, self.service.clock)
            await transaction.execute(update(Run).where(Run.id == run).values(state=RunState.READY, next_seq_id=1))
        return run

    async def checkpoint(
        self,
        run: RunId,
        name: str,
        *,
        segment: Segment = Segment.WEIGHTS,
        ttl_seconds: int | None = None,
        listed: bool = True,
    ) -> Path:
        """A recorded checkpoint; returns its folder, which holds a file."""
        id = checkpoints.new_checkpoint_id()
        folder = self.service.services.runtime.data_folder.path(checkpoints.directory_of(id))
        folder.mkdir(parents=True)
        (folder / "adapter_model.safetensors").write_bytes(b"weights")
        new = checkpoints.NewCheckpoint(
            id=CheckpointId(id),
            run_id=run,
            segment=segment,
            name=name,
            size_bytes=7,
            ttl_seconds=ttl_seconds,
            listed=listed,
            user_metadata={"note": name},
        )
        async with self.service.database.write() as transaction:
            await checkpoints.record_checkpoint(transaction, self.id, new, self.service.clock)
        return folder

    async def operation(
        self,
        lane: str,
        seq_id: int = 1,
        *,
        kind: OperationKind = OperationKind.OPTIM_STEP,
        payload: Payload | None = None,
    ) -> RequestId:
        payload = payload or OptimStep()
        new = NewOperation(self.id, lane, seq_id, kind, BASE, stored(payload), digest(payload))
        async with self.service.database.write() as transaction:
            return await self.service.ledger.accept(transaction, new)


async def as_administrator(tenant: Tenant) -> Tenant:
    """The tenant by an administrator's key."""
    async with tenant.service.database.write() as transaction:
        rights = KeyRights(role=Role.ADMIN)
        made = await keys.create_key(transaction, tenant=tenant.id, note="", clock=tenant.service.clock, rights=rights)
    tenant.http.headers["X-API-Key"] = made.secret
    return tenant


@pytest.fixture
def clock() -> MovableClock:
    return MovableClock()


@pytest.fixture
def settings(tmp_path: Path, migrated_database: Path) -> Settings:
    """Settings of a data folder with a fresh database.

    Polls are held long enough that only an event can end them in time; tests of the 408 shorten them.
    """
    (tmp_path / "data").mkdir()
    shutil.copy(migrated_database, tmp_path / "data" / "weft.db")
    return Settings(data_dir=tmp_path / "data", base_models=(BASE,), metadata_only_bytes=1000, max_body_bytes=100_000)


@pytest.fixture
def base_model(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny"
    folder.mkdir()
    config = {"architectures": ["Qwen3ForCausalLM"], "max_position_embeddings": 128, "vocab_size": 300}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@asynccontextmanager
async def serving_api(settings: Settings, clock: MovableClock, base_model: Path) -> AsyncIterator[Service]:
    """An API process, as far as it is one: nothing of it is another's but the data folder and the database."""
    engine = create_engine(settings.resolved_database_url())
    database, wakeups = Database(engine), WatchedWakeups()
    telemetry = Telemetry.of("test", clock)
    runtime = Runtime(
        settings=settings,
        database=database,
        ledger=Ledger(database, wakeups, clock, telemetry, PayloadFiles(DataFolder(settings.data_dir))),
        wakeups=wakeups,
        feed=TokenFeed(),
        publication=LocalPublication(),
        data_folder=DataFolder(settings.data_dir),
        clock=clock,
        telemetry=telemetry,
    )
    bases = {BASE: read_base_model_facts(BASE, base_model, tokenizer_id=None)}
    vocabularies = {BASE: BaseVocabulary(frozenset(), None)}
    services = ApiServices.over(runtime, bases, vocabularies, Readiness())
    app = create_app(services)
    # asyncio turns Nagle's delay off only for sockets that name their protocol.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    # As long as the service's own: on a slow machine a client's next request met the end of uvicorn's five seconds.
    kept = math.ceil(settings.keep_alive.total_seconds())
    server = uvicorn.Server(
        uvicorn.Config(app, log_level=logging.WARNING, lifespan="off", proxy_headers=False, timeout_keep_alive=kept)
    )
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    yield Service(f"http://127.0.0.1:{listener.getsockname()[1]}", app, services, clock, wakeups)
    wakeups.close()
    server.should_exit = True
    await serving
    await database.close()


@pytest_asyncio.fixture
async def service(settings: Settings, clock: MovableClock, base_model: Path) -> AsyncIterator[Service]:
    async with serving_api(settings, clock, base_model) as made:
        yield made


@pytest_asyncio.fixture
async def new_tenant(service: Service) -> AsyncIterator[Callable[[str], Awaitable[Tenant]]]:
    clients: list[httpx.AsyncClient] = []

    async def create(name: str) -> Tenant:
        async with service.database.write() as transaction:
            id = await create_tenant(transaction, name=name, clock=service.clock)
            key = await keys.create_key(transaction, tenant=id, note=f"key of {name}", clock=service.clock)
        http = httpx.AsyncClient(base_url=f"{service.url}/api/v1", headers={"X-API-Key": key.secret}, timeout=40)
        clients.append(http)
        return Tenant(service, id, key.secret, http)

    yield create
    for client in clients:
        await client.aclose()


@pytest_asyncio.fixture
async def cats(new_tenant: Callable[[str], Awaitable[Tenant]]) -> Tenant:
    return await new_tenant("cats")


@pytest_asyncio.fixture
async def dogs(new_tenant: Callable[[str], Awaitable[Tenant]]) -> Tenant:
    return await new_tenant("dogs")
