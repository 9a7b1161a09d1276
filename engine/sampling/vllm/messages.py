"""Records of the parts of vLLM's JSON that weft reads, and a parser of its server-sent events."""

import msgspec


class Likely(msgspec.Struct):
    """A candidate token and its logprob in the unscaled distribution."""

    token_id: int
    logprob: float | None = None


class Sampled(Likely):
    """A sampled token. ``top_logprobs`` holds the token itself first, then the likeliest."""

    top_logprobs: list[Likely] = []


class Logprobs(msgspec.Struct):
    """Logprobs of a choice: one entry for each new token."""

    content: list[Sampled] | None = None


class WeightSpan(msgspec.Struct):
    """A span of tokens made with the same weights. ``end`` counts the sequence's tokens up to the end of the span."""

    end: int


class Choice(msgspec.Struct):
    """New tokens of a sequence. The last choice has a ``finish_reason`` and the spans of the whole sequence."""

    finish_reason: str | None = None
    token_ids: list[int] | None = None
    logprobs: Logprobs | None = None
    weight_versions: list[WeightSpan] | None = None

    @property
    def first_logprob(self) -> float | None:
        """Logprob of the first new token, None if it is missing."""
        content = self.logprobs.content if self.logprobs is not None else None
        return content[0].logprob if content else None


class ErrorBody(msgspec.Struct):
    """An error's message, and its HTTP status as ``code``."""

    message: str = ""
    code: int | None = None


class ErrorAnswer(msgspec.Struct):
    """Body of most answers with a status of 400 and over."""

    error: ErrorBody


class PromptDetails(msgspec.Struct):
    """Prompt tokens that came from the prefix cache."""

    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """Tokens of a request. The details are there on a server with ``--enable-prompt-tokens-details``."""

    prompt_tokens_details: PromptDetails | None = None

    @property
    def cached(self) -> int:
        """Prompt tokens from the prefix cache, 0 where the server does not tell."""
        return (self.prompt_tokens_details.cached_tokens or 0) if self.prompt_tokens_details is not None else 0


class Chunk(msgspec.Struct):
    """One event of a stream. ``request_id`` is the server's own, by which the request can be aborted.

    The last event has the ``usage`` and no choice.
    """

    request_id: str | None = None
    choices: list[Choice] = []
    error: ErrorBody | None = None
    usage: Usage | None = None


class Drawn(msgspec.Struct):
    """A complete answer with new tokens."""

    choices: list[Choice] = []
    usage: Usage | None = None

    @property
    def cached(self) -> int:
        """Prompt tokens from the prefix cache."""
        return self.usage.cached if self.usage is not None else 0


class PromptToken(msgspec.Struct):
    """Logprob of a token at a position of the prompt."""

    logprob: float | None = None


class ScoredPrompt(msgspec.Struct):
    """A complete answer with prompt scores: for each position the tokens by id; None at the first position."""

    prompt_logprobs: list[dict[str, PromptToken] | None] | None = None


class ModelCard(msgspec.Struct):
    """A base (``max_model_len`` set) or an adapter (``root``: its folder)."""

    id: str
    root: str | None = None
    max_model_len: int | None = None


class ModelList(msgspec.Struct):
    """Answer of ``GET /v1/models``."""

    data: list[ModelCard]


class LoraLimits(msgspec.Struct):
    """The server's limits on adapters. ``target_modules`` None: all modules that vLLM supports."""

    max_lora_rank: int
    max_loras: int
    max_cpu_loras: int | None = None
    target_modules: list[str] | None = None


class ModelLimits(msgspec.Struct):
    """The server's limits on logprobs. ``logprobs_mode`` names the distribution that they are of."""

    max_logprobs: int
    logprobs_mode: str


class Scheduling(msgspec.Struct):
    """The server's scheduler settings."""

    enable_chunked_prefill: bool | None = None


class Parallelism(msgspec.Struct):
    """Number of engines that the server gives requests to in turn, and of its processes that take requests."""

    data_parallel_size: int = 1
    api_processes: int = msgspec.field(default=1, name="_api_process_count")


class Version(msgspec.Struct):
    """Answer of ``GET /version``."""

    version: str


class Device(msgspec.Struct):
    """Device that the model runs on."""

    device: str | None = None


class Config(msgspec.Struct):
    """The server's configuration. ``lora_config`` None: the server takes no adapters."""

    model_config: ModelLimits
    lora_config: LoraLimits | None = None
    scheduler_config: Scheduling = msgspec.field(default_factory=Scheduling)
    device_config: Device = msgspec.field(default_factory=Device)
    parallel_config: Parallelism = msgspec.field(default_factory=Parallelism)


class ServerInfo(msgspec.Struct):
    """Answer of ``GET /server_info?config_format=json``, in development mode."""

    vllm_config: Config


class Paused(msgspec.Struct):
    """Answer of ``GET /is_paused``, in development mode."""

    is_paused: bool


class Sleeping(msgspec.Struct):
    """Answer of ``GET /is_sleeping``, in development mode."""

    is_sleeping: bool


class EventLines:
    """Parser of server-sent events from bytes that arrive in pieces of any size."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Return the payloads of the events that ``data`` completes. vLLM writes each payload on one line."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [line.removeprefix(b"data:").strip() for line in lines if line.startswith(b"data:")]
