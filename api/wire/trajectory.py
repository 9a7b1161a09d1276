"""Key of a trajectory: the field or header by which a client names the conversation that a sample is a turn of."""

from starlette.requests import Request

from contracts.errors import InvalidRequest

HEADER = "X-Weft-Trajectory"
MOST_CHARACTERS = 256


def trajectory_of(request: Request, field: str | None, *, name: str = "trajectory") -> str | None:
    """Return the key of a sample request: that of the body's field ``name``, or else the header's. None: neither is there.

    Raises ``InvalidRequest`` for a key that is empty or too long.
    """
    key, place = (field, name) if field is not None else (request.headers.get(HEADER), HEADER)
    if key is not None and not 0 < len(key) <= MOST_CHARACTERS:
        raise InvalidRequest(f"{place} must have 1 to {MOST_CHARACTERS} characters; got {len(key)}")
    return key
