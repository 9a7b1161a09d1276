"""Records of samples live for a day, and not beyond their session; another tenant's stay."""

from datetime import timedelta

import numpy as np
from sqlalchemy import insert, text, update
from sqlalchemy.orm import Session as SyncSession

from bench.ledger.plans import recorded as statements_of
from contracts.operations import SampledSequence, SampleOutput, SampleRequest
from contracts.provenance import encode_sample_record
from store.settings import Settings
from store.tables import SampleRecord, Session
from tenants.limits import Limits, set_tenant
from tenants.sample_records import LEAST_BYTES, NewRecord, record_samples, recorded_samples, renew_records
from tests.workers.housekeeping.conftest import House
from workers.housekeeping.schedule import StepName

BODY = (
    encode_sample_record(
        SampleRequest(np.array([1, 2])),
        SampleOutput([SampledSequence("stop", np.array([3], np.int32), np.array([-1], np.float32))]),
    )
    or b""
)
ROWS = 4000
DEFAULTS = Limits.of(Settings())


async def sampled(house: House, name: str) -> tuple[str, str, str]:
    """Make a tenant with a sampler; return the tenant, the sampler's session and the sampler."""
    tenant, session, run = await house.run(name)
    return tenant, session, await house.sampler(tenant, session, 0, await house.checkpoint(tenant, run, "one"))


async def recorded(house: House, tenant: str, sampler: str, name: str) -> None:
    """Record a sample as a pool does."""
    kept = house.runtime.settings.retention_sample_records
    async with house.database.write() as transaction:
        new = NewRecord(name, tenant, sampler, BODY)  # type: ignore[arg-type]
        await record_samples(transaction, [new], DEFAULTS, now=house.now, expires_at=house.now + kept)


async def found(house: House, tenant: str) -> set[str]:
    """Names that the tenant may train on."""
    async with house.database.read() as session:
        return set(await recorded_samples(session, tenant, ["old", "young", "theirs"], now=house.now))  # type: ignore[arg-type]


async def test_a_record_ends_after_a_day_or_with_its_session(either_house: House) -> None:
    house = either_house
    tenant, session, mine = await sampled(house, "first")
    other, _, foreign = await sampled(house, "second")
    await recorded(house, tenant, mine, "old")
    house.now += timedelta(hours=23)
    await recorded(house, tenant, mine, "young")
    await recorded(house, other, foreign, "theirs")
    assert (await found(house, tenant), await found(house, other)) == ({"old", "young"}, {"theirs"})
    house.now += timedelta(hours=2)
    assert await found(house, tenant) == {"young"}
    await house.keeping.run_step(StepName.FORGET_SAMPLE_RECORDS)
    assert await house.count(SampleRecord) == 2
    async with house.database.write() as transaction:
        await transaction.execute(update(Session).where(Session.id == session).values(ended_at=house.now))
    assert (await found(house, tenant), await found(house, other)) == (set(), {"theirs"})
    house.now += house.runtime.settings.result_grace
    await house.keeping.run_step(StepName.FORGET_SAMPLE_RECORDS)
    assert await house.count(SampleRecord) == 1
    assert await found(house, other) == {"theirs"}


async def test_a_renewed_record_outlives_its_first_day_and_no_other_does(either_house: House) -> None:
    house = either_house
    tenant, _, mine = await sampled(house, "first")
    other, _, foreign = await sampled(house, "second")
    await recorded(house, tenant, mine, "old")
    await recorded(house, tenant, mine, "young")
    await recorded(house, other, foreign, "theirs")
    house.now += timedelta(hours=23)
    async with house.database.write() as transaction:
        until = house.now + house.runtime.settings.retention_sample_records
        await renew_records(transaction, tenant, ["old", "theirs"], until=until)  # type: ignore[arg-type]
    house.now += timedelta(hours=23)
    await house.keeping.run_step(StepName.FORGET_SAMPLE_RECORDS)
    assert (await found(house, tenant), await found(house, other)) == ({"old"}, set())
    assert await house.count(SampleRecord) == 1


async def test_the_oldest_records_beyond_a_tenants_bytes_are_forgotten_and_another_tenants_stay(
    either_house: House,
) -> None:
    house = either_house
    tenant, _, mine = await sampled(house, "first")
    other, _, foreign = await sampled(house, "second")
    async with house.database.write() as transaction:
        await set_tenant(transaction, name="first", limits={"sample_record_bytes": LEAST_BYTES})
    await recorded(house, other, foreign, "theirs")
    await recorded(house, tenant, mine, "old")
    # A repeat, as after a lost answer of a COMMIT, displaces nothing.
    await recorded(house, tenant, mine, "old")
    assert await found(house, tenant) == {"old"}
    await recorded(house, tenant, mine, "young")
    assert (await found(house, tenant), await found(house, other)) == ({"young"}, {"theirs"})
    assert await house.count(SampleRecord) == 2


async def test_records_that_go_are_found_without_reading_those_that_stay(either_house: House) -> None:
    """The step runs every few minutes, and a busy service has millions of records."""
    house = either_house
    tenant, session, run = await house.run("first")
    other, _, _ = await house.run("second")
    mine = await house.sampler(tenant, session, 0, await house.checkpoint(tenant, run, "mine"))
    await recorded(house, tenant, mine, "old")
    row = {"tenant_id": other, "body": BODY, "created_at": house.now, "expires_at": house.now + timedelta(days=9)}
    theirs = [{**row, "operation_id": f"theirs{n}", "session_id": f"session{n // 4}"} for n in range(ROWS)]
    sessions = [
        {"id": f"session{n}", "tenant_id": other, "sdk_version": "raw", "tags": [], "created_at": house.now}
        for n in range(ROWS // 4)
    ]
    async with house.database.write() as transaction:
        await transaction.execute(insert(Session), [{**one, "last_seen_at": house.now} for one in sessions])
        await transaction.execute(insert(SampleRecord), theirs)
        await transaction.execute(update(Session).where(Session.id == session).values(ended_at=house.now))
        await transaction.execute(text("ANALYZE"))
    house.now += house.runtime.settings.result_grace
    with statements_of(house.database.engine, "forget") as sent:
        await house.keeping.run_step(StepName.FORGET_SAMPLE_RECORDS)
    assert await house.count(SampleRecord) == ROWS
    searches = [one for one in sent if one.text.startswith("SELECT") and "sample_records" in one.text]
    assert len(searches) == 2
    explain = "EXPLAIN" if house.database.engine.dialect.name == "postgresql" else "EXPLAIN QUERY PLAN"
    async with house.database.read() as reading:
        for one in searches:
            plan = await reading.run_sync(_plan, f"{explain} {one.text}", one.parameters)
            assert "Seq Scan on sample_records" not in plan, plan
            assert "SCAN sample_records" not in plan, plan
            assert "sample_records_" in plan, plan


def _plan(session: SyncSession, statement: str, parameters: tuple[object, ...]) -> str:
    return str(session.connection().exec_driver_sql(statement, parameters).all())
