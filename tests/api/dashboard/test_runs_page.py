"""The list of runs: rows that are shown go on by their ids, whatever the list's filters and however many runs came since."""

import pytest
from sqlalchemy import event, update

from api.dashboard.tenant.runs import MOST_ROWS, SHOWN_RUNS
from store.tables import Run
from tests.api.dashboard.test_run_feeds import step
from tests.api.dashboard.visits import visitor

LIVE = "/ui/runs/live"
MANY = MOST_ROWS + 100


async def test_shown_rows_go_on_by_their_ids_and_a_foreign_one_is_left_out(service, cats, dogs) -> None:
    run, theirs = await cats.run(), await dogs.run()
    for number in range(SHOWN_RUNS + 1):
        await cats.run(model_seq_id=number + 1)
    await step(cats, run, 1)
    asked = {"run": [run, theirs, "nothing"]}
    statements: list[str] = []
    engine = service.database.engine.sync_engine
    async with visitor(service, cats.key) as http, visitor(service, dogs.key) as other:
        event.listen(engine, "before_cursor_execute", lambda *told: statements.append(told[2]))
        (told,) = (await http.get(LIVE, params=asked)).json()["runs"]
        assert (told["id"], told["steps"], told["loss"]) == (run, 1, 0.5)
        assert len([one for one in statements if "FROM runs" in one or "FROM run_points" in one]) == 2
        assert [one["id"] for one in (await other.get(LIVE, params=asked)).json()["runs"]] == [theirs]
        assert (await http.get(LIVE)).json() == {"runs": []}
        assert (await http.get(LIVE, params={"run": ["x"] * (SHOWN_RUNS + 1)})).status_code == 400


async def test_pages_of_runs_are_rendered_beside_the_event_loop_with_a_bounded_table(
    service, cats, dogs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Differing settings come first where others are left out: metadata may have thousands of names."""
    runs = [await tenant.run(model_seq_id=number) for tenant in (cats, dogs) for number in (1, 2)]
    for number, run in enumerate(runs):
        metadata = {f"name {place:04}": "same" for place in range(MANY)} | {"zone": str(number)}
        own = metadata if number < 2 else {"zone": str(number)}
        async with service.database.write() as transaction:
            await transaction.execute(update(Run).where(Run.id == run).values(user_metadata=own))
    beside: list[str] = []
    threads = service.services.admission.threads

    async def run_beside(tenant: str, function, *args):
        beside.append(tenant)
        return await type(threads).run(threads, tenant, function, *args)

    monkeypatch.setattr(threads, "run", run_beside)
    async with visitor(service, cats.key) as http, visitor(service, dogs.key) as other:
        shown = (await http.get("/ui/runs/compare", params={"run": runs[:2]})).text
        short = (await other.get("/ui/runs/compare", params={"run": runs[2:]})).text
        listed = (await http.get("/ui/runs")).text
    assert beside == [cats.id, dogs.id, cats.id]
    assert shown.count('<th scope="row">') == MOST_ROWS + 1
    assert "metadata zone" in shown
    settings = 8 + MANY + 1 + 1
    assert f"1 of {settings} differ; those are marked ≠. {settings - MOST_ROWS} are left out here" in shown
    assert "left out" not in short
    assert listed.count(f"+{MANY + 1 - 3}") == 2
