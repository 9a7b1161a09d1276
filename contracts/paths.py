"""Checkpoint addresses, ``tinker://<run_id>/<segment>/<name>``: parsed and checked."""

import re
from dataclasses import dataclass
from enum import StrEnum

from contracts.errors import InvalidRequest

MAX_NAME_LENGTH = 200
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=@-]*")


class Segment(StrEnum):
    """Middle part of a path: the checkpoint's purpose."""

    WEIGHTS = "weights"
    SAMPLER_WEIGHTS = "sampler_weights"
    EXTERNAL_WEIGHTS = "external_weights"


_MADE_BY = {
    Segment.WEIGHTS: "save_state",
    Segment.SAMPLER_WEIGHTS: "save_weights_for_sampler",
    Segment.EXTERNAL_WEIGHTS: "save_weights_external",
}
"""The SDK's call that saves checkpoints of each segment."""


@dataclass(frozen=True, slots=True)
class CheckpointPath:
    """A parsed path. ``run_id`` is unchecked text: look it up within the tenant before using it."""

    run_id: str
    segment: Segment
    name: str

    def __str__(self) -> str:
        return f"tinker://{self.run_id}/{self.segment}/{self.name}"

    @property
    def checkpoint_id(self) -> str:
        """Id of the checkpoint within its run, as the wire has it: ``{segment}/{name}``."""
        return f"{self.segment}/{self.name}"


def check_name(name: str, field: str = "path") -> str:
    """Return ``name`` if a checkpoint may have it, else raise ``InvalidRequest`` naming ``field``."""
    if len(name) > MAX_NAME_LENGTH or not _NAME.fullmatch(name):
        raise InvalidRequest(
            f"{field} must be a plain checkpoint name: 1 to {MAX_NAME_LENGTH} letters, digits or . _ + = @ -, "
            f"starting with a letter or digit, without '/'; got {name[:MAX_NAME_LENGTH]!r}"
        )
    return name


def parse_path(text: str, *, segment: Segment | None = None, field: str = "path") -> CheckpointPath:
    """Parse ``tinker://run/segment/name``. Raises ``InvalidRequest`` for another form or segment (None: any)."""
    parts = text.removeprefix("tinker://").split("/")
    if not text.startswith("tinker://") or len(parts) != 3:
        raise InvalidRequest(f"{field} must be tinker://<run_id>/<segment>/<name>; got {text[:300]!r}")
    run_id, raw_segment, name = parts
    try:
        found = Segment(raw_segment)
    except ValueError:
        raise InvalidRequest(
            f"{field}: segment must be one of {', '.join(Segment)}; got {raw_segment[:100]!r}"
        ) from None
    if segment is not None and found is not segment:
        raise InvalidRequest(f"{field} must be a {segment} path here, {_way_to(segment, found)}; got one of {found}")
    return CheckpointPath(run_id, found, check_name(name, field))


def _way_to(segment: Segment, found: Segment) -> str:
    """Return how a checkpoint of ``segment`` is made, for somebody who has one of ``found``."""
    if segment is Segment.SAMPLER_WEIGHTS and found is Segment.WEIGHTS:
        return f"so load this one with create_training_client_from_state, then call {_MADE_BY[segment]}"
    return f"as {_MADE_BY[segment]} returns it"
