"""Jobs on weights that take minutes: what they are to do, and how far they are."""

from dataclasses import dataclass
from enum import StrEnum

from contracts.paths import Segment


class JobKind(StrEnum):
    """Kind of a job, by the name that the wire and the logs use."""

    MERGE = "merge"
    IMPORT = "import"


class JobState(StrEnum):
    """State of a job. The last three are final."""

    PENDING = "pending"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class MergeRequest:
    """Merge of the checkpoint ``path`` into its base, saved as external weights of ``name``. ``dtype`` None: the base's."""

    path: str
    name: str
    ttl_seconds: int | None = None
    dtype: str | None = None


@dataclass(frozen=True, slots=True)
class ImportRequest:
    """Import of a staged archive of ``archive_bytes`` bytes as the checkpoint ``name`` of a run of its own."""

    name: str
    segment: Segment
    archive_bytes: int
    ttl_seconds: int | None = None


JobRequest = MergeRequest | ImportRequest
