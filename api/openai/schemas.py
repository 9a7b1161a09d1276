"""Bodies of OpenAI's requests. What weft does not offer is refused where it would change the answer; the rest is ignored."""

from typing import Annotated, Any, Literal

from pydantic import Field

from api.wire.json_body import PlainText, RequestModel
from api.wire.schemas import DefaultingModel
from contracts.errors import InvalidRequest

MOST_TOP_LOGPROBS = 20


class StreamOptions(DefaultingModel):
    """Of a streamed answer."""

    include_usage: bool = False


class TextPart(RequestModel):
    """A piece of a message."""

    type: str = "text"
    text: str | None = None


class Message(RequestModel):
    """A turn of a conversation."""

    role: str
    content: str | list[TextPart] | None = None
    tool_calls: list[Any] | None = None


class GenerationRequest(DefaultingModel):
    """What both endpoints take. ``model`` is a ``tinker://`` sampler path, a run's id, or a served base model."""

    model: PlainText
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    n: int = 1
    seed: int | None = None
    stop: str | list[str] = []
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[str, float] = {}

    @property
    def stops(self) -> list[str]:
        """The stop strings."""
        return [self.stop] if isinstance(self.stop, str) else self.stop

    def check_offered(self) -> None:
        """Raises ``InvalidRequest`` for what would make another answer and is not offered."""
        for name in ("presence_penalty", "frequency_penalty", "logit_bias"):
            if getattr(self, name):
                raise InvalidRequest(f"{name} is not offered by this weft; leave it out")
        if len(self.stops) > 4:
            raise InvalidRequest(f"stop has {len(self.stops)} strings; at most 4")


class ChatRequest(GenerationRequest):
    """``/v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=MOST_TOP_LOGPROBS)
    tools: list[Any] = []
    response_format: dict[str, Any] = {}

    def check_offered(self) -> None:
        """Raises ``InvalidRequest`` for what would make another answer and is not offered."""
        super().check_offered()
        if self.tools or any(message.tool_calls for message in self.messages):
            raise InvalidRequest("tools are not offered by this weft; leave them out")
        if self.response_format.get("type", "text") != "text":
            raise InvalidRequest("response_format other than text is not offered by this weft; leave it out")
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs: true")


class CompletionRequest(GenerationRequest):
    """``/v1/completions``. Prompts are texts or token ids, one or several."""

    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: int | None = 16
    logprobs: int | None = Field(default=None, ge=0, le=MOST_TOP_LOGPROBS)
    echo: Literal[False] = False
    best_of: int | None = None
    suffix: str | None = None

    def check_offered(self) -> None:
        """Raises ``InvalidRequest`` for what would make another answer and is not offered."""
        super().check_offered()
        if self.best_of not in (None, self.n):
            raise InvalidRequest("best_of other than n is not offered by this weft; leave it out")
        if self.suffix:
            raise InvalidRequest("suffix is not offered by this weft; leave it out")
