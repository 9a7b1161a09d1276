"""Uploads of archives that outlast their caller: they end with its key and its tenant, and leave nothing."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from api import archive_body
from api.wire import late_body
from tenants.keys import revoke_key
from tenants.rights import SuspendMode
from tenants.suspensions import suspend_tenant
from tenants.weight_jobs import IMPORTS
from tests.api.conftest import BASE, Service, Tenant

SIZE = 3000
THIRD = bytes(SIZE // 3)
DEADLINE = 60


@asynccontextmanager
async def upload(tenant: Tenant, name: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """An upload of which the first third has come."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(tenant.service.url.rpartition(":")[2]))
    head = f"POST /api/weft/v1/imports?base_model={BASE} HTTP/1.1\r\nHost: x\r\nX-API-Key: {tenant.key}\r\n"
    writer.write(f"{head}Idempotency-Key: {name}\r\nContent-Length: {SIZE}\r\n\r\n".encode() + THIRD)
    uploads = tenant.service.services.admission.uploads
    async with asyncio.timeout(DEADLINE):
        await until(tenant, lambda: uploads.used(tenant.id) > 0 and bool(entries(tenant.service)))
        yield reader, writer
    writer.close()


async def until(tenant: Tenant, is_so: Callable[[], bool]) -> None:
    while not is_so():
        assert (await tenant.http.get(f"{tenant.service.url}/healthz")).status_code == 200


def entries(service: Service) -> list[Path]:
    """The folders of archives that come, wait or have broken off."""
    folder = service.services.runtime.data_folder.path(IMPORTS)
    return sorted(folder.iterdir()) if folder.exists() else []


async def end(tenant: Tenant, how: str) -> None:
    service = tenant.service
    async with service.database.write() as transaction:
        if how == "revoked":
            await revoke_key(transaction, prefix=tenant.key, clock=service.clock)
        else:
            name, mode = how.split()
            asked = {"reason": "stolen", "now": service.clock(), "mode": SuspendMode(mode)}
            await suspend_tenant(transaction, name=name, **asked)
    service.clock.move(seconds=1)
    await service.services.ended_keys.look()


@pytest.mark.parametrize(("how", "status"), [("revoked", 401), ("cats blocked", 403)])
async def test_an_upload_ends_with_its_key_or_tenant_before_its_body_does(
    service: Service, cats: Tenant, dogs: Tenant, how: str, status: int
) -> None:
    async with upload(dogs, "theirs") as (their_reader, their_writer), upload(cats, "ours") as (reader, writer):
        await end(cats, how)
        writer.write(THIRD)
        assert (await reader.readuntil(b"\r\n")).split()[1] == str(status).encode()
        await until(dogs, lambda: len(entries(service)) == 1)
        their_writer.write(THIRD + THIRD)
        assert (await their_reader.readuntil(b"\r\n")).split()[1] == b"202"


async def test_an_upload_whose_key_has_ended_keeps_no_part_when_its_client_leaves(
    service: Service, cats: Tenant
) -> None:
    async with upload(cats, "ours") as (_, writer):
        await end(cats, "revoked")
        writer.close()
        await until(cats, lambda: not service.services.admission.uploads.used(cats.id))
    assert [file for folder in entries(service) for file in folder.iterdir()] == []


async def test_an_upload_of_a_tenant_that_has_become_read_only_makes_no_job(
    service: Service, cats: Tenant, dogs: Tenant, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last look is in the transaction that records the job."""
    monkeypatch.setattr(late_body, "MOMENT_SECONDS", 10 * DEADLINE)
    async with upload(cats, "ours") as (reader, writer), upload(dogs, "theirs") as (their_reader, their_writer):
        await end(cats, "cats read_only")
        for one in (writer, their_writer):
            one.write(THIRD + THIRD)
        assert (await reader.readuntil(b"\r\n")).split()[1] == b"403"
        assert b"read-only" in await reader.readuntil(b"}")
        assert (await their_reader.readuntil(b"\r\n")).split()[1] == b"202"
    assert (await cats.http.get(f"{service.url}/api/weft/v1/jobs")).json()["jobs"] == []
    assert len((await dogs.http.get(f"{service.url}/api/weft/v1/jobs")).json()["jobs"]) == 1


async def test_the_folder_of_a_long_upload_looks_changed_as_long_as_bytes_come(
    service: Service, cats: Tenant, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Housekeeping removes folders that no row names and nothing has changed for a day."""
    monkeypatch.setattr(archive_body, "_TOUCHED_SECONDS", 0)
    async with upload(cats, "ours") as (reader, writer):
        (folder,) = entries(service)
        os.utime(folder, (0, 0))
        writer.write(THIRD)
        await until(cats, lambda: folder.stat().st_mtime > 0)
        writer.write(THIRD)
        assert (await reader.readuntil(b"\r\n")).split()[1] == b"202"
