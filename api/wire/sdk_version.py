"""Special answers for old versions of the SDK, which cannot parse the usual ones. Every such rule of the wire is here."""

import re

from starlette.requests import Request

from contracts.paths import Segment

_VERSION = re.compile(r"([0-9]{1,9})\.([0-9]{1,9})")
_EXTERNAL_SINCE = (0, 28)
_RENEWING_SINCE = (0, 38)
_PAUSING_SINCE = (0, 26)


def listed_segments(request: Request) -> frozenset[Segment]:
    """Return the segments of checkpoints that the client can parse.

    An ``external`` checkpoint breaks the list of an SDK below 0.28. A client that sends no version counts as new.
    """
    told = _version(request)
    if told is not None and told < _EXTERNAL_SINCE:
        return frozenset(Segment) - {Segment.EXTERNAL_WEIGHTS}
    return frozenset(Segment)


def exchanges_keys(request: Request) -> bool:
    """Return whether the client is to exchange its key for a token: an SDK that renews a refused one by itself, from 0.38 on."""
    told = _version(request)
    return told is not None and told >= _RENEWING_SINCE


def pauses_unpaid(request: Request) -> bool:
    """Return whether the client waits at 402 and sends its request again. An SDK below 0.26 gives it up."""
    told = _version(request)
    return told is None or told >= _PAUSING_SINCE


def _version(request: Request) -> tuple[int, int] | None:
    """Return the SDK's version that the client sends, None if it sends none."""
    told = _VERSION.match(request.headers.get("x-stainless-package-version", ""))
    return None if told is None else (int(told[1]), int(told[2]))
