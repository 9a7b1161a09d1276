"""The list of models: each tenant's own beside the bases, with the owner that the SDK's lists name."""

from sqlalchemy import update

from contracts.paths import Segment
from store.tables import Run
from tests.api.conftest import BASE, Tenant
from tests.api.dashboard.visits import visitor


async def owners(tenant: Tenant) -> dict[str, str]:
    """Owner of each model that the tenant is shown; one by one a model is described as by the list."""
    address = f"{tenant.service.url}/v1/models"
    listed = (await tenant.http.get(address)).raise_for_status().json()["data"]
    for one in listed:
        shown = (await tenant.http.get(f"{address}/{one['id']}")).raise_for_status().json()
        assert shown == one
    return {one["id"]: one["owned_by"] for one in listed}


async def test_a_model_is_owned_by_its_tenants_name(cats: Tenant, dogs: Tenant) -> None:
    paths = {}
    for tenant in (cats, dogs):
        run = await tenant.run()
        await tenant.checkpoint(run, "best", segment=Segment.SAMPLER_WEIGHTS)
        paths[tenant.id] = run, f"tinker://{run}/sampler_weights/best"
    for tenant, name in ((cats, "cats"), (dogs, "dogs")):
        assert await owners(tenant) == {BASE: "weft", **dict.fromkeys(paths[tenant.id], name)}
        (run, _) = paths[tenant.id]
        described = (await tenant.http.get(f"/training_runs/{run}")).raise_for_status().json()
        assert described["model_owner"] == name


async def test_a_run_that_nothing_can_be_sampled_from_is_not_listed(cats: Tenant, dogs: Tenant) -> None:
    """Without sampler weights a request that names it is answered 404. Another tenant's weights do not count."""
    bare = await cats.run()
    for tenant in (cats, dogs):
        run = await tenant.run(model_seq_id=1)
        await tenant.checkpoint(run, "best", segment=Segment.SAMPLER_WEIGHTS)
        assert set(await owners(tenant)) == {BASE, run, f"tinker://{run}/sampler_weights/best"}
    assert (await cats.http.get(f"{cats.service.url}/v1/models/{bare}")).status_code == 404


async def test_a_published_checkpoint_is_told_as_another_tenants(cats: Tenant, dogs: Tenant) -> None:
    """The name of the tenant that published it is not told; that tenant reads it as before."""
    run = await cats.run()
    await cats.checkpoint(run, "best", segment=Segment.SAMPLER_WEIGHTS)
    (await cats.http.post(f"/training_runs/{run}/checkpoints/sampler_weights/best/publish")).raise_for_status()
    shown = []
    for tenant in (cats, dogs):
        answer = await tenant.http.get(f"{tenant.service.url}/v1/models/tinker://{run}/sampler_weights/best")
        shown.append(answer.raise_for_status().json())
    assert [one["owned_by"] for one in shown] == ["cats", "another tenant"]
    assert [one["created"] for one in shown] == [int(cats.service.clock().timestamp())] * 2


async def test_models_of_a_base_that_is_no_longer_served_are_not_listed(cats: Tenant, dogs: Tenant) -> None:
    """Each request that names one is answered 400. Those of a served base are listed, however many newer ones there are."""
    for tenant in (cats, dogs):
        session = await tenant.session()
        kept = await tenant.run(session=session)
        await tenant.checkpoint(kept, "best", segment=Segment.SAMPLER_WEIGHTS)
        for number in range(1, 102):
            gone = await tenant.run(session=session, model_seq_id=number)
            await tenant.checkpoint(gone, "best", segment=Segment.SAMPLER_WEIGHTS)
        async with tenant.service.database.write() as transaction:
            await transaction.execute(
                update(Run).where(Run.tenant_id == tenant.id, Run.id != kept).values(base_model="test/away")
            )
        assert set(await owners(tenant)) == {BASE, kept, f"tinker://{kept}/sampler_weights/best"}
        refused = await tenant.http.get(f"{tenant.service.url}/v1/models/{gone}")
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "unknown_base_model")
        async with visitor(tenant.service, tenant.key) as http:
            shown = (await http.get("/ui/playground")).text
        assert (kept in shown, gone in shown) == (True, False)
