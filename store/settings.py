"""Settings of a weft process. Command-line options win over ``WEFT_*`` environment variables, and these over ``weft.toml``."""

import os
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta
from difflib import get_close_matches
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, IPvAnyNetwork, ValidationInfo, field_validator, model_validator
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from store.admin_settings import AdminSettings
from store.dashboard_settings import DashboardSettings
from store.http_settings import HttpSettings
from store.limit_settings import LimitSettings
from store.retention_settings import RetentionSettings
from store.vllm_settings import VllmSettings
from store.webhook_settings import WebhookSettings

SETTINGS_FILE = "weft.toml"
"""Settings file in the current folder; the environment variable ``WEFT_CONFIG`` names another one."""


def settings_file() -> Path:
    """Return the settings file's path. The default file need not exist.

    Raises ``FileNotFoundError`` when ``WEFT_CONFIG`` names a file that does not exist.
    """
    named = os.environ.get("WEFT_CONFIG")
    if named is not None and not Path(named).is_file():
        raise FileNotFoundError(f"WEFT_CONFIG names {named}, which is no file")
    return Path(named or SETTINGS_FILE)


_NO_SETTINGS = ("WEFT_CONFIG", "WEFT_ADMIN_URL", "WEFT_ADMIN_KEY")
_NO_SETTINGS_PREFIXES = ("WEFT_TEST_", "WEFT_BENCH_")


class Settings(
    LimitSettings, RetentionSettings, HttpSettings, AdminSettings, DashboardSettings, WebhookSettings, VllmSettings
):
    """Settings with their defaults; ``docs/reference/settings.md`` is generated from this class.

    Durations are ISO 8601 (``PT25S``) or seconds. Raises ``pydantic.ValidationError`` that says what to change.
    """

    model_config = SettingsConfigDict(env_prefix="WEFT_", extra="forbid", frozen=True)

    data_dir: Path = Field(
        default=Path(".weft"), description="Folder of the database, the checkpoints and the snapshots."
    )
    database_url: str | None = Field(
        default=None,
        description="SQLAlchemy URL (sqlite or postgresql+asyncpg). Default: SQLite in the data folder.",
        repr=False,
    )
    database_pool: int = Field(
        default=16,
        ge=2,
        description="Most connections of one process to PostgreSQL. Further requests wait for a free connection.",
    )
    redis_url: str | None = Field(
        default=None,
        description="Redis of a cluster: Celery's broker, and wake-ups between processes. `weft serve` needs none.",
        repr=False,
    )
    redis_namespace: str = Field(
        default="weft",
        pattern="^[A-Za-z0-9_.-]+$",
        description="Prefix of all names in Redis. Services that share a Redis need different ones.",
    )
    host: str = Field(default="127.0.0.1", description="Address on which the API listens.")
    port: int = Field(default=8642, ge=0, le=65535, description="Port on which the API listens. 0 picks a free one.")
    public_url: str | None = Field(
        default=None,
        pattern=r"^https?://[^\s/?#@]+(/[^\s?#]*)?$",
        description="URL under which clients reach the API, such as `https://weft.example.org`. Download links begin "
        "with it. Default: the host that a request names, if it is a trusted one. Set it, too, where a proxy or a tunnel on "
        "this machine passes clients of other machines on.",
    )
    trusted_hosts: tuple[str, ...] = Field(
        default=(),
        description="Host names, without a port, that download links may begin with where no public URL is set. "
        "Loopback and the address that a connection came in on need no entry.",
    )
    trusted_proxies: tuple[IPvAnyNetwork, ...] = Field(
        default=(),
        description="Addresses or networks of proxies whose `X-Forwarded-For` and `X-Forwarded-Proto` are believed.",
    )
    base_models: tuple[str, ...] = Field(default=(), description="Served base models, each as `[NAME=]PATH`.")
    base_dtype: str = Field(
        default="auto", pattern="^(auto|float32|bfloat16|float16)$", description="Precision of the frozen base weights."
    )
    device: str = Field(default="auto", description="Torch device of trainer and sampler: auto, cpu, cuda, cuda:1 ...")

    max_rank: int = Field(default=128, ge=1, description="Largest LoRA rank that is accepted.")
    max_import_bytes: int = Field(
        default=4 * 2**30, ge=1024, description="Most bytes of an imported adapter, packed and unpacked."
    )
    max_body_bytes: int = Field(
        default=64 * 2**20, ge=1024, description="Largest request body in bytes, also after zstd decompression."
    )
    max_datums: int = Field(
        default=4096, ge=1, description="Most sequences in one forward or forward_backward request."
    )
    max_targets_per_position: int = Field(
        default=1024, ge=1, description="Largest K of target_tokens with the shape (N, K)."
    )
    max_samples: int = Field(default=1024, ge=1, description="Largest num_samples of one sample request.")
    max_topk_logprobs: int = Field(
        default=100,
        ge=0,
        description="Largest topk_prompt_logprobs, topk_sample_logprobs and prompt_alt_tokens_k, and most target tokens at a "
        "prompt's position, on every sampler; largest logprobs and top_logprobs of OpenAI's routes.",
    )
    pass_token_budget: int | None = Field(
        default=None,
        ge=1,
        description="Tokens of one fused training pass. Light work that joins the pass may exceed the budget "
        "by an eighth. Tokens computed at once, padding included, never exceed it. Default: 2048 "
        "on a CPU, 16384 on a GPU.",
    )
    piece_time: timedelta = Field(
        default=timedelta(milliseconds=100),
        gt=timedelta(0),
        description="Time that a fused training pass, or a chunk of a prompt in the torch sampler, should take at most while "
        "several tenants have work: who comes waits for the one under way. A pass has at least a quarter of its token "
        "budget, though, and at least one sequence; a chunk has at least 256 tokens.",
    )
    adapter_memory_bytes: int | None = Field(
        default=None,
        ge=1,
        description="Memory in bytes for the adapters in training of one base model: weights, gradients and "
        "moments. Beyond it the least recently used adapters are paged out to disk. Default: a "
        "quarter of the memory that is free once the base is loaded.",
    )
    max_adapters: int | None = Field(
        default=None,
        ge=1,
        description="Most open models of one base model. Further creations wait until a model is unloaded. "
        "Default: no limit.",
    )
    gradient_checkpointing: bool | None = Field(
        default=None,
        description="Keep only each layer's input for the backward pass. It takes less memory and a third "
        "more compute. Default: on an accelerator, not on a CPU.",
    )
    sampler_batch_sequences: int = Field(
        default=64,
        ge=1,
        description="Most sequences of one tenant that the torch sampler decodes together. It decodes up to an eighth more "
        "for tenants that come beside a flood.",
    )
    pool_samples: int = Field(
        default=1024,
        ge=1,
        description="Most samples that one of several sampling processes claims at a time. Other processes "
        "claim the rest.",
    )
    pool_name: str = Field(
        default="",
        pattern="^[A-Za-z0-9_.-]*$",
        max_length=64,
        description="Prefix of this process's replica names, which makes them unique in a cluster. Default: "
        "the host's name in `weft pool`; `pool-0`, `pool-1` and so on under `weft up`; none in "
        "`weft serve`.",
    )
    sampler_resident_adapters: int = Field(
        default=64,
        ge=1,
        description="Most adapter versions in the torch sampler's memory. The least recently used version is "
        "dropped first.",
    )
    sampler_tolerance: float | None = Field(
        default=None,
        gt=0,
        description="Most by which a replica's log-probabilities may differ from the trainer's in its handshake, in nats, as "
        "the mean of a few tokens. A replica that is off by more takes no work. Default: 0.001 for a base in float32, "
        "0.1 for one in half precision.",
    )
    swap_policy: Literal["continue", "finish"] = Field(
        default="continue",
        description="What samples in flight of a live sampler that has no policy of its own do when a newer version is "
        "published: `continue` on it, or `finish` on the old one.",
    )

    pause_ttl: timedelta = Field(
        default=timedelta(hours=1),
        gt=timedelta(0),
        description="Time after which a pause of sampling ends by itself, if it asks for none of its own.",
    )
    longest_pause: timedelta = Field(
        default=timedelta(days=7), gt=timedelta(0), description="Longest time that a pause of sampling may ask for."
    )
    pool_wait: timedelta = Field(
        default=timedelta(minutes=15),
        gt=timedelta(0),
        description="Time after which a sample fails if no sampling process of its base model has a replica that answers.",
    )
    poll_hold: timedelta = Field(
        default=timedelta(seconds=25),
        description="Longest time that a retrieve_future poll is held before it is answered 408; at most 30 s.",
    )
    metadata_only_bytes: int = Field(
        default=2**20,
        ge=0,
        description="Size in bytes above which a result is first announced by its size, to SDKs that ask for it.",
    )
    result_grace: timedelta = Field(
        default=timedelta(hours=1), description="Time for which the result of a finished future can be retrieved."
    )
    gap_grace: timedelta = Field(
        default=timedelta(minutes=15),
        ge=timedelta(seconds=1),
        description="Time without a request of a model after which a seq_id that is missing before others counts as failed, "
        "so that the requests behind it run. The SDK repeats a request for about 6 minutes.",
    )
    reconnect_grace: timedelta = Field(
        default=timedelta(seconds=5),
        description="Time for which a streamed sample goes on after its client has lost the connection. Sent again with "
        "the same seq_id or Idempotency-Key, the request finds the sample; otherwise the sample is cancelled.",
    )
    session_timeout: timedelta = Field(
        default=timedelta(hours=1),
        description="Time without a heartbeat or training request after which a session is ended.",
    )
    sample_silence: timedelta = Field(
        default=timedelta(minutes=2),
        gt=timedelta(0),
        description="Time without a heartbeat after which the pending samples of a session are ended, once its client has "
        "sent heartbeats; counted from a sample's request at the earliest. The SDK sends one every 10 s. If it was only cut "
        "off, it sends such a sample again by itself.",
    )
    housekeeping_interval: timedelta = Field(
        default=timedelta(seconds=30),
        gt=timedelta(0),
        description="Time between two runs of a housekeeping step. A step with work left over goes on at once.",
    )
    lease: timedelta = Field(
        default=timedelta(seconds=3),
        description="Time without a heartbeat after which a trainer or pool counts as dead. Others then take "
        "its work over.",
    )
    stall_limit: timedelta = Field(
        default=timedelta(minutes=10),
        ge=timedelta(seconds=1),
        description="Longest time of one call to the device. A trainer or sampler whose pass takes longer gives up its "
        "lease and ends with status 75. A job on weights that makes no progress for so long loses its lease and is tried again.",
    )
    max_attempts: int = Field(
        default=3,
        ge=1,
        description="Number of processes that may end while they compute an operation. Then it fails with "
        "`poison_operation`. After the first of them it is computed alone.",
    )
    snapshot_operations: int = Field(
        default=64,
        ge=1,
        description="Number of training operations after which a run is snapshotted. It bounds the replay "
        "after a crash.",
    )
    log_level: str = Field(
        default="info", pattern="^(debug|info|warning|error)$", description="Least severe level that is logged."
    )
    log_format: Literal["text", "json"] = Field(
        default="text",
        description="Lines of text for people, or one JSON object a line with trace, tenant and operation of "
        "the current work.",
    )
    metrics_port: int | None = Field(
        default=None,
        ge=0,
        le=65535,
        description="Port of this process's `/metrics`, `/healthz` and `/readyz`, apart from the API's port, "
        "which tenants can reach. 0 picks a free one and logs it. Default: off.",
    )
    metrics_host: str = Field(default="127.0.0.1", description="Address on which the metrics port listens.")
    otlp_endpoint: str | None = Field(
        default=None,
        pattern="^https?://",
        description="Base URL of an OpenTelemetry collector that takes traces over HTTP, such as "
        "`http://localhost:4318`. Needs the extra `traces`. Default: no traces.",
        repr=False,
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Return the sources, the strongest first: options, the environment, the file."""
        del dotenv_settings, file_secret_settings
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls, toml_file=settings_file())

    @field_validator("*", mode="before")
    @classmethod
    def _read_seconds(cls, given: object, info: ValidationInfo) -> object:
        """Return a number of seconds that came as text, as from the environment, as a number."""
        field = cls.model_fields.get(info.field_name or "")
        if field is not None and field.annotation is timedelta and isinstance(given, str):
            with suppress(ValueError):
                return float(given)
        return given

    @field_validator("database_url")
    @classmethod
    def _check_database(cls, given: str | None) -> str | None:
        if given is not None and given.partition(":")[0].partition("+")[0] not in ("sqlite", "postgresql"):
            raise ValueError("must be a URL such as postgresql+asyncpg://user@host/name, or sqlite:///path")
        return given

    @model_validator(mode="after")
    def _check_hold(self) -> Self:
        if not timedelta(0) < self.poll_hold <= timedelta(seconds=30):
            raise ValueError("poll_hold must be above 0 and at most 30 seconds: the SDK gives up a poll after 45")
        return self

    def resolved_database_url(self) -> str:
        """Return the database URL; by default the SQLite file in the data folder."""
        return self.database_url or f"sqlite:///{(self.data_dir / 'weft.db').absolute()}"


def name_of_base(spec: str) -> str:
    """Return the served name of an entry of ``base_models``: NAME of ``NAME=PATH``, or the path as written."""
    name, separator, _ = spec.partition("=")
    return name if separator else spec.rstrip("/") or spec


def unknown_variables(environment: Iterable[str]) -> dict[str, str | None]:
    """Return the variables of weft's that set nothing, each with the setting that its name is nearest to."""
    settings = [f"WEFT_{name.upper()}" for name in Settings.model_fields]
    unknown = [
        name
        for name in sorted(environment)
        if name.startswith("WEFT_")
        and name.upper() not in (*settings, *_NO_SETTINGS)
        and not name.startswith(_NO_SETTINGS_PREFIXES)
    ]
    return {name: next(iter(get_close_matches(name, settings, 1)), None) for name in unknown}
