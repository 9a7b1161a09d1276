"""Points and own metrics of runs over HTTP: idempotent, bounded, and a tenant's own."""

import pytest
from weft_client.models import Points

from contracts.losses import LossName
from contracts.operations import ForwardBackwardOutput, LossSpec, OperationKind, OptimStepped, TrainingBatch
from tenants.limits import set_tenant

PASS = TrainingBatch(LossSpec(LossName.CROSS_ENTROPY), [])
PPO = TrainingBatch(LossSpec(LossName.PPO), [])


def url(tenant, run: str, what: str = "points") -> str:
    return f"{tenant.service.url}/api/weft/v1/runs/{run}/{what}"


async def steps(tenant, run: str, losses: list[float]) -> None:
    """Have a pass and a step done for each loss."""
    for number, loss in enumerate(losses):
        await tenant.operation(run, 2 * number + 1, kind=OperationKind.FORWARD_BACKWARD, payload=PASS)
        await tenant.service.run_next(
            ForwardBackwardOutput([], {"loss:sum": loss, "tokens:sum": 4.0, "weights:sum": 2.0})
        )
        await tenant.operation(run, 2 * number + 2)
        await tenant.service.run_next(OptimStepped({"grad_norm:max": 3.0, "step:max": number + 1.0}))


async def add(tenant, run: str, step: int, **metrics: float | None):
    return await tenant.http.post(url(tenant, run), json={"points": [{"step": step, "metrics": metrics}]})


async def values(tenant, run: str, name: str, **query: int) -> list[tuple[int, float | None]]:
    answer = await tenant.http.get(url(tenant, run, "metrics"), params={"name": name, **query})
    assert answer.status_code == 200, answer.text
    return [(one["step"], one["value"]) for one in answer.json()["values"]]


async def test_a_curve_is_read_on_from_any_step(cats, dogs) -> None:
    mine, theirs = await cats.run(), await dogs.run()
    await steps(cats, mine, [8.0, 6.0, 4.0])
    await steps(dogs, theirs, [1.0])
    whole = (await cats.http.get(url(cats, mine))).json()
    assert [(one["step"], one["mean_loss"], one["loss_per"]) for one in whole["points"]] == [
        (1, 4.0, "weight"),
        (2, 3.0, "weight"),
        (3, 2.0, "weight"),
    ]
    assert whole["optimizer_steps"] == 3
    page = (await cats.http.get(url(cats, mine), params={"after": 1, "limit": 1})).json()
    assert [one["step"] for one in page["points"]] == [2]
    assert len((await dogs.http.get(url(dogs, theirs))).json()["points"]) == 1


async def test_a_point_tells_its_loss_functions_to_its_tenant_and_the_client_reads_them(cats, dogs) -> None:
    mine, theirs = await cats.run(), await dogs.run()
    for number, payload in enumerate((PPO, PASS), 1):
        await cats.operation(mine, number, kind=OperationKind.FORWARD_BACKWARD, payload=payload)
        await cats.service.run_next(ForwardBackwardOutput([], {"loss:sum": 1.0, "tokens:sum": 4.0}))
    await cats.operation(mine, 3)
    await cats.service.run_next(OptimStepped({"step:max": 1.0}))
    await steps(dogs, theirs, [1.0])
    answer = await cats.http.get(url(cats, mine))
    assert [one["loss_fns"] for one in answer.json()["points"]] == [["ppo", "cross_entropy"]]
    (point,) = Points.model_validate_json(answer.content).points
    assert point.loss_fns == ["ppo", "cross_entropy"]
    assert [one["loss_fns"] for one in (await dogs.http.get(url(dogs, theirs))).json()["points"]] == [["cross_entropy"]]


async def test_a_run_of_another_tenant_is_not_found(cats, dogs) -> None:
    run = await cats.run()
    assert (await add(cats, run, 1, reward=0.5)).status_code == 200
    answers = [
        await dogs.http.get(url(dogs, run)),
        await dogs.http.get(url(dogs, run, "metrics"), params={"name": "reward"}),
        await add(dogs, run, 1, reward=9.0),
    ]
    assert [answer.status_code for answer in answers] == [404] * 3
    assert await values(cats, run, "reward") == [(1, 0.5)]


async def test_a_repeated_metric_is_one_value_and_a_later_one_replaces_it(cats) -> None:
    run = await cats.run()
    for reward in (0.5, 0.5, 0.75):
        assert (await add(cats, run, 7, reward=reward, **{"env/all/solved": None})).json() == {"values": 2}
    await add(cats, run, 8, reward=1.0)
    assert await values(cats, run, "reward") == [(7, 0.75), (8, 1.0)]
    assert await values(cats, run, "reward", after=7) == [(8, 1.0)]
    assert await values(cats, run, "env/all/solved") == [(7, None)]
    assert (await cats.http.get(url(cats, run))).json()["metrics"] == ["env/all/solved", "reward"]


async def test_metrics_end_at_the_tenants_limit_and_repeats_still_pass(cats, dogs) -> None:
    mine, theirs = await cats.run(), await dogs.run()
    async with cats.service.database.write() as transaction:
        await set_tenant(transaction, name="cats", limits={"run_metrics": 2})
    for step in (1, 2):
        assert (await add(cats, mine, step, reward=1.0)).status_code == 200
    refused = await add(cats, mine, 3, reward=1.0)
    assert refused.status_code == 400
    assert "run_metrics" in refused.json()["detail"]
    assert (await add(cats, mine, 2, reward=2.0)).status_code == 200
    assert await values(cats, mine, "reward") == [(1, 1.0), (2, 2.0)]
    for step in (1, 2, 3):
        assert (await add(dogs, theirs, step, reward=1.0)).status_code == 200


@pytest.mark.parametrize(
    ("metrics", "step"),
    [({"": 1.0}, 1), ({"x" * 101: 1.0}, 1), ({}, 1), ({"reward": 1.0}, -1), ({"reward": 1.0}, 2**60), ({"r": "a"}, 1)],
)
async def test_a_bad_metric_is_refused_and_nothing_is_recorded(cats, metrics: dict[str, object], step: int) -> None:
    run = await cats.run()
    body = {"points": [{"step": 1, "metrics": {"good": 1.0}}, {"step": step, "metrics": metrics}]}
    if not metrics:
        body = {"points": []}
    assert (await cats.http.post(url(cats, run), json=body)).status_code == 400
    assert await values(cats, run, "good") == []


async def test_names_of_metrics_are_bounded(cats) -> None:
    run = await cats.run()
    assert (await add(cats, run, 1, **{f"m{number}": 1.0 for number in range(200)})).status_code == 200
    refused = await add(cats, run, 1, another=1.0)
    assert (refused.status_code, "use names again" in refused.text) == (400, True)
    assert (await add(cats, run, 2, m7=1.0)).status_code == 200
