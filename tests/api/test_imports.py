"""Archives that come in over HTTP: written as they come, within bounds, each tenant's own, and gone when nobody imports them."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from api.tenant_shares import TenantShares
from store.settings import Settings
from tenants.weight_jobs import IMPORTS, MOST_UNFINISHED
from tests.api.conftest import BASE, Service, Tenant

MIB = 2**20
DEADLINE = 60
MOST = 4 * MIB
ROOM = 6 * MIB


@pytest.fixture
def how(request: pytest.FixtureRequest) -> str:
    """End of a body that does not come whole: ``stops`` or ``leaves``."""
    return str(getattr(request, "param", "leaves"))


@pytest.fixture
def settings(settings: Settings, how: str) -> Settings:
    """Small bounds, and a short time for a body that stops."""
    return Settings(
        data_dir=settings.data_dir,
        max_import_bytes=MOST,
        limit_stored_bytes=ROOM,
        body_timeout=timedelta(seconds=5 if how == "stops" else 2 * DEADLINE),
    )


def url(tenant: Tenant, rest: str = "imports") -> str:
    """Address of one of weft's own endpoints."""
    return f"{tenant.service.url}/api/weft/v1/{rest}"


async def send(tenant: Tenant, content: Any, headers: dict[str, str] | None = None, **wanted: Any) -> httpx.Response:
    """Send an archive."""
    params = {"base_model": BASE, **wanted}
    return await tenant.http.post(url(tenant), content=content, params=params, headers=headers)


def staged(service: Service) -> list[Path]:
    """The files of archives that wait. A folder that goes while it is looked at has none."""
    walk = os.walk(service.services.runtime.data_folder.path(IMPORTS))
    return sorted(Path(folder) / name for folder, _, names in walk for name in names)


async def pieces(size: int) -> AsyncIterator[bytes]:
    """A body whose size is not announced."""
    for _ in range(size // MIB):
        yield bytes(MIB)


async def test_an_archive_waits_for_its_job_and_goes_with_it(service: Service, cats: Tenant, dogs: Tenant) -> None:
    content = bytes(range(256)) * 8192
    answer = await send(cats, content, name="mine", segment="sampler_weights", ttl_seconds=60)
    theirs = await send(dogs, b"theirs")
    assert (answer.status_code, theirs.status_code) == (202, 202)
    job = answer.json()
    assert (job["kind"], job["state"], job["base_model"], job["path"]) == ("import", "pending", BASE, None)
    folder = service.services.runtime.data_folder.path(f"{IMPORTS}/{job['id']}")
    assert (folder / "archive").read_bytes() == content
    assert (folder / "archive").stat().st_mode & 0o77 == 0
    for foreign in (dogs.http.get(url(dogs, f"jobs/{job['id']}")), dogs.http.delete(url(dogs, f"jobs/{job['id']}"))):
        assert (await foreign).status_code == 404
    assert [one["id"] for one in (await dogs.http.get(url(dogs, "jobs"))).json()["jobs"]] == [theirs.json()["id"]]
    for tenant in (cats, dogs):
        me = "tml:key:" + (await tenant.http.get("/auth/apikey/me")).json()["name"]
        (session,) = (await tenant.http.post("/sessions/search", json={})).json()["sessions"]
        assert (session["owner"], session["display_name"]) == (me, "weft import")
    ended = await cats.http.delete(url(cats, f"jobs/{job['id']}"))
    assert ended.json()["state"] == "cancelled"
    assert [path.parent.name for path in staged(service)] == [theirs.json()["id"]]


@pytest.mark.parametrize("is_announced", [True, False])
async def test_too_large_an_archive_is_refused_and_leaves_nothing(
    service: Service, cats: Tenant, dogs: Tenant, is_announced: bool
) -> None:
    size = MOST + MIB
    answer = await send(cats, bytes(size) if is_announced else pieces(size))
    assert (answer.status_code, answer.json()["code"]) == (413, "payload_too_large")
    assert staged(service) == []
    assert (await send(dogs, pieces(MOST))).status_code == 202


async def test_archives_that_wait_count_in_their_tenants_storage(service: Service, cats: Tenant, dogs: Tenant) -> None:
    assert (await send(cats, pieces(MOST))).status_code == 202
    for content in (bytes(3 * MIB), pieces(3 * MIB)):
        answer = await send(cats, content)
        assert (answer.status_code, answer.json()["code"]) == (400, "storage_full")
        assert f"room for an archive of {ROOM - MOST} bytes" in answer.text
    assert len(staged(service)) == 1
    assert (await send(dogs, pieces(3 * MIB))).status_code == 202
    assert (await send(cats, bytes(MIB))).status_code == 202


async def test_one_tenant_has_few_imports_that_are_unfinished(service: Service, cats: Tenant, dogs: Tenant) -> None:
    for _ in range(MOST_UNFINISHED):
        assert (await send(cats, b"x")).status_code == 202
    refused = await send(cats, b"x")
    assert (refused.status_code, refused.json()["code"]) == (429, "too_many_operations")
    assert len(staged(service)) == MOST_UNFINISHED
    assert (await send(dogs, b"x")).status_code == 202


async def test_a_repeat_that_comes_meanwhile_makes_one_job_and_leaves_one_archive(
    service: Service, cats: Tenant, dogs: Tenant
) -> None:
    """The repeat begins before the first request is recorded, as at another process."""
    may_end = asyncio.Event()
    key = {"Idempotency-Key": "one"}

    async def slow() -> AsyncIterator[bytes]:
        yield b"archive"
        await may_end.wait()

    async with asyncio.timeout(DEADLINE):
        first = asyncio.create_task(send(cats, slow(), key))
        while not service.services.admission.uploads.used(cats.id):
            assert (await dogs.http.get(url(dogs, "jobs"))).status_code == 200
        service.services.admission.uploads = TenantShares(1)
        second = await send(cats, b"archive", key)
        may_end.set()
        assert (await first).json()["id"] == second.json()["id"]
    assert [path.parent.name for path in staged(service)] == [second.json()["id"]]
    assert (await send(dogs, b"archive", key)).json()["id"] != second.json()["id"]


@pytest.mark.parametrize(
    ("wanted", "status", "says"),
    [
        ({"base_model": "other"}, 400, "not served"),
        ({"name": "a/b"}, 400, "name"),
        ({"segment": "external_weights"}, 400, "segment"),
        ({"ttl_seconds": 0}, 400, "ttl_seconds"),
        ({"headers": {"Idempotency-Key": ""}}, 400, "Idempotency-Key"),
        ({"headers": {"Content-Encoding": "zstd"}}, 400, "Content-Encoding"),
        ({"headers": {"X-API-Key": "tml-unknown"}}, 401, "key"),
    ],
)
async def test_a_wrong_request_is_refused_before_its_body(
    service: Service, cats: Tenant, wanted: dict[str, Any], status: int, says: str
) -> None:
    answer = await send(cats, b"x", **wanted)
    assert answer.status_code == status
    assert says in answer.text
    assert staged(service) == []


@pytest.mark.parametrize("how", ["stops", "leaves"], indirect=True)
async def test_an_upload_that_does_not_come_whole_leaves_nothing(
    service: Service, cats: Tenant, dogs: Tenant, how: str
) -> None:
    """The archive is on the disk as it comes, one at a time for a tenant; the rest of it never comes."""

    async def until(is_so: Callable[[], bool]) -> None:
        while not is_so():
            assert (await dogs.http.get(url(dogs, "jobs"))).status_code == 200

    reader, writer = await asyncio.open_connection("127.0.0.1", int(service.url.rpartition(":")[2]))
    head = f"POST /api/weft/v1/imports?base_model={BASE} HTTP/1.1\r\nHost: x\r\nX-API-Key: {cats.key}\r\n"
    writer.write(f"{head}Content-Length: {MOST}\r\n\r\n".encode() + bytes(2 * MIB))
    async with asyncio.timeout(DEADLINE):
        if how == "stops":
            assert await reader.readuntil(b"body_too_slow")
        else:
            await until(lambda: any(path.stat().st_size >= MIB for path in staged(service)))
            second = await send(cats, b"x")
            assert (second.status_code, second.json()["code"]) == (429, "too_many_requests")
            writer.close()
        await until(lambda: not staged(service) and not service.services.admission.uploads.used(cats.id))
    writer.close()
    assert (await send(cats, b"x")).status_code == 202
    assert len((await cats.http.get(url(cats, "jobs"))).json()["jobs"]) == 1


async def broken_off(tenant: Tenant, content: bytes, key: str, how: str) -> int:
    """Send the first half of an archive, which then stops or whose sender leaves; return how much is kept."""
    half = len(content) // 2
    reader, writer = await asyncio.open_connection("127.0.0.1", int(tenant.service.url.rpartition(":")[2]))
    head = f"POST /api/weft/v1/imports?base_model={BASE} HTTP/1.1\r\nHost: x\r\nX-API-Key: {tenant.key}\r\n"
    writer.write(f"{head}Idempotency-Key: {key}\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content[:half])
    await writer.drain()
    async with asyncio.timeout(DEADLINE):
        if how == "stops":
            assert await reader.readuntil(b"body_too_slow")
        else:
            while not any(path.stat().st_size for path in staged(tenant.service)):
                await received(tenant, key)
        writer.close()
        while not (kept := await received(tenant, key)) or tenant.service.services.admission.uploads.used(tenant.id):
            continue
    return kept


async def received(tenant: Tenant, key: str) -> int:
    """Return the bytes of the archive that are kept under the key."""
    answer = await tenant.http.get(url(tenant, "imports/received"), headers={"Idempotency-Key": key})
    found: int = answer.raise_for_status().json()["received_bytes"]
    return found


@pytest.mark.parametrize("how", ["stops", "leaves"], indirect=True)
async def test_an_upload_that_breaks_off_goes_on_where_it_ended(
    service: Service, cats: Tenant, dogs: Tenant, how: str
) -> None:
    """Another tenant's request of the same key has nothing of it, and an offset that is not the end changes nothing."""
    content = bytes(range(256)) * (3 * MIB // 256)
    kept = await broken_off(cats, content, "one", how)
    assert MIB <= kept <= len(content) // 2
    assert (await received(dogs, "one"), await received(cats, "other")) == (0, 0)
    for tenant, offset, key in ((dogs, kept, "one"), (cats, kept - 1, "one"), (cats, kept, "other")):
        refused = await send(tenant, b"x", {"Idempotency-Key": key, "Upload-Offset": str(offset)})
        assert (refused.status_code, refused.json()["code"]) == (400, "sequence_conflict")
    assert (await send(cats, b"x", {"Upload-Offset": str(kept)})).json()["code"] == "invalid_request"
    assert await received(cats, "one") == kept
    rest = {"Idempotency-Key": "one", "Upload-Offset": str(kept)}
    job = (await send(cats, content[kept:], rest)).raise_for_status().json()["id"]
    assert [path.read_bytes() == content for path in staged(service)] == [True]
    assert (await send(cats, content[kept:], rest)).json()["id"] == job
    assert await received(cats, "one") == 0


async def test_a_tenant_keeps_the_newest_upload_that_broke_off_and_bounds_hold_for_the_whole(
    service: Service, cats: Tenant, dogs: Tenant
) -> None:
    content = bytes(2 * MIB)
    theirs = await broken_off(dogs, content, "one", "leaves")
    await broken_off(cats, content, "one", "leaves")
    kept = await broken_off(cats, content, "two", "leaves")
    assert (await received(cats, "one"), await received(cats, "two")) == (0, kept)
    over = await send(cats, bytes(MOST), {"Idempotency-Key": "two", "Upload-Offset": str(kept)})
    assert over.status_code == 413
    assert (await received(cats, "two"), await received(dogs, "one")) == (0, theirs)
    assert [path.parent.name.removeprefix("part-") for path in staged(service)] == [dogs.id]
