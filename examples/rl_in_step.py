"""RL in step: publish the weights, draw a group with them, learn from it, and so on.

    python -m examples.rl_in_step

Every sample is drawn with the very weights that learn from it. The price: samples wait for training, and training waits for
samples.
"""

import tinker

from examples.service import new_trainer, parse_options
from examples.vowels import VowelTask


def main() -> None:
    """Train, and print the mean reward of each step."""
    options = parse_options(__doc__, steps=10)
    with tinker.ServiceClient() as service:
        trainer = new_trainer(service, options)
        task = VowelTask(trainer)
        for step in range(options.steps):
            sampler = trainer.save_weights_and_get_sampling_client().result()
            group = task.ask(sampler).result()
            reward = task.learn(trainer, [group], "importance_sampling")
            print(f"step {step:>3}  reward {reward:.3f}", flush=True)


if __name__ == "__main__":
    main()
