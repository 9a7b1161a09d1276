"""A client that runs into its tenant's limits, one after another, through the public ``tinker`` SDK.

    python sdk_limits.py BASE_URL API_KEY BASE_MODEL

The client knows nothing of limits: it sends all its work at once and waits for the results. At each word that it prints, a limit
with its value or what else befalls the tenant, it waits for a line. Prints one JSON line at its end.
"""

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

import tinker
from tinker import types

STEPS = 4
SAMPLES = 4
WAITING_SECONDS = 4.0
PROMPT = [109]


def pause(word: str) -> None:
    """Have whoever runs this do what belongs to the word."""
    print(word, flush=True)
    sys.stdin.readline()


@contextmanager
def limit(name: str, value: int) -> Iterator[None]:
    """Have the limit that value within the block."""
    pause(f"{name}={value}")
    yield
    pause(f"{name}=default")


def outcome(call: Callable[[], Any]) -> str:
    """Return the text of the error that ``call`` ends with, an empty one without."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 - told to whoever runs this
        return f"{getattr(error, 'status_code', None)} {error}"
    return ""


class Client:
    """A client with a run that it trains and a sampler of the base."""

    def __init__(self, base_url: str, api_key: str, base_model: str) -> None:
        self._address = {"base_url": base_url, "api_key": api_key}
        self._base_model = base_model
        self._service = self.connected()
        self.trainer = self.created(self._service)
        self._sampler = self.sampler()
        self.losses: list[float] = []
        self.samples: list[list[int]] = []
        self.refused: dict[str, str] = {}
        self.waited: dict[str, bool] = {}

    def connected(self, **options: Any) -> tinker.ServiceClient:
        """A client of the service with a session of its own."""
        return tinker.ServiceClient(**self._address, **options)

    def created(self, service: tinker.ServiceClient) -> tinker.TrainingClient:
        """A training client of a new model. Old SDKs return it, newer ones a future of it."""
        made: Any = service.create_lora_training_client(base_model=self._base_model, rank=4, seed=1)
        return made.result() if hasattr(made, "result") else made

    def sampler(self) -> tinker.SamplingClient:
        """A new sampler of the base."""
        made: Any = self._service.create_sampling_client(base_model=self._base_model)
        return made.result() if hasattr(made, "result") else made

    def begun(self, trainer: tinker.TrainingClient) -> tuple[Any, Any]:
        """A step that is sent and not waited for."""
        tokens = list(b"meow meow")
        inputs = {"target_tokens": types.TensorData(data=tokens, dtype="int64", shape=[len(tokens)])}
        datum = types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)
        loss = trainer.forward_backward([datum], "cross_entropy")
        return loss, trainer.optim_step(types.AdamParams(learning_rate=1e-3))

    def ended(self, step: tuple[Any, Any]) -> float:
        """Loss of a step that was begun."""
        step[1].result()
        loss: float = step[0].result().metrics["loss:sum"]
        return loss

    def train(self, steps: int) -> None:
        """Take as many steps, sent without waiting for any."""
        sent = [self.begun(self.trainer) for _ in range(steps)]
        self.losses += [self.ended(step) for step in sent]

    def drawn(self, sampler: tinker.SamplingClient | None = None) -> Any:
        """A sample that is sent and not waited for."""
        params = types.SamplingParams(max_tokens=8, temperature=0.0)
        return (sampler or self._sampler).sample(types.ModelInput.from_ints(PROMPT), 1, params)

    def walk_what_waits(self) -> None:
        """Work beyond these limits waits by itself: it is sent again, or its creation is answered later."""
        for name, value in (("pending_operations", 3), ("pending_bytes", 1000)):
            with limit(name, value):
                self.train(STEPS)
        for name, value in (("pending_samples", 2), ("sample_tokens", 20)):
            with limit(name, value):
                asked = [self.drawn() for _ in range(SAMPLES)]
                self.samples += [list(one.result().sequences[0].tokens) for one in asked]
        with ThreadPoolExecutor(1) as threads:
            for name, make in (
                ("open_runs", lambda: self.created(self._service)),
                ("sessions", lambda: self.created(self.connected())),
            ):
                with limit(name, 1):
                    other = threads.submit(make)
                    self.waited[name] = not wait([other], timeout=WAITING_SECONDS).done
                    self.train(1)
                self.losses.append(self.ended(self.begun(other.result(timeout=120))))

    def walk_what_is_refused(self) -> None:
        """Work beyond these limits ends with an error, and the run goes on; once lifted, the same is done."""
        service, trainer = self._service, self.trainer
        calls: tuple[tuple[str, int, Callable[[], Any]], ...] = (
            ("max_rank", 2, lambda: self.created(service)),
            ("metadata_bytes", 10, lambda: self.created(self.connected(user_metadata={"note": "x" * 100}))),
            ("session_samplers", 1, lambda: self.drawn(self.sampler()).result()),
            ("sample_work", 4, lambda: self.drawn().result()),
            ("stored_bytes", 1, lambda: trainer.save_state("beyond-bytes").result()),
        )
        for name, value, call in calls:
            with limit(name, value):
                self.refused[name] = outcome(call)
                self.train(1)
            self.refused[f"{name} lifted"] = outcome(call) if name != "stored_bytes" else ""
        trainer.save_state("within-bytes").result()
        with limit("checkpoints", 1):
            self.refused["checkpoints"] = outcome(lambda: trainer.save_state("beyond-number").result())
            self.train(1)
        with limit("kept_checkpoints", 1), limit("checkpoint_seconds", 3600):
            for name in ("first", "second"):
                trainer.save_state(name).result()
                self.train(1)

    def walk_too_far_ahead(self) -> None:
        """Operations too far ahead of one that is held fail, and leave no hole in their run."""
        trainer = self.created(self._service)
        with limit("seq_ahead", 2):
            pause("hold")
            sent = [self.begun(trainer) for _ in range(STEPS)]
            pause("resume")
            ends = [outcome(lambda step=step: self.ended(step)) for step in sent]  # type: ignore[misc]
            self.refused |= {"seq_ahead first": ends[0], "seq_ahead": ends[-1]}
        self.ended(self.begun(trainer))


def main(base_url: str, api_key: str, base_model: str) -> dict[str, Any]:
    """Every limit once."""
    client = Client(base_url, api_key, base_model)
    client.walk_what_waits()
    client.walk_what_is_refused()
    client.walk_too_far_ahead()
    client.train(1)
    return {
        "losses": client.losses,
        "samples": client.samples,
        "refused": client.refused,
        "waited": client.waited,
        "path": client.trainer.save_state("end").result().path,
    }


if __name__ == "__main__":
    from sdk_end import end

    end(main(*sys.argv[1:4]))
