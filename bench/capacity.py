"""Capacity of one service, in adapters: ``python -m bench.capacity``.

Creates many rank-8 adapters of the tiny base through a ``weft serve`` process and the real SDK, trains each one step, and
gives the service so little memory for adapters that most are paged out. Then trains one more step of some that were
paged out, each alone. Prints a table and, last, one JSON line.
"""

import argparse
import random
import statistics
import tempfile
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import tinker
from tinker import types

from bench.bases import write_base
from bench.clients.sdk_worker import sdk_data
from bench.processes.fresh_process import in_fresh_process, prepare
from bench.processes.memory import rss_mib
from bench.report import print_figures
from bench.workload import LEARNING_RATE, RANK, OperationShape, token_block
from contracts.base_model import read_base_model_facts
from testing.service_process import ServiceProcess
from testing.tenants import make_tenants

BASE = "weft/tiny"
ADAPTER_MEMORY_VARIABLE = "WEFT_ADAPTER_MEMORY_BYTES"
ADAPTER_MEMORY_BYTES = 32 * 2**20
"""About 40 adapters with their optimiser's moments: one is 0.75 MiB."""
_SHAPE = OperationShape(1, 64)
_TENANTS = 4
_IN_FLIGHT = 8
"""Models made and trained at once, over all tenants."""
_FIRST_ADAPTERS = 100
"""Adapters after which the memory of further ones is counted: the service has then touched all memory of its own."""
_RECENT_DIVISOR = 4
"""The last quarter of the adapters may still be in memory. The other adapters count as paged out."""
_SETTLE_SECONDS = 3.0


class Adapters:
    """Training clients of a few tenants, a fixed number of models in flight."""

    def __init__(self, *, base_url: str, keys: list[str], vocabulary: int) -> None:
        self._services = [tinker.ServiceClient(base_url=base_url, api_key=key) for key in keys]
        self._vocabulary = vocabulary
        self._adam = types.AdamParams(learning_rate=LEARNING_RATE)
        self.trainers: list[Any] = []

    def grow(self, count: int) -> None:
        """Create adapters, and train each new one for one step, until there are ``count``."""
        with ThreadPoolExecutor(_IN_FLIGHT) as pool:
            self.trainers += pool.map(self._create, range(len(self.trainers), count))

    def _create(self, number: int) -> Any:
        service = self._services[number % len(self._services)]
        trainer = service.create_lora_training_client(
            base_model=BASE, rank=RANK, seed=number, train_unembed=False
        ).result()
        computed = trainer.forward_backward(self._data(number), "cross_entropy")
        stepped = trainer.optim_step(self._adam)
        computed.result()
        stepped.result()
        return trainer

    def step_ms(self, number: int) -> float:
        """Return the milliseconds of the adapter's ``forward_backward``, alone. An ``optim_step`` follows untimed."""
        data = self._data(number)
        started = time.perf_counter()
        self.trainers[number].forward_backward(data, "cross_entropy").result()
        elapsed = (time.perf_counter() - started) * 1e3
        self.trainers[number].optim_step(self._adam).result()
        return elapsed

    def _data(self, number: int) -> list[types.Datum]:
        return sdk_data(token_block(_SHAPE, vocabulary=self._vocabulary, seed=number))

    def close(self) -> None:
        """End the sessions."""
        for service in self._services:
            service.close("success").result()


def settled_rss_mib(pid: int) -> float:
    """Return the resident MiB of a process after a pause."""
    time.sleep(_SETTLE_SECONDS)
    return rss_mib(pid)


def page_in_ms(adapters: Adapters, samples: int) -> dict[str, float]:
    """Return median milliseconds of a paged-out adapter's step, of the same adapter's next step, and the difference."""
    idle = len(adapters.trainers) - len(adapters.trainers) // _RECENT_DIVISOR
    chosen = random.Random(0).sample(range(idle), min(samples, idle))
    times = [(adapters.step_ms(number), adapters.step_ms(number)) for number in chosen]
    paged_out = statistics.median(first for first, _ in times)
    resident = statistics.median(second for _, second in times)
    return {
        "paged_out_p50_ms": paged_out,
        "resident_p50_ms": resident,
        "page_in_p50_ms": paged_out - resident,
    }


def measure(folder: Path, options: argparse.Namespace) -> dict[str, float | int]:
    """Return every figure: memory of the service in MiB, times in milliseconds, ``seconds`` to make all adapters."""
    model, data = folder / "tiny", folder / "data"
    in_fresh_process(write_base, "tiny", model, dtype="float32")
    vocabulary = read_base_model_facts(BASE, model, None).vocabulary_size
    keys = make_tenants(data, [f"tenant{number}" for number in range(_TENANTS)])
    adapters_wanted: int = options.adapters
    budget: int = options.adapter_memory_bytes
    environment = {ADAPTER_MEMORY_VARIABLE: str(budget)} if budget else {}
    first = min(_FIRST_ADAPTERS, max(1, adapters_wanted // 10))
    with ServiceProcess(data=data, base_models=[f"{BASE}={model}"], environment=environment) as service:
        before = settled_rss_mib(service.pid)
        adapters = Adapters(base_url=service.base_url, keys=keys, vocabulary=vocabulary)
        started = time.perf_counter()
        adapters.grow(first)
        first_seconds = time.perf_counter() - started
        first_rss = settled_rss_mib(service.pid)
        started = time.perf_counter()
        adapters.grow(adapters_wanted)
        seconds = first_seconds + time.perf_counter() - started
        rss = settled_rss_mib(service.pid)
        figures = page_in_ms(adapters, options.samples)
        adapters.close()
    idle_bytes = (rss - first_rss) * 2**20 / max(1, adapters_wanted - first)
    return {
        "adapters": adapters_wanted,
        "adapter_memory_bytes": budget,
        "rss_before_mib": before,
        "first_adapters": first,
        "rss_at_first_mib": first_rss,
        "rss_mib": rss,
        "bytes_per_idle_adapter_in_memory": idle_bytes,
        **figures,
        "seconds": seconds,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--adapters", type=int, default=1000)
    parser.add_argument("--samples", type=int, default=100, help="paged-out adapters that are trained again")
    parser.add_argument(
        "--adapter-memory-bytes",
        type=int,
        default=ADAPTER_MEMORY_BYTES,
        help=f"{ADAPTER_MEMORY_VARIABLE} of the service; 0 does not set it",
    )
    options = parser.parse_args()
    warnings.simplefilter("ignore", FutureWarning)
    prepare()
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as folder:
        figures = measure(Path(folder), options)
    print_figures(figures, digits=3)


if __name__ == "__main__":
    main()
