"""An owner that moves from one batch to the other takes its own past along, whoever gets the rows that it leaves."""

import asyncio
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from engine.model.base import BaseModel
from engine.sampling.event_stream import EventStream
from engine.sampling.in_process.continuous_batching import ContinuousBatcher
from engine.sampling.in_process.forward_pass import ForwardPass
from engine.sampling.in_process.sequences import Job
from engine.sampling.replica import GenerateEvent, GenerateRequest, NewToken
from tests.engine.sampling.conftest import World

PROMPT = list(range(40, 60))
TOKENS = 60
CROWD = 24
"""Sequences of the owner that holds many times as much as the others."""


class Tokens:
    """Outbox of one job, which keeps the tokens of its sequences."""

    def __init__(self) -> None:
        self.made: defaultdict[int, list[NewToken]] = defaultdict(list)

    def add(self, _stream: EventStream, event: GenerateEvent) -> None:
        """Keep a token."""
        if isinstance(event, NewToken):
            self.made[event.index].append(event)

    def end(self, *_: Any) -> None: ...
    def answer(self, *_: Any) -> None: ...


class Batches:
    """A batcher whose clock the test moves."""

    def __init__(self, base: BaseModel) -> None:
        self.forward, self.now = ForwardPass(base), 0.0
        self.made: dict[str, Tokens] = {}
        """Tokens by owner."""
        self.batcher = ContinuousBatcher(self.forward, 64, 1 << 30, piece_seconds=0.1, clock=lambda: self.now)

    def submit(self, owner: str, prompt: list[int], sequences: int) -> Job:
        """Queue an owner's greedy sequences."""
        ids = np.array(prompt, np.int64)
        request = GenerateRequest(owner, ids, tuple(range(sequences)), TOKENS, temperature=0, owner=owner)
        self.made[owner] = Tokens()
        job = Job(request, self.made[owner], lambda _: None)  # type: ignore[arg-type]
        self.batcher.submit(job)
        return job

    def turn(self, *, seconds: float = 0.0) -> None:
        """Take a turn, which takes so long."""
        self.now += seconds
        with torch.inference_mode():
            self.batcher.turn()


@pytest.fixture
def batches(world: World) -> Iterator[Batches]:
    made = Batches(world.base)
    yield made
    made.forward.close()


@pytest.mark.parametrize(("newcomers", "neighbours"), [(3, 9), (0, 21)])
async def test_an_owner_that_moves_goes_on_from_its_own_past(
    world: World, batches: Batches, newcomers: int, neighbours: int
) -> None:
    """The crowd shrinks, so an owner is one of the many now. In the same turn others join those that it leaves."""
    crowd = batches.submit("crowd", [1, 2, 3], CROWD)
    for _ in range(2):
        batches.turn()
    batches.submit("mover", PROMPT, 3)
    for number in range(neighbours):
        batches.submit(f"neighbour {number}", [100 + number] * (3 + number), 1)
    while batches.batcher.running < CROWD + 3 + neighbours:
        batches.turn()
    for number in range(newcomers):
        batches.submit(f"newcomer {number}", [200] * 10, 1)
    for index in range(CROWD - 8):
        crowd.cut(index, asyncio.get_running_loop().create_future())
    batches.turn()
    while batches.batcher.busy:
        batches.turn(seconds=0.01)
    for owner, prompt in (("mover", PROMPT), ("neighbour 0", [100] * 3), ("neighbour 8", [108] * 11)):
        made = batches.made[owner].made[0]
        assert len(made) == TOKENS
        expected = world.bare.of_tokens(prompt, [one.token for one in made])
        np.testing.assert_allclose([one.logprob for one in made], expected, atol=1e-4)
