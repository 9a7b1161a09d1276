"""Facts of versions: the step that each was saved after, read of a long run's points about once for all of its versions."""

import time
from datetime import timedelta
from typing import Any

from sqlalchemy import insert

from store.tables import Checkpoint, RunPoint
from tenants.version_facts import version_facts
from tests.tenants.test_run_searches import make_runs
from tests.tenants.usage_books import NOON, Books

LONG, MANY, LOOKS = 60_000, 100, 5


def version(books: Books, who: int, run: str, id: str, seconds: float, *, listed: bool = True) -> dict[str, Any]:
    told = {"id": id, "tenant_id": books.tenants[who], "run_id": run, "segment": "sampler_weights", "name": id}
    told |= {"directory": id, "size_bytes": 1, "listed": listed, "public": False}
    return told | {"created_at": NOON + timedelta(seconds=seconds)}


def points(books: Books, who: int, run: str, count: int) -> list[dict[str, Any]]:
    """A step a second; the last one's gradient is still gathered."""
    same = {"run_id": run, "tenant_id": books.tenants[who], "loss_sum": 1.0, "loss_weight": 1.0, "loss_per": "weight"}
    same |= {"tokens": 1, "sampled_tokens": 0}
    made = [same | {"step": step, "at": NOON + timedelta(seconds=step)} for step in range(1, count + 1)]
    return [*made, same | {"step": count + 1, "at": None}]


async def write(books: Books, table: type, rows: list[dict[str, Any]]) -> None:
    async with books.database.write() as transaction:
        await transaction.execute(insert(table), rows)


async def test_each_version_has_the_step_it_was_saved_after(books: Books) -> None:
    await make_runs(books, 0, [{}, {}, {}])
    await make_runs(books, 1, [{}])
    await write(books, RunPoint, points(books, 0, "0-0", 9) + points(books, 0, "0-1", 4) + points(books, 1, "1-0", 5))
    wanted = {"early": ("0-0", 0.5, 0), "one": ("0-0", 1, 1), "five": ("0-0", 5.5, 5), "same": ("0-0", 5.5, 5)}
    wanted |= {"last": ("0-0", 99, 9), "other": ("0-1", 3, 3), "none": ("0-2", 50, 0)}
    rows = [version(books, 0, run, id, at, listed=id != "last") for id, (run, at, _) in wanted.items()]
    await write(books, Checkpoint, [*rows, version(books, 1, "1-0", "theirs", 3)])
    async with books.database.read() as session:
        found = await version_facts(session, books.tenants[0], [*wanted, "theirs", "gone"])
        alone = await version_facts(session, books.tenants[0], ["five"])
        theirs = await version_facts(session, books.tenants[1], ["theirs", "one"])
    assert {id: one.step for id, one in found.items()} == {id: step for id, (_, _, step) in wanted.items()}
    assert (found["last"].path, found["one"].path) == (None, "tinker://0-0/sampler_weights/one")
    assert alone == {"five": found["five"]}
    assert {id: one.step for id, one in theirs.items()} == {"theirs": 3}


async def test_many_versions_of_a_long_run_are_told_about_as_soon_as_its_oldest(books: Books) -> None:
    await make_runs(books, 0, [{}])
    await write(books, RunPoint, points(books, 0, "0-0", LONG))
    every = LONG // MANY
    await write(
        books, Checkpoint, [version(books, 0, "0-0", f"v{number}", every * number) for number in range(1, MANY + 1)]
    )
    async with books.database.read() as session:
        took: list[list[float]] = [[], []]
        # The quickest of several counts: the machine may be busy.
        for _ in range(LOOKS):
            for taken, wanted in zip(took, (["v1"], [f"v{number}" for number in range(1, MANY + 1)]), strict=True):
                began = time.perf_counter()
                found = await version_facts(session, books.tenants[0], wanted)
                taken.append(time.perf_counter() - began)
    assert {id: one.step for id, one in found.items()} == {
        f"v{number}": every * number for number in range(1, MANY + 1)
    }
    # One by one they would read fifty times as many points.
    assert min(took[1]) < 10 * min(took[0]) + 0.2, took
