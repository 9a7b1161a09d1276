"""The service's part of an SDK call: ``python -m bench.overhead``.

Starts a service on the tiny base and, in front of it, a server that repeats the service's answers at once. The same SDK calls
go to both in turns, and the engine's own pass takes its turn beside them. The repeating server is the floor: the time above
the floor is weft's. Prints a table and, last, one JSON line. Nothing else should run meanwhile: all share the machine.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import tinker
from tinker import types

from bench.report import print_figures
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
_STOP_SECONDS = 30.0
Call = Callable[[], object]


def sdk_datum() -> types.Datum:
    """Return one sequence of eight tokens."""
    return types.Datum(
        model_input=types.ModelInput.from_ints(TOKENS[:-1]),
        loss_fn_inputs={
            "target_tokens": types.TensorData(data=TOKENS[1:], dtype="int64", shape=[8]),
            "weights": types.TensorData(data=[1.0] * 8, dtype="float32", shape=[8]),
        },
    )


def engine_pass(model: Path) -> Call:
    """Return a call that computes the same ``forward_backward`` in this process."""
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
    return lambda: trainer.run_pass([item])


def sdk_calls(client: tinker.ServiceClient) -> dict[str, Call]:
    """Return the SDK's calls by name, each from the call to its result."""
    trainer = client.create_lora_training_client(base_model=BASE_NAME, rank=RANK, seed=1).result()
    sampler = client.create_sampling_client(base_model=BASE_NAME).result()
    datum, prompt = sdk_datum(), types.ModelInput.from_ints(TOKENS)
    params = types.SamplingParams(max_tokens=16, stop=[], seed=1)
    adam = types.AdamParams(learning_rate=1e-4)
    return {
        "forward_backward": lambda: trainer.forward_backward([datum], "cross_entropy").result(),
        "optim_step": lambda: trainer.optim_step(adam).result(),
        "asample_16_tokens": lambda: sampler.sample(prompt, 1, params).result(),
    }


@contextmanager
def replaying(upstream: str) -> Iterator[str]:
    """Run a server that repeats the answers of ``upstream``, and yield the server's base URL."""
    command = [sys.executable, "-m", "testing.replay_server", "--upstream", upstream]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.terminate()
            process.wait(timeout=_STOP_SECONDS)


def medians_in_turns(calls: dict[str, Call], *, repeats: int, warm_up: int) -> dict[str, float]:
    """Return each call's median wall time in milliseconds. A round makes every call once; each round begins with another call."""
    names = list(calls)
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(warm_up + repeats):
        first = number % len(names)
        # The very first round keeps the order: the floor learns the answers of a run's seq_ids one after another.
        for name in names if number == 0 else (*names[first:], *names[:first]):
            started = time.perf_counter()
            calls[name]()
            if number >= warm_up:
                times[name].append((time.perf_counter() - started) * 1e3)
    return {name: statistics.median(found) for name, found in times.items()}


def measure(folder: Path, *, repeats: int, warm_up: int) -> dict[str, float]:
    """Return every figure: times in milliseconds, and weft's part as ratios to the floor."""
    model = folder / "tiny"
    write_tiny_model(model)
    with (
        ServiceProcess(data=folder / "data", base_models=[f"{BASE_NAME}={model}"]) as service,
        replaying(service.base_url) as floor_url,
    ):
        clients = {
            "": tinker.ServiceClient(base_url=service.base_url, api_key=service.first_key),
            "floor_": tinker.ServiceClient(base_url=floor_url, api_key=service.first_key),
        }
        calls = {
            f"{prefix}{name}": call for prefix, client in clients.items() for name, call in sdk_calls(client).items()
        }
        calls["engine_forward_backward"] = engine_pass(model)
        median = medians_in_turns(calls, repeats=repeats, warm_up=warm_up)
        for client in clients.values():
            client.close("success")
    figures = {f"{name}_p50_ms": value for name, value in median.items()}
    overhead = median["forward_backward"] - median["engine_forward_backward"]
    return figures | {
        "overhead_p50_ms": overhead,
        "optim_step_to_floor": median["optim_step"] / median["floor_optim_step"],
        "forward_backward_to_floor": overhead / median["floor_forward_backward"],
        "asample_to_floor": median["asample_16_tokens"] / median["floor_asample_16_tokens"],
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--warm-up", type=int, default=20)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as folder:
        figures = measure(Path(folder), repeats=options.repeats, warm_up=options.warm_up)
    print_figures(figures, digits=3)


if __name__ == "__main__":
    main()
