"""One row of ``bench.training``, measured in a process of its own, so that the process's peak of memory is the row's."""

import os
import statistics
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter

import numpy as np
import torch

from bench.bases import matmul_flops_per_second, step_flops
from bench.clients.sdk_clients import SdkClients
from bench.processes.memory import peak_rss_mib
from bench.service_trainer import make_trainer
from bench.training.contestants import (
    SMALL_TOKENS,
    Contestant,
    EngineContestant,
    PeftContestant,
    ServiceContestant,
    sequential_peft,
    tokens_of,
)
from bench.training.peft_reference import PeftReference
from bench.workload import RANK, OperationShape, token_block
from contracts.base_model import read_base_model_facts
from engine.model.base import BaseModel

Rates = dict[str, list[float]]
_FUSED, _SEQUENTIAL, _UNSWITCHED = "fused", "sequential_peft", "sequential_peft_without_set_adapter"
_SINGLE_PEFT, _SINGLE_ENGINE, _SERVICE = "single_peft", "single_engine", "service"
_NAMES = (_FUSED, _SEQUENTIAL, _UNSWITCHED, _SINGLE_PEFT, _SINGLE_ENGINE, _SERVICE)
_LOSS_TOLERANCE = {"float32": 1e-3, "bfloat16": 3e-2}


@dataclass(frozen=True, slots=True)
class ServiceAddress:
    """A running service that serves the row's base under the base's name, and a key for each of the row's tenants."""

    base_url: str
    keys: list[str]
    pid: int


@dataclass(frozen=True, slots=True)
class RowTask:
    """A row to measure, in at most ``repeats`` rounds. No round begins once the rounds have taken ``seconds``."""

    base: str
    model: Path
    tenants: int
    shape: OperationShape
    device: str
    dtype: str
    repeats: int
    seconds: float
    service: ServiceAddress | None


@dataclass(frozen=True, slots=True)
class RowResult:
    """A measured row. Rates are in tokens a second, ratios are medians over rounds, None is not measured.

    - ``single_tenant_tokens_per_s``: the faster of PEFT and engine, with one adapter and the whole batch.
    - ``peak_rss_mib``: peak memory of the process while only the fused contestant was loaded.
    - ``share_of_floor``: the fused rate over the rate that the measured rate of matrix products would allow.
    - ``client_cpu_share``: the clients' part of all cores, during the service's turns.
    - ``service_own_cores``, ``service_children_cores``, ``idle_cores``: cores used by the service's own process and by its
      children, and idle cores, during the service's turns.
    """

    base: str
    tenants: int
    sequences: int
    length: int
    fused_tokens_per_s: float
    sequential_peft_tokens_per_s: float
    sequential_peft_without_set_adapter_tokens_per_s: float
    single_tenant_tokens_per_s: float
    single_peft_tokens_per_s: float | None
    single_engine_tokens_per_s: float
    service_tokens_per_s: float | None
    ratio_to_sequential: float
    ratio_to_sequential_without_set_adapter: float
    ratio_to_single: float
    ratio_service_to_engine: float | None
    client_cpu_share: float | None
    service_own_cores: float | None
    service_children_cores: float | None
    idle_cores: float | None
    peak_rss_mib: float
    peak_cuda_mib: float | None
    matmul_gflop_per_s: float
    floor_tokens_per_s: float
    share_of_floor: float
    threads: int
    rounds: int


class Row:
    """The contestants of one row, loaded one after another."""

    def __init__(self, task: RowTask, service: SdkClients | None) -> None:
        self._task = task
        self._facts = read_base_model_facts(task.base, task.model, None)
        vocabulary = self._facts.vocabulary_size
        self._blocks = [token_block(task.shape, vocabulary=vocabulary, seed=number) for number in range(task.tenants)]
        self._tokens = tokens_of(self._blocks)
        self._base = BaseModel.load(self._facts, dtype=task.dtype, device=task.device)
        trainer = make_trainer(self._base)
        device = self._base.device
        self._fused = EngineContestant(trainer, "fused", self._blocks, device)
        loss = self._fused.warm_up()
        self._peak_rss = peak_rss_mib()
        self._peak_cuda = torch.cuda.max_memory_allocated(device) / 2**20 if device.type == "cuda" else None
        whole = [np.concatenate(self._blocks)]
        self._single_engine = self._warm_single(EngineContestant(trainer, "single", whole, device))
        self._sequential = sequential_peft(self._reference(task.tenants), self._blocks, device)
        self._check_same_work(loss, self._sequential.warm_up())
        self._single_peft = self._fitting(PeftContestant(self._reference(1), whole, device, most_tokens=None))
        self._service = None
        if service is not None and task.service is not None:
            self._service = ServiceContestant(service, task.shape, vocabulary, task.service.pid)
        if self._service is not None:
            self._service.warm_up()

    def _reference(self, adapters: int) -> PeftReference:
        return PeftReference(self._task.model, adapters=adapters, device=str(self._base.device), dtype=self._task.dtype)

    def _warm_single(self, single: EngineContestant) -> EngineContestant:
        """Warm up ``single``, unless its batch is large: the fused contestant has warmed the same code."""
        if self._tokens <= SMALL_TOKENS:
            single.warm_up()
        else:
            single.step_seconds = self._fused.step_seconds
        return single

    @staticmethod
    def _fitting(single: PeftContestant) -> PeftContestant | None:
        return single if single.fits() else None

    def _check_same_work(self, ours: float, theirs: float) -> None:
        """Compare the first tenant's losses, before any step has changed an adapter. Raises ``RuntimeError`` when they differ."""
        if not np.isclose(ours, theirs, rtol=_LOSS_TOLERANCE[self._task.dtype]):
            raise RuntimeError(f"the contestants do not compute the same: loss {ours} in the engine, {theirs} in PEFT")

    def measure(self) -> RowResult:
        """Measure rounds in which each contestant takes a turn."""
        contestants: dict[str, Contestant | None] = {
            _FUSED: self._fused,
            _SEQUENTIAL: self._sequential,
            _SINGLE_PEFT: self._single_peft,
            _SINGLE_ENGINE: self._single_engine,
            _SERVICE: self._service,
        }
        rates: Rates = {name: [] for name in _NAMES}
        rounds, started = 0, perf_counter()
        while rounds == 0 or (rounds < self._task.repeats and perf_counter() - started < self._task.seconds):
            # Each round begins with another contestant, so that none always runs after the same one's caches and last work.
            first = rounds % len(contestants)
            for name, contestant in (*list(contestants.items())[first:], *list(contestants.items())[:first]):
                if contestant is not None:
                    rates[name].append(contestant.turn())
            rates[_UNSWITCHED].append(self._sequential.switch_free_rate)
            rounds += 1
        return self._result(rates, rounds)

    def _result(self, rates: Rates, rounds: int) -> RowResult:
        task = self._task
        median = {name: statistics.median(values) if values else None for name, values in rates.items()}
        single = max((_SINGLE_PEFT, _SINGLE_ENGINE), key=lambda name: median[name] or 0.0)
        matmul = matmul_flops_per_second(self._base.model)
        flops = step_flops(self._base.model, tokens=self._tokens, length=task.shape.length, rank=RANK)
        floor = self._tokens * matmul / flops
        return RowResult(
            base=task.base,
            tenants=task.tenants,
            sequences=task.shape.sequences,
            length=task.shape.length,
            fused_tokens_per_s=median[_FUSED] or 0.0,
            sequential_peft_tokens_per_s=median[_SEQUENTIAL] or 0.0,
            sequential_peft_without_set_adapter_tokens_per_s=median[_UNSWITCHED] or 0.0,
            single_tenant_tokens_per_s=median[single] or 0.0,
            single_peft_tokens_per_s=median[_SINGLE_PEFT],
            single_engine_tokens_per_s=median[_SINGLE_ENGINE] or 0.0,
            service_tokens_per_s=median[_SERVICE],
            ratio_to_sequential=_ratio(rates[_FUSED], rates[_SEQUENTIAL]) or 0.0,
            ratio_to_sequential_without_set_adapter=_ratio(rates[_FUSED], rates[_UNSWITCHED]) or 0.0,
            ratio_to_single=_ratio(rates[_FUSED], rates[single]) or 0.0,
            ratio_service_to_engine=_ratio(rates[_SERVICE], rates[_FUSED]),
            client_cpu_share=self._client_cpu_share(),
            service_own_cores=self._cores(lambda service: service.own_cpu_s),
            service_children_cores=self._cores(lambda service: service.children_cpu_s),
            idle_cores=self._cores(lambda service: service.idle_s),
            peak_rss_mib=self._peak_rss,
            peak_cuda_mib=self._peak_cuda,
            matmul_gflop_per_s=matmul / 1e9,
            floor_tokens_per_s=floor,
            share_of_floor=(median[_FUSED] or 0.0) / floor,
            threads=torch.get_num_threads(),
            rounds=rounds,
        )

    def _client_cpu_share(self) -> float | None:
        cores = self._cores(lambda service: service.client_cpu_s)
        return None if cores is None else cores / (os.cpu_count() or 1)

    def _cores(self, seconds: Callable[[ServiceContestant], float]) -> float | None:
        return None if self._service is None else seconds(self._service) / self._service.wall_s


def _ratio(ours: list[float], theirs: list[float]) -> float | None:
    """Return the median over rounds of the ratio of two contestants' rates in the same round."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True)) if ours and theirs else None


def measure_row(task: RowTask) -> dict[str, float | str | None]:
    """Measure one row; call it in a fresh process."""
    with ExitStack() as stack:
        clients = None
        if task.service is not None:
            clients = stack.enter_context(
                SdkClients(base_url=task.service.base_url, keys=task.service.keys, base_model=task.base)
            )
        return asdict(Row(task, clients).measure())
