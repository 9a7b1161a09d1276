"""RL fully asynchronous: samples are drawn all the time from a live sampler, and no sample is older than a bound.

    python -m examples.rl_async

The sampler is *live* (``kind="inflight"``): each publication moves it to the new weights, and a sample in flight goes on with
them. Groups are learned from in the order in which they were asked for, so group ``k`` belongs to step ``k // BATCH``. It is
asked for only when that step is at most ``MAX_LAG`` versions away. So the lag printed, in versions between the first weights
that may have drawn a sample and those that learn from it, never passes the bound, and no sample is thrown away.
"""

from collections import deque
from typing import Any

import tinker

from examples.service import new_trainer, parse_options
from examples.vowels import GROUP, VowelTask

MAX_LAG = 2
BATCH = 4
"""Groups of a step."""


def main() -> None:
    """Train, and print the mean reward of each step and the lag of its oldest group."""
    options = parse_options(__doc__, steps=12)
    with tinker.ServiceClient() as service:
        trainer = new_trainer(service, options)
        task = VowelTask(trainer)
        sampler = trainer.save_weights_and_get_sampling_client(kind="inflight").result()
        asked: deque[tuple[int, Any]] = deque()
        number = 0
        for step in range(options.steps):
            # After ``step`` steps the live sampler has version ``step``.
            while number // BATCH <= min(step + MAX_LAG, options.steps - 1):
                asked.append((step, task.ask(sampler, group=GROUP // BATCH)))
                number += 1
            batch = [asked.popleft() for _ in range(BATCH)]
            lag = step - min(version for version, _ in batch)
            reward = task.learn(trainer, [group.result() for _, group in batch], "cispo")
            trainer.save_weights_and_get_sampling_client(kind="inflight").result()
            print(f"step {step:>3}  lag {lag}  reward {reward:.3f}", flush=True)


if __name__ == "__main__":
    main()
