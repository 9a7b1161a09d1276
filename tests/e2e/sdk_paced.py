"""A client whose tenant has a rate, and whose budget is spent and raised, through the public ``tinker`` SDK.

    python sdk_paced.py BASE_URL API_KEY BASE_MODEL

The client knows nothing of both: it sends all its work at once and waits for the results. At each word that it prints it waits
for a line. Prints one JSON line at its end.
"""

import logging
import sys
import threading
import time
from typing import Any

import tinker
from tinker import types

STEPS = 4
SAMPLES = 4


class Pauses(logging.Handler):
    """Keeps what the SDK tells its user of pauses, and wakes who waits for the first."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []
        self.heard = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the line if it tells of a pause."""
        if "is paused" in (line := record.getMessage()):
            self.told.append(line)
            self.heard.set()

    def begin(self) -> None:
        """Forget what was told before."""
        self.told.clear()
        self.heard.clear()


def datum() -> types.Datum:
    """One sequence of nine tokens to learn."""
    tokens = list(b"meow meow")
    inputs = {"target_tokens": types.TensorData(data=tokens, dtype="int64", shape=[len(tokens)])}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)


def begun(trainer: tinker.TrainingClient) -> tuple[Any, Any]:
    """A step that is sent and not waited for."""
    loss = trainer.forward_backward([datum()], "cross_entropy")
    return loss, trainer.optim_step(types.AdamParams(learning_rate=1e-3))


def ended(step: tuple[Any, Any]) -> float:
    """Loss of a step that was begun."""
    step[1].result()
    loss: float = step[0].result().metrics["loss:sum"]
    return loss


def pause(word: str) -> None:
    """Have whoever runs this do what belongs to the word."""
    print(word, flush=True)
    sys.stdin.readline()


def main(base_url: str, api_key: str, base_model: str, bounded: str) -> dict[str, Any]:
    """Work under the rate, then under a spent budget that is raised."""
    pauses = Pauses()
    logging.getLogger("tinker").addHandler(pauses)
    service = tinker.ServiceClient(base_url=base_url, api_key=api_key)
    made: Any = service.create_lora_training_client(base_model=base_model, rank=4, seed=1)
    trainer: tinker.TrainingClient = made.result() if hasattr(made, "result") else made
    sampler = service.create_sampling_client(base_model=base_model)
    params = types.SamplingParams(max_tokens=8, temperature=0.0)
    prompt = types.ModelInput.from_ints([109])
    seen: dict[str, Any] = {}
    pause("rate")
    started = time.monotonic()
    steps = [begun(trainer) for _ in range(STEPS)]
    asked = [sampler.sample(prompt, 1, params) for _ in range(SAMPLES)]
    seen["losses"] = [ended(step) for step in steps]
    seen["training_seconds"] = time.monotonic() - started
    seen["samples"] = [list(one.result().sequences[0].tokens) for one in asked]
    seen["seconds"] = time.monotonic() - started
    seen["told_of_rate"] = list(pauses.told)
    pauses.begin()
    pause("spend")
    step, drawing = begun(trainer), sampler.sample(prompt, 1, params)
    if bounded == "bounded":
        seen["was_paused"] = pauses.heard.wait(120)
        seen["was_done"] = step[0].done() if hasattr(step[0], "done") else False
    pause("raise")
    seen["losses"].append(ended(step))
    seen["samples"].append(list(drawing.result().sequences[0].tokens))
    seen["told_of_budget"] = list(pauses.told)
    seen["losses"].append(ended(begun(trainer)))
    seen["path"] = trainer.save_state("end").result().path
    return seen


if __name__ == "__main__":
    from sdk_end import end

    end(main(*sys.argv[1:5]))
