"""Count of a JSON text's values, before a parser builds an object for each of them.

A parser holds the interpreter's lock from the first to the last value, so their number bounds how long all others wait.
"""

import re
from dataclasses import dataclass
from itertools import islice

from contracts.errors import InvalidRequest

_PIECE = 2**20
"""Bytes that are counted at once; between two pieces other threads get their turn."""
_OBJECT = re.compile(rb'\{[ \t\r\n]*["}]')
"""Beginning of an object. Within a string the quote would be escaped."""


@dataclass(frozen=True, slots=True)
class JsonBounds:
    """Most values of a JSON text, most objects among them, and most members of all objects together.

    An object costs a hundred times a number. Each member may be refused by itself, with an error that costs as much.
    """

    values: int
    objects: int
    members: int


SMALL = JsonBounds(values=20_000, objects=4_000, members=20_000)
"""Bounds of every body that carries no data."""
DATA = JsonBounds(values=600_000, objects=16_384, members=32_768)
"""Bounds of sequences as numbers: a request of old SDKs has half a million numbers in 1,024 sequences."""
TEXT = JsonBounds(values=600_000, objects=16_384, members=600_000)
"""Bounds of text, in which commas and colons count as well."""


def check_json_counts(body: bytes, bounds: JsonBounds) -> None:
    """Raise ``InvalidRequest`` if ``body`` has more than ``bounds`` allow."""
    if len(body) <= bounds.objects:
        return
    braces = _count(body, b"{")
    if _count(body, b",") + _count(body, b"[") + braces > bounds.values:
        raise InvalidRequest(f"the body has more than {bounds.values} values; send fewer sequences a request")
    if _count(body, b":") > bounds.members:
        raise InvalidRequest(f"the body has more than {bounds.members} fields; send fewer sequences a request")
    if braces > bounds.objects and _objects(body, bounds.objects) > bounds.objects:
        raise InvalidRequest(f"the body has more than {bounds.objects} objects; send fewer of them a request")


def _objects(body: bytes, enough: int) -> int:
    return sum(1 for _ in islice(_OBJECT.finditer(body), enough + 1))


def _count(body: bytes, mark: bytes) -> int:
    return sum(body.count(mark, start, start + _PIECE) for start in range(0, len(body), _PIECE))
