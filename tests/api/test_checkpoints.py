import httpx
import pytest
from tinker import types

from contracts.paths import Segment
from tenants.checkpoints import MAX_TTL, forget_deletions


def _url(run: str, checkpoint_id: str, action: str = "") -> str:
    return f"/training_runs/{run}/checkpoints/{checkpoint_id}{action}"


async def _ids(tenant, path: str = "/checkpoints") -> list[str]:
    response = await tenant.http.get(path)
    parsed = types.CheckpointsListResponse.model_validate(response.raise_for_status().json())
    return [checkpoint.checkpoint_id for checkpoint in parsed.checkpoints]


async def _forget(tenant) -> None:
    """Delete what has expired, as housekeeping does."""
    runtime = tenant.service.services.runtime
    async with runtime.database.write() as transaction:
        await forget_deletions(transaction, before=runtime.clock() - runtime.settings.result_grace, most=10)


async def test_checkpoint_shows_what_it_is(cats, clock) -> None:
    run = await cats.run()
    await cats.checkpoint(run, "ck1", ttl_seconds=3600)
    await cats.checkpoint(run, "ck1", segment=Segment.SAMPLER_WEIGHTS)
    response = await cats.http.get(f"/training_runs/{run}/checkpoints")
    listed = types.CheckpointsListResponse.model_validate(response.json()).checkpoints
    by_type = {one.checkpoint_type: one for one in listed}
    assert set(by_type) == {"training", "sampler"}
    training = by_type["training"]
    assert (training.checkpoint_id, training.tinker_path) == ("weights/ck1", f"tinker://{run}/weights/ck1")
    assert (training.size_bytes, training.public, training.user_metadata) == (7, False, {"note": "ck1"})
    assert training.time == clock()
    assert training.expires_at is not None
    assert (training.expires_at - training.time).total_seconds() == 3600
    assert by_type["sampler"].expires_at is None


async def test_run_list_has_no_cursor_and_the_tenants_list_has(cats, clock) -> None:
    first, second = await cats.run(), await cats.run()
    await cats.checkpoint(first, "a")
    clock.move(seconds=1)
    await cats.checkpoint(second, "b")
    assert await _ids(cats, f"/training_runs/{first}/checkpoints") == ["weights/a"]
    page = (await cats.http.get("/checkpoints", params={"limit": 1})).json()
    assert [one["checkpoint_id"] for one in page["checkpoints"]] == ["weights/b"]
    assert page["cursor"] == {"offset": 0, "limit": 1, "total_count": 2}


async def test_nameless_versions_are_not_listed(cats) -> None:
    run = await cats.run()
    await cats.checkpoint(run, "nameless", segment=Segment.SAMPLER_WEIGHTS, listed=False)
    assert await _ids(cats) == []


class TestDelete:
    @pytest.mark.parametrize("checkpoint_id", ["weights/ck1", "weights%2Fck1"])
    async def test_row_goes(self, cats, checkpoint_id: str) -> None:
        run = await cats.run()
        folder = await cats.checkpoint(run, "ck1")
        kept = await cats.checkpoint(run, "ck2")
        assert (await cats.http.delete(_url(run, checkpoint_id))).status_code == 204
        assert await _ids(cats) == ["weights/ck2"]
        assert (folder.exists(), kept.exists()) == (True, True), "the files go later: a sample may read them"

    async def test_a_repeat_is_answered_like_the_first_until_it_is_forgotten(self, cats, dogs, clock) -> None:
        """The SDK repeats a DELETE whose answer was lost, for up to six minutes."""
        run, other = await cats.run(), await dogs.run()
        await cats.checkpoint(run, "ck1")
        kept = await dogs.checkpoint(other, "ck1")

        async def again() -> int:
            return (await cats.http.delete(_url(run, "weights/ck1"))).status_code

        assert [await again(), await again()] == [204, 204]
        assert (await cats.http.delete(_url(run, "weights/never"))).status_code == 404
        strangers = [
            await dogs.http.delete(_url(run, "weights/ck1")),
            await cats.http.delete(_url(other, "weights/ck1")),
        ]
        assert ([answer.status_code for answer in strangers], kept.exists()) == ([404, 404], True)
        clock.move(hours=1)
        await _forget(cats)
        assert await again() == 204
        clock.move(seconds=1)
        await _forget(cats)
        assert await again() == 404

    async def test_a_name_that_was_deleted_and_saved_again_is_deleted_again(self, cats) -> None:
        run = await cats.run()
        for _ in range(2):
            await cats.checkpoint(run, "ck1")
            assert await _ids(cats) == ["weights/ck1"]
            assert (await cats.http.delete(_url(run, "weights/ck1"))).status_code == 204
            assert await _ids(cats) == []

    async def test_same_name_of_another_segment_and_run_stays(self, cats) -> None:
        run, other = await cats.run(), await cats.run()
        await cats.checkpoint(run, "ck1")
        kept = [await cats.checkpoint(run, "ck1", segment=Segment.SAMPLER_WEIGHTS), await cats.checkpoint(other, "ck1")]
        assert (await cats.http.delete(_url(run, "weights/ck1"))).status_code == 204
        assert all(folder.exists() for folder in kept)

    async def test_foreign_checkpoint_is_404_and_stays(self, cats, dogs) -> None:
        run = await cats.run()
        folder = await cats.checkpoint(run, "ck1")
        response = await dogs.http.delete(_url(run, "weights/ck1"))
        assert (response.status_code, response.json()["code"]) == (404, "not_found")
        assert folder.exists()
        assert await _ids(cats) == ["weights/ck1"]

    @pytest.mark.parametrize(
        "checkpoint_id",
        [
            "models/ck1",
            "weights",
            "weights/..",
            "weights%2F..%2Fck1",
            "..%2F..%2Fetc%2Fpasswd",
            "weights/a%2Fb",
            "weights/%2e%2e",
            "weights/" + "x" * 300,
            "weights/a%00",
        ],
    )
    async def test_address_that_is_none_is_400(self, cats, service, checkpoint_id: str) -> None:
        run = await cats.run()
        folder = await cats.checkpoint(run, "ck1")
        # A raw request: the client would tidy the dots away.
        url = f"{service.url}/api/v1/training_runs/{run}/checkpoints/{checkpoint_id.replace('/..', '/%2e%2e')}"
        response = await cats.http.delete(url)
        assert (response.status_code, response.json()["code"]) == (400, "invalid_request"), response.text
        assert folder.exists()


class TestTtl:
    async def _set(self, tenant, run: str, body: object, name: str = "ck1"):
        return await tenant.http.put(_url(run, f"weights/{name}", "/ttl"), json=body)

    async def test_checkpoint_expires_and_disappears(self, cats, clock) -> None:
        run = await cats.run()
        await cats.checkpoint(run, "ck1")
        assert (await self._set(cats, run, {"ttl_seconds": 60})).is_success
        clock.move(seconds=59)
        assert await _ids(cats) == ["weights/ck1"]
        clock.move(seconds=1)
        assert await _ids(cats) == []
        assert (await cats.http.delete(_url(run, "weights/ck1"))).status_code == 404
        assert (await self._set(cats, run, {"ttl_seconds": None})).status_code == 404

    async def test_null_keeps_for_ever(self, cats, clock) -> None:
        run = await cats.run()
        await cats.checkpoint(run, "ck1", ttl_seconds=60)
        assert (await self._set(cats, run, {"ttl_seconds": None})).is_success
        clock.move(days=9999)
        assert await _ids(cats) == ["weights/ck1"]

    @pytest.mark.parametrize(
        "body",
        [
            {"ttl_seconds": 0},
            {"ttl_seconds": -5},
            {"ttl_seconds": 10**30},
            {"ttl_seconds": "soon"},
            {"ttl_seconds": 1.5},
            {},
        ],
    )
    async def test_bad_ttl_is_400_naming_the_field(self, cats, body: dict) -> None:
        run = await cats.run()
        await cats.checkpoint(run, "ck1")
        response = await self._set(cats, run, body)
        assert response.status_code == 400
        assert "ttl_seconds" in response.json()["detail"]

    async def test_bounds_are_accepted(self, cats) -> None:
        run = await cats.run()
        await cats.checkpoint(run, "ck1")
        for ttl in (1, int(MAX_TTL.total_seconds())):
            assert (await self._set(cats, run, {"ttl_seconds": ttl})).is_success

    async def test_foreign_checkpoint_is_404_and_keeps_its_time(self, cats, dogs, clock) -> None:
        run = await cats.run()
        await cats.checkpoint(run, "ck1")
        assert (await self._set(dogs, run, {"ttl_seconds": 1})).status_code == 404
        clock.move(days=1)
        assert await _ids(cats) == ["weights/ck1"]

    async def test_checkpoint_named_ttl_is_a_checkpoint(self, cats) -> None:
        run = await cats.run()
        await cats.checkpoint(run, "ttl")
        assert (await self._set(cats, run, {"ttl_seconds": 60}, name="ttl")).is_success
        assert (await cats.http.delete(_url(run, "weights/ttl"))).status_code == 204


async def test_foreign_lists_are_404_or_empty(cats, dogs) -> None:
    run = await cats.run()
    await cats.checkpoint(run, "ck1")
    assert (await dogs.http.get(f"/training_runs/{run}/checkpoints")).status_code == 404
    assert await _ids(dogs) == []


async def test_external_checkpoints_are_hidden_from_sdks_that_do_not_know_them(cats) -> None:
    run = await cats.run()
    await cats.checkpoint(run, "a")
    await cats.checkpoint(run, "b", segment=Segment.EXTERNAL_WEIGHTS)
    for path in ("/checkpoints", f"/training_runs/{run}/checkpoints"):
        shown = {}
        for version in ("0.18.2", "0.38.0"):
            response = await cats.http.get(path, headers={"X-Stainless-Package-Version": version})
            shown[version] = {one["checkpoint_type"] for one in response.json()["checkpoints"]}
        assert shown == {"0.18.2": {"training"}, "0.38.0": {"training", "external"}}


async def _delete(tenant, paths: list[str]) -> httpx.Response:
    return await tenant.http.post(f"{tenant.service.url}/api/weft/v1/checkpoints/delete", json={"paths": paths})


async def test_many_checkpoints_are_deleted_at_once_and_none_of_another_tenant(cats, dogs) -> None:
    run, foreign = await cats.run(), await dogs.run()
    for number in range(40):
        await cats.checkpoint(run, f"one-{number}")
    await cats.checkpoint(run, "kept")
    await dogs.checkpoint(foreign, "theirs")
    own = [f"tinker://{run}/weights/one-{number}" for number in range(40)]
    missing = [f"tinker://{foreign}/weights/theirs", f"tinker://{run}/weights/nothing"]
    answer = await _delete(cats, [*own, *missing, own[0]])
    assert answer.json() == {"deleted": 40, "missing": missing}
    assert await _ids(cats) == ["weights/kept"]
    assert await _ids(dogs) == ["weights/theirs"]
    again = await _delete(cats, own)
    assert again.json() == {"deleted": 0, "missing": own}
    single = await cats.http.delete(_url(run, "weights/one-3"))
    assert single.status_code == 204


@pytest.mark.parametrize("paths", [[], ["no path"], ["tinker://x/weights/y"] * 1001, ["tinker://x/weights/\x00"], [1]])
async def test_a_list_of_checkpoints_that_is_none_deletes_nothing(cats, paths: list) -> None:
    run = await cats.run()
    await cats.checkpoint(run, "kept")
    assert (await _delete(cats, [f"tinker://{run}/weights/kept", *paths] if paths else [])).status_code == 400
    assert await _ids(cats) == ["weights/kept"]
