"""What a client's SDK version cannot take. Every per-version rule of the wire lives here."""

import re

from starlette.requests import Request

from contracts.paths import Segment

_VERSION = re.compile(r"(\d+)\.(\d+)")
_EXTERNAL_SINCE = (0, 28)


def listed_segments(request: Request) -> frozenset[Segment]:
    """Segments of checkpoints that the client can parse: an ``external`` one takes an SDK below 0.28's list down.

    A client that tells no version is taken for a new one.
    """
    told = _VERSION.match(request.headers.get("x-stainless-package-version", ""))
    if told is not None and (int(told[1]), int(told[2])) < _EXTERNAL_SINCE:
        return frozenset(Segment) - {Segment.EXTERNAL_WEIGHTS}
    return frozenset(Segment)
