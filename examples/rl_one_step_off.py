"""RL one step off: the next group is drawn while this one is learned from.

    python -m examples.rl_one_step_off

Each group was drawn with the weights of one step before. The loss ``cispo`` bounds the weight that this gives a token.
"""

import tinker

from examples.service import new_trainer, parse_options
from examples.vowels import VowelTask


def main() -> None:
    """Train, and print the mean reward of each step."""
    options = parse_options(__doc__, steps=14)
    with tinker.ServiceClient() as service:
        trainer = new_trainer(service, options)
        task = VowelTask(trainer)
        sampler = trainer.save_weights_and_get_sampling_client().result()
        coming = task.ask(sampler)
        for step in range(options.steps):
            group, coming = coming.result(), task.ask(sampler)
            reward = task.learn(trainer, [group], "cispo")
            sampler = trainer.save_weights_and_get_sampling_client().result()
            print(f"step {step:>3}  reward {reward:.3f}", flush=True)
        coming.result()


if __name__ == "__main__":
    main()
