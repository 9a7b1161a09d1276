"""Watching a run with weft's own client: its curve, a pause in the midst of a sample, and what was used.

    python -m examples.watch

The run is trained by the ``tinker`` SDK; ``weft_client`` (clients/python) reads and steers beside it.
"""

from datetime import UTC, datetime, timedelta

import tinker
from tinker import types
from weft_client import Weft

from examples.data import supervised_datum
from examples.service import new_trainer, parse_options

ASK, SAY = "The cat says:", " meow"


def main() -> None:
    """Train a few steps, and print what the client sees."""
    options = parse_options(__doc__, steps=8)
    began = datetime.now(UTC) - timedelta(hours=1)
    with tinker.ServiceClient() as service, Weft() as weft:
        trainer = new_trainer(service, options)
        tokenizer, run = trainer.get_tokenizer(), trainer.model_id
        datum = supervised_datum(tokenizer.encode(ASK), tokenizer.encode(SAY))
        for step in range(options.steps):
            trainer.forward_backward([datum], "cross_entropy")
            trainer.optim_step(types.AdamParams(learning_rate=5e-3)).result()
            weft.runs.add_metrics(run, {step: {"progress": step / options.steps}})
        for point in weft.runs.points(run).points:
            print(f"step {point.step:>3}  loss {point.mean_loss:.3f}  norm {point.grad_norm:.3f}")
        sampler = trainer.save_weights_and_get_sampling_client().result()
        greedy = types.SamplingParams(max_tokens=len(tokenizer.encode(SAY)), temperature=0.0, stop=[])
        with weft.gates.paused(run, mode="keep", ttl=60):
            drawn = sampler.sample(types.ModelInput.from_ints(tokenizer.encode(ASK)), 1, greedy)
            print(f"gate {weft.gates.state(run).state}, sample ended: {drawn.future().done()}")
        print(ASK + tokenizer.decode(drawn.result().sequences[0].tokens))
        for line in weft.usage.query(since=began, group_by=["session", "kind"]):
            if line.session == run.partition(":")[0]:
                tokens = line.train_tokens + line.prompt_tokens + line.sampled_tokens
                print(f"used {line.kind}: {line.operations} operations, {tokens} tokens")


if __name__ == "__main__":
    main()
