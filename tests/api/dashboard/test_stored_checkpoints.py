"""Pages of checkpoints and models offer what there is: storage adds up, and what cannot be sampled is not offered."""

import re

from sqlalchemy import update

from contracts.paths import Segment
from store.tables import Run
from tenants.limit_use import ALL_USE
from tests.api.conftest import Service, Tenant
from tests.api.dashboard.visits import visitor


async def test_listed_and_unlisted_checkpoints_add_up_to_what_the_limits_count(
    service: Service, cats: Tenant, dogs: Tenant
) -> None:
    run, theirs = await cats.run(), await dogs.run()
    await cats.checkpoint(run, "named")
    await cats.checkpoint(run, "brief", ttl_seconds=5)
    for name in ("first", "second"):
        await cats.checkpoint(run, name, segment=Segment.SAMPLER_WEIGHTS, listed=False)
    await dogs.checkpoint(theirs, "other")
    async with service.database.write() as transaction:
        await transaction.execute(update(Run).where(Run.id == run).values(snapshot_dir="s", snapshot_bytes=100))
    service.clock.move(seconds=10)
    async with visitor(service, cats.key) as http, visitor(service, dogs.key) as other:
        shown, beside = (await http.get("/ui/checkpoints")).text, (await other.get("/ui/checkpoints")).text
        filtered = (await http.get("/ui/checkpoints?type=training")).text
    unlisted = re.search(r'data-unlisted="(\d+)">([^<]*)<', shown)
    assert unlisted is not None
    listed = shown.count('aria-label="Tick ')
    async with service.database.read() as session:
        used = (await ALL_USE.of(session, cats.id, service.services.limits)).used
    assert (listed, used["checkpoints"]) == (1, 4)
    assert 7 * listed + int(unlisted[1]) == used["stored_bytes"]
    assert "3 unnamed versions" in unlisted[2]
    assert "snapshots of 1 run," in unlisted[2]
    assert "data-unlisted" not in beside + filtered


async def test_a_run_without_sampler_weights_is_not_offered_for_samples(
    service: Service, cats: Tenant, dogs: Tenant
) -> None:
    ready, theirs = await cats.run(), await dogs.run()
    await cats.checkpoint(ready, "live", segment=Segment.SAMPLER_WEIGHTS, listed=False)
    newer, expired = await cats.run(), await cats.run()
    await cats.checkpoint(newer, "state")
    await cats.checkpoint(expired, "gone", segment=Segment.SAMPLER_WEIGHTS, ttl_seconds=5)
    await dogs.checkpoint(theirs, "live", segment=Segment.SAMPLER_WEIGHTS)
    service.clock.move(seconds=10)
    async with visitor(service, cats.key) as http, visitor(service, dogs.key) as other:
        shown, beside = (await http.get("/ui/playground")).text, (await other.get("/ui/playground")).text
    offered = re.findall(r'<option value="([^"]*)"', shown)
    assert offered[0] == ready
    assert not {newer, expired, theirs} & set(offered)
    assert theirs in re.findall(r'<option value="([^"]*)"', beside)
