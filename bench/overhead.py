"""What the service adds to a training step: ``python -m bench.overhead``.

Starts its own service on a tiny base, times the SDK's calls over HTTP against the same engine call made directly, and
prints, last, one JSON line. Nothing else should run meanwhile: client, service and engine share the machine.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import tinker
from tinker import types

from contracts.base_model import read_base_model_facts
from contracts.ids import RunId
from contracts.losses import LossName
from contracts.operations import Datum, LoraSettings, LossSpec, TrainingBatch
from engine.model.base import BaseModel
from engine.model.tiny_model import write_tiny_model
from engine.training.trainer import PassItem, Trainer
from testing.service_process import ServiceProcess

BASE_NAME = "weft/tiny"
RANK = 32
TOKENS = [72, 101, 108, 108, 111, 44, 32, 119, 101]
"""Nine tokens: eight positions, each predicting the next."""


def median_ms(call: Callable[[], object], *, repeats: int, warm_up: int) -> float:
    """Median wall time of ``call`` in milliseconds after ``warm_up`` untimed calls."""
    for _ in range(warm_up):
        call()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        times.append((time.perf_counter() - started) * 1e3)
    return statistics.median(times)


def sdk_datum() -> types.Datum:
    """One sequence of eight tokens."""
    return types.Datum(
        model_input=types.ModelInput.from_ints(TOKENS[:-1]),
        loss_fn_inputs={
            "target_tokens": types.TensorData(data=TOKENS[1:], dtype="int64", shape=[8]),
            "weights": types.TensorData(data=[1.0] * 8, dtype="float32", shape=[8]),
        },
    )


def engine_median_ms(model: Path, *, repeats: int, warm_up: int) -> float:
    """The same pass, called directly in this process."""
    base = BaseModel.load(read_base_model_facts(BASE_NAME, model, None))
    trainer = Trainer(base)
    run = RunId("bench:train:0")
    trainer.create(run, LoraSettings(rank=RANK, seed=1))
    datum = Datum(
        tokens=np.array(TOKENS[:-1], dtype=np.int64),
        targets=np.array(TOKENS[1:], dtype=np.int64),
        inputs={"weights": np.ones(8, dtype=np.float32)},
    )
    item = PassItem(run=run, batch=TrainingBatch(LossSpec(LossName.CROSS_ENTROPY), [datum]), backward=True)
    return median_ms(lambda: trainer.run_pass([item]), repeats=repeats, warm_up=warm_up)


def service_medians(model: Path, data: Path, *, repeats: int, warm_up: int) -> dict[str, float]:
    """Each SDK call over real HTTP, from the call to its result."""
    with ServiceProcess(data=data, base_models=[f"{BASE_NAME}={model}"]) as service:
        client = tinker.ServiceClient(base_url=service.base_url, api_key=service.first_key)
        trainer = client.create_lora_training_client(base_model=BASE_NAME, rank=RANK, seed=1)
        datum = sdk_datum()
        sampler = client.create_sampling_client(base_model=BASE_NAME)
        prompt = types.ModelInput.from_ints(TOKENS)
        params = types.SamplingParams(max_tokens=16, stop=[], seed=1)
        adam = types.AdamParams(learning_rate=1e-4)
        calls: dict[str, Callable[[], object]] = {
            "forward_backward_p50_ms": lambda: trainer.forward_backward([datum], "cross_entropy").result(),
            "optim_step_p50_ms": lambda: trainer.optim_step(adam).result(),
            "asample_16_tokens_p50_ms": lambda: sampler.sample(prompt, 1, params).result(),
        }
        medians = {name: median_ms(call, repeats=repeats, warm_up=warm_up) for name, call in calls.items()}
        client.close("success")
    return medians


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--warm-up", type=int, default=20)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as folder:
        model = Path(folder) / "tiny"
        write_tiny_model(model)
        figures = service_medians(model, Path(folder) / "data", repeats=options.repeats, warm_up=options.warm_up)
        engine = engine_median_ms(model, repeats=options.repeats, warm_up=options.warm_up)
    figures["engine_forward_backward_p50_ms"] = engine
    figures["overhead_p50_ms"] = figures["forward_backward_p50_ms"] - engine
    for name, value in figures.items():
        print(f"{name:34} {value:8.2f}")
    print(json.dumps({name: round(value, 3) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
