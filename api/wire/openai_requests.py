"""Fields of OpenAI's request bodies that chat and plain completions share.

A parameter that weft does not offer is refused if it would change the answer. Other unknown parameters are ignored.
"""

from api.wire.request_model import DefaultingModel, ListOf, MapOf, PlainText
from api.wire.sample_checks import FieldNames
from contracts.errors import InvalidRequest

MOST_TOP_LOGPROBS = 20
"""Most alternatives for each token, as in OpenAI's API."""
_MOST_STOPS = 4


class StreamOptions(DefaultingModel):
    """Options of a streamed answer."""

    include_usage: bool = False


class GenerationRequest(DefaultingModel):
    """Fields of both endpoints. ``model`` is a ``tinker://`` sampler path, a run's id, or a served base model.

    ``prompt_cache_key`` is OpenAI's name for the key of a trajectory.
    """

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
    def field_names(self) -> FieldNames:
        """Names of this endpoint for the fields of a ``SampleRequest``, where they differ."""
        return {"num_samples": "n"}

    def check_offered(self) -> None:
        """Raise ``InvalidRequest`` for a parameter that weft does not offer and that would change the answer."""
        for name in ("presence_penalty", "frequency_penalty", "logit_bias"):
            if getattr(self, name):
                raise InvalidRequest(f"{name} is not offered by this weft; leave it out")
        if len(self.stops) > _MOST_STOPS:
            raise InvalidRequest(f"stop has {len(self.stops)} strings; send at most {_MOST_STOPS}")
