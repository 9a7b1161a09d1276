"""vLLM's JSON as far as weft reads it, and its stream of server-sent events."""

import msgspec


class Likely(msgspec.Struct):
    """A token that could have come; ``logprob`` of the unscaled distribution."""

    token_id: int
    logprob: float | None = None


class Sampled(Likely):
    """A token that came; ``top_logprobs`` holds itself first, then the likeliest."""

    top_logprobs: list[Likely] = []


class Logprobs(msgspec.Struct):
    """One entry for each new token."""

    content: list[Sampled] | None = None


class WeightSpan(msgspec.Struct):
    """``end``: how many tokens of the sequence there are up to the end of this span."""

    end: int


class Choice(msgspec.Struct):
    """New tokens of a sequence; its last one has a ``finish_reason`` and the spans of the whole."""

    finish_reason: str | None = None
    token_ids: list[int] | None = None
    logprobs: Logprobs | None = None
    weight_versions: list[WeightSpan] | None = None


class ErrorBody(msgspec.Struct):
    """``code`` is an HTTP status."""

    message: str = ""
    code: int | None = None


class ErrorAnswer(msgspec.Struct):
    """The body of most answers with a status of 400 and over."""

    error: ErrorBody


class Chunk(msgspec.Struct):
    """One event of a stream. ``request_id`` is the server's own, by which it can be aborted."""

    request_id: str | None = None
    choices: list[Choice] = []
    error: ErrorBody | None = None


class PromptToken(msgspec.Struct):
    """Logprob of a token at a position of the prompt."""

    logprob: float | None = None


class ScoredPrompt(msgspec.Struct):
    """A whole answer with prompt scores: for each position tokens by id, None at the first."""

    prompt_logprobs: list[dict[str, PromptToken] | None] | None = None


class ModelCard(msgspec.Struct):
    """A base (``max_model_len`` set) or an adapter (``root``: its folder)."""

    id: str
    root: str | None = None
    max_model_len: int | None = None


class ModelList(msgspec.Struct):
    """``GET /v1/models``."""

    data: list[ModelCard]


class LoraLimits(msgspec.Struct):
    """``target_modules`` None: all that vLLM knows."""

    max_lora_rank: int
    max_loras: int
    max_cpu_loras: int | None = None
    target_modules: list[str] | None = None


class ModelLimits(msgspec.Struct):
    """``logprobs_mode``: which distribution logprobs are of."""

    max_logprobs: int
    logprobs_mode: str


class Scheduling(msgspec.Struct):
    """How steps are put together."""

    enable_chunked_prefill: bool | None = None


class Device(msgspec.Struct):
    """What the model runs on."""

    device: str | None = None


class Config(msgspec.Struct):
    """``lora_config`` None: the server takes no adapters."""

    model_config: ModelLimits
    lora_config: LoraLimits | None = None
    scheduler_config: Scheduling = msgspec.field(default_factory=Scheduling)
    device_config: Device = msgspec.field(default_factory=Device)


class ServerInfo(msgspec.Struct):
    """``GET /server_info?config_format=json``, of development mode."""

    vllm_config: Config


class Paused(msgspec.Struct):
    """``GET /is_paused``, of development mode."""

    is_paused: bool


class Sleeping(msgspec.Struct):
    """``GET /is_sleeping``, of development mode."""

    is_sleeping: bool


class EventLines:
    """Cuts bytes, as they come, into the payloads of server-sent events."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The payloads that ``data`` completes. vLLM writes each on one line."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [line.removeprefix(b"data:").strip() for line in lines if line.startswith(b"data:")]
