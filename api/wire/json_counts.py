"""Count of a JSON text's values, before a parser builds an object for each of them.

A parser holds the interpreter's lock from the first to the last value, so their number bounds how long all others wait.
"""

import re
from dataclasses import dataclass
from itertools import islice

import numpy as np

from contracts.errors import InvalidRequest

_PIECE = 2**20
"""Bytes that are counted at once; between two pieces other threads get their turn."""
_OBJECT = re.compile(rb'\{[ \t\r\n]*["}]')
"""Beginning of an object. Within a string the quote would be escaped."""
_MEMBER = re.compile(rb'"[ \t\r\n]*:')
"""End of a member's name, once escaped quotes are gone."""
MOST_DIGITS = 40
"""Most digits of a number in a row. A client that writes no exponents needs 23 for 64 bits (0.0000012345678901234567)."""
MOST_LARGE = 4096
"""Most integers beyond 64 bits. Each takes four times as long to parse as one within."""
_DIGITS_OF_64_BITS = 19
_ZERO, _QUOTE, _POINT, _LIST = b'0".['


@dataclass(frozen=True, slots=True)
class JsonBounds:
    """Most values of a JSON text, most objects and lists among them, and most members of all objects together.

    An object costs a hundred times a number, a list twenty times. Each member may be refused by itself, with an error that
    costs as much as an object.
    """

    values: int
    objects: int
    members: int
    lists: int


SMALL = JsonBounds(values=20_000, objects=4_000, members=20_000, lists=20_000)
"""Bounds of every body that carries no data."""
DATA = JsonBounds(values=600_000, objects=16_384, members=32_768, lists=32_768)
"""Bounds of bodies that carry data: a request of old SDKs has half a million numbers in 1,024 sequences, and in a text every
comma counts as a value."""


def check_json_counts(body: bytes, bounds: JsonBounds) -> None:
    """Raise ``InvalidRequest`` if ``body`` has more than ``bounds`` allow, or costly numbers outside strings."""
    if len(body) <= bounds.objects:
        return
    braces, brackets = _count(body, b"{"), _count(body, b"[")
    if _count(body, b",") + brackets + braces > bounds.values:
        raise InvalidRequest(f"the body has more than {bounds.values} values; send fewer sequences a request")
    if _count(body, b":") > bounds.members and _found(_MEMBER, _unescaped(body), bounds.members) > bounds.members:
        raise InvalidRequest(f"the body has more than {bounds.members} fields; send fewer sequences a request")
    if braces > bounds.objects and _found(_OBJECT, body, bounds.objects) > bounds.objects:
        raise InvalidRequest(f"the body has more than {bounds.objects} objects; send fewer of them a request")
    if brackets > bounds.lists and _lists(_unescaped(body)) > bounds.lists:
        raise InvalidRequest(f"the body has more than {bounds.lists} lists; send fewer of them a request")
    _check_numbers(body)


def _check_numbers(body: bytes) -> None:
    found = _numbers(body, in_strings=True)
    if not found.long and found.large <= MOST_LARGE:
        return
    found = _numbers(_unescaped(body), in_strings=False)
    if found.long:
        raise InvalidRequest(f"the body has a number of more than {MOST_DIGITS} digits; round it to what 64 bits hold")
    if found.large > MOST_LARGE:
        raise InvalidRequest(f"the body has more than {MOST_LARGE} integers beyond 64 bits; send ids that fit")


def _found(pattern: re.Pattern[bytes], body: bytes, enough: int) -> int:
    return sum(1 for _ in islice(pattern.finditer(body), enough + 1))


def _count(body: bytes, mark: bytes) -> int:
    return sum(body.count(mark, start, start + _PIECE) for start in range(0, len(body), _PIECE))


def _lists(body: bytes) -> int:
    """Return the number of lists of an ``_unescaped`` body: brackets outside strings."""
    found = quotes = 0
    for begin in range(0, len(body), _PIECE):
        codes = np.frombuffer(body, np.uint8, count=min(_PIECE, len(body) - begin), offset=begin)
        opened = quotes + np.cumsum(codes == _QUOTE)
        found += int(((codes == _LIST) & (opened % 2 == 0)).sum())
        quotes = int(opened[-1])
    return found


def _unescaped(body: bytes) -> bytes:
    """Return the body without escaped backslashes and quotes: every quote that is left begins or ends a string."""
    return body.replace(b"\\\\", b"").replace(b'\\"', b"")


@dataclass(frozen=True, slots=True)
class _Numbers:
    """Numbers that cost more than others: rows of more than ``MOST_DIGITS`` digits, and integers beyond 64 bits."""

    long: int
    large: int


def _numbers(body: bytes, *, in_strings: bool) -> _Numbers:
    """Count the costly numbers. Without ``in_strings`` those outside strings only: ``body`` is ``_unescaped`` then."""
    long = large = quotes = 0
    before, code_before = -1, 0
    """Last byte that is no digit: its place from the beginning of the next piece, and its code."""
    for begin in range(0, len(body), _PIECE):
        codes = np.frombuffer(body, np.uint8, count=min(_PIECE, len(body) - begin), offset=begin)
        # Codes below that of 0 wrap around.
        ends = np.flatnonzero(codes - np.uint8(_ZERO) > 9)
        if begin + len(codes) == len(body):
            ends = np.append(ends, len(codes))
        digits = np.diff(ends, prepend=before) - 1
        if (digits > _DIGITS_OF_64_BITS).any():
            others = codes[ends[ends < len(codes)]]
            begins = np.concatenate(([code_before], others))[: len(ends)]
            opened = quotes + np.concatenate(([0], np.cumsum(others == _QUOTE)))[: len(ends)]
            counted = in_strings | (opened % 2 == 0)
            long += int((counted & (digits > MOST_DIGITS)).sum())
            large += int((counted & (digits > _DIGITS_OF_64_BITS) & (begins != _POINT)).sum())
        quotes += int((codes == _QUOTE).sum())
        if len(ends) and ends[-1] < len(codes):
            before, code_before = int(ends[-1]), int(codes[ends[-1]])
        before -= len(codes)
    return _Numbers(long, large)
