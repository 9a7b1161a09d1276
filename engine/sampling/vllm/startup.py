"""Compares a vLLM server with its replica's settings, before the first request."""

import re

from contracts.adapted_heads import ADAPTED_HEADS
from contracts.errors import EngineFailure, InvalidRequest
from engine.sampling.vllm.adapters import MODELS
from engine.sampling.vllm.http import VllmHttp
from engine.sampling.vllm.messages import LoraLimits, ModelList, Parallelism, ServerInfo, Version
from engine.sampling.vllm.served_length import served_length
from engine.sampling.vllm.settings import VllmReplicaSettings

LEAST_VERSION = (0, 32)
"""Oldest vLLM that weft has run on: earlier ones lack routes, or fields of their answers, that it needs."""
_VERSION = "/version"
_INFO = "/server_info?config_format=json"
_RAW = "raw_logprobs"
_HEAD = "lm_head"


async def check_server(http: VllmHttp, settings: VllmReplicaSettings) -> int:
    """Return the most tokens that a prompt and what is drawn after it may have on the server.

    Raises ``InvalidRequest`` for a server that does not fit ``settings``, naming the server's value and the wanted one.
    Raises ``EngineFailure`` for a server that does not answer. Limits on adapters and logprobs are checked only on a server
    in development mode: other servers do not tell their limits.
    """
    await _check_version(http, settings)
    longest = await _check_model(http, settings)
    answer = await http.get(_INFO, settings.start_deadline_s)
    if answer.status == 404:
        return longest
    if not answer.ok:
        raise EngineFailure(f"replica {settings.name} does not tell its settings (status {answer.status})")
    config = http.decode(answer.body, ServerInfo).vllm_config
    model = config.model_config
    if model.logprobs_mode != _RAW:
        raise _mismatch(settings, "logprobs mode", model.logprobs_mode, _RAW)
    if model.max_logprobs < settings.max_logprobs:
        raise _mismatch(settings, "max logprobs", model.max_logprobs, settings.max_logprobs)
    if config.lora_config is None:
        raise InvalidRequest(f"replica {settings.name}: its server takes no adapters; start it with --enable-lora")
    _check_adapters(config.lora_config, settings)
    _check_parallelism(config.parallel_config, settings)
    if config.device_config.device == "cpu" and config.scheduler_config.enable_chunked_prefill:
        # vLLM rewinds the random generator of a seeded prompt that spans two steps, and a CPU's generator cannot be rewound.
        raise InvalidRequest(
            f"replica {settings.name}: vLLM on a CPU dies of the first prompt with a seed that it splits over two steps; "
            "start it with --no-enable-chunked-prefill"
        )
    return longest


async def _check_version(http: VllmHttp, settings: VllmReplicaSettings) -> None:
    answer = await http.get(_VERSION, settings.health_deadline_s)
    if answer.status == 404:
        raise InvalidRequest(
            f"replica {settings.name}: its server is no vLLM, or one before {_least()}: it tells no version"
        )
    if not answer.ok:
        raise EngineFailure(f"replica {settings.name} does not tell its version (status {answer.status})")
    version = http.decode(answer.body, Version).version
    numbers = re.match(r"(\d+)\.(\d+)", version)
    # A build from a checkout may have no number. What it lacks shows in its answers.
    if numbers is not None and (int(numbers[1]), int(numbers[2])) < LEAST_VERSION:
        raise _mismatch(settings, "vLLM's version", version, f"{_least()} or later")


def _least() -> str:
    return ".".join(map(str, LEAST_VERSION))


def _check_parallelism(found: Parallelism, settings: VllmReplicaSettings) -> None:
    # An adapter loaded through one process or engine is unknown to the others.
    if found.api_processes > 1:
        raise _mismatch(settings, "API server count", found.api_processes, "1 (--api-server-count 1)")
    if found.data_parallel_size > 1:
        raise _mismatch(
            settings, "data parallel size", found.data_parallel_size, "1: start a server for each engine instead"
        )


async def _check_model(http: VllmHttp, settings: VllmReplicaSettings) -> int:
    answer = await http.get(MODELS, settings.health_deadline_s)
    if answer.status in (401, 403):
        raise InvalidRequest(f"replica {settings.name}: its server refuses the API key")
    if not answer.ok:
        raise EngineFailure(f"replica {settings.name} does not list its models (status {answer.status})")
    bases = {card.id: card for card in http.decode(answer.body, ModelList).data if card.max_model_len is not None}
    if settings.served_model not in bases:
        raise _mismatch(settings, "served model", ", ".join(bases), settings.served_model)
    length = bases[settings.served_model].max_model_len
    if length is None or length < settings.base.context_length:
        raise _mismatch(settings, "max model length", length, settings.base.context_length)
    served = served_length(settings.base.path, length)
    if served != length:
        # By its length the server chooses how positions are computed: weft trains adapters for the other way.
        raise _mismatch(settings, "max model length", length, f"at {'least' if served > length else 'most'} {served}")
    return length


def _check_adapters(limits: LoraLimits, settings: VllmReplicaSettings) -> None:
    if limits.max_lora_rank < settings.max_lora_rank:
        raise _mismatch(settings, "max LoRA rank", limits.max_lora_rank, settings.max_lora_rank)
    if limits.max_loras < settings.max_loras:
        raise _mismatch(settings, "max LoRAs in a batch", limits.max_loras, settings.max_loras)
    # Beyond its own limit vLLM evicts adapters, and later reads their files again between other requests' steps.
    kept = limits.max_cpu_loras or limits.max_loras
    resident = settings.max_resident + settings.spare_places
    if kept < resident + 1:
        raise _mismatch(settings, "max CPU LoRAs", kept, f"{resident} resident and the zero adapter")
    # A class without an adapted head has none, whatever modules the server names.
    takes_head = settings.base.architecture in ADAPTED_HEADS and (
        limits.target_modules is None or _HEAD in limits.target_modules
    )
    if takes_head and not settings.head_adapters:
        # Scoring a prompt in one batch with other requests would kill the engine.
        raise _mismatch(settings, "LoRA target modules", limits.target_modules or "all", f"modules without {_HEAD}")
    if settings.head_adapters and not takes_head:
        # vLLM would drop the adapters' heads without an error.
        raise _mismatch(settings, "LoRA target modules", limits.target_modules, f"modules with {_HEAD}")


def _mismatch(settings: VllmReplicaSettings, what: str, found: object, wanted: object) -> InvalidRequest:
    return InvalidRequest(f"replica {settings.name}: {what} is {found} on the server, and should be {wanted}")
