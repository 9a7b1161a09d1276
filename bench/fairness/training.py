"""Fairness of training: latency of light tenants beside heavy ones, and the heavy ones' rates."""

import argparse
import statistics
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from bench.bases import write_base
from bench.clients.sdk_clients import LoadReport, SdkClients
from bench.fairness.rates import jain_index
from bench.processes.fresh_process import in_fresh_process
from bench.service_trainer import make_trainer, pass_tokens
from bench.workload import ALPHA, LEARNING_RATE, RANK, OperationShape, token_block, training_batch
from contracts.base_model import read_base_model_facts
from contracts.errors import WeftError
from contracts.ids import RunId
from contracts.operations import LoraSettings, OptimStep
from engine.model.base import BaseModel
from engine.training.trainer import PassItem
from testing.cluster_process import started_service

BASE = "weft/base"
_PASS_LENGTH = 512
_PASS_REPEATS = 5
_WARM_UP_SECONDS = 10.0
"""Load before the first measurement, in seconds."""
_LEAD_SECONDS = 2.0
"""Seconds that the other tenants begin before the light tenants, and end after them."""


@dataclass(frozen=True, slots=True)
class Group:
    """Tenants of one kind, in a client process of their own."""

    name: str
    tenants: int
    shape: OperationShape
    in_flight: int


LIGHT = Group("light", 3, OperationShape(1, 32), in_flight=1)
NORMAL = Group("normal", 32, OperationShape(1, 128), in_flight=1)
FLOOD = Group("flood", 1, OperationShape(16, 512), in_flight=2)


@dataclass(frozen=True, slots=True)
class FullPass:
    """One pass that fills the token budget: the number of tokens and the median time."""

    tokens: int
    milliseconds: float


def full_pass(model: Path, tokens: int | None) -> FullPass:
    """Time passes, forward and backward, of ``tokens`` (None: the service's budget) through the warmed-up trainer.

    A pass is one operation of sequences of 512 tokens. Call this in a fresh process, with nothing else running.
    """
    facts = read_base_model_facts(BASE, model, None)
    base = BaseModel.load(facts)
    trainer, budget = make_trainer(base), tokens or pass_tokens(base)
    run = RunId("bench:train:0")
    trainer.create(run, LoraSettings(rank=RANK, alpha=ALPHA, seed=0, train_unembed=True))
    shape = OperationShape(max(1, budget // _PASS_LENGTH), min(budget, _PASS_LENGTH))
    block = token_block(shape, vocabulary=facts.vocabulary_size, seed=0)
    item = PassItem(run=run, batch=training_batch(block), backward=True)
    times = []
    for _ in range(1 + _PASS_REPEATS):
        started = time.perf_counter()
        outcome = trainer.run_pass([item])[0]
        times.append((time.perf_counter() - started) * 1e3)
        if isinstance(outcome, WeftError):
            raise outcome
        trainer.optim_steps([(run, OptimStep(LEARNING_RATE))])
    return FullPass(shape.tokens, statistics.median(times[1:]))


class Phases:
    """Service with groups of tenants, and the phases of the benchmark, in each of which some groups train."""

    def __init__(self, stack: ExitStack, folder: Path, model: Path, *, normal: int, is_cluster: bool) -> None:
        data = folder / "data"
        self._vocabulary = read_base_model_facts(BASE, model, None).vocabulary_size
        sizes = {LIGHT: LIGHT.tenants, NORMAL: normal, FLOOD: FLOOD.tenants}
        names = [f"{group.name}{number}" for group, size in sizes.items() for number in range(size)]
        service, secrets = stack.enter_context(
            started_service(data=data, base_models=[f"{BASE}={model}"], tenants=names, is_cluster=is_cluster)
        )
        keys = dict(zip(names, secrets, strict=True))
        self._clients = {
            group: stack.enter_context(
                SdkClients(
                    base_url=service.base_url,
                    keys=[keys[f"{group.name}{number}"] for number in range(size)],
                    base_model=BASE,
                )
            )
            for group, size in sizes.items()
        }

    def warm_up(self) -> None:
        """Train two steps of each tenant, one group after another, then put load on the service until its rate is steady."""
        for group in self._clients:
            self._start(group, steps=2)
            self._clients[group].finish_run()
        self.alone(NORMAL, _WARM_UP_SECONDS)

    def alone(self, group: Group, seconds: float) -> LoadReport:
        """Have one group train by itself, and return its report."""
        self._start(group, seconds=seconds)
        return self._clients[group].finish_run()

    def beside(self, others: Group, seconds: float) -> tuple[LoadReport, LoadReport]:
        """Have the light tenants train for ``seconds`` beside ``others``. Return both reports, the light tenants' first."""
        self._start(others, seconds=seconds + 2 * _LEAD_SECONDS)
        time.sleep(_LEAD_SECONDS)
        self._start(LIGHT, seconds=seconds)
        return self._clients[LIGHT].finish_run(), self._clients[others].finish_run()

    def _start(self, group: Group, *, steps: int | None = None, seconds: float | None = None) -> None:
        self._clients[group].start_run(
            group.shape, vocabulary=self._vocabulary, in_flight=group.in_flight, steps=steps, seconds=seconds
        )


def latencies_ms(report: LoadReport) -> list[float]:
    """Return the latencies, in milliseconds, of every step of every tenant."""
    return [(end - begin) * 1e3 for steps in report.steps for begin, end in steps]


def percentile(values: list[float], percent: int) -> float:
    """Return the value that ``percent`` percent of the values do not exceed, interpolated."""
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1] if len(values) > 1 else values[0]


def rates(report: LoadReport, window: tuple[float, float]) -> list[float]:
    """Return the tokens a second of each tenant between the first and the last of its steps that ended in the window.

    The rate of a tenant with fewer than two such steps is taken over the whole window.
    """
    found = []
    for steps in report.steps:
        ends = [end for _, end in steps if window[0] <= end <= window[1]]
        if len(ends) > 1:
            found.append((len(ends) - 1) * report.tokens_per_step / (ends[-1] - ends[0]))
        else:
            found.append(len(ends) * report.tokens_per_step / (window[1] - window[0]))
    return found


def window_of(report: LoadReport) -> tuple[float, float]:
    """Return the first step's begin and the last step's end, in seconds of the monotonic clock."""
    steps = [step for tenant in report.steps for step in tenant]
    return min(begin for begin, _ in steps), max(end for _, end in steps)


def measure(folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """Return every figure: times in milliseconds, rates in tokens a second."""
    model = folder / options.base
    in_fresh_process(write_base, options.base, model, dtype="float32")
    one_pass = in_fresh_process(full_pass, model, options.pass_tokens)
    with ExitStack() as stack:
        phases = Phases(stack, folder, model, normal=options.normal, is_cluster=options.cluster)
        phases.warm_up()
        alone = phases.alone(LIGHT, options.seconds)
        flood_alone = phases.alone(FLOOD, options.seconds)
        light_normal, normal = phases.beside(NORMAL, options.seconds)
        light_flood, flood = phases.beside(FLOOD, options.seconds)
        flood_again = phases.alone(FLOOD, options.seconds)
    flood_rate, light_rate = rates(flood, window_of(light_flood))[0], sum(rates(light_flood, window_of(light_flood)))
    # The mean of before and after, because the machine may have changed meanwhile.
    flood_alone_rate = statistics.mean(rates(report, window_of(report))[0] for report in (flood_alone, flood_again))
    normal_rates = rates(normal, window_of(light_normal))
    return {
        "light_alone_p50_ms": percentile(latencies_ms(alone), 50),
        "light_alone_p95_ms": percentile(latencies_ms(alone), 95),
        "light_with_normal_p50_ms": percentile(latencies_ms(light_normal), 50),
        "light_with_normal_p95_ms": percentile(latencies_ms(light_normal), 95),
        "light_with_flood_p50_ms": percentile(latencies_ms(light_flood), 50),
        "light_with_flood_p95_ms": percentile(latencies_ms(light_flood), 95),
        "light_steps_with_flood": float(len(latencies_ms(light_flood))),
        "light_clients_cores_with_flood": light_flood.cpu_s / light_flood.wall_s,
        "pass_p50_ms": one_pass.milliseconds,
        "pass_tokens": float(one_pass.tokens),
        "normal_tokens_per_s": sum(normal_rates),
        "flood_alone_tokens_per_s": flood_alone_rate,
        "flood_with_light_tokens_per_s": flood_rate,
        "light_with_flood_tokens_per_s": light_rate,
        "flood_tokens_per_s_ratio": flood_rate / flood_alone_rate,
        "served_tokens_per_s_ratio": (flood_rate + light_rate) / flood_alone_rate,
        "jain_index": jain_index(normal_rates),
    }
