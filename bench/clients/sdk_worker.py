"""The client side of a benchmark in a process of its own: many tenants on the real ``tinker`` SDK.

``python -m bench.clients.sdk_worker`` reads one JSON command a line and answers each with one JSON line.
``bench.clients.sdk_clients`` starts this process and speaks to it. Tenants are threads: threads cost the client less processor
time than a second event loop beside the SDK's.
"""

import json
import sys
import time
import warnings
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import tinker
from numpy.typing import NDArray
from tinker import types

from bench.workload import LEARNING_RATE, RANK, OperationShape, token_block

Command = dict[str, Any]


def sdk_data(block: NDArray[np.int64]) -> list[types.Datum]:
    """Return a ``token_block`` as the SDK's data for ``cross_entropy``."""
    length = block.shape[1] - 1
    return [
        types.Datum(
            model_input=types.ModelInput.from_ints(row[:-1].tolist()),
            loss_fn_inputs={
                "target_tokens": types.TensorData(data=row[1:].tolist(), dtype="int64", shape=[length]),
                "weights": types.TensorData(data=[1.0] * length, dtype="float32", shape=[length]),
            },
        )
        for row in block
    ]


class Tenants:
    """Training clients, one for each key, each on a service client and session of its own."""

    def __init__(self, *, base_url: str, keys: list[str], base_model: str) -> None:
        self._services = [tinker.ServiceClient(base_url=base_url, api_key=key) for key in keys]
        futures = [
            service.create_lora_training_client(base_model=base_model, rank=RANK, seed=number)
            for number, service in enumerate(self._services)
        ]
        self.trainers = [future.result() for future in futures]

    def close(self) -> None:
        """End the sessions: the service releases their adapters."""
        for service in self._services:
            service.close("success").result()


class Load:
    """One ``run`` command: every tenant makes steps of one shape, at most ``in_flight`` of its own at a time.

    The run ends after ``steps`` of each tenant. If ``steps`` is None, no step begins after ``seconds``.
    """

    def __init__(self, command: Command) -> None:
        self._shape = OperationShape(command["sequences"], command["length"])
        self._vocabulary: int = command["vocabulary"]
        self._in_flight: int = command["in_flight"]
        self._steps: int | None = command["steps"]
        self._seconds: float | None = command["seconds"]
        self._adam = types.AdamParams(learning_rate=LEARNING_RATE)

    def run(self, trainers: list[Any]) -> dict[str, Any]:
        """Run the steps and return the report. A step lasts from its submission to its results, on the monotonic clock."""
        cpu, started = time.process_time(), time.monotonic()
        with ThreadPoolExecutor(len(trainers)) as pool:
            steps = list(pool.map(self._tenant, range(len(trainers)), trainers))
        wall = time.monotonic() - started
        return {"wall_s": wall, "cpu_s": time.process_time() - cpu, "steps": steps}

    def _tenant(self, number: int, trainer: Any) -> list[tuple[float, float]]:
        data = sdk_data(token_block(self._shape, vocabulary=self._vocabulary, seed=number))
        done: list[tuple[float, float]] = []
        waiting: deque[tuple[float, Any, Any]] = deque()
        begun, until = 0, time.monotonic() + (self._seconds or 0.0)
        while True:
            has_more = time.monotonic() < until if self._steps is None else begun < self._steps
            if has_more and len(waiting) < self._in_flight:
                at = time.monotonic()
                computed = trainer.forward_backward(data, "cross_entropy")
                waiting.append((at, computed, trainer.optim_step(self._adam)))
                begun += 1
            elif waiting:
                at, computed, stepped = waiting.popleft()
                computed.result()
                stepped.result()
                done.append((at, time.monotonic()))
            else:
                return done


def answer(command: Command, tenants: Tenants | None) -> tuple[Tenants | None, dict[str, Any]]:
    """Run ``command``. Return the tenants from now on, and the answer."""
    match command["do"]:
        case "open":
            opened = Tenants(base_url=command["base_url"], keys=command["keys"], base_model=command["base_model"])
            return opened, {"opened": len(opened.trainers)}
        case "run" if tenants is not None:
            return tenants, Load(command).run(tenants.trainers)
        case "close" if tenants is not None:
            tenants.close()
            return None, {"closed": True}
        case other:
            raise ValueError(f"cannot {other} now")


def main() -> None:
    """Answer commands until standard input ends."""
    warnings.simplefilter("ignore", FutureWarning)
    tenants: Tenants | None = None
    for line in sys.stdin:
        tenants, said = answer(json.loads(line), tenants)
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
