"""Every setting of a weft process: command-line options before ``WEFT_*`` environment variables before ``weft.toml``."""

import os
from datetime import timedelta
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

SETTINGS_FILE = "weft.toml"
"""Read in the current folder, unless the environment's ``WEFT_CONFIG`` names another one."""


def settings_file() -> Path:
    """The file that settings come from; the default one need not be there.

    Raises ``FileNotFoundError`` for one that is named and is not there.
    """
    named = os.environ.get("WEFT_CONFIG")
    if named is not None and not Path(named).is_file():
        raise FileNotFoundError(f"WEFT_CONFIG names {named}, which is no file")
    return Path(named or SETTINGS_FILE)


class Settings(BaseSettings):
    """Settings with their defaults; ``docs/reference/settings.md`` is generated from this class.

    Durations accept ISO 8601 (``PT25S``) or seconds. Raises ``pydantic.ValidationError`` saying what to change.
    """

    model_config = SettingsConfigDict(env_prefix="WEFT_", extra="forbid", frozen=True)

    data_dir: Path = Field(default=Path(".weft"), description="Folder of the database, checkpoints and snapshots.")
    database_url: str | None = Field(
        default=None,
        description="SQLAlchemy URL (sqlite+aiosqlite or postgresql+asyncpg); default: SQLite in the data folder.",
    )
    database_pool: int = Field(
        default=16, ge=2, description="Connections to PostgreSQL that one process holds at most; requests wait for one."
    )
    redis_url: str | None = Field(
        default=None,
        description="Redis of a cluster: Celery's broker, and wake-ups between processes. `weft serve` needs none.",
        repr=False,
    )
    redis_namespace: str = Field(
        default="weft", pattern="^[A-Za-z0-9_.-]+$", description="What keeps services apart that share a Redis."
    )
    host: str = Field(default="127.0.0.1", description="Address to listen on.")
    port: int = Field(default=8642, ge=0, le=65535, description="Port to listen on; 0 picks a free one.")
    base_models: tuple[str, ...] = Field(default=(), description="Served base models, each `[NAME=]PATH`.")
    base_dtype: str = Field(
        default="auto", pattern="^(auto|float32|bfloat16|float16)$", description="Precision of the frozen base weights."
    )
    device: str = Field(default="auto", description="Torch device of trainer and sampler: auto, cpu, cuda, cuda:1 ...")

    max_rank: int = Field(default=128, ge=1, description="Largest LoRA rank accepted.")
    max_body_bytes: int = Field(
        default=64 * 2**20, ge=1024, description="Largest request body, and the most that a zstd body may expand to."
    )
    max_datums: int = Field(default=4096, ge=1, description="Most sequences in one forward_backward request.")
    max_targets_per_position: int = Field(default=1024, ge=1, description="Largest K of (N, K) target_tokens.")
    max_samples: int = Field(default=1024, ge=1, description="Largest num_samples of one sample request.")
    max_pending_samples: int = Field(
        default=4096,
        ge=1,
        description="Sample requests that one tenant may have pending; the next is answered 429, which the SDK repeats.",
    )
    max_topk_logprobs: int = Field(
        default=100, ge=0, description="Largest topk_prompt_logprobs and topk_sample_logprobs."
    )
    pass_token_budget: int | None = Field(
        default=None,
        ge=1,
        description="Tokens of one fused training pass, which light work beside it may exceed by an eighth; what is computed "
        "at once never does, padding included. Default: 2048 on a CPU, 16384 on a GPU.",
    )
    adapter_memory_bytes: int | None = Field(
        default=None,
        ge=1,
        description="Memory of adapters in training (weights, gradient, moments) of one base model; beyond it the least "
        "recently used are paged out to disk. Default: a quarter of the memory that is free once the base is loaded.",
    )
    max_adapters: int | None = Field(
        default=None,
        ge=1,
        description="Open models of one base model; a creation beyond it waits until one is unloaded. Default: no limit.",
    )
    gradient_checkpointing: bool = Field(
        default=False,
        description="Keep only each layer's input for the backward pass: less memory, a third more compute.",
    )
    sampler_batch_sequences: int = Field(
        default=64, ge=1, description="Sequences decoded together by the torch sampler."
    )
    pool_samples: int = Field(
        default=1024,
        ge=1,
        description="Samples that one of several sampling processes takes at a time; the others are left to the rest.",
    )
    pool_name: str = Field(
        default="",
        pattern="^[A-Za-z0-9_.-]*$",
        max_length=64,
        description="What stands before the names of this process's replicas, so that each is one of a kind in a cluster. "
        "Default: the host's name in `weft pool`, `pool-0`, `pool-1` and so on under `weft up`, nothing in `weft serve`.",
    )
    sampler_resident_adapters: int = Field(
        default=64,
        ge=1,
        description="Adapter versions kept in the torch sampler's memory; least recently used go first.",
    )
    vllm_urls: tuple[str, ...] = Field(
        default=(),
        description="vLLM servers to sample on instead of this process, each `[NAME=]URL`; NAME is the base model it serves, "
        "all of them by default.",
    )
    vllm_api_key: str | None = Field(default=None, description="API key of the vLLM servers.", repr=False)
    vllm_replicas: int = Field(default=0, ge=0, description="vLLM servers that weft starts itself for each base model.")
    vllm_command: tuple[str, ...] = Field(
        default=(), description="How to start one, as a list; default: the vLLM in `.venv-vllm` (`make vllm`)."
    )
    vllm_arguments: tuple[str, ...] = Field(
        default=(), description="More arguments for it, such as `--tensor-parallel-size`, `2`."
    )
    vllm_max_loras: int = Field(
        default=8, ge=2, description="Adapters in one batch of a vLLM server; one of them stands for the bare base."
    )
    vllm_context_length: int | None = Field(
        default=None, ge=1, description="Context of the vLLM servers in tokens; default: the base model's own."
    )
    vllm_prompt_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Tokens of prompts that one vLLM server computes at a time, longer ones alone: less makes others wait less "
        "for the prompts and continuations of a few. For servers that do not split prompts, as on a CPU. Default: no limit.",
    )
    vllm_head_adapters: bool = Field(
        default=True,
        description="Adapters may change the output head (`train_unembed`). Prompts are then scored with nothing else on the "
        "server, which a build of vLLM for the CPU needs.",
    )
    vllm_tune_cpu: bool = Field(
        default=True,
        description="On a machine without an accelerator, a vLLM server that weft starts keeps engine and model in one process, "
        "and the first one keeps off the last core. Off: as vLLM does it.",
    )
    swap_policy: Literal["continue", "finish"] = Field(
        default="continue",
        description="What samples in flight of a live sampler do when a newer version is published: go on with it, or end "
        "on the old one.",
    )

    poll_hold: timedelta = Field(
        default=timedelta(seconds=25), description="Longest hold of a retrieve_future poll before it answers 408."
    )
    metadata_only_bytes: int = Field(
        default=2**20, ge=0, description="Results larger than this are announced by size first to SDKs that ask for it."
    )
    result_grace: timedelta = Field(
        default=timedelta(hours=1), description="How long a finished future's result stays retrievable."
    )
    session_timeout: timedelta = Field(
        default=timedelta(hours=1),
        description="A session without heartbeat or training request for this long is ended.",
    )
    housekeeping_interval: timedelta = Field(
        default=timedelta(seconds=30), description="Time between sweeps for expired checkpoints, futures and sessions."
    )
    lease: timedelta = Field(
        default=timedelta(seconds=3),
        description="A trainer or pool that gives no sign of life for this long is dead: others take its work over.",
    )
    snapshot_operations: int = Field(
        default=64, ge=1, description="A run is snapshotted after this many training operations, which bounds replay."
    )
    log_level: str = Field(
        default="info", pattern="^(debug|info|warning|error)$", description="Least severe log shown."
    )
    log_format: Literal["text", "json"] = Field(
        default="text",
        description="Log lines for people, or one JSON object a line with trace, tenant and operation of the work in hand.",
    )
    metrics_port: int | None = Field(
        default=None,
        ge=0,
        le=65535,
        description="Port of `/metrics`, `/healthz` and `/readyz` of this process, apart from the API's, which tenants can "
        "reach; 0 picks a free one and logs it. Default: off.",
    )
    metrics_host: str = Field(default="127.0.0.1", description="Address to listen on for them.")
    otlp_endpoint: str | None = Field(
        default=None,
        pattern="^https?://",
        description="Base URL of an OpenTelemetry collector that takes traces over HTTP, such as `http://localhost:4318`; "
        "needs the extra `traces`. Default: no traces.",
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
        """Options, then the environment, then the file."""
        del dotenv_settings, file_secret_settings
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls, toml_file=settings_file())

    @model_validator(mode="after")
    def _check_hold(self) -> Self:
        if not timedelta(0) < self.poll_hold <= timedelta(seconds=30):
            raise ValueError("poll_hold must be above 0 and at most 30 seconds: the SDK gives up a poll after 45")
        return self

    def resolved_database_url(self) -> str:
        """The database URL, the data folder's SQLite file by default."""
        return self.database_url or f"sqlite+aiosqlite:///{(self.data_dir / 'weft.db').absolute()}"
