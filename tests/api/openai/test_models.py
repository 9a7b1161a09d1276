"""The list of models: each tenant's own beside the bases, with the owner that the SDK's lists name."""

from contracts.paths import Segment
from tests.api.conftest import BASE, Tenant


async def owners(tenant: Tenant) -> dict[str, str]:
    """Owner of each model that the tenant is shown, by the list and one by one."""
    address = f"{tenant.service.url}/v1/models"
    listed = (await tenant.http.get(address)).raise_for_status().json()["data"]
    found = {one["id"]: one["owned_by"] for one in listed}
    for name, owner in found.items():
        shown = (await tenant.http.get(f"{address}/{name}")).raise_for_status().json()
        assert shown["owned_by"] == owner, name
    return found


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
