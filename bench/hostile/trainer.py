"""An honest tenant who trains through the real SDK: one small step after another, each waited for."""

import time
import warnings
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import asdict, dataclass, field

import tinker
from tinker import types

from bench.clients.sdk_worker import Tenants, sdk_data
from bench.processes.json_process import give_answer, given_task
from bench.workload import LEARNING_RATE, OperationShape, token_block

STEP = OperationShape(1, 64)
_HUNG_SECONDS = 60.0
"""Seconds after which a step without an answer counts as hung."""
_SHOWN_ERRORS = 10


@dataclass(frozen=True, slots=True)
class TrainingTask:
    """Task: train until ``ends``, in seconds of ``time.monotonic``."""

    base_url: str
    key: str
    base_model: str
    vocabulary: int
    ends: float


@dataclass(slots=True)
class Trained:
    """Steps as (sent, answered), in seconds of ``time.monotonic``."""

    steps: list[tuple[float, float]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    hung: int = 0


def train(task: TrainingTask) -> Trained:
    """Train until the task ends; a step that fails is counted, and the next one is sent."""
    tenants, found = Tenants(base_url=task.base_url, keys=[task.key], base_model=task.base_model), Trained()
    data = sdk_data(token_block(STEP, vocabulary=task.vocabulary, seed=0))
    (trainer,) = tenants.trainers
    while time.monotonic() < task.ends and not found.hung and len(found.errors) < _SHOWN_ERRORS:
        sent = time.monotonic()
        try:
            computed = trainer.forward_backward(data, "cross_entropy")
            stepped = trainer.optim_step(types.AdamParams(learning_rate=LEARNING_RATE))
            computed.result(timeout=_HUNG_SECONDS)
            stepped.result(timeout=_HUNG_SECONDS)
        except (FutureTimeout, TimeoutError):
            found.hung += 1
        except tinker.TinkerError as error:
            found.errors.append(f"step {len(found.steps)}: {error!r}"[:300])
        else:
            found.steps.append((sent, time.monotonic()))
    if not found.hung:
        tenants.close()
    return found


def main() -> None:
    """Read the task, train, and write the outcome."""
    warnings.simplefilter("ignore", FutureWarning)
    give_answer(asdict(train(TrainingTask(**given_task()))))


if __name__ == "__main__":
    main()
