"""A sampling replica in this process: one worker thread that decodes all in one continuous batch."""

import asyncio
import atexit
import threading
from concurrent.futures import Future

import torch

from engine.contracts.errors import EngineFailure, InvalidRequest, WeftError
from engine.contracts.ids import RequestId
from engine.contracts.operations import SampleOutput
from engine.sampling.adapter_store import AdapterStore
from engine.sampling.continuous_batching import ContinuousBatcher
from engine.sampling.failures import as_weft_error
from engine.sampling.forward_pass import ForwardPass
from engine.sampling.replica import AdapterVersion, GenerateRequest, ReplicaHealth
from engine.sampling.sequences import Job, stop_rules
from engine.training.base import BaseModel
from engine.training.checkpoint_files import read_lora_weights
from engine.training.lora import LoraWeights

DEFAULT_CACHE_BYTES = 4 << 30


class TorchReplica:
    """``SamplerReplica`` over a loaded base.

    At most ``max_sequences`` sequences decode at once, whose keys and values stay under ``cache_bytes`` (a single
    sequence may exceed it); at most ``max_adapters`` adapter versions are resident. Raises ``InvalidRequest`` for a
    model that is not one of attention layers.
    """

    def __init__(
        self,
        base: BaseModel,
        *,
        max_sequences: int = 64,
        max_adapters: int = 64,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
    ) -> None:
        self._base = base
        self._limits = (max_sequences, cache_bytes)
        self._forward = ForwardPass(base)
        self._batcher = self._new_batcher()
        self._adapters = AdapterStore(self._read, max_adapters)
        self._changed = threading.Condition()
        self._jobs: dict[RequestId, Job] = {}
        self._arrived: list[Job] = []
        self._worker: threading.Thread | None = None
        self._closing = False

    async def start(self) -> None:
        """Start the worker thread."""
        # Read now, off the event loop: the first stop string would otherwise stall everyone while it loads.
        await asyncio.to_thread(lambda: self._base.tokenizer)
        self._worker = threading.Thread(target=self._work, name="weft-sampler", daemon=True)
        self._worker.start()
        # A worker that still computes while the interpreter is torn down would crash the process.
        atexit.register(self._stop)

    async def close(self) -> None:
        """Fail what is outstanding and wait for the worker to end the step in hand."""
        atexit.unregister(self._stop)
        await asyncio.to_thread(self._stop)
        await asyncio.to_thread(self._adapters.close)
        self._forward.close()
        self._batcher = self._new_batcher()

    async def generate(self, request: GenerateRequest) -> SampleOutput:
        """See ``SamplerReplica.generate``."""
        job = Job(request, stop_rules(request.sample, self._base), self._forget)
        self._register(job)
        try:
            self._submit(job)
            return await asyncio.wrap_future(job.outcome)
        finally:
            # Only a cancelled caller leaves before the outcome is there.
            job.fail(EngineFailure("the request was aborted"))

    async def abort(self, request_id: RequestId) -> bool:
        """See ``SamplerReplica.abort``; its sequences leave the batch before the next step."""
        with self._changed:
            job = self._jobs.get(request_id)
        return job is not None and job.fail(EngineFailure("the request was aborted"))

    async def load(self, version: AdapterVersion) -> None:
        """See ``SamplerReplica.load``."""
        lease = self._adapters.lease(version)
        try:
            await asyncio.wrap_future(lease.weights)
        finally:
            lease.release()

    async def unload(self, name: str) -> None:
        """See ``SamplerReplica.unload``."""
        self._adapters.forget(name)

    async def health(self) -> ReplicaHealth:
        """See ``SamplerReplica.health``."""
        with self._changed:
            waiting = sum(job.begun == 0 for job in self._jobs.values())
        alive = self._worker is not None and self._worker.is_alive() and not self._closing
        return ReplicaHealth(alive, self._batcher.running, waiting, self._adapters.names())

    def _read(self, version: AdapterVersion) -> LoraWeights:
        weights = read_lora_weights(version.directory, self._base)
        if not bool(weights.vector.isfinite().all()):
            raise InvalidRequest(f"adapter {version.name}: its weights are not finite; its training has diverged")
        return weights

    def _stop(self) -> None:
        with self._changed:
            self._closing = True
            outstanding = list(self._jobs.values())
            self._changed.notify_all()
        for job in outstanding:
            job.fail(EngineFailure("the sampler was closed before the request was done"))
        if self._worker is not None:
            self._worker.join()

    def _new_batcher(self) -> ContinuousBatcher:
        return ContinuousBatcher(self._forward, *self._limits)

    def _register(self, job: Job) -> None:
        request_id = job.request.request_id
        with self._changed:
            if self._worker is None or self._closing:
                raise EngineFailure("the sampler is not running")
            if request_id in self._jobs:
                raise EngineFailure(f"request {request_id} is already being sampled")
            self._jobs[request_id] = job

    def _submit(self, job: Job) -> None:
        if job.request.adapter is None:
            self._arrive(job)
            return
        lease = self._adapters.lease(job.request.adapter)
        job.outcome.add_done_callback(lambda _: lease.release())
        lease.weights.add_done_callback(lambda weights: self._adapter_ready(job, weights))

    def _adapter_ready(self, job: Job, weights: Future[LoraWeights]) -> None:
        error = weights.exception()
        if error is not None:
            job.fail(as_weft_error(error, "loading an adapter"))
            return
        job.adapter = weights.result()
        self._arrive(job)

    def _arrive(self, job: Job) -> None:
        with self._changed:
            self._arrived.append(job)
            self._changed.notify_all()

    def _forget(self, job: Job) -> None:
        with self._changed:
            self._jobs.pop(job.request.request_id, None)

    def _work(self) -> None:
        with torch.inference_mode():
            while (arrived := self._next_arrivals()) is not None:
                try:
                    for job in arrived:
                        self._batcher.submit(job)
                    self._batcher.turn()
                except Exception as error:  # noqa: BLE001 - the thread's edge: it must outlive any turn
                    self._start_over(as_weft_error(error, "sampling"))

    def _start_over(self, failure: WeftError) -> None:
        with self._changed:
            coming = {id(job) for job in self._arrived}
            lost = [job for job in self._jobs.values() if job.ready and id(job) not in coming]
        self._batcher = self._new_batcher()
        for job in lost:
            job.fail(failure)

    def _next_arrivals(self) -> list[Job] | None:
        """Wait until there is something to do; None when closing."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing or self._arrived or self._batcher.busy)
            if self._closing:
                return None
            arrived, self._arrived = self._arrived, []
            return arrived
