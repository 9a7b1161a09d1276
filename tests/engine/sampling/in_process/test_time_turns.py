"""Turns by time between owners with few sequences and owners with many."""

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from engine.piece_size import COMPANY_SECONDS
from engine.sampling.in_process.continuous_batching import ContinuousBatcher
from engine.sampling.in_process.forward_pass import ForwardPass
from engine.sampling.in_process.sequences import Job
from engine.sampling.in_process.time_turns import CREDIT_SECONDS, Division, Group, TimeTurns
from engine.sampling.replica import GenerateRequest
from tests.engine.sampling.conftest import World


def test_an_owner_is_apart_while_another_one_holds_many_times_as_much() -> None:
    division = Division(divides=True)
    assert not division.renew({"a": 8, "b": 8, "c": 2})
    assert division.renew({"a": 16, "b": 8, "c": 2})
    assert [division.group_of(owner) for owner in "abc"] == [Group.MANY, Group.MANY, Group.FEW]
    assert not division.renew({"a": 8, "b": 8, "c": 2}), "an owner moved at the first change"
    assert division.renew({"a": 7, "b": 7, "c": 2})
    assert division.group_of("c") is Group.MANY


def test_an_accelerator_keeps_all_owners_together() -> None:
    division = Division(divides=False)
    assert not division.renew({"a": 64, "b": 1})
    assert division.group_of("b") is Group.MANY


@pytest.mark.parametrize("seed", range(20))
def test_groups_get_time_by_their_shares_within_the_bound(seed: int) -> None:
    rng = random.Random(seed)
    shares = {Group.FEW: rng.uniform(0.2, 5), Group.MANY: rng.uniform(0.2, 5)}
    longest = {Group.FEW: rng.uniform(0.5, 3), Group.MANY: rng.uniform(0.5, 60)}
    turns, got = TimeTurns(), dict.fromkeys(Group, 0.0)
    bound = max(longest[group] / shares[group] for group in Group)
    for _ in range(2000):
        group = turns.choose(shares)
        assert group is not None
        seconds = rng.uniform(0.1, longest[group])
        turns.charge(group, seconds, shares)
        got[group] += seconds
        assert abs(got[Group.FEW] / shares[Group.FEW] - got[Group.MANY] / shares[Group.MANY]) <= bound + 1e-9


BOTH = dict.fromkeys(Group, 1.0)


def turns_taken(turns: TimeTurns, number: int, seconds: float) -> list[Group]:
    """Return the groups of the next turns, ``seconds`` each, while both have work."""
    taken = []
    for _ in range(number):
        group = turns.choose(BOTH)
        assert group is not None
        taken.append(group)
        turns.charge(group, seconds, BOTH)
    return taken


def test_the_few_are_ahead_by_what_they_left_to_the_many_and_by_no_more_than_the_credit() -> None:
    turns, few, many = TimeTurns(), Group.FEW, Group.MANY
    turns.charge(many, 0.25, {many: 1.0})
    # Where both have had as much, the few go first.
    assert turns_taken(turns, 5, 0.125) == [few, few, few, many, few]
    for _ in range(100):
        assert turns.choose({many: 1.0}) is many
        turns.charge(many, 0.25, {many: 1.0})
    assert turns_taken(turns, 8, CREDIT_SECONDS / 4) == [few] * 5 + [many, few, many]
    assert turns.choose({}) is None


def test_the_many_are_owed_nothing_for_the_time_they_were_away() -> None:
    turns, few, many = TimeTurns(), Group.FEW, Group.MANY
    for _ in range(100):
        assert turns.choose({few: 1.0}) is few
        turns.charge(few, 1.0, {few: 1.0})
    assert turns_taken(turns, 4, 1.0) == [few, many, few, many]


def test_the_turn_under_way_is_owed_whole_to_the_few_that_come_in_it() -> None:
    turns, few, many = TimeTurns(), Group.FEW, Group.MANY
    turns.charge(many, 4 * CREDIT_SECONDS, {many: 1.0})
    assert turns_taken(turns, 6, CREDIT_SECONDS) == [few] * 5 + [many]


@dataclass
class TokenClock:
    """Clock of a device whose forward pass takes a second for each token, as a CPU's takes longer the more there are."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> TokenClock:
    """The clock, which every forward pass moves."""
    found, whole = TokenClock(), ForwardPass.__call__

    def timed(self: ForwardPass, token_ids: Any, *rest: Any) -> Any:
        found.now += token_ids.shape[0] * token_ids.shape[1]
        return whole(self, token_ids, *rest)

    monkeypatch.setattr(ForwardPass, "__call__", timed)
    return found


class _Outbox:
    """Outbox of jobs whose events nobody reads."""

    def add(self, *_: Any) -> None: ...
    def end(self, *_: Any) -> None: ...


def test_a_light_owner_has_half_of_the_time_beside_a_full_batch_and_all_of_it_after_a_pause(
    world: World, clock: TokenClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step takes as long as it has rows, as on a CPU: a light sequence had one token for each step of the crowd."""
    forward = ForwardPass(world.base)
    monkeypatch.setattr("engine.sampling.in_process.time_turns.CREDIT_SECONDS", 200.0)
    batcher = ContinuousBatcher(forward, 32, 1 << 30, piece_seconds=1e9, clock=clock)

    def submit(owner: str, sequences: int, tokens: int) -> Job:
        request = GenerateRequest(
            request_id=f"{owner}-{sequences}-{tokens}",
            prompt=np.array([5, 6], np.int64),
            seeds=tuple(range(sequences)),
            max_tokens=tokens,
            owner=owner,
        )
        job = Job(request, _Outbox(), lambda _: None)  # type: ignore[arg-type]
        batcher.submit(job)
        return job

    def seconds_of(job: Job) -> float:
        began = clock.now
        while job.live:
            batcher.turn()
        return clock.now - began

    def pause(seconds: float) -> None:
        ends = clock.now + seconds
        while clock.now < ends:
            batcher.turn()

    try:
        alone = seconds_of(submit("light", 1, 64))
        flood = submit("flood", 32, 2000)
        while batcher.running < 32:
            batcher.turn()
        seconds_of(submit("light", 1, 128))
        beside = seconds_of(submit("light", 1, 64))
        pause(2 * alone)
        after_a_pause = seconds_of(submit("light", 1, 64))
        assert flood.live
        pause(6 * alone)
        long_after = seconds_of(submit("light", 1, 320))
        assert flood.live
    finally:
        forward.close()
    assert beside <= 2 * alone + 2 * 32
    assert beside >= 1.5 * alone, "the flood got less than its part of the time"
    assert after_a_pause <= alone + 32, "a sample after a pause waited for more than the step under way"
    assert long_after >= 2 * 320 - 200 - 2 * 32, "a pause of any length stops the flood for as long"


def test_who_comes_waits_for_a_chunk_of_bounded_time_not_for_a_whole_prompt(world: World, clock: TokenClock) -> None:
    """A forward pass takes a second for each token. A prompt is read at once only while its owner is alone."""
    forward = ForwardPass(world.base)
    batcher = ContinuousBatcher(forward, 32, 1 << 30, piece_seconds=300.0, clock=clock)

    def submit(owner: str, prompt: int) -> Job:
        tokens = np.full(prompt, 5, np.int64)
        request = GenerateRequest(
            request_id=f"{owner}-{clock.now}", prompt=tokens, seeds=(1,), max_tokens=2, owner=owner
        )
        job = Job(request, _Outbox(), lambda _: None)  # type: ignore[arg-type]
        batcher.submit(job)
        return job

    def turn() -> float:
        began = clock.now
        batcher.turn()
        return clock.now - began

    def finish(job: Job) -> None:
        while job.live:
            batcher.turn()

    try:
        alone = submit("flood", 1000)
        assert turn() >= 1000
        finish(alone)
        finish(submit("light", 2))
        flood = submit("flood", 1000)
        assert turn() <= 300
        light = submit("light", 2)
        began = clock.now
        finish(light)
        assert clock.now - began <= 300
        assert flood.live
        finish(flood)
        clock.now += COMPANY_SECONDS
        alone = submit("flood", 1000)
        assert turn() >= 1000, "an owner that is alone again has its prompts cut"
        finish(alone)
    finally:
        forward.close()


def test_a_prompt_whose_owner_has_left_keeps_nobody_busy(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner leaves while its prompt is read, alone and beside another one, which draws all its tokens."""
    monkeypatch.setattr("engine.sampling.in_process.prefill.MAX_CELLS", 4)
    forward = ForwardPass(world.base)
    batcher = ContinuousBatcher(forward, 32, 1 << 30, piece_seconds=1.0)

    def submit(owner: str, prompt: int) -> Job:
        tokens = np.full(prompt, 5, np.int64)
        request = GenerateRequest(request_id=owner, prompt=tokens, seeds=(1,), max_tokens=8, owner=owner)
        job = Job(request, _Outbox(), lambda _: None)  # type: ignore[arg-type]
        batcher.submit(job)
        return job

    def leave() -> None:
        leaver = submit("leaver", 300)
        batcher.turn()
        assert leaver.live
        assert not leaver.begun
        leaver.drop()

    try:
        leave()
        batcher.turn()
        assert not batcher.busy
        stays = submit("stays", 2)
        batcher.turn()
        leave()
        for _ in range(12):
            batcher.turn()
        assert not stays.live
        assert not batcher.busy
    finally:
        forward.close()
