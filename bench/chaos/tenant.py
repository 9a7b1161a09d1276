"""A tenant that trains and samples through the SDK until it is stopped, and the weights that its steps must have made."""

import threading
import time
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field

import numpy as np
import tinker
from tinker import types

from bench.workload import OperationShape, token_block, training_batch
from contracts.ids import RunId
from contracts.operations import LoraSettings, OptimStep
from engine.model.base import BaseModel
from engine.training.adapter_state import AdapterState
from engine.training.trainer import PassItem, Trainer

RANK = 8
LEARNING_RATE = 1e-4
SHAPE = OperationShape(2, 32)
PROMPT = (72, 101, 108, 108, 111)
SAMPLE_TOKENS = 16
HUNG_SECONDS = 180.0
"""Seconds after which a future without an answer counts as hung."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Send and answer time of a request, in seconds of ``time.monotonic``."""

    sent: float
    answered: float


@dataclass(slots=True)
class Account:
    """One tenant's answers, failures and losses."""

    steps: int = 0
    trained: list[Answer] = field(default_factory=list)
    sampled: list[Answer] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    step_numbers: list[int] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    """Requests that ended in an error of the client: no answer, or none that is known."""
    failed: list[str] = field(default_factory=list)
    """Operations that the service failed, though nothing was wrong with them."""
    hung: int = 0
    checkpoint: str = ""


class ChaosTenant:
    """Two threads on one SDK client: one trains step after step, the other samples the bare base meanwhile.

    Each pauses for ``pause`` seconds after an answer.
    """

    def __init__(
        self, number: int, *, base_url: str, key: str, base_model: str, vocabulary: int, pause: float = 0.0
    ) -> None:
        self.number = number
        self._pause = pause
        self.key = key
        self.account = Account()
        self._vocabulary = vocabulary
        self._stopping = threading.Event()
        self._client = tinker.ServiceClient(base_url=base_url, api_key=key)
        created = self._client.create_lora_training_client(
            base_model=base_model, rank=RANK, seed=number, train_unembed=False
        )
        self._trainer = getattr(created, "result", lambda: created)()
        sampler = self._client.create_sampling_client(base_model=base_model)
        self._sampler = getattr(sampler, "result", lambda: sampler)()
        self._threads = [threading.Thread(target=self._train), threading.Thread(target=self._sample)]

    def start(self) -> None:
        """Begin to work."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Finish the step in hand, save, and end."""
        self._stopping.set()
        for thread in self._threads:
            thread.join()
        self._client.close("success")

    def batch(self, step: int) -> np.ndarray:
        """Return the tokens of a step, the same in every run: int64 (sequences, length + 1)."""
        return token_block(SHAPE, vocabulary=self._vocabulary, seed=1000 * self.number + step)

    def _train(self) -> None:
        while not self._stopping.is_set() and not (self.account.lost or self.account.failed or self.account.hung):
            sent = time.monotonic()
            data = [_datum(row) for row in self.batch(self.account.steps).tolist()]
            try:
                passed = self._trainer.forward_backward(data, "cross_entropy")
                stepped = self._trainer.optim_step(types.AdamParams(learning_rate=LEARNING_RATE))
                loss = passed.result(timeout=HUNG_SECONDS).metrics["loss:sum"]
                found = stepped.result(timeout=HUNG_SECONDS).metrics or {}
            except FutureTimeout:
                self.account.hung += 1
            except tinker.RequestFailedError as error:
                self.account.failed.append(f"step {self.account.steps}: {error!r}")
            except Exception as error:  # noqa: BLE001 - whatever else the SDK raises is a lost operation
                self.account.lost.append(f"step {self.account.steps}: {error!r}")
            else:
                self.account.losses.append(loss)
                self.account.step_numbers.append(int(found["step:max"]))
                self.account.steps += 1
                self.account.trained.append(Answer(sent, time.monotonic()))
            self._stopping.wait(self._pause)
        self._save()

    def _save(self) -> None:
        try:
            saved = self._trainer.save_state(f"after-{self.account.steps}").result(timeout=HUNG_SECONDS)
            self.account.checkpoint = saved.path
        except FutureTimeout:
            self.account.hung += 1
        except tinker.RequestFailedError as error:
            self.account.failed.append(f"save: {error!r}")
        except Exception as error:  # noqa: BLE001 - as above
            self.account.lost.append(f"save: {error!r}")

    def _sample(self) -> None:
        prompt = types.ModelInput.from_ints(list(PROMPT))
        number = 0
        while not self._stopping.is_set():
            sent, number = time.monotonic(), number + 1
            params = types.SamplingParams(max_tokens=SAMPLE_TOKENS, temperature=1.0, seed=number, stop=[])
            try:
                answer = self._sampler.sample(prompt, 1, params).result(timeout=HUNG_SECONDS)
            except FutureTimeout:
                self.account.hung += 1
                return
            except tinker.RequestFailedError as error:
                self.account.failed.append(f"sample {number}: {error!r}")
                return
            except Exception as error:  # noqa: BLE001 - as above
                self.account.lost.append(f"sample {number}: {error!r}")
                return
            (sequence,) = answer.sequences
            if len(sequence.tokens) != SAMPLE_TOKENS or len(sequence.logprobs or []) != SAMPLE_TOKENS:
                self.account.lost.append(f"sample {number}: {len(sequence.tokens)} tokens")
            self.account.sampled.append(Answer(sent, time.monotonic()))
            self._stopping.wait(self._pause)

    def done_tokens(self) -> dict[str, int]:
        """Return the tokens of all that was answered as done, by the names of usage."""
        samples = len(self.account.sampled)
        return {
            "train_tokens": self.account.steps * SHAPE.tokens,
            "prompt_tokens": samples * len(PROMPT),
            "sampled_tokens": samples * SAMPLE_TOKENS,
        }

    # --- what must have come of it -------------------------------------------------------------------------------------

    def undisturbed(self, base: BaseModel) -> tuple[AdapterState, list[float]]:
        """Return the adapter after the same steps on the engine alone, and the loss of each step."""
        trainer, run = Trainer(base), RunId("undisturbed")
        settings = LoraSettings(
            rank=RANK, alpha=32.0, seed=self.number, train_attn=True, train_mlp=True, train_unembed=False
        )
        trainer.create(run, settings)
        losses = []
        for step in range(self.account.steps):
            (outcome,) = trainer.run_pass([PassItem(run, training_batch(self.batch(step)), backward=True)])
            if isinstance(outcome, Exception):
                raise outcome
            losses.append(outcome.metrics["loss:sum"])
            trainer.optim_step(run, OptimStep(learning_rate=LEARNING_RATE))
        return trainer.state(run), losses


def _datum(row: list[int]) -> types.Datum:
    return types.Datum(
        model_input=types.ModelInput.from_ints(row[:-1]),
        loss_fn_inputs={
            "target_tokens": types.TensorData(data=row[1:], dtype="int64", shape=[len(row) - 1]),
            "weights": types.TensorData(data=[1.0] * (len(row) - 1), dtype="float32", shape=[len(row) - 1]),
        },
    )
