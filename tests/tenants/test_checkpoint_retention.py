"""A tenant's checkpoints are kept as long as its limits say, and nobody else's are touched."""

from dataclasses import replace
from datetime import timedelta

import pytest_asyncio

from contracts.ids import CheckpointId, RunId, SessionId, TenantId
from contracts.operations import LoraSettings
from contracts.paths import CheckpointPath, Segment
from store.limit_settings import LimitSettings
from tenants.checkpoint_changes import set_ttl
from tenants.checkpoint_lists import CheckpointFilter, list_checkpoints
from tenants.checkpoints import NewCheckpoint
from tenants.limits import Limits
from tenants.runs import NewRun
from tenants.storage import store_checkpoint
from testing.runs import create_run
from tests.tenants.usage_books import NOON, Books

DEFAULTS = Limits.of(LimitSettings())
LORA = LoraSettings(rank=4, alpha=8, seed=1, train_attn=True, train_mlp=True, train_unembed=False)


class Saver:
    """Run of one of two tenants whose checkpoints are saved a minute apart."""

    def __init__(self, books: Books, who: int) -> None:
        self.books, self.tenant = books, books.tenants[who]
        self.session: SessionId = books.sessions[who]
        self.saved = 0

    async def open(self) -> RunId:
        async with self.books.database.write() as transaction:
            new = NewRun(self.session, 0, "tiny", LORA, None)
            self.run = await create_run(transaction, self.tenant, new, lambda: NOON)
        return self.run

    async def save(
        self, limits: Limits, *, ttl: int | None = None, segment: Segment = Segment.WEIGHTS, listed: bool = True
    ) -> str:
        self.saved += 1
        name = f"one-{self.saved}"
        id = CheckpointId(f"{self.tenant[:8]}{segment[:4]}{self.saved}")
        new = NewCheckpoint(id, self.run, segment, name, 1, ttl, listed, None)
        now = NOON + timedelta(minutes=self.saved)
        async with self.books.database.write() as transaction:
            await store_checkpoint(transaction, self.tenant, new, lambda: now, limits)
        return name

    async def kept(self, tenant: TenantId | None = None) -> dict[str, object]:
        async with self.books.database.read() as session:
            now = NOON + timedelta(minutes=self.saved)
            found = await list_checkpoints(session, CheckpointFilter(tenant or self.tenant, now), limit=100)
            return {one.name: one.expires_at for one in found}


@pytest_asyncio.fixture
async def savers(books: Books) -> tuple[Saver, Saver]:
    both = Saver(books, 0), Saver(books, 1)
    for one in both:
        await one.open()
    return both


async def test_without_limits_all_are_kept_as_asked(savers: tuple[Saver, Saver]) -> None:
    cats, _ = savers
    for _ in range(3):
        await cats.save(DEFAULTS)
    assert await cats.kept() == {"one-1": None, "one-2": None, "one-3": None}


async def test_the_newest_of_each_kind_are_kept_and_no_others_are_touched(savers: tuple[Saver, Saver]) -> None:
    cats, dogs = savers
    limits = replace(DEFAULTS, kept_checkpoints=2)
    await dogs.save(DEFAULTS)
    samplers = [await cats.save(limits, segment=Segment.SAMPLER_WEIGHTS)]
    # Versions without a name count to nothing: training publishes one after another.
    for _ in range(3):
        await cats.save(limits, segment=Segment.SAMPLER_WEIGHTS, listed=False)
    samplers.append(await cats.save(limits, segment=Segment.SAMPLER_WEIGHTS))
    names = [await cats.save(limits) for _ in range(4)]
    assert set(await cats.kept()) == {*samplers, *names[-2:]}
    assert await dogs.kept() == {"one-1": None}


async def test_no_checkpoint_is_kept_longer_than_the_limit(savers: tuple[Saver, Saver]) -> None:
    cats, dogs = savers
    limits = replace(DEFAULTS, checkpoint_seconds=3600)
    long, short, dog = await cats.save(limits), await cats.save(limits, ttl=600), await dogs.save(DEFAULTS)
    saved = NOON + timedelta(minutes=1)
    assert await cats.kept() == {
        long: saved + timedelta(hours=1),
        short: saved + timedelta(minutes=11),
    }
    path = CheckpointPath(cats.run, Segment.WEIGHTS, short)
    async with cats.books.database.write() as transaction:
        for ttl in (None, 10**6):
            _, after = await set_ttl(
                transaction, cats.tenant, path, ttl_seconds=ttl, clock=lambda: NOON, longest=limits.checkpoint_seconds
            )
            assert after == NOON + timedelta(hours=1)
    assert await dogs.kept() == {dog: None}
