"""The batcher: questions are answered in batches, and each caller gets its own answer or error."""

import asyncio
from collections.abc import Sequence

import pytest

from contracts.errors import NotFound, Unavailable, WeftError
from store.batcher import Batcher, few_lengths


class Answers:
    """Doubles numbers. While ``is_held``, a batch lasts until ``go_on``. 13 fails its whole batch, a negative number itself."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.is_held = False
        self.begun = asyncio.Event()
        self.go_on = asyncio.Event()
        self.outage: WeftError | None = None

    async def work(self, asked: Sequence[int]) -> list[int | WeftError]:
        self.batches.append(list(asked))
        self.begun.set()
        if self.is_held:
            await self.go_on.wait()
        if self.outage is not None:
            raise self.outage
        if 13 in asked:
            raise ValueError("13")
        return [2 * one if one >= 0 else NotFound(f"no {one}") for one in asked]


async def test_what_is_asked_while_a_batch_runs_goes_into_the_next() -> None:
    answers = Answers()
    batcher: Batcher[int, int] = Batcher(answers.work, most=3)
    answers.is_held = True
    first = asyncio.create_task(batcher.ask(1))
    await answers.begun.wait()
    later = [asyncio.create_task(batcher.ask(number)) for number in (1, 2, 3, 4)]
    answers.go_on.set()
    assert await asyncio.gather(first, *later) == [2, 2, 4, 6, 8]
    # The same question again is not answered by the batch that was running.
    assert answers.batches == [[1], [1, 2, 3], [4]]
    assert await batcher.ask(5) == 10


async def test_batches_are_bounded_by_the_sizes_of_their_questions() -> None:
    answers = Answers()
    batcher: Batcher[int, int] = Batcher(answers.work, most=3, size=lambda number: number)
    asked = [asyncio.create_task(batcher.ask(number)) for number in (1, 2, 5, 1, 3)]
    assert await asyncio.gather(*asked) == [2, 4, 10, 2, 6]
    assert answers.batches == [[1, 2], [5], [1], [3]]


async def test_one_that_is_refused_or_breaks_does_not_take_the_others_down() -> None:
    answers = Answers()
    batcher: Batcher[int, int] = Batcher(answers.work)
    ends = await asyncio.gather(*(batcher.ask(number) for number in (1, -1, 13, 2)), return_exceptions=True)
    assert (ends[0], ends[3]) == (2, 4)
    assert isinstance(ends[1], NotFound)
    assert isinstance(ends[2], ValueError)


async def test_an_outage_is_told_to_everybody_at_once() -> None:
    answers = Answers()
    batcher: Batcher[int, int] = Batcher(answers.work)
    answers.outage = Unavailable("the database does not answer")
    ends = await asyncio.gather(*(batcher.ask(number) for number in range(3)), return_exceptions=True)
    assert all(isinstance(end, Unavailable) for end in ends)
    assert answers.batches == [[0, 1, 2]]
    answers.outage = None
    assert await batcher.ask(1) == 2


async def test_one_who_leaves_takes_nobody_along() -> None:
    answers = Answers()
    batcher: Batcher[int, int] = Batcher(answers.work)
    answers.is_held = True
    asked = [asyncio.create_task(batcher.ask(number)) for number in (1, 2)]
    await answers.begun.wait()
    asked[0].cancel()
    answers.go_on.set()
    assert await asked[1] == 4
    with pytest.raises(asyncio.CancelledError):
        await asked[0]


def test_lengths_are_powers_of_two() -> None:
    assert few_lengths([]) == []
    assert few_lengths([1]) == [1]
    assert few_lengths([1, 2, 3]) == [1, 2, 3, 3]
    assert [len(few_lengths(range(number))) for number in (4, 5, 128)] == [4, 8, 128]
