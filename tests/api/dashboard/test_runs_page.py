"""The list of runs: rows that are shown go on by their ids, whatever the list's filters and however many runs came since."""

from sqlalchemy import event

from api.dashboard.tenant.runs import SHOWN_RUNS
from tests.api.dashboard.test_run_feeds import step
from tests.api.dashboard.visits import visitor

LIVE = "/ui/runs/live"


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
