"""Compares a vLLM server with its replica's settings, before the first request."""

from contracts.errors import EngineFailure, InvalidRequest
from engine.sampling.vllm.adapters import MODELS
from engine.sampling.vllm.http import VllmHttp
from engine.sampling.vllm.messages import LoraLimits, ModelList, ServerInfo
from engine.sampling.vllm.settings import VllmSettings

_INFO = "/server_info?config_format=json"
_RAW = "raw_logprobs"
_HEAD = "lm_head"


async def check_server(http: VllmHttp, settings: VllmSettings) -> None:
    """Raise ``InvalidRequest`` for a server that does not fit ``settings``, naming the server's value and the wanted one.

    Raises ``EngineFailure`` for a server that does not answer. Limits on adapters and logprobs are checked only on a server
    in development mode: other servers do not tell their limits.
    """
    await _check_model(http, settings)
    answer = await http.get(_INFO, settings.start_deadline_s)
    if answer.status == 404:
        return
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
    if config.device_config.device == "cpu" and config.scheduler_config.enable_chunked_prefill:
        # vLLM rewinds the random generator of a seeded prompt that spans two steps, and a CPU's generator cannot be rewound.
        raise InvalidRequest(
            f"replica {settings.name}: vLLM on a CPU dies of the first prompt with a seed that it splits over two steps; "
            "start it with --no-enable-chunked-prefill"
        )


async def _check_model(http: VllmHttp, settings: VllmSettings) -> None:
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


def _check_adapters(limits: LoraLimits, settings: VllmSettings) -> None:
    if limits.max_lora_rank < settings.max_lora_rank:
        raise _mismatch(settings, "max LoRA rank", limits.max_lora_rank, settings.max_lora_rank)
    if limits.max_loras < settings.max_loras:
        raise _mismatch(settings, "max LoRAs in a batch", limits.max_loras, settings.max_loras)
    # Beyond its own limit vLLM evicts adapters, and later reads their files again between other requests' steps.
    kept = limits.max_cpu_loras or limits.max_loras
    resident = settings.max_resident + settings.spare_places
    if kept < resident + 1:
        raise _mismatch(settings, "max CPU LoRAs", kept, f"{resident} resident and the zero adapter")
    takes_head = limits.target_modules is None or _HEAD in limits.target_modules
    if takes_head and not settings.head_adapters:
        # Scoring a prompt in one batch with other requests would kill the engine.
        raise _mismatch(settings, "LoRA target modules", limits.target_modules or "all", f"modules without {_HEAD}")
    if settings.head_adapters and not takes_head:
        # vLLM would drop the adapters' heads without an error.
        raise _mismatch(settings, "LoRA target modules", limits.target_modules, f"modules with {_HEAD}")


def _mismatch(settings: VllmSettings, what: str, found: object, wanted: object) -> InvalidRequest:
    return InvalidRequest(f"replica {settings.name}: {what} is {found} on the server, and should be {wanted}")
