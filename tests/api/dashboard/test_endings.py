"""Pages of a tenant tell what is about to end and what was lost: its checkpoints, and its sessions that went silent."""

from datetime import timedelta

from tenants.sessions import end_silent_sessions
from tests.api.conftest import BASE
from tests.api.dashboard.visits import key_of, visitor


async def test_the_overview_tells_checkpoints_that_expire_within_a_day(service, cats, dogs) -> None:
    run, theirs = await cats.run(), await dogs.run()
    await cats.checkpoint(run, "today", ttl_seconds=23 * 3600)
    await cats.checkpoint(run, "tomorrow", ttl_seconds=25 * 3600)
    await cats.checkpoint(run, "kept")
    await dogs.checkpoint(theirs, "elsewhere", ttl_seconds=3600)
    async with visitor(service, cats.key) as http, visitor(service, dogs.key) as other:
        for path in ("/ui", "/ui/parts/overview"):
            told = (await http.get(path)).text
            assert told.count("data-ending=") == 1
            assert f'data-ending="tinker://{run}/weights/today"' in told
        assert f'data-ending="tinker://{theirs}/weights/elsewhere"' in (await other.get("/ui")).text
        service.clock.move(hours=2)
        told = (await http.get("/ui/parts/overview")).text
        assert (told.count("data-ending="), "weights/tomorrow" in told) == (2, True)


async def test_sessions_that_went_silent_are_among_the_errors(service, cats, dogs) -> None:
    silent, ended = await cats.session(), await cats.session()
    run, theirs = await cats.run(), await dogs.run()
    async with visitor(service, cats.key) as http, visitor(service, dogs.key) as other:
        assert "data-lost=" not in (await http.get("/ui/errors")).text
        service.clock.move(hours=1)
        async with service.database.write() as transaction:
            since = service.clock() - timedelta(minutes=1)
            assert await end_silent_sessions(transaction, silent_since=since, now=service.clock(), most=1) == 1
        lost = (await http.get("/ui/errors")).text + (await other.get("/ui/errors")).text
        assert lost.count("data-lost=") == 1
        async with service.database.write() as transaction:
            await end_silent_sessions(transaction, silent_since=since, now=service.clock(), most=10)
        told = (await http.get("/ui/errors")).text
        assert told.count("data-lost=") == 3
        assert all(f'data-lost="{one}"' in told for one in (silent, ended, run.partition(":")[0]))
        of_run = (await http.get("/ui/errors", params={"run": run})).text
        assert (of_run.count("data-lost="), f'data-lost="{run.partition(":")[0]}"' in of_run) == (1, True)
        assert theirs.partition(":")[0] not in told


async def test_the_overview_names_the_base_models_that_the_key_may_use(service, cats) -> None:
    bound = await key_of(service, cats, base_models=frozenset({"weft/elsewhere"}))
    async with visitor(service, cats.key) as http, visitor(service, bound.secret) as other:
        assert f"serves <strong>{BASE}</strong>" in (await http.get("/ui")).text
        told = (await other.get("/ui")).text
    assert f"<strong>{BASE}</strong>" not in told
    assert "no base model that this key may use" in told
