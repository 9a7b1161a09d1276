"""Settings that say for how long what has ended is kept."""

from datetime import timedelta

from pydantic import Field
from pydantic_settings import BaseSettings


class RetentionSettings(BaseSettings):
    """The ``WEFT_RETENTION_*`` settings, with their defaults."""

    retention_operations: timedelta = Field(
        default=timedelta(days=1),
        ge=timedelta(0),
        description="Time for which the row of a finished operation is kept, beyond `result_grace` if that is longer. "
        "Repeats of its request find it. Rows of open models stay.",
    )
    retention_sessions: timedelta = Field(
        default=timedelta(days=30),
        ge=timedelta(0),
        description="Time for which an ended session and its samplers are kept. A session with a model that is kept stays.",
    )
    retention_runs: timedelta = Field(
        default=timedelta(days=90),
        ge=timedelta(0),
        description="Time after its last request for which an ended training run without any checkpoint is kept. "
        "A run with a checkpoint stays.",
    )
    retention_run_events: timedelta = Field(
        default=timedelta(days=30),
        ge=timedelta(0),
        description="Time for which the events of a run's history, and the processes that have died, are kept.",
    )
    retention_usage_hours: timedelta = Field(
        default=timedelta(days=400),
        ge=timedelta(days=1),
        description="Time for which usage and storage by hour are kept. Usage by day stays for ever.",
    )
    retention_sample_records: timedelta = Field(
        default=timedelta(days=1),
        ge=timedelta(0),
        description="Time for which what was sampled with `record_stability_info` can be named by training. Each training that "
        "names it begins the time anew. It ends with the sampler's session at the latest.",
    )
    retention_sampler_versions: int = Field(
        default=8,
        ge=1,
        description="Number of a run's newest versions without a name that are kept while a sampler of an open "
        "session has them. Named versions stay.",
    )
    retention_sampler_idle: timedelta = Field(
        default=timedelta(minutes=30),
        ge=timedelta(0),
        description="Time without a sample after which an older version without a name is deleted, although a "
        "sampler has it. To use a version for longer, save it with a name.",
    )
    retention_audit: timedelta = Field(
        default=timedelta(days=400),
        ge=timedelta(days=1),
        description="Time for which the entries of the audit log are kept, beyond their day. The digest of each day stays.",
    )
    retention_webhook_events: timedelta = Field(
        default=timedelta(days=7),
        ge=timedelta(days=3),
        description="Time for which the events of webhooks are kept, taken or not. None is sent any more after it.",
    )
