"""Special answers for old versions of the SDK, which cannot parse the usual ones. Every such rule of the wire is here."""

import re

from starlette.requests import Request

from contracts.paths import Segment

_VERSION = re.compile(r"([0-9]{1,9})\.([0-9]{1,9})")
_EXTERNAL_SINCE = (0, 28)


def listed_segments(request: Request) -> frozenset[Segment]:
    """Return the segments of checkpoints that the client can parse.

    An ``external`` checkpoint breaks the list of an SDK below 0.28. A client that sends no version counts as new.
    """
    told = _VERSION.match(request.headers.get("x-stainless-package-version", ""))
    if told is not None and (int(told[1]), int(told[2])) < _EXTERNAL_SINCE:
        return frozenset(Segment) - {Segment.EXTERNAL_WEIGHTS}
    return frozenset(Segment)
