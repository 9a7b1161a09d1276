"""Settings of a replica over one vLLM server: its address, its limits and weft's deadlines."""

from dataclasses import dataclass, field
from pathlib import Path

from contracts.base_model import BaseModelFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmReplicaSettings:
    """Settings for one server, which only this process samples on. Names that end in ``_s`` are in seconds.

    - ``base``: facts of the base model as it is served. Its ``context_length`` may be below the model's own.
    - ``max_lora_rank``, ``max_loras`` (adapters in one batch) and ``max_logprobs`` must be within the server's own limits.
    - ``max_resident``: adapters on the server at a time, besides the zero adapter, which is written to the folder
      ``zero_adapter``. The server has ``spare_places`` more, so that a new version need not wait for an unload.
    - ``head_adapters``: adapters may change ``lm_head``, and the server scores no prompts. Without it, the server's
      ``--lora-target-modules`` must leave out ``lm_head``.
    - ``max_streams``: most sequences sent at once; the server must work on as many at once (``--max-num-seqs``).
    - ``prompt_tokens``: most prompt tokens on the server that wait for their first new token.

    - ``folder``, ``server_folder``: the folder that adapters are in, as weft and as the server see it. None: the same paths.
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
    folder: Path | None = None
    server_folder: Path | None = None
    probe_every_s: float = 5.0
    longest_silence_s: float = 300.0

    def seen_path(self, directory: Path) -> str:
        """Return the path under which the server sees an adapter's folder."""
        own = directory.absolute()
        if self.folder is None or self.server_folder is None or not own.is_relative_to(self.folder.absolute()):
            return str(own)
        return str(self.server_folder / own.relative_to(self.folder.absolute()))
