"""What weft must know of a vLLM server to sample on it."""

from dataclasses import dataclass, field
from pathlib import Path

from contracts.base_model import BaseModelFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmSettings:
    """One server, which this process alone samples on. All ``_s`` are seconds.

    ``base`` holds the facts of the base as it is served: a ``context_length`` below the model's own is fine.
    ``max_lora_rank`` and ``max_loras`` (adapters in one batch) must be within the server's own; at most
    ``max_resident`` adapters are listed there at a time, and the zero adapter, written to the folder ``zero_adapter``; the server
    has ``spare_places`` for others that are just leaving, so that a new version need not wait for that.
    The server reads adapters by the very paths that weft has. With ``head_adapters``, adapters may change ``lm_head``,
    and prompts are scored with nothing else on the server; without, its ``--lora-target-modules`` must leave out
    ``lm_head``. ``max_logprobs`` is the server's. ``max_streams`` bounds the sequences sent at once,
    ``prompt_tokens`` the tokens of prompts that wait for their first new token there.
    """

    name: str
    base_url: str
    served_model: str
    base: BaseModelFacts
    zero_adapter: Path
    max_lora_rank: int
    max_loras: int
    max_resident: int
    spare_places: int = 0
    api_key: str | None = field(default=None, repr=False)
    head_adapters: bool = False
    max_logprobs: int = 20
    max_streams: int = 256
    prompt_tokens: int | None = None
    start_deadline_s: float = 300.0
    load_deadline_s: float = 60.0
    health_deadline_s: float = 5.0
    cut_deadline_s: float = 10.0
    probe_every_s: float = 5.0
    longest_silence_s: float = 300.0
