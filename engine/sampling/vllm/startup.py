"""Whether a vLLM server is what the settings say, before anything is sampled on it."""

from contracts.errors import EngineFailure, InvalidRequest
from engine.sampling.vllm.adapters import MODELS
from engine.sampling.vllm.http import VllmHttp
from engine.sampling.vllm.messages import LoraLimits, ModelList, ServerInfo
from engine.sampling.vllm.settings import VllmSettings

_INFO = "/server_info?config_format=json"
_RAW = "raw_logprobs"
_HEAD = "lm_head"


async def check_server(http: VllmHttp, settings: VllmSettings) -> None:
    """Raises ``InvalidRequest`` naming what the server has and what was asked, ``EngineFailure`` if it does not answer.

    Adapter limits and logprobs can only be checked on a server in development mode.
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
        # A prompt that a step splits has a generator to be set back when it has a seed, and a CPU's cannot be.
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
    # Beyond its own limit vLLM would read an adapter's files again in the middle of others' steps.
    kept = limits.max_cpu_loras or limits.max_loras
    resident = settings.max_resident + settings.spare_places
    if kept < resident + 1:
        raise _mismatch(settings, "max CPU LoRAs", kept, f"{resident} resident and the zero adapter")
    takes_head = limits.target_modules is None or _HEAD in limits.target_modules
    if takes_head and not settings.head_adapters:
        # Scoring a prompt in one batch with others would kill the engine.
        raise _mismatch(settings, "LoRA target modules", limits.target_modules or "all", f"modules without {_HEAD}")
    if settings.head_adapters and not takes_head:
        # Heads would be dropped without a word.
        raise _mismatch(settings, "LoRA target modules", limits.target_modules, f"modules with {_HEAD}")


def _mismatch(settings: VllmSettings, what: str, found: object, wanted: object) -> InvalidRequest:
    return InvalidRequest(f"replica {settings.name}: {what} is {found} on the server, and should be {wanted}")
