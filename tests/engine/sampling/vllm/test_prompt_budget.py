"""The budget of prompt tokens on a vLLM server: tenants take turns at it, by tokens and shares. Needs no vLLM."""

import asyncio
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.sampling.vllm.prompt_budget import PromptBudget, Reservation
from engine.sampling.vllm.replica import VllmReplica
from tests.engine.sampling.drawing import DEADLINE_S, GREEDY, Client
from tests.engine.sampling.vllm.scripted import ScriptedServer, chunk, scripted_settings

LIMIT = 1000


class Line:
    """Prompts that wait for a budget, and their reservations in the order in which they were given."""

    def __init__(self) -> None:
        self.budget = PromptBudget(LIMIT)
        self.given: list[tuple[str, Reservation]] = []

    async def add(self, owner: str, tokens: int, *, count: int = 1, share: float = 1.0) -> list["asyncio.Task[None]"]:
        """Let ``count`` prompts wait."""
        tasks = [asyncio.create_task(self._reserve(owner, tokens, share)) for _ in range(count)]
        await self.settle()
        return tasks

    async def _reserve(self, owner: str, tokens: int, share: float) -> None:
        self.given.append((owner, await self.budget.reserve(tokens, owner=owner, share=share)))

    async def settle(self) -> None:
        """Let every prompt that has the budget go on."""
        for _ in range(5):
            await asyncio.sleep(0)

    async def release(self, number: int) -> None:
        """Return the tokens of reservation ``number``."""
        self.given[number][1].release()
        await self.settle()

    @property
    def owners(self) -> list[str]:
        return [owner for owner, _ in self.given]


async def test_one_tenants_many_long_prompts_do_not_stand_before_anothers() -> None:
    line = Line()
    await line.add("cat", 900, count=20)
    await line.add("dog", 300, count=3)
    assert line.owners == ["cat"]
    await line.release(0)
    assert line.owners == ["cat", "dog", "dog", "dog"]
    for number in range(1, 4):
        await line.release(number)
    # With nobody beside it the flood has the budget to itself.
    for number in range(4, 22):
        await line.release(number)
    assert Counter(line.owners) == {"cat": 20, "dog": 3}


async def test_tenants_share_the_budget_by_their_shares() -> None:
    line = Line()
    await line.add("cat", 500, count=40, share=1.0)
    await line.add("dog", 500, count=40, share=3.0)
    number = 0
    while len(line.given) < 50:
        await line.release(number)
        number += 1
    later = Counter(line.owners[2:])
    assert abs(later["dog"] - 3 * later["cat"]) <= 4, later


async def test_a_prompt_longer_than_the_budget_is_read_alone_and_is_kept_out_by_nobodys_short_ones() -> None:
    line = Line()
    await line.add("dog", 400, count=2)
    await line.add("cat", 2 * LIMIT)
    waiting = await line.add("dog", 100, count=60)
    number = 0
    while "cat" not in line.owners:
        await line.release(number)
        number += 1
    assert number < 2 + len(waiting) // 2
    given = len(line.given)
    await line.release(line.owners.index("cat"))
    assert line.owners[given:] == ["dog"] * 10


async def test_a_prompt_that_waits_no_longer_takes_nobodys_turn() -> None:
    line = Line()
    await line.add("dog", LIMIT)
    (left,) = await line.add("cat", LIMIT)
    (given,) = await line.add("cat", 10)
    beside = await line.add("dog", 10)
    left.cancel()
    await line.settle()
    line.given[0][1].release()
    # Given, and cancelled before its task went on: the budget has its tokens again.
    given.cancel()
    await line.settle()
    assert line.owners == ["dog", "dog"]
    await asyncio.gather(*beside)
    await line.add("cat", LIMIT - 10)
    assert line.owners == ["dog", "dog", "cat"]


async def test_a_replicas_tenants_take_turns_at_its_budget(
    scripted: ScriptedServer, world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The flood's prompts came first. The neighbour's is the next one on the server all the same."""
    reserve, asked = PromptBudget.reserve, asyncio.Queue[str]()

    async def noted(budget: PromptBudget, tokens: int, *, owner: str = "", share: float = 1.0) -> Reservation:
        asked.put_nowait(owner)
        return await reserve(budget, tokens, owner=owner, share=share)

    flood, light = [5, 1, 2], [5, 3]
    settings = replace(scripted_settings(scripted, world.base.facts, tmp_path), prompt_tokens=len(flood))
    replica = VllmReplica(settings)
    await replica.start()
    monkeypatch.setattr(PromptBudget, "reserve", noted)
    client = Client(replica)
    scripted.lines, scripted.hangs = (), True
    first = client.start(flood, world.bare, replace(GREEDY, owner="cat"))
    await scripted.until_asked(flood, 1)
    waiting = [client.start(flood, world.bare, replace(GREEDY, owner="cat")) for _ in range(5)]
    async with asyncio.timeout(DEADLINE_S):
        assert [await asked.get() for _ in range(6)] == ["cat"] * 6
        neighbour = client.start(light, world.bare, replace(GREEDY, owner="dog"))
        assert await asked.get() == "dog"
    scripted.lines, scripted.hangs = (chunk(1, 2, 3, finish="length", end=3), "[DONE]"), False
    await first.leave()
    await asyncio.gather(neighbour.end(), *(one.end() for one in waiting))
    order = [body["token_ids"] for body in scripted.bodies if body["token_ids"] in (flood, light)]
    assert order == [flood, light, *[flood] * 5]
    await replica.close()
