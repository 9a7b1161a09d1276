"""DPO: an adapter learns to prefer one answer over another, with a loss of the client's own.

    python -m examples.dpo

The loss, of Rafailov et al. 2023 ("Direct Preference Optimization"), is written in torch and runs here, in the client:
``forward_backward_custom`` brings the log-probabilities and sends back their gradient. The reference is the base itself, which
a new adapter equals.
"""

from typing import Any

import tinker
import torch
from tinker import types

from examples.data import supervised_datum
from examples.service import new_trainer, parse_options

BETA = 0.1
PAIRS = {"The cat says:": (" meow", " woof"), "The dog says:": (" woof", " meow"), "The cow says:": (" moo", " caw")}
"""Each prompt with the answer that is preferred, and the other one."""


def answer_logprobs(data: list[types.Datum], logprobs: list[Any]) -> torch.Tensor:
    """Return each answer's log-probability, shape (answers,): the sum over the tokens that have a weight."""
    weights = [torch.tensor(datum.loss_fn_inputs["weights"].data) for datum in data]
    return torch.stack([(row * weight).sum() for row, weight in zip(logprobs, weights, strict=True)])


def main() -> None:
    """Train, and print the loss of each step and by how much the preferred answers have gained on the others."""
    options = parse_options(__doc__, steps=20)
    with tinker.ServiceClient() as service:
        trainer = new_trainer(service, options)
        encode = trainer.get_tokenizer().encode
        data = [supervised_datum(encode(ask), encode(say)) for ask, pair in PAIRS.items() for say in pair]
        before = trainer.forward(data, "cross_entropy").result().loss_fn_outputs
        reference = answer_logprobs(data, [torch.tensor(output["logprobs"].data) for output in before])

        def preference(given: list[types.Datum], logprobs: list[Any]) -> tuple[torch.Tensor, dict[str, float]]:
            gains = answer_logprobs(given, logprobs) - reference
            margins = BETA * (gains[0::2] - gains[1::2])
            loss = -torch.nn.functional.logsigmoid(margins).mean()
            return loss, {"dpo_loss": loss.item(), "margin": margins.mean().item()}

        for step in range(options.steps):
            seen = trainer.forward_backward_custom(data, preference).result().metrics
            trainer.optim_step(types.AdamParams(learning_rate=3e-3)).result()
            print(f"step {step:>3}  margin {seen['margin']:.3f}  loss {seen['dpo_loss']:.3f}", flush=True)


if __name__ == "__main__":
    main()
