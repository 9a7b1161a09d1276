"""Statements of a model's creation: its tenant's room is counted under the lock, and looked for once for many models."""

from sqlalchemy import event

from contracts.operations import LoraSettings
from tests.workers.training.conftest import NewRig

MANY = 12


async def test_creations_of_a_tenant_are_asked_for_together_and_a_neighbours_goes_on(new_rig: NewRig) -> None:
    counts: list[str] = []

    def note(_connection: object, _cursor: object, statement: str, *_rest: object) -> None:
        if "used_open_runs" in statement:
            counts.append(statement)

    rig = new_rig()
    cats = await rig.client("cats")
    others = [
        await rig.model(cats.tenant, cats.session, LoraSettings(rank=1, seed=1), number) for number in range(1, MANY)
    ]
    dogs = await rig.client("dogs")
    event.listen(rig.database.engine.sync_engine, "before_cursor_execute", note)
    async with rig.running():
        for one in (cats, *others, dogs):
            await one.result(one.created)
    # Each creation counts under the lock. A look may have come between the claims, and a sweep asks anew.
    assert len(counts) < 2 * (MANY + 1)
