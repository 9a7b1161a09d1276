"""The sampling replica in weft's own process: a worker thread that decodes all requests in one continuous batch.

Two threads share the work. The event loop's thread owns the table of outstanding requests. The worker's thread owns the
jobs, the batch and the caches. The loop reaches the worker by calls that the worker makes before its next turn; the
worker reaches the loop through the outbox.
"""

import asyncio
import atexit
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from functools import partial
from time import monotonic

import torch

from contracts.errors import EngineFailure, InvalidRequest, WeftError
from engine.model.adapter_folder import read_lora_weights
from engine.model.base import BaseModel
from engine.model.device import DeviceFailed, SelfTest
from engine.model.lora import LoraWeights
from engine.sampling.engine_failure import as_weft_error
from engine.sampling.in_process.adapter_store import AdapterStore
from engine.sampling.in_process.continuous_batching import ContinuousBatcher
from engine.sampling.in_process.forward_pass import ForwardPass
from engine.sampling.in_process.outbox import Outbox
from engine.sampling.in_process.sequences import Job
from engine.sampling.replica import AdapterVersion, GenerateEvent, GenerateRequest, ReplicaHealth, turn_taker
from engine.sampling.request_checks import check_request

DEFAULT_CACHE_BYTES = 4 << 30
DEFAULT_STALL_SECONDS = 600.0
DEFAULT_PIECE_SECONDS = 0.1
ONE_CORE_PARAMETERS = 100_000_000
"""Number of parameters below which a CPU decodes on one core. In so small a model the barriers of a step cost more than the
other cores gain (``bench.sampling``), and the trainer can use those cores."""


class TorchReplica:
    """``SamplerReplica`` over a base model in memory. Usable on one event loop: the loop of ``start``.

    At most ``max_sequences`` sequences decode at once, and their keys and values stay under ``cache_bytes`` (a single
    sequence may exceed it). At most ``max_adapters`` adapter versions are resident. Raises ``InvalidRequest`` for a
    model with layers other than attention.
    """

    def __init__(
        self,
        base: BaseModel,
        *,
        name: str | None = None,
        max_sequences: int = 64,
        max_adapters: int = 64,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
        stall_seconds: float = DEFAULT_STALL_SECONDS,
        piece_seconds: float = DEFAULT_PIECE_SECONDS,
    ) -> None:
        """``piece_seconds`` is the time that a chunk of prompts should take while several owners have work."""
        self._base = base
        self._name = name or f"torch:{base.facts.name}"
        self._limits = (max_sequences, cache_bytes)
        self._piece_seconds = piece_seconds
        self._forward = ForwardPass(base)
        self._batcher = self._new_batcher()
        self._adapters = AdapterStore(self._read, max_adapters)
        self._outbox: Outbox | None = None
        self._jobs: dict[str, Job] = {}
        self._cuts: set[asyncio.Future[bool]] = set()
        # Jobs that the batcher has. Owned by the worker's thread.
        self._submitted: set[Job] = set()
        self._calls: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._worker: threading.Thread | None = None
        self._closing = False
        self._stall_seconds = stall_seconds
        self._turn_began: float | None = None
        self._device_failure: DeviceFailed | None = None

    @property
    def name(self) -> str:
        """See ``SamplerReplica.name``."""
        return self._name

    async def start(self) -> None:
        """See ``SamplerReplica.start``."""
        self._outbox = Outbox(asyncio.get_running_loop())
        self_test = await asyncio.to_thread(SelfTest, self._base)
        work = partial(self._work, self._outbox, self_test)
        self._worker = threading.Thread(target=work, name="weft-sampler", daemon=True)
        self._worker.start()
        # A worker that still computes at the interpreter's exit would crash the process.
        atexit.register(self._stop)

    async def close(self) -> None:
        """See ``SamplerReplica.close``. Waits for the worker to end its current turn."""
        atexit.unregister(self._stop)
        await asyncio.to_thread(self._stop)
        failure = EngineFailure("the sampler was closed before the request was done")
        for job in self._jobs.values():
            job.stream.end(failure)
        for waiter in self._cuts:
            if not waiter.done():
                waiter.set_exception(EngineFailure("the sampler was closed before the request was cut"))
        await asyncio.to_thread(self._adapters.close)
        self._forward.close()
        self._batcher = self._new_batcher()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Sequence[GenerateEvent]]:
        """See ``SamplerReplica.generate``."""
        check_request(request, self._base.facts)
        if request.logit_rules is not None:
            raise InvalidRequest(
                "penalties, biases and forms of the text: this sampler has none of them; leave them out"
            )
        job = self._register(request)
        try:
            self._submit(job)
            while (events := await job.stream.next()) is not None:
                yield events
        finally:
            del self._jobs[request.request_id]
            self._call_worker(job.drop)

    async def cut(self, request_id: str, index: int | None = None) -> bool:
        """See ``SamplerReplica.cut``. A turn that begins after the cut computes no tokens of a cut sequence."""
        job = self._jobs.get(request_id)
        if job is None:
            return False
        if not self._alive:
            raise EngineFailure("the sampler is not running")
        if index is not None and not 0 <= index < len(job.request.seeds):
            raise InvalidRequest(f"request {request_id} has no sequence {index}")
        waiter: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._cuts.add(waiter)
        try:
            self._call_worker(partial(job.cut, index, waiter))
            return await waiter
        finally:
            self._cuts.discard(waiter)

    async def load(self, version: AdapterVersion, *, owner: str = "", share: float = 1.0) -> None:
        """See ``SamplerReplica.load``."""
        pin = self._adapters.pin(version, turn_taker(owner, version), share)
        try:
            await asyncio.wrap_future(pin.weights)
        finally:
            pin.release()

    async def unload(self, name: str) -> None:
        """See ``SamplerReplica.unload``."""
        self._adapters.forget(name)

    async def sleep(self) -> None:
        """Raise ``InvalidRequest``: the replica's memory is the trainer's base model."""
        raise InvalidRequest(
            "the sampler in weft's own process has no memory of its own to give back; drain it instead"
        )

    async def wake_up(self) -> None:
        """See ``SamplerReplica.wake_up``. This replica never sleeps."""

    async def health(self) -> ReplicaHealth:
        """See ``SamplerReplica.health``. A turn that takes longer than the stall limit is a failure of the device."""
        if self._device_failure is not None:
            raise self._device_failure
        began = self._turn_began
        if began is not None and monotonic() - began > self._stall_seconds:
            raise DeviceFailed(f"the sampler has made no progress for {monotonic() - began:.0f} s")
        waiting = sum(job.live and not job.begun for job in self._jobs.values())
        return ReplicaHealth(self._alive, self._batcher.running, waiting, self._adapters.names())

    @property
    def _alive(self) -> bool:
        return self._worker is not None and self._worker.is_alive() and not self._closing

    def _register(self, request: GenerateRequest) -> Job:
        if self._outbox is None or not self._alive:
            raise EngineFailure("the sampler is not running")
        if request.request_id in self._jobs:
            raise EngineFailure(f"request {request.request_id} is already being sampled")
        job = self._jobs[request.request_id] = Job(request, self._outbox, self._ended)
        return job

    def _submit(self, job: Job) -> None:
        if job.request.adapter is None:
            self._call_worker(partial(self._add, job))
            return
        job.pin = self._adapters.pin(job.request.adapter, job.request.turn_taker, job.request.share)
        job.pin.weights.add_done_callback(lambda weights: self._call_worker(partial(self._add_adapted, job, weights)))

    def _call_worker(self, call: Callable[[], None]) -> None:
        """Have the worker's thread make ``call`` before its next turn. Callable from any thread."""
        with self._changed:
            self._calls.append(call)
            self._changed.notify_all()

    def _read(self, version: AdapterVersion) -> LoraWeights:
        weights = read_lora_weights(version.directory, self._base)
        if not bool(weights.vector.isfinite().all()):
            raise InvalidRequest(f"adapter {version.name}: its weights are not finite; its training has diverged")
        return weights

    def _stop(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._worker is not None:
            self._worker.join()

    def _new_batcher(self) -> ContinuousBatcher:
        return ContinuousBatcher(self._forward, *self._limits, piece_seconds=self._piece_seconds)

    # The methods below run on the worker's thread.

    def _work(self, outbox: Outbox, self_test: SelfTest) -> None:
        cores = torch.get_num_threads()
        threads = 1 if self._fits_one_core() else cores
        with torch.inference_mode():
            while self._has_work():
                self._turn_began = monotonic()
                try:
                    self._turn(outbox, threads=threads, self_test=self_test)
                except DeviceFailed as failure:
                    self._device_failure = failure
                    self._start_over(EngineFailure("the sampler's device has failed"))
                    outbox.flush()
                    return
                finally:
                    self._turn_began = None
                    torch.set_num_threads(cores)
                outbox.flush()

    def _turn(self, outbox: Outbox, *, threads: int, self_test: SelfTest) -> None:
        """Make the calls that wait, and run one turn of the batch. Raises ``DeviceFailed``."""
        failed_before = self._batcher.failed_steps
        try:
            while self._calls:
                self._calls.popleft()()
            # Before the turn: the answer to a cut must not wait for the other sequences' step.
            outbox.flush()
            # MKL has one thread count for the whole process, and the trainer sets it too.
            torch.set_num_threads(threads)
            self._batcher.turn()
        except Exception as error:  # noqa: BLE001 - the thread's edge: the worker must outlive any turn
            self._start_over(as_weft_error(error, "sampling"))
            self_test.check()
        else:
            if self._batcher.failed_steps > failed_before:
                self_test.check()

    def _fits_one_core(self) -> bool:
        parameters = sum(parameter.numel() for parameter in self._base.model.parameters())
        return bool(self._base.device.type == "cpu" and parameters < ONE_CORE_PARAMETERS)

    def _has_work(self) -> bool:
        """Wait until there is a call or work for the batcher. False when the replica closes."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing or self._calls or self._batcher.busy)
            return not self._closing

    def _add(self, job: Job) -> None:
        if job.live:
            self._submitted.add(job)
            self._batcher.submit(job)

    def _add_adapted(self, job: Job, weights: Future[LoraWeights]) -> None:
        error = weights.exception()
        if error is not None:
            job.fail(as_weft_error(error, "loading an adapter"))
            return
        job.adapter = weights.result()
        self._add(job)

    def _ended(self, job: Job) -> None:
        self._submitted.discard(job)
        if job.pin is not None:
            job.pin.release()

    def _start_over(self, failure: WeftError) -> None:
        self._batcher = self._new_batcher()
        for job in list(self._submitted):
            job.fail(failure)
