"""Metadata of users: checks its size before it is stored."""

from collections.abc import Mapping, Sequence

import orjson

from contracts.errors import InvalidRequest
from contracts.operations import Payload
from tenants.limits import Limits


def check_metadata(value: Mapping[str, object] | Sequence[str] | None, limits: Limits, field: str) -> int:
    """Return the bytes of JSON that ``value`` takes. Raises ``InvalidRequest`` naming ``field`` for more than the limit."""
    size = 0 if value is None else len(orjson.dumps(value))
    if size > limits.metadata_bytes:
        raise InvalidRequest(
            f"{field} takes {size} bytes of JSON, and your limit is {limits.metadata_bytes}; shorten it, or keep it "
            "elsewhere and store its address"
        )
    return size


def check_payload_metadata(payload: Payload, limits: Limits) -> None:
    """Raise ``InvalidRequest`` if the payload's ``user_metadata``, where it has any, is larger than allowed."""
    check_metadata(getattr(payload, "user_metadata", None), limits, "user_metadata")
