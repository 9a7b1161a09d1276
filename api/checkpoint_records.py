"""Body of a checkpoint in answers, for Tinker's endpoints and weft's own."""

from datetime import datetime
from typing import Literal

from pydantic import BaseModel

from contracts.paths import Segment
from store.tables import Checkpoint
from tenants import checkpoints

CheckpointType = Literal["training", "sampler", "external"]

_TYPES: dict[Segment, CheckpointType] = {
    Segment.WEIGHTS: "training",
    Segment.SAMPLER_WEIGHTS: "sampler",
    Segment.EXTERNAL_WEIGHTS: "external",
}


class CheckpointInfo(BaseModel):
    """A checkpoint. ``checkpoint_id`` is ``{segment}/{name}`` within the run."""

    checkpoint_id: str
    checkpoint_type: CheckpointType
    time: datetime
    tinker_path: str
    size_bytes: int
    public: bool
    user_metadata: dict[str, str] | None
    expires_at: datetime | None


def checkpoint_info(row: Checkpoint) -> CheckpointInfo:
    """Return the answer's form of a database row."""
    path = checkpoints.path_of(row)
    return CheckpointInfo(
        checkpoint_id=path.checkpoint_id,
        checkpoint_type=_TYPES[path.segment],
        time=row.created_at,
        tinker_path=str(path),
        size_bytes=row.size_bytes,
        public=row.public,
        user_metadata=row.user_metadata,
        expires_at=row.expires_at,
    )


def segment_of(type: CheckpointType) -> Segment:
    """Return the segment that holds checkpoints of the type."""
    return next(segment for segment, name in _TYPES.items() if name == type)
