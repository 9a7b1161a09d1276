"""A checkpoint's files over HTTP, by links that need no key and are nobody else's to make."""

import asyncio
import io
import os
import tarfile
from contextlib import AsyncExitStack
from datetime import timedelta

import httpx
import psutil
import pytest
from tinker import types

from api.tinker.downloads import COMPLETE, _archive
from tenants.keys import create_key
from tenants.rights import KeyRights, SuspendMode
from tenants.suspensions import suspend_tenant
from testing.tenants import end_key


def _url(run: str, action: str) -> str:
    return f"/training_runs/{run}/checkpoints/weights/ck1/{action}"


def _files(folder) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
    }


def _add_folder(folder) -> None:
    """A folder within, as external weights on a tied head have."""
    (folder / "peft").mkdir()
    (folder / "peft" / "adapter_model.safetensors").write_bytes(b"the same by other names")


async def _fetched(cats, url: str) -> httpx.Response:
    """Fetch a link as a downloader does: no key."""
    del cats
    async with httpx.AsyncClient(timeout=300) as stranger:
        return await stranger.get(url)


async def _until_one_waits(tenant) -> None:
    """Wait until a download of the tenant's waits for its turn."""
    downloads = tenant.service.services.admission._downloads
    async with asyncio.timeout(300):
        while not downloads._shares[tenant.id].waiting:  # noqa: ASYNC110
            await asyncio.sleep(0)


async def test_an_archive_holds_the_checkpoints_files(cats, dogs) -> None:
    run = await cats.run()
    folder = await cats.checkpoint(run, "ck1")
    _add_folder(folder)
    theirs = await dogs.run()
    await dogs.checkpoint(theirs, "ck1")
    answer = await cats.http.get(_url(run, "archive"))
    assert answer.status_code == 302
    assert answer.headers["expires"].endswith("GMT")
    fetched = await _fetched(cats, answer.headers["location"])
    with tarfile.open(fileobj=io.BytesIO(fetched.raise_for_status().content)) as tar:
        found = {member.name: tar.extractfile(member).read() for member in tar}
    assert list(found)[-1] == COMPLETE, "old SDKs look for it, as the mark of an archive that came whole"
    assert found.pop(COMPLETE) == b""
    assert found == _files(folder) != {}
    assert (await dogs.http.get(_url(run, "archive"))).status_code == 404
    assert (await dogs.http.get(_url(theirs, "archive"))).status_code == 302


async def test_every_file_has_a_link(cats, clock) -> None:
    run = await cats.run()
    folder = await cats.checkpoint(run, "ck1")
    _add_folder(folder)
    answer = (await cats.http.get(_url(run, "external_weights_urls"))).raise_for_status().json()
    parsed = types.ExternalWeightsUrlsResponse.model_validate(answer)
    assert parsed.urls.keys() == _files(folder).keys()
    assert parsed.expires.tzinfo is not None
    assert parsed.expires > clock()
    for name, url in parsed.urls.items():
        assert (await _fetched(cats, url)).content == _files(folder)[name]
    other = parsed.urls["adapter_model.safetensors"].rpartition("/")[0]
    assert (await _fetched(cats, f"{other}/peft")).status_code == 404
    assert (await _fetched(cats, f"{other}/..%2F..%2Fweft.db")).status_code == 404
    assert (await _fetched(cats, f"{other}/nothing")).status_code == 404


async def test_a_link_ends_with_its_time_and_with_the_checkpoint(cats, clock) -> None:
    run = await cats.run()
    await cats.checkpoint(run, "ck1")
    first = (await cats.http.get(_url(run, "archive"))).headers["location"]
    clock.move(seconds=3599)
    second = (await cats.http.get(_url(run, "archive"))).headers["location"]
    assert (await _fetched(cats, first)).status_code == 200
    clock.move(seconds=2)
    assert (await _fetched(cats, first)).status_code == 404
    assert (await _fetched(cats, second)).status_code == 200
    await cats.http.delete(f"/training_runs/{run}/checkpoints/weights/ck1")
    assert (await _fetched(cats, second)).status_code == 404
    assert (await _fetched(cats, second.replace("downloads/", "downloads/x"))).status_code == 404


@pytest.mark.parametrize("by", ["an operator", "its time", "a block"])
async def test_a_link_ends_with_the_key_that_made_it_and_so_does_a_download(cats, dogs, by: str) -> None:
    """The key is revoked or expires in the middle of a download, or its tenant is blocked; links of others stay."""
    run, theirs = await cats.run(), await dogs.run()
    folder = await cats.checkpoint(run, "ck1")
    os.truncate(folder / "adapter_model.safetensors", 2**26)
    await dogs.checkpoint(theirs, "ck1")
    async with cats.service.database.write() as transaction:
        rights = KeyRights(expires_at=cats.service.clock() + timedelta(minutes=10))
        key = await create_key(transaction, tenant=cats.id, note="", clock=cats.service.clock, rights=rights)
    async with httpx.AsyncClient(base_url=cats.http.base_url, headers={"X-API-Key": key.secret}, timeout=40) as other:
        ending = (await other.get(_url(run, "archive"))).headers["location"]
        files = (await other.get(_url(run, "external_weights_urls"))).json()["urls"]
    staying = [
        (await cats.http.get(_url(run, "archive"))).headers["location"],
        (await dogs.http.get(_url(theirs, "archive"))).headers["location"],
    ]
    file = files["adapter_model.safetensors"]
    async with (
        httpx.AsyncClient(timeout=40) as stranger,
        stranger.stream("GET", ending) as archive,
        stranger.stream("GET", file) as alone,
    ):
        parts = [answer.aiter_bytes() for answer in (archive, alone)]
        for part in parts:
            await anext(part)
        if by == "an operator":
            await end_key(cats.service.database, key.secret)
        elif by == "its time":
            cats.service.clock.move(minutes=10)
        else:
            async with cats.service.database.write() as transaction:
                now = cats.service.clock()
                await suspend_tenant(transaction, name="cats", reason="", now=now, mode=SuspendMode.BLOCKED)
            # The links of its other keys as well.
            files["other"] = staying.pop(0)
        await cats.service.services.ended_keys.look()
        for part in parts:
            with pytest.raises(httpx.RemoteProtocolError):
                async for _ in part:
                    pass
    for url in (ending, *files.values()):
        assert (await _fetched(cats, url)).status_code == 404
    for url in staying:
        assert (await _fetched(cats, url)).status_code == 200


async def test_a_link_ends_with_the_last_second_of_its_key(cats, clock) -> None:
    run = await cats.run()
    await cats.checkpoint(run, "ck1")
    ends = clock() + timedelta(minutes=10)
    async with cats.service.database.write() as transaction:
        rights = KeyRights(expires_at=ends)
        key = await create_key(transaction, tenant=cats.id, note="", clock=clock, rights=rights)
    made = await cats.http.get(_url(run, "archive"), headers={"X-API-Key": key.secret})
    link, other = made.headers["location"], (await cats.http.get(_url(run, "archive"))).headers["location"]
    clock.move(seconds=599)
    assert [(await _fetched(cats, url)).status_code for url in (link, other)] == [200, 200]
    clock.move(seconds=1)
    assert [(await _fetched(cats, url)).status_code for url in (link, other)] == [404, 200]


async def test_a_tenant_has_few_downloads_at_a_time_and_another_tenants_goes_on(
    cats, dogs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each archive that nobody reads on holds its files open. Further ones wait, and are then refused."""
    run, theirs = await cats.run(), await dogs.run()
    folder = await cats.checkpoint(run, "ck1")
    os.truncate(folder / "adapter_model.safetensors", 2**26)
    (folder / "small").write_bytes(b"x")
    await dogs.checkpoint(theirs, "ck1")
    link = (await cats.http.get(_url(run, "archive"))).headers["location"]
    other = (await dogs.http.get(_url(theirs, "archive"))).headers["location"]
    file = (await cats.http.get(_url(run, "external_weights_urls"))).json()["urls"]["small"]
    async with httpx.AsyncClient(timeout=40, limits=httpx.Limits(max_connections=None)) as stranger:
        async with AsyncExitStack() as unread:
            for _ in range(16):
                answer = await unread.enter_async_context(stranger.stream("GET", link))
                assert answer.status_code == 200
            monkeypatch.setattr("api.admission.PATIENCE_SECONDS", 300.0)
            waiting = asyncio.create_task(_fetched(cats, file))
            await _until_one_waits(cats)
            assert (await _fetched(dogs, other)).status_code == 200
            assert not waiting.done()
            monkeypatch.setattr("api.admission.PATIENCE_SECONDS", 0.1)
            refused = await _fetched(cats, file)
            assert (refused.status_code, "downloads in progress" in refused.text) == (429, True)
        assert (await waiting).status_code == 200
        assert (await _fetched(cats, file)).status_code == 200


def test_an_archive_of_which_nothing_is_read_keeps_no_file_open(tmp_path) -> None:
    """A download may be ended before its first piece."""
    for folder in ("mine", "theirs"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "adapter").write_bytes(b"x")
    mine, theirs = _archive(tmp_path / "mine"), _archive(tmp_path / "theirs")
    del mine
    open_now = {file.path for file in psutil.Process().open_files()} & {str(path) for path in tmp_path.rglob("adapter")}
    assert open_now == {str(tmp_path / "theirs" / "adapter")}
    assert b"".join(theirs).startswith(b"adapter")


async def test_files_that_cannot_be_seen_are_no_whole_checkpoint_without_files(cats, dogs) -> None:
    """The folder is away. Links say so, and lead to all files once it is back; another tenant's work meanwhile."""
    run, theirs = await cats.run(), await dogs.run()
    folder = await cats.checkpoint(run, "ck1")
    await dogs.checkpoint(theirs, "ck1")
    link = (await cats.http.get(_url(run, "archive"))).headers["location"]
    other = (await dogs.http.get(_url(theirs, "archive"))).headers["location"]
    urls = (await cats.http.get(_url(run, "external_weights_urls"))).json()["urls"]
    away = folder.rename(folder.with_name("away"))
    for url in (link, *urls.values()):
        assert (await _fetched(cats, url)).status_code == 503
    assert (await cats.http.get(_url(run, "external_weights_urls"))).status_code == 503
    assert (await _fetched(dogs, other)).status_code == 200
    away.rename(folder)
    for url in (link, *urls.values()):
        assert (await _fetched(cats, url)).status_code == 200
