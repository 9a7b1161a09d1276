"""The two loops that are compared: in step, and asynchronous within a bound on the versions' lag."""

import asyncio
from collections import deque
from dataclasses import dataclass, field
from time import perf_counter

from bench.rl.policy import Group, Policy


@dataclass(slots=True)
class Turn:
    """Figures of one loop on a policy of its own. Seconds leave out the steps that warm up.

    ``sampling`` and ``training`` are the parts of a loop in step: drawing a batch; the step on it with the publication.
    """

    seconds: float = 0.0
    sampling: float = 0.0
    training: float = 0.0
    rewards: list[float] = field(default_factory=list)
    """Mean reward of each step's batch."""
    largest_lag: int = 0
    """Most versions between the oldest one that drew a token of a batch and the one that learned from it."""
    sampler_cpu: float = 0.0
    """Processor seconds of the vLLM server for each batch that was drawn, those of the warm-up included."""
    cuts: int = 0
    """Times that samples were cut, those of the warm-up included."""
    lost: int = 0
    """Sequences that were asked for and did not come back whole."""

    def note_batch(self, policy: Policy, batch: list[Group]) -> None:
        """Note the lag of a batch that is learned from now."""
        self.largest_lag = max(self.largest_lag, *(policy.version - group.oldest for group in batch))

    def final_reward(self) -> float:
        """Return the mean reward of the last third of the steps."""
        last = self.rewards[-max(1, len(self.rewards) // 3) :]
        return sum(last) / len(last)


async def in_step(policy: Policy, *, groups: int, steps: int, warm_up: int) -> Turn:
    """Draw a batch, learn from it, publish, and so on. Every batch is drawn by the version that learns from it."""
    turn = Turn()
    for step in range(warm_up + steps):
        began = perf_counter()
        batch = list(await asyncio.gather(*(policy.draw() for _ in range(groups))))
        drawn = perf_counter()
        turn.note_batch(policy, batch)
        turn.rewards.append(await policy.learn(batch))
        await policy.publish()
        if step >= warm_up:
            turn.sampling += drawn - began
            turn.training += perf_counter() - drawn
    turn.seconds = turn.sampling + turn.training
    turn.lost = policy.asked - policy.came
    return turn


async def asynchronous(policy: Policy, *, groups: int, steps: int, warm_up: int, max_lag: int) -> Turn:
    """Draw all the time, and learn from groups in the order in which they were asked for.

    Group ``k`` belongs to step ``k // groups``. It is asked for once that step is at most ``max_lag`` versions away, which
    bounds the lag without throwing a sample away. What is in flight at the end is waited for, and not timed.
    """
    turn, open_groups = Turn(), deque[asyncio.Task[Group]]()
    number, began = 0, perf_counter()
    for step in range(warm_up + steps):
        if step == warm_up:
            began = perf_counter()
        while number // groups <= step + max_lag:
            open_groups.append(asyncio.create_task(policy.draw()))
            number += 1
        batch = [await open_groups.popleft() for _ in range(groups)]
        turn.note_batch(policy, batch)
        turn.rewards.append(await policy.learn(batch))
        await policy.publish()
    turn.seconds = perf_counter() - began
    await asyncio.gather(*open_groups)
    turn.lost, turn.cuts = policy.asked - policy.came, policy.cuts
    return turn
