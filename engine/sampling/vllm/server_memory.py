"""Memory that weft gives to each vLLM server that it starts: an equal share of what is left on the server's device.

vLLM by itself asks for 92 % of a device, which is not there beside a trainer.
"""

import bisect
import itertools
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from contracts.errors import EngineFailure, InvalidRequest
from engine.machine_memory import Gpu
from engine.sampling.vllm.model_memory import ModelMemory

CPU = "cpu"
SHARE_BESIDE_TRAINER, SHARE_ALONE = 0.5, 0.9
"""Share of what is left that servers take, on a device that trains, too, and on a GPU that does not."""
CPU_OVERHEAD, GPU_OVERHEAD = 2 * 2**30, 3 * 2**30
"""Bytes of a server besides weights, adapters, keys and values: on a CPU libraries, processes and a step's activations.

On a GPU CUDA and its libraries, recorded graphs (with adapters and without), work space, and the difference between the
memory that the driver tells and that which CUDA has; a step's activations are reckoned apart. Reckoned, not measured.
"""
_CUDA_CONTEXT = 2**29
"""Bytes of a GPU that a server takes for CUDA itself, beside what it was given."""
_BATCHED_TOKENS = ((160 * 2**30, 16_384), (70 * 2**30, 8192), (0, 2048))
"""Tokens of one step on GPUs of at least so many bytes, from ``get_batch_defaults`` in vLLM's ``engine/arg_utils.py``.

vLLM takes 2048 on an A100 of 80 GiB, too: more is reckoned for it here.
"""
_SPARE_TOKENS = 256
"""Tokens beyond one context whose keys and values a server needs: blocks are whole, and one stays empty."""
_GIB = 2**30
_OWN_SIZES = (
    "--kv-cache-memory-bytes",
    "--gpu-memory-utilization",
    "--memory-utilization",
    "--num-gpu-blocks-override",
)
_OWN_VARIABLE = "VLLM_CPU_KVCACHE_SPACE"
_UNITS = {"": 1, **{unit: 1000 ** (power + 1) for power, unit in enumerate("kmgt")}}
_UNITS |= {unit: 1024 ** (power + 1) for power, unit in enumerate("KMGT")}
_NUMBER = re.compile(r"(\d+(?:\.\d+)?)([kmgtKMGT]?)")
"""A number as vLLM's ``human_readable_int`` reads it: ``16k`` is 16,000 and ``16K`` 16,384."""
_TENSOR, _PIPELINE = ("--tensor-parallel-size", "-tp"), ("--pipeline-parallel-size", "-pp")
_BATCHED = ("--max-num-batched-tokens",)


@dataclass(frozen=True, slots=True)
class ServerMemory:
    """Bytes given to one server on each of its devices: ``cpu``, or the UUIDs of the GPUs that CUDA shows it.

    ``kv_cache`` are those of them for keys and values. ``fraction`` is the share of a GPU's memory that vLLM may use, None on a
    CPU.
    """

    devices: tuple[str, ...]
    given: int
    kv_cache: int
    fraction: float | None = None

    @property
    def gpus(self) -> tuple[str, ...]:
        """UUIDs of the server's GPUs; none on a CPU."""
        return () if CPU in self.devices else self.devices

    def arguments(self) -> list[str]:
        """Return vLLM's options.

        With the bytes, vLLM does not measure what is left for keys and values, by which it takes all that other processes
        allocate or free meanwhile for its own (``determine_available_memory`` in its ``v1/worker/gpu_worker.py``). By the
        fraction it still looks whether as much is free at its start (``request_memory`` in its ``v1/worker/utils.py``).
        """
        bytes_of_cache = ["--kv-cache-memory-bytes", str(self.kv_cache)]
        return (
            bytes_of_cache
            if self.fraction is None
            else [*bytes_of_cache, "--gpu-memory-utilization", f"{self.fraction:.4f}"]
        )

    def variables(self) -> dict[str, str]:
        """Return environment variables."""
        return {"CUDA_VISIBLE_DEVICES": ",".join(self.gpus)} if self.gpus else {}

    def __str__(self) -> str:
        where = f"GPU {','.join(self.gpus)}" if self.gpus else CPU
        return f"{self.given / _GIB:.2f} GiB on {where}, {self.kv_cache / _GIB:.2f} GiB of them for keys and values"


@dataclass(frozen=True, slots=True)
class MemoryClaim:
    """Bytes that a running server of this machine was given and has not taken yet. ``owner`` is the process that started it."""

    owner: int
    memory: ServerMemory
    untaken: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeed:
    """Needs of one server, one of ``servers`` that this process starts.

    - ``model``: what the base takes. ``context_length`` is in tokens, ``sequences`` are drawn at once.
    - ``share`` of what is left goes to the servers; None: a half beside a trainer, nine tenths elsewhere.
    - ``trainer_gpu``: place of the trainer's GPU among the visible ones, None for a trainer on the CPU.
    - ``gpus_each``: number of GPUs of one server, ``stages`` of which a token passes one after another.
    - ``batched_tokens``: most tokens of one step on a GPU, None for vLLM's own number.
    - ``resident``: bytes of the adapters that one server keeps in the host's memory, beside its places for a batch.
    - ``scores_prompts``: the server scores prompts itself, a whole step of them at a time.
    - ``had``: memory of the server's earlier start, None for a first one. On those GPUs the trainer has taken its own part
      since: the share of what is left then is a share of the server's alone.
    """

    model: ModelMemory
    context_length: int
    sequences: int
    servers: int = 1
    share: float | None = None
    trainer_gpu: int | None = 0
    gpus_each: int = 1
    stages: int = 1
    batched_tokens: int | None = None
    resident: int = 0
    scores_prompts: bool = False
    had: ServerMemory | None = None

    @property
    def context_bytes(self) -> int:
        """Bytes of the keys and values of one sequence of the whole context on a CPU; 0 where they are not known.

        Prompts are not split over steps there: one as long as the context is in flight as a whole.
        """
        return self.sequence_bytes(self.context_length, self.context_length)

    def sequence_bytes(self, length: int, in_flight: int) -> int:
        """Return the bytes of the keys and values of one sequence, with ``in_flight`` tokens in steps; 0 if not known."""
        return self.model.sequence(length + _SPARE_TOKENS, in_flight + _SPARE_TOKENS)

    @property
    def gpu_cache_parts(self) -> int:
        """Number of GPUs that keys and values are cut over."""
        return self.model.cache_parts(self.gpus_each // self.stages, self.stages)

    def fixed_on_gpu(self, batched: int) -> int:
        """Return the bytes on each GPU besides keys and values, where a step has ``batched`` tokens.

        A step's activations: in one layer at a time, inputs and outputs of attention and perceptron (``step_token``), and the
        logits of every sequence's last token. A prompt that is scored takes the logits of all its tokens in the step.
        """
        step = batched * self.model.step_token + self.sequences * self.model.logits
        if self.scores_prompts:
            step += batched * self.model.scores
        return GPU_OVERHEAD + step + self.model.on_each_gpu(self.gpus_each // self.stages, self.stages)

    def fitting(self, room: int, in_flight: int) -> int:
        """Return the length of the longest sequence whose keys and values fit into ``room`` bytes, at most the context's."""
        lengths = range(self.context_length + 1)
        return bisect.bisect_right(lengths, room, key=lambda length: self.sequence_bytes(length, in_flight)) - 1

    def wish(self, device: str) -> int:
        """Return the bytes that the server had on the device at its earlier start; 0 on another one."""
        return self.had.given if self.had is not None and device in self.had.devices else 0


def is_sized_by_operator(extra: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Tell whether the operator's arguments or environment say themselves how much memory a server takes."""
    return bool(environment.get(_OWN_VARIABLE)) or any(word in _OWN_SIZES for word in _words(extra))


def gpus_each(extra: Sequence[str]) -> int:
    """Return the number of GPUs that vLLM's arguments ask for one server."""
    return math.prod(_numbers(extra, *_TENSOR, *_PIPELINE))


def stages(extra: Sequence[str]) -> int:
    """Return the number of groups of layers that vLLM's arguments put on GPUs of their own."""
    return math.prod(_numbers(extra, *_PIPELINE))


def batched_tokens(extra: Sequence[str]) -> int | None:
    """Return the most tokens of one step that vLLM's arguments say, None without them."""
    return max(_numbers(extra, *_BATCHED), default=None)


def _numbers(extra: Sequence[str], *options: str) -> list[int]:
    values = [after for word, after in itertools.pairwise(_words(extra)) if word in options]
    return [int(float(found[1]) * _UNITS[found[2]]) for value in values if (found := _NUMBER.fullmatch(value))]


def _words(extra: Sequence[str]) -> list[str]:
    """Return vLLM's arguments, options apart from their values. vLLM takes ``_`` for ``-`` in the name of an option."""
    words = [word for part in extra for word in part.split("=", 1)]
    return [word.replace("_", "-") if word.startswith("--") else word for word in words]


def give_on_cpu(need: MemoryNeed, left: int, claims: Sequence[MemoryClaim]) -> ServerMemory:
    """Return a server's memory, ``left`` bytes being available on this machine. Raises ``EngineFailure`` if it is too little.

    Memory beyond what every sequence at full length needs is not taken.
    """
    left -= _untaken(claims, CPU)
    budget = _equal_share(left, claims, CPU, need.share or SHARE_BESIDE_TRAINER, need.servers)
    fixed = CPU_OVERHEAD + need.model.weights + need.model.adapters + need.model.embedding + need.resident
    cache = budget - fixed
    if need.model.token is not None:
        cache = min(need.context_bytes * need.sequences, max(need.context_bytes, cache))
    if cache <= 0 or fixed + cache > left:
        raise _too_little(need, left, fixed, in_flight=need.context_length, parts=1)
    return ServerMemory((CPU,), fixed + cache, kv_cache=cache)


def give_on_gpus(need: MemoryNeed, gpus: Sequence[Gpu], claims: Sequence[MemoryClaim]) -> ServerMemory:
    """Return a server's GPUs and its memory on each: GPUs with fewest servers, without the trainer, with most left come first.

    One whole context fits beyond the share while it is left, and so does what the server had on the GPU before.
    Raises ``InvalidRequest`` if there are too few GPUs or they are too small, ``EngineFailure`` if too little is left on them.
    """
    if need.gpus_each > len(gpus):
        raise InvalidRequest(f"a vLLM server needs {need.gpus_each} GPUs, and {len(gpus)} are visible here")
    trainer = gpus[need.trainer_gpu] if need.trainer_gpu is not None and need.trainer_gpu < len(gpus) else None
    taken = [device for claim in claims for device in claim.memory.devices]
    left = {gpu: gpu.free - _untaken(claims, gpu.name) for gpu in gpus}
    chosen = sorted(gpus, key=lambda gpu: (taken.count(gpu.name), gpu is trainer, -left[gpu]))[: need.gpus_each]
    together = math.ceil(need.servers * need.gpus_each / len(gpus))
    batched = need.batched_tokens or _batched_tokens(max(gpu.total for gpu in chosen))
    # One step for each stage, and one that is prepared meanwhile: ``max_in_flight_tokens`` in vLLM's ``config/vllm.py``.
    in_flight, parts = batched * (need.stages + 1), need.gpu_cache_parts
    fixed = need.fixed_on_gpu(batched)
    needed = fixed + need.sequence_bytes(need.context_length, in_flight) // parts
    given = min(
        _give_on_gpu(need, needed, left[gpu], claims, gpu, together=together, trains=gpu is trainer) for gpu in chosen
    )
    if given < needed or given == fixed:
        total = min(gpu.total for gpu in chosen)
        raise _too_little(need, given, fixed, in_flight=in_flight, parts=parts, total=total)
    # Rounded down: more than is free would end vLLM at its start.
    fraction = math.floor(given / max(gpu.total for gpu in chosen) * 1e4) / 1e4
    return ServerMemory(tuple(gpu.name for gpu in chosen), given, given - fixed, fraction)


def _batched_tokens(total: int) -> int:
    """Return the most tokens of one step on a GPU of ``total`` bytes, if vLLM chooses."""
    return next(tokens for least, tokens in _BATCHED_TOKENS if total >= least)


def _give_on_gpu(
    need: MemoryNeed, needed: int, left: int, claims: Sequence[MemoryClaim], gpu: Gpu, *, together: int, trains: bool
) -> int:
    """Return a server's bytes on one GPU: its share, or more if that leaves theirs to this process's servers to come."""
    of_all = need.share or (SHARE_BESIDE_TRAINER if trains else SHARE_ALONE)
    share = _equal_share(left, claims, gpu.name, of_all, together)
    to_come = max(0, together - 1 - len(_own(claims, gpu.name))) * share
    whole = needed if needed <= int(left * SHARE_ALONE) - to_come else 0
    return max(share, whole, min(need.wish(gpu.name), left - _CUDA_CONTEXT - to_come))


def _untaken(claims: Sequence[MemoryClaim], device: str) -> int:
    return sum(claim.untaken for claim in claims if device in claim.memory.devices)


def _own(claims: Sequence[MemoryClaim], device: str) -> list[MemoryClaim]:
    """Return the claims of this process's servers on the device."""
    return [claim for claim in claims if claim.owner == os.getpid() and device in claim.memory.devices]


def _equal_share(left: int, claims: Sequence[MemoryClaim], device: str, share: float, servers: int) -> int:
    """Return the share as if none of this process's servers had been given any yet, but no more than is left."""
    own = sum(claim.memory.given for claim in _own(claims, device))
    return min(int((left + own) * share / servers), int(left * SHARE_ALONE))


def _too_little(
    need: MemoryNeed, left: int, fixed: int, *, in_flight: int, parts: int, total: int | None = None
) -> InvalidRequest | EngineFailure:
    """Return the error. It is for good only where the device as a whole, of ``total`` bytes, is too small."""
    fits = need.fitting((left - fixed) * parts, in_flight) if need.model.token else 0
    way = f"set WEFT_VLLM_CONTEXT_LENGTH to at most {fits}, or free memory" if fits > 0 else "free memory"
    needed = fixed + need.sequence_bytes(need.context_length, in_flight) // parts
    message = (
        f"a vLLM server needs {needed / _GIB:.1f} GiB for its weights, its adapters and one sequence of {need.context_length} "
        f"tokens, and its share of what is left on its device is {left / _GIB:.1f} GiB: {way}, or set a larger "
        "WEFT_VLLM_MEMORY_SHARE"
    )
    return InvalidRequest(message) if total is not None and needed > total else EngineFailure(message)
