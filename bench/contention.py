"""The engine's rate beside other processes on its cores: ``python -m bench.contention``.

The service shares its machine with its API, its ledger and, on one machine, its clients. Here the trainer computes steps
while another process uses a part of one core, in pieces as short as a request's. One round is without that process. The
figure bounds the ``ratio_service_to_engine`` that ``bench.training`` can show. Prints a table and, last, one JSON line.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from bench.bases import write_base
from bench.processes.fresh_process import in_fresh_process, prepare
from bench.service_trainer import make_trainer
from bench.training.contestants import EngineContestant
from bench.workload import OperationShape, token_block
from contracts.base_model import read_base_model_facts
from engine.model.base import BaseModel

_PIECE_SECONDS = 0.001
_COMPETITOR = """
import sys, time
busy, idle = map(float, sys.argv[1:])
while True:
    began = time.perf_counter()
    while time.perf_counter() - began < busy:
        pass
    time.sleep(idle)
"""


@dataclass(frozen=True, slots=True)
class Task:
    """A measurement to make; ``core_parts`` are the parts of one core that the competitor uses."""

    base: str
    model: Path
    tenants: int
    shape: OperationShape
    core_parts: list[float]
    rounds: int


@dataclass(frozen=True, slots=True)
class Kept:
    """The engine's rate beside a competitor over its rate alone, median over rounds."""

    share_of_a_core: float
    tokens_per_s: float
    ratio_to_alone: float


@contextmanager
def competitor(core_part: float) -> Iterator[None]:
    """Run a process that computes for ``core_part`` of the time; none at 0."""
    if core_part == 0.0:
        yield
        return
    idle = _PIECE_SECONDS * (1.0 - core_part) / core_part
    process = subprocess.Popen([sys.executable, "-c", _COMPETITOR, str(_PIECE_SECONDS), str(idle)])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def measure(task: Task) -> list[Kept]:
    """Measure rounds in which the engine has a turn beside each part of a core. Call this in a fresh process."""
    facts = read_base_model_facts(task.base, task.model, None)
    blocks = [token_block(task.shape, vocabulary=facts.vocabulary_size, seed=number) for number in range(task.tenants)]
    base = BaseModel.load(facts, dtype="float32", device="cpu")
    engine = EngineContestant(make_trainer(base), "fused", blocks, torch.device("cpu"))
    engine.warm_up()
    rates: dict[float, list[float]] = {core_part: [] for core_part in (0.0, *task.core_parts)}
    for _ in range(task.rounds):
        for core_part, seen in rates.items():
            with competitor(core_part):
                engine.turn()
                seen.append(engine.turn())
    alone = rates[0.0]
    return [
        Kept(core_part, statistics.median(seen), statistics.median(a / b for a, b in zip(seen, alone, strict=True)))
        for core_part, seen in rates.items()
    ]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="small", help="tiny, small or large")
    parser.add_argument("--tenants", type=int, default=16)
    parser.add_argument("--operation", default="4x128", help="sequences x length of a tenant's operation")
    parser.add_argument("--shares", default="0.25,0.5,0.75", help="of one core, comma between")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    prepare()
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as folder:
        model = Path(folder) / options.base
        in_fresh_process(write_base, options.base, model, dtype="float32")
        shape = OperationShape.parse(options.operation)
        core_parts = [float(part) for part in options.shares.split(",")]
        rows = in_fresh_process(measure, Task(options.base, model, options.tenants, shape, core_parts, options.rounds))
    print(f"{'share of a core':>16}{'tokens/s':>12}{'of alone':>10}")
    for row in rows:
        print(f"{row.share_of_a_core:>16.2f}{row.tokens_per_s:>12.0f}{row.ratio_to_alone:>10.2f}")
    print(json.dumps({"base": options.base, "operation": options.operation, "rows": [asdict(row) for row in rows]}))


if __name__ == "__main__":
    main()
