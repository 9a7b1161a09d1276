"""Limits are exact while several API processes accept at once, each with its own connections to one PostgreSQL."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass

import numpy as np
import pytest_asyncio

from contracts.codec import digest
from contracts.errors import TooManySamples
from contracts.ids import RequestId, TenantId
from contracts.ledger_records import NewOperation
from contracts.operations import OperationKind, SampleRequest, SamplingParams
from contracts.sample_demand import demand_of
from ledger.ledger import Ledger
from ledger.sample_intake import SampleIntake
from ledger.wakeups import Wakeups
from migrations.upgrade import upgrade
from store.clock import utc_now
from store.database import Database, create_engine
from store.settings import Settings
from telemetry.telemetry import Telemetry
from tenants.keys import create_tenant, find_tenant
from tenants.limits import Limits, set_tenant

BASE = "test/tiny"
PROCESSES = 3
MOST = 7
DEFAULTS = Limits.of(Settings())


@dataclass
class Process:
    """The accepting parts of one API process."""

    database: Database
    samples: SampleIntake


def process(url: str) -> Process:
    database = Database(create_engine(url))
    telemetry = Telemetry.of("test", utc_now)
    ledger = Ledger(database, Wakeups(), utc_now, telemetry)
    return Process(database, SampleIntake(database, ledger, utc_now, telemetry, defaults=DEFAULTS))


@pytest_asyncio.fixture
async def processes(postgres_url: str) -> AsyncIterator[list[Process]]:
    """Three of them over one database with the tenants ``cats``, who may do little, and ``dogs``."""
    upgrade(postgres_url)
    made = [process(postgres_url) for _ in range(PROCESSES)]
    async with made[0].database.write() as transaction:
        await create_tenant(transaction, name="cats", clock=utc_now)
        await create_tenant(transaction, name="dogs", clock=utc_now)
        await set_tenant(transaction, name="cats", limits={"pending_samples": MOST, "pending_operations": MOST})
    yield made
    for one in made:
        await one.database.close()


async def tenant(processes: list[Process], name: str) -> TenantId:

    async with processes[0].database.read() as session:
        return await find_tenant(session, name=name)


def sample(tenant: TenantId, seq_id: int, *, max_tokens: int = 1) -> NewOperation:
    payload = SampleRequest(np.arange(4, dtype=np.int64), params=SamplingParams(max_tokens=max_tokens))
    demand = demand_of(payload, 128)
    return NewOperation(
        tenant, f"{tenant}:sample:0", seq_id, OperationKind.SAMPLE, BASE, payload, digest(payload), demand=demand
    )


async def outcomes(processes: list[Process], samples: list[NewOperation]) -> Counter[str]:
    """How many were accepted, and how many refused by which error, when all come at once to all processes in turn."""
    asked = [processes[place % PROCESSES].samples.accept(one) for place, one in enumerate(samples)]
    found = await asyncio.gather(*asked, return_exceptions=True)
    return Counter("accepted" if isinstance(one, str) else type(one).__name__ for one in found)


async def test_three_processes_accept_exactly_as_many_samples_as_the_tenant_may_have(processes: list[Process]) -> None:
    cats, dogs = await tenant(processes, "cats"), await tenant(processes, "dogs")
    many = [sample(cats, seq_id) for seq_id in range(60)]
    theirs = [sample(dogs, seq_id) for seq_id in range(60)]
    mixed = [one for pair in zip(many, theirs, strict=True) for one in pair]
    found = await outcomes(processes, mixed)
    assert found == {"accepted": MOST + len(theirs), TooManySamples.__name__: len(many) - MOST}


async def test_tokens_of_pending_samples_are_counted_together(processes: list[Process]) -> None:
    async with processes[0].database.write() as transaction:
        await set_tenant(transaction, name="cats", limits={"sample_tokens": 50, "pending_samples": None})
    cats = await tenant(processes, "cats")
    # Each may take 4 + 8 tokens: four fit into 50.
    found = await outcomes(processes, [sample(cats, seq_id, max_tokens=8) for seq_id in range(30)])
    assert found == {"accepted": 4, TooManySamples.__name__: 26}


async def test_a_repeat_is_found_at_the_limit(processes: list[Process]) -> None:
    cats = await tenant(processes, "cats")
    first: list[RequestId] = [await processes[0].samples.accept(sample(cats, seq_id)) for seq_id in range(MOST)]
    again = [await processes[1].samples.accept(sample(cats, seq_id)) for seq_id in range(MOST)]
    assert again == first
