"""A tenant's runs over HTTP: pages by key, filters, the newest losses, and the marks of a curve."""

from datetime import timedelta

import pytest
from sqlalchemy import update

from contracts.paths import Segment
from store.tables import Run, RunState
from tenants.run_history import RunEventKind, note_run_events
from tenants.sessions import finish_session
from tests.api.test_points import steps


def url(tenant, path: str = "") -> str:
    return f"{tenant.service.url}/api/weft/v1/runs{path}"


async def ids(tenant, **query) -> list[str]:
    answer = await tenant.http.get(url(tenant), params=query)
    assert answer.status_code == 200, answer.text
    return [one["id"] for one in answer.json()["runs"]]


async def test_pages_by_key_have_every_run_once_while_others_are_made(cats, dogs) -> None:
    await dogs.run()
    session = await cats.session()
    made = [await cats.run(session=session, model_seq_id=number) for number in range(5)]
    seen: list[str] = []
    cursor = None
    while True:
        query = {"limit": 2} | ({} if cursor is None else {"cursor": cursor})
        page = (await cats.http.get(url(cats), params=query)).json()
        seen += [one["id"] for one in page["runs"]]
        cats.service.clock.move(seconds=1)
        await cats.run()
        if (cursor := page["next_cursor"]) is None:
            break
    assert seen == sorted(made, reverse=True)


async def test_a_wrong_cursor_and_a_wrong_entry_are_refused(cats) -> None:
    for query in ({"cursor": "x"}, {"cursor": "99999999999999999999-x"}, {"metadata": "colour"}, {"metadata": "=b"}):
        answer = await cats.http.get(url(cats), params=query)
        assert answer.status_code == 400, answer.text


async def test_runs_are_chosen_by_state_base_text_and_metadata(cats, dogs) -> None:
    await dogs.run()
    session = await cats.session()
    one, two, three = [await cats.run(session=session, model_seq_id=number) for number in range(3)]
    four = await cats.run()
    async with cats.service.database.write() as transaction:
        for run, metadata in ((one, {"colour": "grün"}), (two, {"colour": "red", "50%": "_"}), (three, None)):
            await transaction.execute(update(Run).where(Run.id == run).values(user_metadata=metadata))
        await transaction.execute(update(Run).where(Run.id == three).values(state=RunState.UNLOADED))
        await transaction.execute(update(Run).where(Run.id == four).values(base_model="other/base"))
        await finish_session(transaction, cats.id, session, reason="success", detail=None, clock=cats.service.clock)
    assert await ids(cats, state="ended") == [two, one]
    assert await ids(cats, state="unloaded") == [three]
    assert await ids(cats, state="ready") == [four]
    assert await ids(cats, base_model="other/base") == [four]
    assert await ids(cats, text="OTHER") == [four]
    assert await ids(cats, text="grün") == [one]
    assert await ids(cats, text="0%") == [two]
    assert await ids(cats, text="%") == [two]
    assert await ids(cats, metadata="colour=red") == [two]
    assert await ids(cats, metadata="colour=re") == []
    assert await ids(cats, text=one) == [one]


async def test_a_run_tells_its_last_losses(cats, dogs) -> None:
    mine, theirs = await cats.run(), await dogs.run()
    await steps(cats, mine, [8.0, 6.0, 4.0])
    await steps(dogs, theirs, [1.0])
    (told,) = (await cats.http.get(url(cats), params={"recent": 2})).json()["runs"]
    assert told["recent_losses"] == [3.0, 2.0]
    assert told["optimizer_steps"] == 3
    assert told["sdk_version"] == "0.38.0"
    alone = (await cats.http.get(url(cats, f"/{mine}"), params={"recent": 100})).json()
    assert alone["recent_losses"] == [4.0, 3.0, 2.0]
    assert (await dogs.http.get(url(dogs, f"/{mine}"))).status_code == 404


async def test_marks_stand_at_the_steps_that_had_ended(cats, dogs) -> None:
    run = await cats.run()
    service = cats.service
    service.clock.move(seconds=1)
    await steps(cats, run, [8.0])
    service.clock.move(seconds=1)
    await cats.checkpoint(run, "one")
    await cats.http.post(f"/adapters/{run}/pause", json={"timeout_seconds": 0, "ttl_seconds": 60, "reason": "look"})
    service.clock.move(seconds=1)
    async with service.database.write() as transaction:
        await note_run_events(transaction, [run], RunEventKind.LOST, trainer="secret", now=service.clock())
    service.clock.move(seconds=120)
    await cats.checkpoint(run, "two", segment=Segment.SAMPLER_WEIGHTS)
    marks = (await cats.http.get(url(cats, f"/{run}/marks"))).json()["marks"]
    assert [(mark["kind"], mark["step"]) for mark in marks] == [
        ("session_opened", 0),
        ("paused", 1),
        ("checkpoint", 1),
        ("trainer_lost", 1),
        ("resumed", 1),
        ("publication", 1),
    ]
    assert "look" in marks[1]["text"]
    assert "secret" not in str(marks)
    assert (await dogs.http.get(url(dogs, f"/{run}/marks"))).status_code == 404


@pytest.mark.parametrize("read_whole", [2000, 0])
async def test_a_mark_of_a_long_run_is_found_by_halves(cats, monkeypatch, read_whole) -> None:
    monkeypatch.setattr("tenants.run_marks._READ_WHOLE", read_whole)
    session = await cats.session()
    run = await cats.run(session=session)
    from tenants.run_marks import steps_at
    from tenants.run_points import PointPart, add_parts

    begin = cats.service.clock()
    async with cats.service.database.write() as transaction:
        parts = [PointPart(run, step, cats.id, at=begin + timedelta(seconds=step)) for step in range(1, 38)]
        await add_parts(transaction, parts)
        await transaction.execute(update(Run).where(Run.id == run).values(optimizer_steps=37))
    async with cats.service.database.read() as reading:
        found = await reading.get_one(Run, run)
        times = [begin + timedelta(seconds=seconds) for seconds in (0, 1, 1.5, 20, 37, 90)]
        assert await steps_at(reading, found, times) == [0, 1, 1, 20, 37, 37]
