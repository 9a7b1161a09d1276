"""Settings of the limits of a tenant: the values of every tenant that has none of its own (``tenants.limits``)."""

from pydantic import Field
from pydantic_settings import BaseSettings


class LimitSettings(BaseSettings):
    """Default limits of one tenant. ``weft tenant set NAME --limit name=value`` gives a tenant a value of its own."""

    limit_pending_operations: int = Field(
        default=4096,
        ge=1,
        description="Most pending training operations of one tenant. A further request is held for up to 20 s and "
        "then answered 429, and the SDK repeats it.",
    )
    limit_pending_bytes: int = Field(
        default=2**30,
        ge=1,
        description="Most bytes of one tenant's pending training operations, before compression. Beyond it as with their number.",
    )
    limit_seq_ahead: int = Field(
        default=8192,
        ge=1,
        description="Largest distance of a training request's seq_id from the one that may run next in its model. A "
        "request farther ahead fails.",
    )
    limit_open_runs: int = Field(
        default=1024,
        ge=1,
        description="Most open models of one tenant. Further creations wait until a model is unloaded or its session ends.",
    )
    limit_max_rank: int = Field(
        default=0,
        ge=0,
        description="Largest LoRA rank of one tenant's new models, copies and imports; 0: that of `WEFT_MAX_RANK`. A larger one "
        "is answered 403, and an import fails.",
    )
    limit_sessions: int = Field(
        default=1024, ge=1, description="Most open sessions of one tenant. The next one is answered 429."
    )
    limit_stored_bytes: int = Field(
        default=256 * 2**30,
        ge=1,
        description="Most bytes of one tenant's checkpoints and training snapshots. Beyond it saves fail, and "
        "training goes on.",
    )
    limit_checkpoints: int = Field(
        default=20_000,
        ge=1,
        description="Most checkpoints of one tenant, versions without a name included. Beyond it saves fail.",
    )
    limit_metadata_bytes: int = Field(
        default=16 * 1024,
        ge=1,
        description="Largest user_metadata, in bytes of JSON, of a session, a model or a checkpoint; and largest tags "
        "of a session.",
    )
    limit_pending_samples: int = Field(
        default=4096,
        ge=1,
        description="Most pending sample requests of one tenant. Further requests are answered 429, and the "
        "SDK repeats them.",
    )
    limit_sample_tokens: int = Field(
        default=2**26,
        ge=1,
        description="Most tokens that one tenant's pending samples may take together: prompts, and max_tokens for "
        "each sequence. Beyond it as with their number.",
    )
    limit_sample_work: int = Field(
        default=2**24,
        ge=1,
        description="Largest num_samples x max_tokens x topk of one sample request; prompt logprobs and tokens drawn at the "
        "prompt's positions count, too.",
    )
    limit_session_samplers: int = Field(
        default=65_536,
        ge=1,
        description="Most samplers (sampling sessions) of one open session. The next one is answered 400, and a save for "
        "sampling without a name fails.",
    )
    limit_sample_record_bytes: int = Field(
        default=4 * 2**30,
        ge=1,
        description="Most bytes of one tenant's records of samples (`record_stability_info`), compressed; each counts for at "
        "least 1 KiB. Beyond it the oldest records are forgotten.",
    )
    limit_run_metrics: int = Field(
        default=200_000,
        ge=1,
        description="Most values of own metrics of one model. A request that would bring more is answered 400.",
    )
    limit_tenant_metrics: int = Field(
        default=10_000_000,
        ge=1,
        description="Most values of own metrics of all models of one tenant. A request that would bring more is answered 400. "
        "They are counted at each 1,000 values of a model.",
    )
    limit_webhooks: int = Field(
        default=10,
        ge=0,
        description="Most webhooks of one tenant. The next one is answered 400.",
    )
    limit_keys: int = Field(
        default=1000,
        ge=1,
        description="Most API keys of one tenant that have not ended. The next one that the tenant makes is answered 400.",
    )
    limit_checkpoint_seconds: int = Field(
        default=0,
        ge=0,
        description="Longest time for which a checkpoint with a name is kept, in seconds: one that is saved to be kept longer, "
        "or for ever, expires then; 0: no bound.",
    )
    limit_kept_checkpoints: int = Field(
        default=0,
        ge=0,
        description="Checkpoints with a name of one model and kind that are kept, the newest ones: an older one expires when "
        "another is saved; 0: all.",
    )
    limit_train_tokens_per_minute: int = Field(
        default=0,
        ge=0,
        description="Tokens of training data that one tenant may have computed in a minute; 0: no rate. Work over it is "
        "accepted and waits, and polls say for how long.",
    )
    limit_train_tokens_burst: int = Field(
        default=0,
        ge=0,
        description="Tokens of training data that may run at once under that rate; 0: those of a minute.",
    )
    limit_sample_tokens_per_minute: int = Field(
        default=0,
        ge=0,
        description="Tokens of samples that one tenant may have drawn in a minute; 0: no rate. A sample counts with its "
        "prompt and max_tokens for each sequence until it ends, then with what it took. Samples over the rate are accepted "
        "and wait; on OpenAI's routes they are answered 429.",
    )
    limit_sample_tokens_burst: int = Field(
        default=0,
        ge=0,
        description="Tokens of samples that may run at once under that rate; 0: those of a minute.",
    )
    limit_requests_per_minute: int = Field(
        default=0,
        ge=0,
        description="Requests of one tenant that are answered in a minute, in all processes together where they share a Redis; "
        "0: no rate. Further ones are answered 429. What the SDK counts on is not counted and never refused: training, samples, "
        "polls, heartbeats, and whatever begins or ends a session.",
    )
