"""Supervised fine-tuning: an adapter learns answers by example.

    python -m examples.sft

Each step sends its two requests at once, so that the service need not wait for the client between them.
"""

import tinker
from tinker import types

from examples.data import supervised_datum
from examples.service import new_trainer, parse_options

ANSWERS = {"The cat says:": " meow", "The dog says:": " woof", "The cow says:": " moo", "The owl says:": " hoot"}


def main() -> None:
    """Train, print the loss of each step, and let the adapter answer."""
    options = parse_options(__doc__, steps=30)
    with tinker.ServiceClient() as service:
        trainer = new_trainer(service, options)
        tokenizer = trainer.get_tokenizer()
        data = [supervised_datum(tokenizer.encode(ask), tokenizer.encode(say)) for ask, say in ANSWERS.items()]
        answer_tokens = sum(len(tokenizer.encode(say)) for say in ANSWERS.values())
        for step in range(options.steps):
            computed = trainer.forward_backward(data, "cross_entropy")
            trainer.optim_step(types.AdamParams(learning_rate=5e-3)).result()
            print(f"step {step:>3}  loss {computed.result().metrics['loss:sum'] / answer_tokens:.3f}", flush=True)
        sampler = trainer.save_weights_and_get_sampling_client().result()
        for ask, say in ANSWERS.items():
            greedy = types.SamplingParams(max_tokens=len(tokenizer.encode(say)), temperature=0.0, stop=[])
            drawn = sampler.sample(types.ModelInput.from_ints(tokenizer.encode(ask)), 1, greedy).result()
            print(ask + tokenizer.decode(drawn.sequences[0].tokens))


if __name__ == "__main__":
    main()
