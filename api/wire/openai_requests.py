"""Fields of OpenAI's request bodies that chat and plain completions share.

A field that weft does not serve is refused by name, unless the answer is the same without it.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import ConfigDict

from api.wire.request_model import DefaultingModel, ListOf, MapOf, PlainText
from api.wire.sample_checks import FieldNames
from contracts.errors import InvalidRequest
from contracts.logit_rules import Grammar

_MOST_STOPS = 4
_WITHOUT_EFFECT = frozenset(
    {
        "metadata",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "user",
    }
)
"""Fields that do not change the answer."""
_SERVED_VALUES: Mapping[str, Any] = {"modalities": ["text"], "store": False}
"""Fields of which weft serves this value only."""


class StreamOptions(DefaultingModel):
    """Options of a streamed answer."""

    include_usage: bool = False


class GenerationRequest(DefaultingModel):
    """Fields of both endpoints. ``model`` is a ``tinker://`` sampler path, a run's id, or a served base model.

    ``prompt_cache_key`` is OpenAI's name for the key of a trajectory.
    """

    model_config = ConfigDict(extra="allow")
    tokenized = frozenset({"messages", "prompt", "stop"})

    model: PlainText
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    n: int = 1
    seed: int | None = None
    stop: str | ListOf[str] = []
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: MapOf[float] = {}
    prompt_cache_key: PlainText | None = None

    @property
    def stops(self) -> list[str]:
        """The stop strings as a list."""
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def token_limit(self) -> int | None:
        """Most tokens of a choice; None for as many as the context holds."""
        return self.max_tokens

    @property
    def alternatives(self) -> int:
        """Likeliest tokens that are reported for each place of a choice."""
        return 0

    @property
    def wants_logprobs(self) -> bool:
        """True if each token's logprob is reported."""
        return False

    @property
    def scores_prompt(self) -> bool:
        """True if the logprobs of the prompt's tokens are reported, too."""
        return False

    @property
    def only_echoes(self) -> bool:
        """True if the prompt is asked for and nothing after it; what is sampled is left out."""
        return False

    @property
    def grammar(self) -> Grammar | None:
        """Form that the text must have. Raises ``InvalidRequest``."""
        return None

    @property
    def grammar_field(self) -> str:
        """Name of the field that asks for ``grammar``."""
        return "response_format"

    @property
    def most_calls(self) -> int:
        """Most tool calls that are read from a choice's text; 0 leaves the text as it is."""
        return 0

    @property
    def field_names(self) -> FieldNames:
        """Names of this endpoint for the fields of a ``SampleRequest``, where they differ."""
        return {"num_samples": "n"}

    def check_offered(self) -> None:
        """Raise ``InvalidRequest`` for a field that weft does not offer, or a value of it."""
        for name, value in (self.model_extra or {}).items():
            if name in _SERVED_VALUES and value != _SERVED_VALUES[name]:
                raise InvalidRequest(
                    f"{name} other than {_SERVED_VALUES[name]} is not offered by this weft; leave it out"
                )
            if name not in _WITHOUT_EFFECT and name not in _SERVED_VALUES:
                raise InvalidRequest(f"{name[:100]} is not offered by this weft; leave it out")
        if len(self.stops) > _MOST_STOPS:
            raise InvalidRequest(f"stop has {len(self.stops)} strings; send at most {_MOST_STOPS}")
